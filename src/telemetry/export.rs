//! The way to the collector: gRPC or HTTP, over the same client.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, header, uri::PathAndQuery};
use http_body_util::BodyExt;
use parking_lot::Mutex;
use prost::Message;
use tonic::{Code, Status, body::Body, client::Grpc};
use tonic_prost::ProstCodec;

use super::{
    Counts, Options, Protocol, Signal,
    wire::{
        self, ExportMetrics, ExportTraces, Exported, Metric, Resource, ResourceMetrics, ResourceSpans, Scope, ScopeMetrics,
        ScopeSpans, Span,
    },
};
use crate::model::meter::add;

/// Time a request may take, as OpenTelemetry has it.
const TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT: Duration = Duration::from_secs(5);
/// Tries to send one batch of spans, and the pause after the first; each further pause is twice as long.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(500);
/// Points of one request of metrics. Collectors take 4 MiB at a time; a point has up to half a KiB.
const MAX_POINTS: usize = 4000;
/// A collector that does not take telemetry is reported this often.
const COMPLAINT: Duration = Duration::from_secs(60);

/// Where telemetry leaves the process.
pub struct Outlet {
    client: reqwest::Client,
    endpoint: String,
    protocol: Protocol,
    counts: Arc<Counts>,
    complained: Mutex<Option<Instant>>,
}

/// Why the collector did not take something.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
struct Refused {
    text: String,
    /// A repetition may succeed.
    passing: bool,
}

impl Outlet {
    /// Nothing is connected yet.
    ///
    /// # Errors
    /// What is wrong with the certificates or the headers.
    pub fn new(options: &Options, counts: Arc<Counts>) -> Result<Self, String> {
        let mut headers = HeaderMap::new();
        for (name, value) in &options.headers {
            let name =
                HeaderName::try_from(name.as_str()).map_err(|_| format!("OTLP_HEADERS: {name:?} is no name of a header"))?;
            let mut value =
                HeaderValue::try_from(value.as_str()).map_err(|_| format!("OTLP_HEADERS: the value of {name} is none"))?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        let mut roots = Vec::new();
        if !options.ca_file.as_os_str().is_empty() {
            let wrong = |what: String| format!("OTLP_CA_FILE {}: {what}", options.ca_file.display());
            let pem = std::fs::read(&options.ca_file).map_err(|e| wrong(e.to_string()))?;
            roots = reqwest::Certificate::from_pem_bundle(&pem).map_err(|e| wrong(e.to_string()))?;
            if roots.is_empty() {
                return Err(wrong("there is no certificate in it".into()));
            }
        }
        let builder = reqwest::Client::builder()
            .tls_certs_merge(roots)
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("landline/", env!("CARGO_PKG_VERSION")))
            .default_headers(headers)
            .connect_timeout(CONNECT)
            .timeout(TIMEOUT)
            .no_proxy();
        let builder = if options.protocol == Protocol::Grpc { builder.http2_prior_knowledge() } else { builder };
        let client = builder.build().map_err(|e| format!("the client of the OTLP collector: {e}"))?;
        let (endpoint, protocol) = (options.endpoint.clone(), options.protocol);
        Ok(Self { client, endpoint, protocol, counts, complained: Mutex::new(None) })
    }

    /// Sends spans, several times if need be.
    pub async fn send_spans(&self, resource: &Resource, spans: Vec<Span>) {
        let count = spans.len() as u64;
        let scope_spans = vec![ScopeSpans { scope: Some(scope()), spans }];
        let request = ExportTraces { resource_spans: vec![ResourceSpans { resource: Some(resource.clone()), scope_spans }] };
        let mut pause = PAUSE;
        for tried in 1.. {
            match self.send(Signal::Traces, &request).await {
                Ok(rejected) => {
                    let rejected = rejected.min(count);
                    add(&self.counts.exported, count - rejected);
                    add(&self.counts.failed, rejected);
                    return;
                }
                Err(refused) if refused.passing && tried < TRIES => tokio::time::sleep(pause).await,
                Err(_) => {
                    add(&self.counts.failed, count);
                    return;
                }
            }
            pause *= 2;
        }
    }

