//! The server's end of TLS.

use std::{path::PathBuf, sync::Arc};

use parking_lot::RwLock;
use rustls::{ServerConfig, server::WebPkiClientVerifier};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{Accept, TlsAcceptor};

use super::{TlsError, Watched, certificates, private_key, provider, read, roots};

/// Protocols a client may choose by ALPN, ours first.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// Whether clients are asked for certificates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ClientAuth {
    #[default]
    Off,
    /// A certificate is checked where one is sent.
    Optional,
    /// Without a certificate there is no connection.
    Required,
}

/// The files of the server's end; paths are empty where there is none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServerFiles {
    /// The certificate and those between it and its root, PEM. Empty: the port does not speak TLS.
    pub certificate: PathBuf,
    /// The certificate's private key, PEM.
    pub key: PathBuf,
    /// Roots of the clients' certificates, PEM.
    pub client_roots: PathBuf,
    pub client_auth: ClientAuth,
}

impl ServerFiles {
    /// True when the port speaks TLS.
    pub fn is_set(&self) -> bool {
        !self.certificate.as_os_str().is_empty()
    }

    fn paths(&self) -> Vec<PathBuf> {
        let all = [&self.certificate, &self.key, &self.client_roots];
        all.into_iter().filter(|path| !path.as_os_str().is_empty()).cloned().collect()
    }

    fn load(&self) -> Result<Arc<ServerConfig>, TlsError> {
        let chain = certificates(&self.certificate, &read(&self.certificate)?)?;
        let key = private_key(&self.key, &read(&self.key)?)?;
        let setup = |e: rustls::Error| TlsError::Setup(e.to_string());
        let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().map_err(setup)?;
        let builder = match self.client_auth {
            ClientAuth::Off => builder.with_no_client_auth(),
            asked => {
                let roots = roots(&self.client_roots, &read(&self.client_roots)?)?;
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider());
                let verifier = if asked == ClientAuth::Optional { verifier.allow_unauthenticated() } else { verifier };
                let refused =
                    |e: rustls::server::VerifierBuilderError| TlsError::Refused(self.client_roots.clone(), e.to_string());
                builder.with_client_cert_verifier(verifier.build().map_err(refused)?)
            }
        };
        let mut config =
            builder.with_single_cert(chain, key).map_err(|e| TlsError::Refused(self.certificate.clone(), e.to_string()))?;
        config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).into();
        Ok(Arc::new(config))
    }
}

/// Begins TLS on accepted connections, with the files as they are now; cheap to clone.
#[derive(Clone)]
pub struct Acceptor {
    files: ServerFiles,
    config: Arc<RwLock<Arc<ServerConfig>>>,
}

impl Acceptor {
    /// Reads the files.
    ///
    /// # Errors
    /// Which file is missing or wrong.
    pub fn open(files: &ServerFiles) -> Result<Self, TlsError> {
        Ok(Self { files: files.clone(), config: Arc::new(RwLock::new(files.load()?)) })
    }

    /// Begins TLS on a connection.
    pub fn accept<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> Accept<S> {
        let config = self.config.read().clone();
        TlsAcceptor::from(config).accept(stream)
    }

    /// Reads the files again whenever they change, for ever. While they don't fit together, as between the writing of a
    /// certificate and that of its key, the last good ones stay in use. Open connections go on with what they began with.
    pub async fn follow(self) {
        let mut watched = Watched::new(self.files.paths());
        loop {
            watched.changed().await;
            match self.files.load() {
                Ok(config) => {
                    *self.config.write() = config;
                    tracing::info!("the TLS files changed and are in use");
                }
                Err(error) => tracing::warn!(%error, "the TLS files changed but can't be used; the former ones stay in use"),
            }
        }
    }
}
