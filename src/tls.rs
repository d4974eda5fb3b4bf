//! TLS on both ends: the server's port, and the program's own clients (`healthcheck`, `bench`).
//!
//! TLS 1.2 and 1.3 with the library's default suites; HTTP/2 and HTTP/1.1 are offered by ALPN.

mod client;
mod files;
mod peer;
mod server;

pub use client::{Client, Trust};
pub use files::Watched;
pub use peer::PeerName;
pub use server::{Acceptor, ClientAuth, ServerFiles};

use std::{io, path::Path, path::PathBuf, sync::Arc};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};

/// Why TLS can't be set up. Names files, never what they hold.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{path}: {source}", path = .0.display(), source = .1)]
    Read(PathBuf, #[source] io::Error),
    #[error("{path}: holds no {what} in PEM form", path = .0.display(), what = .1)]
    Content(PathBuf, &'static str),
    #[error("{path}: {text}", path = .0.display(), text = .1)]
    Refused(PathBuf, String),
    #[error("TLS can't be set up: {0}")]
    Setup(String),
}

/// The cryptography every TLS configuration of the program uses.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|e| TlsError::Read(path.to_owned(), e))
}

/// The certificates of a PEM text, in order; at least one.
fn certificates(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        _ => Err(TlsError::Content(path.to_owned(), "certificate")),
    }
}

/// The first private key of a PEM text.
fn private_key(path: &Path, pem: &[u8]) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|_| TlsError::Content(path.to_owned(), "private key"))
}

/// The certificates of a PEM text as what a peer's certificate must lead to.
fn roots(path: &Path, pem: &[u8]) -> Result<rustls::RootCertStore, TlsError> {
    let mut store = rustls::RootCertStore::empty();
    for certificate in certificates(path, pem)? {
        store.add(certificate).map_err(|e| TlsError::Refused(path.to_owned(), e.to_string()))?;
    }
    Ok(store)
}
