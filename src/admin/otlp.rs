//! The metrics as OTLP has them: the same families, under names and units that the rules of Prometheus turn back into theirs.

use std::sync::OnceLock;

use super::exposition::{Kind, Labels, Sink};
use crate::{
    model::meter::{BOUNDS_MICROS, HistogramView},
    telemetry::{
        now_nanos,
        wire::{self, Data, Gauge, Histogram, HistogramPoint, Metric, NumberPoint, Sum},
    },
};

/// Parts of names that are namespaces, after the first.
const NAMESPACES: [&str; 4] = ["topic", "subscription", "broker", "otlp"];
/// What a name in Prometheus ends with, the unit, and whether that end is the unit's own.
const UNITS: [(&str, &str, bool); 5] = [
    ("_seconds", "s", true),
    ("_bytes", "By", true),
    ("_messages", "{message}", false),
    ("_requests", "{request}", false),
    ("_responses", "{response}", false),
];

/// Metrics of one moment.
pub struct Report {
    metrics: Vec<Metric>,
    /// When counting began.
    start_nanos: u64,
    nanos: u64,
}

impl Default for Report {
    fn default() -> Self {
        // Counters begin with the process; the first report comes soon after.
        static START: OnceLock<u64> = OnceLock::new();
        let nanos = now_nanos();
        Self { metrics: Vec::new(), start_nanos: *START.get_or_init(|| process_start().unwrap_or(nanos)), nanos }
    }
}

fn process_start() -> Option<u64> {
    Some((super::process::read()?.started_at * 1e9) as u64)
}

impl Report {
    /// Everything that has a value.
    pub fn into_metrics(mut self) -> Vec<Metric> {
        self.metrics.retain(|metric| match &metric.data {
            Some(Data::Gauge(gauge)) => !gauge.points.is_empty(),
            Some(Data::Sum(sum)) => !sum.points.is_empty(),
            Some(Data::Histogram(histogram)) => !histogram.points.is_empty(),
            None => false,
        });
        self.metrics
    }
}

/// Name and unit of a family.
fn named(prometheus: &str) -> (String, &'static str) {
    let mut name = prometheus.strip_suffix("_total").unwrap_or(prometheus);
    let mut unit = "";
    for (end, of, own) in UNITS {
        if let Some(rest) = name.strip_suffix(end) {
            unit = of;
            name = if own { rest } else { name };
            break;
        }
    }
    let (first, rest) = name.split_once('_').unwrap_or((name, ""));
    let rest = match rest.split_once('_') {
        Some((space, rest)) if NAMESPACES.contains(&space) => format!("{space}.{rest}"),
        _ => rest.to_owned(),
    };
    (format!("{first}.{rest}"), unit)
}

impl Sink for Report {
    fn head(&mut self, name: &str, kind: Kind, about: &str) {
        let (name, unit) = named(name);
        let data = match kind {
            Kind::Gauge => Data::Gauge(Gauge::default()),
            Kind::Counter => Data::Sum(Sum { temporality: wire::CUMULATIVE, monotonic: true, ..Sum::default() }),
            Kind::Histogram => Data::Histogram(Histogram { temporality: wire::CUMULATIVE, ..Histogram::default() }),
        };
        self.metrics.push(Metric { name, description: about.to_owned(), unit: unit.to_owned(), data: Some(data) });
    }

    fn sample(&mut self, _: &str, labels: Labels, value: f64) {
        let (start_nanos, nanos) = (self.start_nanos, self.nanos);
        let attributes = labels.iter().map(|(key, value)| wire::text(key, *value)).collect();
        match self.metrics.last_mut().and_then(|metric| metric.data.as_mut()) {
            Some(Data::Gauge(gauge)) => {
                gauge.points.push(NumberPoint { start_nanos: 0, nanos, value: Some(value), attributes });
            }
            Some(Data::Sum(sum)) => sum.points.push(NumberPoint { start_nanos, nanos, value: Some(value), attributes }),
            _ => {}
        }
    }

    fn histogram(&mut self, _: &str, labels: Labels, view: &HistogramView) {
        let Some(Data::Histogram(histogram)) = self.metrics.last_mut().and_then(|metric| metric.data.as_mut()) else { return };
        histogram.points.push(HistogramPoint {
            start_nanos: self.start_nanos,
            nanos: self.nanos,
            count: view.buckets.iter().sum(),
            sum: Some(view.sum.as_secs_f64()),
            buckets: view.buckets.to_vec(),
            bounds: BOUNDS_MICROS.iter().map(|micros| *micros as f64 / 1e6).collect(),
            attributes: labels.iter().map(|(key, value)| wire::text(key, *value)).collect(),
        });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{admin::markdown, model::meter::Histogram as Counted};

    /// What Prometheus makes of a name by its rules for OTLP: signs become `_`, then come the unit and `_total`.
    fn in_prometheus(name: &str, unit: &str, kind: &str) -> String {
        let mut name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        match unit {
            "s" => name += "_seconds",
            "By" => name += "_bytes",
            _ => assert!(unit.is_empty() || unit.starts_with('{'), "{unit}"),
        }
        if kind == "counter" { name + "_total" } else { name }
    }

    #[test]
    fn prometheus_turns_every_name_back() {
        let table = markdown();
        let rows: Vec<_> = table.lines().skip(2).map(|row| row.split(" | ").collect::<Vec<_>>()).collect();
        assert!(rows.len() > 30);
        for row in rows {
            let (family, kind) = (row[0].trim_start_matches("| ").trim_matches('`'), row[1]);
            let (name, unit) = named(family);
            assert_eq!(in_prometheus(&name, unit, kind), family, "{name} {unit}");
        }
        assert_eq!(named("landline_subscription_ack_messages_total"), ("landline.subscription.ack_messages".into(), "{message}"));
        assert_eq!(named("landline_topic_sent_bytes_total"), ("landline.topic.sent".into(), "By"));
        assert_eq!(named("process_cpu_seconds_total"), ("process.cpu".into(), "s"));
        assert_eq!(named("landline_broker_sync_duration_seconds"), ("landline.broker.sync_duration".into(), "s"));
    }

    #[test]
    fn samples_become_points_of_their_family() {
        let mut report = Report::default();
        report.head("a_total", Kind::Counter, "All of it");
        report.sample("a_total", &[("b", "x")], 3.0);
        report.head("none", Kind::Gauge, "Nothing");
        report.head("t_seconds", Kind::Histogram, "Times");
        let counted = Counted::default();
        [50, 200, 200_000_000].into_iter().for_each(|micros| counted.observe(Duration::from_micros(micros)));
        report.histogram("t_seconds", &[], &counted.view());
        let metrics = report.into_metrics();
        assert_eq!(metrics.len(), 2);
        let Some(Data::Sum(sum)) = &metrics[0].data else { panic!("{metrics:?}") };
        assert_eq!((sum.monotonic, sum.temporality, sum.points[0].value), (true, 2, Some(3.0)));
        assert_eq!(sum.points[0].attributes, [wire::text("b", "x")]);
        assert!(sum.points[0].start_nanos > 0 && sum.points[0].start_nanos <= sum.points[0].nanos);
        let Some(Data::Histogram(histogram)) = &metrics[1].data else { panic!("{metrics:?}") };
        let point = &histogram.points[0];
        assert_eq!((point.count, point.buckets.len(), point.bounds.len()), (3, 17, 16));
        assert_eq!((point.buckets[0], point.buckets[1], point.buckets[16]), (1, 1, 1));
        assert_eq!((point.bounds[0], point.sum), (0.0001, Some(200.00025)));
    }
}
