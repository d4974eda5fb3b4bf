//! `landline mirror`: runs the mirror until a signal stops it.

use tokio_util::sync::CancellationToken;

use super::{EXIT_CUT_SHORT, Error, signals::Signals};
use crate::mirror::{self, Options};

/// Copies until SIGTERM or SIGINT, then drains. A second signal ends at once.
///
/// # Errors
/// What keeps it from copying.
pub fn run(options: &Options) -> Result<(), Error> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(Error::System)?;
    runtime.block_on(async {
        let mut signals = Signals::new().map_err(Error::System)?;
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        tokio::spawn(async move {
            let signal = signals.next().await;
            eprintln!("mirror: {signal}: settling what was copied");
            stopped.cancel();
            signals.next().await;
            std::process::exit(EXIT_CUT_SHORT)
        });
        mirror::run(options, stop).await.map_err(Error::Mirror)
    })
}
