//! `landline bench`: load for any Pub/Sub endpoint, measured and checked.
//!
//! Every run makes its own topic and subscriptions, prints one line of JSON and removes them again. Each payload begins
//! with its number and the time it was sent, so that loss, repeats, order and latency are seen by the receiver.

mod client;
mod idle;
mod latency;
mod load;
mod report;
mod seek;

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use client::Client;
pub use report::Report;

/// What to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scenario {
    /// Publish into one subscription's backlog.
    Publish,
    /// Receive and acknowledge a backlog that was published before.
    Drain,
    /// Publish and receive at the same time, as fast as both go.
    EndToEnd,
    /// Publish at a steady rate, a message a request unless --batch is given; time from publish to receipt.
    Latency,
    /// As `end-to-end`, over ordering keys; checks the order.
    Ordered,
    /// As `end-to-end`, through a filter that every message passes.
    Filtered,
    /// Every subscription gets every message.
    FanOut,
    /// Publish, then take a snapshot, seek to the future, the past and the snapshot, with another subscription in use.
    Seek,
    /// Publish over ordering keys, a key a message, receive and keep everything: memory of what is outstanding.
    Hold,
    /// Open the streams of all subscriptions and wait, with another subscription in use.
    Idle,
}

/// What the topic does to messages before they are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Shaping {
    None,
    /// An Avro schema in JSON.
    Schema,
    /// A function that adds an attribute.
    Transform,
}

/// Options of a run.
#[derive(Debug, Clone, Args, serde::Serialize)]
pub struct Options {
    /// What to measure.
    #[arg(value_enum)]
    pub scenario: Scenario,
    /// Where the server is.
    #[arg(long, default_value = "http://127.0.0.1:8085")]
    pub endpoint: String,
    /// Roots of the server's certificate, PEM, for an `https://` endpoint; by default those of the machine.
    #[arg(long)]
    pub ca_file: Option<PathBuf>,
    /// Key file of a service account whose calls these are, as `landline keys create` makes it. Good for an hour.
    #[arg(long)]
    pub key_file: Option<PathBuf>,
    /// Messages in all.
    #[arg(long, default_value_t = 100_000)]
    pub messages: u64,
    /// Messages a Publish request; by default 100, and 1 for `latency`.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub batch: Option<u64>,
    /// Bytes a payload, at least 16.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(16..=9_000_000))]
    pub bytes: u64,
    /// Publish requests under way at once.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    pub publishers: u64,
    /// Connections that carry them.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub connections: u64,
    /// StreamingPull streams a subscription.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    pub streams: u64,
    /// Subscriptions of `fan-out` and `idle`.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    pub subscriptions: u64,
    /// Ordering keys of `ordered` and `hold`.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pub keys: u64,
    /// Messages a second of `latency`.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub rate: u64,
    /// What the topic of `publish` checks or changes. With another value than none, payloads are JSON texts.
    #[arg(long, value_enum, default_value_t = Shaping::None)]
    pub shaping: Shaping,
    /// The topic of `publish`, one that is there and stays: `projects/P/topics/T`. By default every run makes its own.
    #[arg(long)]
    pub topic: Option<String>,
    /// Project of the topic and the subscriptions.
    #[arg(long, default_value = "bench")]
    pub project: String,
    /// Process id of the server on this machine: adds its CPU time and memory to the report.
    #[arg(long)]
    pub pid: Option<u32>,
    /// Seconds without any message after which what is missing counts as lost.
    #[arg(long, default_value_t = 30)]
    pub patience_seconds: u64,
}

impl Options {
    /// Messages a Publish request.
    fn batch(&self) -> u64 {
        self.batch.unwrap_or(if self.scenario == Scenario::Latency { 1 } else { 100 })
    }
}

/// Runs one scenario.
///
/// # Errors
/// A text that says which call failed and why.
pub async fn run(options: &Options) -> Result<Report, String> {
    if options.shaping != Shaping::None && options.scenario != Scenario::Publish {
        return Err("--shaping goes with the scenario publish alone".into());
    }
    if options.topic.is_some() && options.scenario != Scenario::Publish {
        return Err("--topic goes with the scenario publish alone".into());
    }
    let client = Client::open(options).await?;
    let report = match options.scenario {
        Scenario::Publish => load::publish(options, &client).await,
        Scenario::Drain => load::drain(options, &client).await,
        Scenario::EndToEnd | Scenario::FanOut | Scenario::Filtered => load::end_to_end(options, &client, 0).await,
        Scenario::Ordered => load::end_to_end(options, &client, options.keys).await,
        Scenario::Seek => seek::seek(options, &client).await,
        Scenario::Hold => load::hold(options, &client).await,
        Scenario::Idle => idle::idle(options, &client).await,
        Scenario::Latency => latency::steady(options, &client).await,
    };
    client.remove().await;
    report
}
