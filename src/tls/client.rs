//! The client's end of TLS, for the program's own calls to a server.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use http::Uri;
use hyper_util::rt::TokioIo;
use rustls::{
    ClientConfig, DigitallySignedStruct, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use rustls_platform_verifier::BuilderVerifierExt;
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::{TlsError, certificates, private_key, provider, read, roots};

/// Which servers are trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trust {
    /// Those the machine's own roots vouch for.
    System,
    /// Those the roots in this file vouch for.
    Roots(PathBuf),
    /// The one that has the first certificate of this file, whatever name it is called by.
    Exactly(PathBuf),
}

/// Opens connections over TLS that speak HTTP/2; cheap to clone.
#[derive(Clone)]
pub struct Client {
    connector: TlsConnector,
}

impl Client {
    /// `identity` is the client's own certificate and key, if the server asks for one.
    ///
    /// # Errors
    /// Which file is missing or wrong.
    pub fn new(trust: &Trust, identity: Option<(&Path, &Path)>) -> Result<Self, TlsError> {
        let setup = |e: rustls::Error| TlsError::Setup(e.to_string());
        let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().map_err(setup)?;
        let builder = match trust {
            Trust::System => builder.with_platform_verifier().map_err(setup)?,
            Trust::Roots(path) => builder.with_root_certificates(roots(path, &read(path)?)?),
            Trust::Exactly(path) => {
                let expected = certificates(path, &read(path)?)?.swap_remove(0);
                builder.dangerous().with_custom_certificate_verifier(Arc::new(Exactly { expected, provider: provider() }))
            }
        };
        let mut config = match identity {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let chain = certificates(certificate, &read(certificate)?)?;
                let key = private_key(key, &read(key)?)?;
                let refused = |e: rustls::Error| TlsError::Refused(certificate.to_owned(), e.to_string());
                builder.with_client_auth_cert(chain, key).map_err(refused)?
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Self { connector: Arc::new(config).into() })
    }

    /// Connects to the host and port of an address; the port is 443 where it names none.
    ///
    /// # Errors
    /// When there is no server, or none that is trusted.
    pub async fn connect(&self, address: Uri) -> io::Result<TokioIo<TlsStream<TcpStream>>> {
        let host = address.host().unwrap_or_default().trim_matches(['[', ']']);
        let port = address.port_u16().unwrap_or(443);
        let name = ServerName::try_from(host.to_owned()).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
        let stream = TcpStream::connect((host, port)).await?;
        stream.set_nodelay(true)?;
        Ok(TokioIo::new(self.connector.connect(name, stream).await?))
    }
}

/// Trusts one certificate: that of a server whose files are at hand.
#[derive(Debug)]
struct Exactly {
    expected: CertificateDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Exactly {
    fn verify_server_cert(
        &self,
        presented: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if *presented == self.expected {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(rustls::Error::General("the server has another certificate than the file".into()))
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