    /// Sends metrics, once: the next ones tell more.
    pub async fn send_metrics(&self, resource: &Resource, metrics: Vec<Metric>) {
        for metrics in parcels(metrics) {
            let scope_metrics = vec![ScopeMetrics { scope: Some(scope()), metrics }];
            let resource_metrics = vec![ResourceMetrics { resource: Some(resource.clone()), scope_metrics }];
            if self.send(Signal::Metrics, &ExportMetrics { resource_metrics }).await.is_err() {
                return;
            }
        }
    }

    /// Answers how much of the request was rejected.
    async fn send<M: Message + Clone + 'static>(&self, signal: Signal, request: &M) -> Result<u64, Refused> {
        let sent = match self.protocol {
            Protocol::Grpc => self.send_grpc(signal, request).await,
            Protocol::Http => self.send_http(signal, request).await,
        };
        let sent = sent.map(|exported| exported.partial.unwrap_or_default());
        let [taken, refused] = &self.counts.requests[signal as usize];
        add(if sent.is_ok() { taken } else { refused }, 1);
        match &sent {
            Ok(partial) if partial.rejected > 0 => {
                self.complain(&format!("it rejected {} items: {}", partial.rejected, partial.message));
            }
            Ok(_) => {}
            Err(refused) => self.complain(&refused.text),
        }
        sent.map(|partial| u64::try_from(partial.rejected).unwrap_or(0))
    }

    fn complain(&self, why: &str) {
        let mut complained = self.complained.lock();
        if complained.is_none_or(|at| at.elapsed() >= COMPLAINT) {
            *complained = Some(Instant::now());
            tracing::warn!(endpoint = self.endpoint, "the OTLP collector does not take telemetry: {why}");
        } else {
            tracing::debug!(endpoint = self.endpoint, "the OTLP collector does not take telemetry: {why}");
        }
    }

    async fn send_http(&self, signal: Signal, request: &impl Message) -> Result<Exported, Refused> {
        let path = match signal {
            Signal::Traces => "v1/traces",
            Signal::Metrics => "v1/metrics",
        };
        let call = self.client.post(format!("{}/{path}", self.endpoint)).body(request.encode_to_vec());
        let answer = call.header(header::CONTENT_TYPE, "application/x-protobuf").send().await.map_err(unreachable)?;
        let status = answer.status().as_u16();
        let body = answer.bytes().await.map_err(unreachable)?;
        match status {
            200..=299 => Ok(Exported::decode(body).unwrap_or_default()),
            _ => Err(Refused { text: format!("it answered {status}"), passing: [429, 502, 503, 504].contains(&status) }),
        }
    }

    async fn send_grpc<M: Message + Clone + 'static>(&self, signal: Signal, request: &M) -> Result<Exported, Refused> {
        let path = PathAndQuery::from_static(match signal {
            Signal::Traces => "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
            Signal::Metrics => "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
        });
        let origin = self.endpoint.parse().map_err(|e| Refused { text: format!("{}: {e}", self.endpoint), passing: false })?;
        let client = self.client.clone();
        let transport = tower::service_fn(move |request| carry(client.clone(), request));
        let mut grpc = Grpc::with_origin(transport, origin);
        let answer = grpc.unary(tonic::Request::new(request.clone()), path, ProstCodec::<M, Exported>::default()).await;
        answer.map(tonic::Response::into_inner).map_err(|status| Refused { passing: is_passing(&status), text: told(&status) })
    }
}

/// Carries a gRPC call by the HTTP client. Its requests are small and whole.
async fn carry(client: reqwest::Client, request: Request<Body>) -> Result<Response<reqwest::Body>, tower::BoxError> {
    let (parts, body) = request.into_parts();
    let body: Bytes = body.collect().await?.to_bytes();
    let call = client.request(parts.method, parts.uri.to_string()).headers(parts.headers).body(body);
    Ok(call.send().await?.into())
}

/// What OTLP says may be repeated.
fn is_passing(status: &Status) -> bool {
    use Code::{Aborted, Cancelled, DataLoss, DeadlineExceeded, OutOfRange, Unavailable, Unknown};
    // A connection that breaks is an unknown error.
    let broke = status.code() == Unknown && std::error::Error::source(status).is_some();
    broke || [Aborted, Cancelled, DataLoss, DeadlineExceeded, OutOfRange, Unavailable].contains(&status.code())
}

/// A status with what caused it.
fn told(status: &Status) -> String {
    causes(format!("{:?}: {}", status.code(), status.message()), std::error::Error::source(status))
}

