//! Sends metrics and spans to an OTLP collector for as long as the process runs.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::MissedTickBehavior;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    admin::Admin,
    telemetry::{Counts, Options, Outlet, Spans, Tracer, resource, wire::Resource},
};

/// Time that the last spans and metrics get at the end of a drain.
const FLUSH: Duration = Duration::from_secs(5);

/// The way out of telemetry; one per process, with or without a collector.
pub struct Exporting {
    options: Options,
    outlet: Option<Arc<Outlet>>,
    counts: Arc<Counts>,
    tracer: Option<Arc<Tracer>>,
    spans: Mutex<Option<Spans>>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Exporting {
    /// Prepares everything; [`begin`](Self::begin) sends.
    ///
    /// # Errors
    /// What is wrong with the settings' files or headers.
    pub fn open(options: &Options) -> Result<Self, String> {
        let counts = Arc::<Counts>::default();
        let outlet = (!options.endpoint.is_empty()).then(|| Outlet::new(options, counts.clone())).transpose()?.map(Arc::new);
        let (tracer, spans) = match options.traces.filter(|_| outlet.is_some()) {
            Some(ratio) => {
                let (tracer, spans) = Tracer::new(ratio, counts.clone());
                (Some(tracer), Some(spans))
            }
            None => (None, None),
        };
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        Ok(Self { options: options.clone(), outlet, counts, tracer, spans: Mutex::new(spans), stop, tasks })
    }

    /// What records spans, if they are recorded.
    pub fn tracer(&self) -> Option<&Arc<Tracer>> {
        self.tracer.as_ref()
    }

    /// Sends from now on, in this node's name.
    pub fn begin(&self, node_id: &str, admin: &Arc<Admin>) {
        let Some(outlet) = &self.outlet else { return };
        admin.watch_exports(self.counts.clone());
        let resource = resource(node_id, &self.options.attributes);
        if let Some(spans) = self.spans.lock().take() {
            self.tasks.spawn(send_spans(outlet.clone(), resource.clone(), spans, self.stop.clone()));
        }
        if self.options.metrics_seconds > 0 {
            let every = Duration::from_secs(self.options.metrics_seconds);
            self.tasks.spawn(send_metrics(outlet.clone(), resource, admin.clone(), every, self.stop.clone()));
        }
    }

    /// Sends what is left, for a while. The broker must still be there.
    pub async fn end(&self) {
        self.stop.cancel();
        self.tasks.close();
        if tokio::time::timeout(FLUSH, self.tasks.wait()).await.is_err() {
            tracing::warn!("the OTLP collector did not take the last telemetry in time");
        }
    }
}

async fn send_spans(outlet: Arc<Outlet>, resource: Resource, mut spans: Spans, stop: CancellationToken) {
    while let Some(batch) = spans.next(&stop).await {
        outlet.send_spans(&resource, batch).await;
    }
}

/// The first report goes out at once, the last when the process stops.
async fn send_metrics(outlet: Arc<Outlet>, resource: Resource, admin: Arc<Admin>, every: Duration, stop: CancellationToken) {
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let last = tokio::select! {
            _ = ticks.tick() => false,
            () = stop.cancelled() => true,
        };
        outlet.send_metrics(&resource, admin.report().await).await;
        if last {
            return;
        }
    }
}
