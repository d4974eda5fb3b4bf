//! Log lines: standard error, as text or JSON.

use tracing_subscriber::{Layer, filter::Targets, fmt, layer::SubscriberExt, util::SubscriberInitExt};

use crate::settings::{LogFormat, Settings};

/// Starts the logs of this process, and sends panics there too.
pub fn start(settings: &Settings) {
    let filter: Targets = settings.log.parse().unwrap_or_default();
    let lines = fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    let lines = match settings.log_format {
        LogFormat::Text => lines.with_filter(filter).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).with_filter(filter).boxed(),
    };
    // Fails only when the process has logs already, as in tests that start it twice.
    let _ = tracing_subscriber::registry().with(lines).try_init();

    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        tracing::error!(thread = thread.name().unwrap_or("unnamed"), "{panic}");
    }));
}
