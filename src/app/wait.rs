//! `landline wait`: waits until nothing of a subscription waits or is leased.

use std::time::{Duration, Instant};

use clap::Args;
use serde_json::Value;

use super::Error;
use crate::settings::Settings;

/// Time one request waits at most; proxies and clients give up on longer ones.
const SLICE: Duration = Duration::from_secs(20);
/// Pause after a request that failed.
const PAUSE: Duration = Duration::from_millis(250);

/// Arguments of `landline wait`.
#[derive(Debug, Clone, Args)]
pub struct Wait {
    /// The subscriptions, each PROJECT/ID or its full name
    #[arg(value_name = "SUBSCRIPTION", required = true)]
    subscriptions: Vec<String>,

    /// Address of the server's ADMIN_ADDRESS: a URL or HOST:PORT; the settings' own by default
    #[arg(long, value_name = "URL")]
    admin: Option<String>,

    /// Longest time to wait
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(0..=86_400))]
    timeout_seconds: u64,
}

/// Comes back when everything is drained.
///
/// # Errors
/// When that does not happen in time, there is no such subscription, or there is no admin address to ask.
pub fn run(wait: &Wait, settings: &Settings) -> Result<(), Error> {
    let admin = match (&wait.admin, settings.admin) {
        (Some(url), _) if url.contains("://") => url.trim_end_matches('/').to_owned(),
        (Some(address), _) => format!("http://{address}"),
        (None, Some(address)) => format!("http://{address}"),
        (None, None) => return Err(Error::Wait("ADMIN_ADDRESS is empty; --admin must be given".into())),
    };
    let full = |name: &String| match name.split_once('/') {
        Some((project, id)) if !name.starts_with("projects/") => format!("projects/{project}/subscriptions/{id}"),
        _ => name.clone(),
    };
    let escaped = |name: String| percent_encoding::utf8_percent_encode(&name, percent_encoding::NON_ALPHANUMERIC).to_string();
    let names: Vec<_> = wait.subscriptions.iter().map(full).map(escaped).collect();
    let url = format!("{admin}/drained?subscription={}", names.join("&subscription="));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::System)?;
    runtime.block_on(ask(&url, Instant::now() + Duration::from_secs(wait.timeout_seconds))).map_err(Error::Wait)
}

async fn ask(url: &str, limit: Instant) -> Result<(), String> {
    let client = reqwest::Client::new();
    loop {
        let left = limit.saturating_duration_since(Instant::now());
        let slice = left.min(SLICE);
        let request = client.get(format!("{url}&timeout={:.3}s", slice.as_secs_f64())).timeout(slice + SLICE);
        let told = match request.send().await {
            Err(error) => Err(format!("{url}: {error}")),
            Ok(answer) => {
                let status = answer.status().as_u16();
                let text = answer.text().await.unwrap_or_default();
                let value: Value = serde_json::from_str(&text).unwrap_or_default();
                match (status, value["error"].as_str()) {
                    (200, _) => return Ok(()),
                    (400 | 401 | 403 | 404, told) => return Err(told.unwrap_or(&text).trim().to_owned()),
                    (504, None) => Ok(format!("not drained in time: {}", value["subscriptions"])),
                    (_, told) => Err(told.unwrap_or(&text).trim().to_owned()),
                }
            }
        };
        if Instant::now() >= limit {
            return Err(told.unwrap_or_else(|error| error));
        }
        if told.is_err() {
            tokio::time::sleep(PAUSE).await;
        }
    }
}
