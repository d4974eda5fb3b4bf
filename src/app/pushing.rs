//! Push delivery as a part of the process.

#[cfg(feature = "push")]
mod on {
    use std::sync::Arc;

    use tokio::task::JoinHandle;
    use tokio_util::sync::CancellationToken;

    use crate::{
        app::Error,
        connector::Connector,
        push::{Issuer, Options, Pusher},
        settings::Settings,
    };

    /// Push delivery under way.
    pub struct Pushing {
        pub issuer: Arc<Issuer>,
        stop: CancellationToken,
        task: JoinHandle<()>,
    }

    impl Pushing {
        /// Starts it. `port` is the one that the server listens on.
        ///
        /// # Errors
        /// [`Error::Push`].
        pub fn start(settings: &Settings, connector: &Arc<Connector>, port: u16) -> Result<Self, Error> {
            let scheme = if settings.tls.is_set() { "https" } else { "http" };
            let url = match (settings.push_issuer.as_str(), settings.advertised_endpoint.as_str()) {
                ("", "") => format!("{scheme}://localhost:{port}"),
                ("", endpoint) => format!("{scheme}://{endpoint}"),
                (url, _) => url.to_owned(),
            };
            let issuer = Arc::new(Issuer::new(connector.clone(), url));
            let options = Options { private_networks: settings.push_internal_networks, ca_file: settings.push_ca_file.clone() };
            let stop = CancellationToken::new();
            let pusher = Pusher::new(connector.clone(), issuer.clone(), &options, stop.clone()).map_err(Error::Push)?;
            Ok(Self { issuer, stop, task: tokio::spawn(pusher.run()) })
        }

        /// Ends push delivery after the requests under way.
        pub async fn stop(&mut self) {
            self.stop.cancel();
            // A panic has been reported where it happened.
            let _ = (&mut self.task).await;
        }
    }
}

#[cfg(not(feature = "push"))]
mod off {
    use std::sync::Arc;

    use crate::{app::Error, connector::Connector, settings::Settings};

    /// Stands in for push delivery in a server built without it.
    pub struct Pushing;

    impl Pushing {
        pub fn start(_: &Settings, _: &Arc<Connector>, _: u16) -> Result<Self, Error> {
            Ok(Self)
        }

        pub async fn stop(&mut self) {}
    }
}

#[cfg(not(feature = "push"))]
pub use off::Pushing;
#[cfg(feature = "push")]
pub use on::Pushing;