fn unreachable(error: reqwest::Error) -> Refused {
    let error = error.without_url();
    Refused { text: causes(error.to_string(), std::error::Error::source(&error)), passing: true }
}

fn causes(mut text: String, mut cause: Option<&(dyn std::error::Error + 'static)>) -> String {
    while let Some(next) = cause {
        text += &format!(": {next}");
        cause = next.source();
    }
    text
}

fn scope() -> Scope {
    Scope { name: "landline".into(), version: env!("CARGO_PKG_VERSION").into() }
}

/// What the telemetry of this process is of. Attributes that are given win.
pub fn resource(node_id: &str, given: &[(String, String)]) -> Resource {
    let own = [("service.name", "landline"), ("service.instance.id", node_id), ("service.version", env!("CARGO_PKG_VERSION"))];
    let own = own.iter().filter(|(key, _)| !given.iter().any(|(name, _)| name == key));
    let own = own.map(|(key, value)| wire::text(key, *value));
    Resource { attributes: own.chain(given.iter().map(|(key, value)| wire::text(key, value.as_str()))).collect() }
}

/// Metrics in requests of a bounded size. A metric with too many points is sent in several parts, which the protocol allows.
fn parcels(metrics: Vec<Metric>) -> Vec<Vec<Metric>> {
    let mut parcels = vec![Vec::new()];
    let mut room = MAX_POINTS;
    for mut metric in metrics {
        loop {
            let rest = metric.split_off(room);
            room -= metric.points();
            if let Some(parcel) = parcels.last_mut().filter(|_| metric.points() > 0) {
                parcel.push(metric);
            }
            match rest {
                Some(rest) => {
                    parcels.push(Vec::new());
                    room = MAX_POINTS;
                    metric = rest;
                }
                None => break,
            }
        }
    }
    parcels.retain(|parcel| !parcel.is_empty());
    parcels
}

impl Metric {
    fn points(&self) -> usize {
        match &self.data {
            Some(wire::Data::Gauge(gauge)) => gauge.points.len(),
            Some(wire::Data::Sum(sum)) => sum.points.len(),
            Some(wire::Data::Histogram(histogram)) => histogram.points.len(),
            None => 0,
        }
    }

    /// Leaves so many points and answers the metric with the others, if there are any.
    fn split_off(&mut self, at: usize) -> Option<Self> {
        if self.points() <= at {
            return None;
        }
        let mut rest = self.clone();
        match (&mut self.data, &mut rest.data) {
            (Some(wire::Data::Gauge(own)), Some(wire::Data::Gauge(rest))) => rest.points = own.points.split_off(at),
            (Some(wire::Data::Sum(own)), Some(wire::Data::Sum(rest))) => rest.points = own.points.split_off(at),
            (Some(wire::Data::Histogram(own)), Some(wire::Data::Histogram(rest))) => rest.points = own.points.split_off(at),
            _ => return None,
        }
        Some(rest)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn gauge(name: &str, points: usize) -> Metric {
        let points = (0..points).map(|n| wire::NumberPoint { value: Some(n as f64), ..Default::default() }).collect();
        let data = Some(wire::Data::Gauge(wire::Gauge { points }));
        Metric { name: name.into(), data, ..Default::default() }
    }

    #[test]
    fn requests_are_bounded_and_no_point_is_lost() {
        let parcels = parcels(vec![gauge("a", 10), gauge("none", 0), gauge("b", 2 * MAX_POINTS), gauge("c", 1)]);
        let sizes: Vec<usize> = parcels.iter().map(|parcel| parcel.iter().map(Metric::points).sum()).collect();
        assert_eq!(sizes, [MAX_POINTS, MAX_POINTS, 11]);
        let names: Vec<_> = parcels.iter().flatten().map(|metric| metric.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "b", "b", "c"]);
    }

    #[test]
    fn given_attributes_of_the_resource_win() {
        let resource =
            resource("n1", &[("service.name".into(), "messages".into()), ("k8s.namespace.name".into(), "prod".into())]);
        let keys: Vec<_> = resource.attributes.iter().map(|a| a.key.as_str()).collect();
        assert_eq!(keys, ["service.instance.id", "service.version", "service.name", "k8s.namespace.name"]);
        assert!(resource.attributes.contains(&wire::text("service.name", "messages")));
    }
}
