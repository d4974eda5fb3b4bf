//! `grpc.health.v1`: serving only while the broker answers and the server is not draining.

use std::{
    pin::Pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures::Stream;
use tokio::sync::watch;
use tonic::{Request, Response, Status};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus, health_server};

use crate::{broker::Broker, model::text::clipped};

/// The services a client may ask about, beside the server as a whole (the empty name). All share one health.
const SERVICES: [&str; 5] = [
    "",
    "google.pubsub.v1.Publisher",
    "google.pubsub.v1.Subscriber",
    "google.pubsub.v1.SchemaService",
    "google.iam.v1.IAMPolicy",
];
/// A broker that takes longer is not ready. Probes of orchestrators often give up after a second.
const READY_TIMEOUT: Duration = Duration::from_millis(800);
/// How often a watched health is looked at.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// Whether the server serves; cheap to clone.
#[derive(Clone)]
pub struct Readiness {
    broker: Arc<OnceLock<Arc<dyn Broker>>>,
    draining: Arc<watch::Sender<bool>>,
}

impl Default for Readiness {
    fn default() -> Self {
        Self { broker: Arc::default(), draining: Arc::new(watch::channel(false).0) }
    }
}

impl Readiness {
    /// From now on the broker decides.
    pub fn open(&self, broker: Arc<dyn Broker>) {
        let _ = self.broker.set(broker);
    }

    /// From now on the server does not serve.
    pub fn drain(&self) {
        self.draining.send_replace(true);
    }

    /// Asks the broker.
    pub async fn is_serving(&self) -> bool {
        let Some(broker) = self.broker.get() else { return false };
        !*self.draining.borrow() && matches!(tokio::time::timeout(READY_TIMEOUT, broker.ready()).await, Ok(Ok(())))
    }

    /// The same question for the admin address.
    pub fn probe(&self) -> crate::admin::Ready {
        let readiness = self.clone();
        Box::new(move || {
            let readiness = readiness.clone();
            Box::pin(async move { readiness.is_serving().await })
        })
    }

    async fn answer(&self) -> HealthCheckResponse {
        let status = if self.is_serving().await { ServingStatus::Serving } else { ServingStatus::NotServing };
        HealthCheckResponse { status: status.into() }
    }
}

#[tonic::async_trait]
impl health_server::Health for Readiness {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.into_inner().service;
        if !SERVICES.contains(&service.as_str()) {
            return Err(Status::not_found(format!("Unknown service {}.", clipped(&service))));
        }
        Ok(Response::new(self.answer().await))
    }

    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let known = SERVICES.contains(&request.into_inner().service.as_str());
        let watched = Watched { readiness: self.clone(), draining: self.draining.subscribe(), known, told: None, over: false };
        Ok(Response::new(Box::pin(futures::stream::unfold(watched, Watched::next))))
    }
}

struct Watched {
    readiness: Readiness,
    draining: watch::Receiver<bool>,
    /// The protocol keeps a watch of an unknown service open: it may come later.
    known: bool,
    told: Option<HealthCheckResponse>,
    over: bool,
}

impl Watched {
    /// The next change. After the one to a draining server the stream ends, so that it holds up no drain.
    async fn next(mut self) -> Option<(Result<HealthCheckResponse, Status>, Self)> {
        if self.over {
            return None;
        }
        loop {
            if *self.draining.borrow_and_update()
                && self.told.is_some_and(|told| told.status != i32::from(ServingStatus::Serving))
            {
                self.over = true;
                return Some((Err(Status::unavailable("The server is draining.")), self));
            }
            let now = match self.known {
                true => self.readiness.answer().await,
                false => HealthCheckResponse { status: ServingStatus::ServiceUnknown.into() },
            };
            if self.told != Some(now) {
                self.told = Some(now);
                return Some((Ok(now), self));
            }
            tokio::select! {
                () = tokio::time::sleep(WATCH_INTERVAL) => {}
                _ = self.draining.changed() => {}
            }
        }
    }
}
