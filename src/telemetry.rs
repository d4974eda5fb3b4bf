//! What leaves the process by OTLP, the protocol of OpenTelemetry: spans of what happens to messages, and metrics.
//!
//! Calls only put finished spans into a bounded queue; a task sends them. Nothing here makes a call wait or fail.

mod context;
mod export;
mod tracer;
pub mod wire;

use std::{
    path::PathBuf,
    sync::atomic::AtomicU64,
    time::{SystemTime, UNIX_EPOCH},
};

pub use self::{
    context::{CREATED_BY, Context, parent, under},
    export::{Outlet, resource},
    tracer::{Batch, Facts, Operation, Spans, Tracer},
};

/// Where telemetry goes, and what of it.
#[derive(Clone, PartialEq)]
pub struct Options {
    /// URL of the collector without a slash at its end; empty sends nothing anywhere.
    pub endpoint: String,
    pub protocol: Protocol,
    /// Sent with every request, such as credentials.
    pub headers: Vec<(String, String)>,
    /// Root certificates of the collector beside those of the machine, PEM; empty for none.
    pub ca_file: PathBuf,
    /// Time between two reports of the metrics; 0 sends none.
    pub metrics_seconds: u64,
    /// Part of the traces begun here that are recorded, 0 to 1; none records no spans at all.
    pub traces: Option<f64>,
    /// Attributes of the resource that the telemetry is of, beside the server's own.
    pub attributes: Vec<(String, String)>,
}

/// How OTLP travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    Grpc,
    /// Protocol buffers by HTTP POST.
    Http,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            endpoint: String::new(),
            protocol: Protocol::Grpc,
            headers: Vec::new(),
            ca_file: PathBuf::new(),
            metrics_seconds: 60,
            traces: None,
            attributes: Vec::new(),
        }
    }
}

/// Without the headers' values.
impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options").field("endpoint", &self.endpoint).field("traces", &self.traces).finish_non_exhaustive()
    }
}

/// Kinds of telemetry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    Traces,
    Metrics,
}

impl Signal {
    /// Every kind, with its label.
    pub const ALL: [(Self, &'static str); 2] = [(Self::Traces, "traces"), (Self::Metrics, "metrics")];
}

/// What became of telemetry.
#[derive(Debug, Default)]
pub struct Counts {
    /// Spans that the collector took.
    pub exported: AtomicU64,
    /// Spans for which there was no room in the queue.
    pub dropped: AtomicU64,
    /// Spans that the collector did not take.
    pub failed: AtomicU64,
    /// Requests by [`Signal`]: taken, and not.
    pub requests: [[AtomicU64; 2]; Signal::ALL.len()],
}

/// Nanoseconds since the epoch.
pub fn now_nanos() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}
