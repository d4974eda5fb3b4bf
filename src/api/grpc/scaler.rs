//! `externalscaler.ExternalScaler`: KEDA scales the consumers of a subscription by its backlog.
//!
//! The broker is asked at each call, so that every node of a cluster tells the same. A trigger's metadata has the keys of
//! KEDA's own scaler for Google Cloud Pub/Sub.

mod trigger;

use std::{pin::Pin, sync::Arc, time::Duration};

use futures::{Stream, stream};
use tokio::time::Instant;
use tonic::{Request, Response, Status, async_trait};

use self::trigger::Trigger;
use super::gate::{self, Gate, Guarded};
use crate::{
    api::{
        proto::externalscaler::{self as pb, external_scaler_server::ExternalScaler},
        status::to_status,
    },
    connector::{Connector, Error, catalog::queue_ref},
    model::access::Permission,
};

/// How often an open stream looks at its subscription: fast enough to start a consumer, and one question to the broker.
const LOOK: Duration = Duration::from_secs(2);

/// The service.
pub struct ExternalScalerService {
    connector: Arc<Connector>,
    gate: Gate,
}

impl Guarded for Trigger {
    fn needs(&self, ask: &mut dyn FnMut(Permission, &str)) {
        ask(Permission::SubscriptionsGet, self.subscription.as_str());
    }
}

/// Where a stream stands.
struct Watch {
    connector: Arc<Connector>,
    trigger: Trigger,
    /// What was told last.
    told: Option<bool>,
    look_at: Instant,
    refused: Pin<Box<dyn Future<Output = Status> + Send>>,
    ended: bool,
}

impl ExternalScalerService {
    pub fn new(connector: Arc<Connector>, gate: Gate) -> Self {
        Self { connector, gate }
    }

    async fn admit(&self, request: Request<pb::ScaledObjectRef>) -> Result<Trigger, Status> {
        let (metadata, extensions, object) = request.into_parts();
        let trigger = Trigger::parse(&object.scaler_metadata).map_err(to_status)?;
        let request = self.gate.admit(Request::from_parts(metadata, extensions, trigger)).await?.0;
        Ok(request.into_inner())
    }
}

/// The trigger's metric now.
async fn value(connector: &Connector, trigger: &Trigger) -> Result<f64, Error> {
    let entry = match connector.subscription(&trigger.subscription).await {
        Ok(entry) => entry,
        Err(Error::NotFound(id)) => return trigger.if_null.ok_or(Error::NotFound(id)),
        Err(error) => return Err(error),
    };
    let broker = connector.broker();
    let stats = broker.stats(&queue_ref(&entry.subscription)).await?;
    Ok(trigger.mode.of(&stats, broker.now_ms()))
}

#[async_trait]
impl ExternalScaler for ExternalScalerService {
    async fn is_active(&self, request: Request<pb::ScaledObjectRef>) -> Result<Response<pb::IsActiveResponse>, Status> {
        let trigger = self.admit(request).await?;
        let value = value(&self.connector, &trigger).await.map_err(to_status)?;
        Ok(Response::new(pb::IsActiveResponse { result: trigger.is_active(value) }))
    }

    type StreamIsActiveStream = Pin<Box<dyn Stream<Item = Result<pb::IsActiveResponse, Status>> + Send>>;

    async fn stream_is_active(
        &self,
        request: Request<pb::ScaledObjectRef>,
    ) -> Result<Response<Self::StreamIsActiveStream>, Status> {
        let caller = gate::caller(&request);
        let trigger = self.admit(request).await?;
        let refused: Pin<Box<dyn Future<Output = Status> + Send>> = match self.gate.until_refused(caller, trigger.clone()) {
            Some(refused) => Box::pin(refused),
            None => Box::pin(std::future::pending()),
        };
        let (connector, look_at) = (self.connector.clone(), Instant::now());
        let watch = Watch { connector, trigger, told: None, look_at, refused, ended: false };
        Ok(Response::new(Box::pin(stream::unfold(watch, Watch::next))))
    }

    async fn get_metric_spec(
        &self,
        request: Request<pb::ScaledObjectRef>,
    ) -> Result<Response<pb::GetMetricSpecResponse>, Status> {
        let trigger = self.admit(request).await?;
        let spec = pb::MetricSpec {
            metric_name: trigger.metric_name(),
            target_size: whole(trigger.target),
            target_size_float: trigger.target,
        };
        Ok(Response::new(pb::GetMetricSpecResponse { metric_specs: vec![spec] }))
    }

    async fn get_metrics(&self, request: Request<pb::GetMetricsRequest>) -> Result<Response<pb::GetMetricsResponse>, Status> {
        let (metadata, extensions, asked) = request.into_parts();
        let object = Request::from_parts(metadata, extensions, asked.scaled_object_ref.unwrap_or_default());
        let trigger = self.admit(object).await?;
        let value = value(&self.connector, &trigger).await.map_err(to_status)?;
        let metric_name = if asked.metric_name.is_empty() { trigger.metric_name() } else { asked.metric_name };
        let value = pb::MetricValue { metric_name, metric_value: whole(value), metric_value_float: value };
        Ok(Response::new(pb::GetMetricsResponse { metric_values: vec![value] }))
    }
}

impl Watch {
    /// Waits until there is something new to tell. The last item is why the stream ends.
    async fn next(mut self) -> Option<(Result<pb::IsActiveResponse, Status>, Self)> {
        if self.ended {
            return None;
        }
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(self.look_at) => {}
                status = &mut self.refused => return Some(self.end(status)),
                () = self.connector.stopping() => return Some(self.end(to_status(Error::Closing))),
            }
            self.look_at = Instant::now() + LOOK;
            match value(&self.connector, &self.trigger).await {
                Ok(value) => {
                    let active = self.trigger.is_active(value);
                    if self.told.replace(active) != Some(active) {
                        return Some((Ok(pb::IsActiveResponse { result: active }), self));
                    }
                }
                Err(error) => return Some(self.end(to_status(error))),
            }
        }
    }

    fn end(mut self, status: Status) -> (Result<pb::IsActiveResponse, Status>, Self) {
        self.ended = true;
        (Err(status), self)
    }
}

/// Rounded up, so that a little work is not none. A float beyond the range becomes the largest number.
fn whole(value: f64) -> i64 {
    value.ceil() as i64
}
