//! One run's figures, and the server's own by way of /proc.

use std::time::Instant;

use serde::Serialize;

use super::Options;

/// What a run prints.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    #[serde(flatten)]
    pub options: Options,
    pub seconds: f64,
    pub published: u64,
    pub delivered: u64,
    pub messages_per_second: f64,
    /// Messages that were confirmed to the publisher and never came.
    pub lost: u64,
    /// Deliveries beyond the first.
    pub duplicates: u64,
    /// Messages of a key that came before an earlier one.
    pub out_of_order: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<Percentiles>,
    /// Processor time of the server, microseconds a message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_cpu_us_per_message: Option<f64>,
    /// The same as a share of one core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_cores: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_resident_mb: Option<f64>,
    /// Processor time of this process, microseconds a message.
    pub client_cpu_us_per_message: f64,
    /// The steps of `seek` and `idle`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub phases: Vec<Phase>,
}

/// One step of a run, and what another subscription noticed of it.
#[derive(Debug, Clone, Serialize)]
pub struct Phase {
    pub step: String,
    pub seconds: f64,
    /// Its times from publish to acknowledged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub neighbour_us: Option<Percentiles>,
}

/// Latencies, microseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Percentiles {
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub p999: u64,
    pub max: u64,
}

impl Percentiles {
    pub fn of(mut values: Vec<u64>) -> Option<Self> {
        values.sort_unstable();
        let at = |share: f64| values.get(((values.len() as f64 * share) as usize).min(values.len().saturating_sub(1))).copied();
        Some(Self { p50: at(0.5)?, p90: at(0.9)?, p99: at(0.99)?, p999: at(0.999)?, max: at(1.0)? })
    }
}

/// What the receivers of a run saw.
#[derive(Debug, Default, Clone)]
pub struct Seen {
    pub delivered: u64,
    pub lost: u64,
    pub duplicates: u64,
    pub out_of_order: u64,
    pub latencies: Vec<u64>,
}

/// Measures one phase.
pub struct Watch {
    start: Instant,
    server_ticks: Option<u64>,
    own_ticks: Option<u64>,
}

impl Watch {
    pub fn start(options: &Options) -> Self {
        Self { start: Instant::now(), server_ticks: options.pid.and_then(ticks), own_ticks: ticks(std::process::id()) }
    }

    pub fn stop(self, options: &Options, published: u64, seen: Seen) -> Report {
        let seconds = self.start.elapsed().as_secs_f64();
        let count = published.max(seen.delivered).max(1) as f64;
        let per_message = |before: Option<u64>, pid: Option<u32>| {
            let spent = pid.and_then(ticks)?.saturating_sub(before?);
            Some(spent as f64 * 1e6 / ticks_per_second() / count)
        };
        let server_cpu_us_per_message = per_message(self.server_ticks, options.pid);
        Report {
            options: options.clone(),
            seconds,
            published,
            delivered: seen.delivered,
            messages_per_second: count / seconds,
            lost: seen.lost,
            duplicates: seen.duplicates,
            out_of_order: seen.out_of_order,
            latency_us: Percentiles::of(seen.latencies),
            server_cpu_us_per_message,
            server_cores: server_cpu_us_per_message.map(|us| us * count / 1e6 / seconds),
            server_resident_mb: options.pid.and_then(resident_mb),
            client_cpu_us_per_message: per_message(self.own_ticks, Some(std::process::id())).unwrap_or(0.0),
            phases: Vec::new(),
        }
    }
}

fn ticks_per_second() -> f64 {
    rustix::param::clock_ticks_per_second() as f64
}

/// Processor time of a process, threads that have ended included, in clock ticks.
fn ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name may contain spaces; the fields go on after its closing parenthesis.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
}

fn resident_mb(pid: u32) -> Option<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    Some(line.trim().trim_end_matches(" kB").trim().parse::<f64>().ok()? / 1024.0)
}
