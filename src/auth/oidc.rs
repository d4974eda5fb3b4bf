//! Identity providers (OpenID Connect): their signing keys, fetched, remembered and fetched again.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use parking_lot::RwLock;
use serde::Deserialize;

use super::{
    Invalid,
    jwt::{self, PublicKey},
};

/// Time a provider has to answer; a caller waits for it.
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of a provider's answer: keys with their certificates take a few KiB each.
const MAX_ANSWER_BYTES: usize = 1024 * 1024;
/// Least time between two fetches: tokens with made-up key ids must not become load on the provider.
const MIN_REFRESH: Duration = Duration::from_secs(10);
/// Keys older than this are fetched again; if that fails, they stay in use.
const MAX_AGE: Duration = Duration::from_secs(3600);

/// A provider that is trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IssuerSpec {
    /// The `iss` of its tokens.
    pub issuer: String,
    /// Where its keys are, a URL or the path of a file; by default its discovery document says so.
    pub keys: Option<String>,
}

impl IssuerSpec {
    /// Reads `ISSUER` or `ISSUER=KEYS`. Plain HTTP is for the own machine alone: who can change the answer can sign tokens.
    pub fn parse(text: &str) -> Option<Self> {
        let (issuer, keys) = text.split_once('=').map_or((text, None), |(issuer, keys)| (issuer, Some(keys.to_owned())));
        let fetchable = |url: &str| {
            url.strip_prefix("https://").is_some_and(|rest| !rest.is_empty())
                || url.strip_prefix("http://").is_some_and(|rest| {
                    let host = rest.split('/').next().unwrap_or_default();
                    let host = host.rsplit_once(':').map_or(host, |(host, _)| host);
                    matches!(host, "localhost" | "127.0.0.1" | "[::1]")
                })
        };
        let legal = match &keys {
            None => fetchable(issuer),
            Some(keys) => !issuer.is_empty() && (fetchable(keys) || !keys.contains("://") && !keys.is_empty()),
        };
        legal.then(|| Self { issuer: issuer.to_owned(), keys })
    }
}

impl std::fmt::Display for IssuerSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.issuer)?;
        self.keys.iter().try_for_each(|keys| write!(f, "={keys}"))
    }
}

/// The providers that are trusted.
pub struct Issuers {
    issuers: Vec<Issuer>,
    client: reqwest::Client,
}

struct Issuer {
    spec: IssuerSpec,
    keys: RwLock<Vec<(Option<String>, PublicKey)>>,
    /// When keys were last asked for and, if that went well, got. The lock makes one caller ask for all.
    asked: tokio::sync::Mutex<Option<Instant>>,
    got: RwLock<Option<Instant>>,
}

impl Issuers {
    /// `roots` are certificates that vouch for the providers, beside the machine's own.
    ///
    /// # Errors
    /// When the file holds no certificates.
    pub fn new(specs: &[IssuerSpec], roots: Option<&Path>) -> Result<Self, String> {
        let mut builder =
            reqwest::Client::builder().timeout(FETCH_TIMEOUT).redirect(reqwest::redirect::Policy::none()).user_agent("landline");
        if let Some(path) = roots {
            let failed = |e: String| format!("{}: {e}", path.display());
            let pem = std::fs::read(path).map_err(|e| failed(e.to_string()))?;
            let certificates = reqwest::Certificate::from_pem_bundle(&pem).map_err(|e| failed(e.to_string()))?;
            if certificates.is_empty() {
                return Err(failed("there is no certificate in it".into()));
            }
            builder = builder.tls_certs_merge(certificates);
        }
        let issuer = |spec: &IssuerSpec| Issuer {
            spec: spec.clone(),
            keys: RwLock::default(),
            asked: tokio::sync::Mutex::default(),
            got: RwLock::default(),
        };
        let client = builder.build().map_err(|e| e.to_string())?;
        Ok(Self { issuers: specs.iter().map(issuer).collect(), client })
    }

    /// True for a provider that is trusted.
    pub fn knows(&self, issuer: &str) -> bool {
        self.issuers.iter().any(|known| known.spec.issuer == issuer)
    }

    /// The keys of a provider that may have signed a token with this key id.
    ///
    /// # Errors
    /// [`Invalid::Issuer`], [`Invalid::UnknownKey`], or [`Invalid::Provider`] when it does not answer.
    pub async fn keys(&self, issuer: &str, key_id: Option<&str>) -> Result<Vec<PublicKey>, Invalid> {
        let issuer = self.issuers.iter().find(|known| known.spec.issuer == issuer).ok_or(Invalid::Issuer)?;
        let fresh = issuer.got.read().is_some_and(|got| got.elapsed() < MAX_AGE);
        let known = issuer.find(key_id);
        if fresh && !known.is_empty() {
            return Ok(known);
        }
        let refreshed = issuer.refresh(&self.client).await;
        let known = issuer.find(key_id);
        match (known.is_empty(), refreshed) {
            (false, _) => Ok(known),
            (true, Ok(())) => Err(Invalid::UnknownKey),
            (true, Err(error)) => {
                tracing::warn!(issuer = issuer.spec.issuer, error, "the keys of an identity provider can't be fetched");
                Err(Invalid::Provider)
            }
        }
    }
}

impl Issuer {
    fn find(&self, key_id: Option<&str>) -> Vec<PublicKey> {
        let keys = self.keys.read();
        let fits = |id: &Option<String>| match (id, key_id) {
            (Some(id), Some(asked)) => id == asked,
            _ => true,
        };
        keys.iter().filter(|(id, _)| fits(id)).map(|(_, key)| key.clone()).collect()
    }

    async fn refresh(&self, client: &reqwest::Client) -> Result<(), String> {
        let mut asked = self.asked.lock().await;
        if asked.is_some_and(|asked| asked.elapsed() < MIN_REFRESH) {
            return Ok(());
        }
        *asked = Some(Instant::now());
        let keys = self.fetch(client).await?;
        *self.keys.write() = keys;
        *self.got.write() = Some(Instant::now());
        Ok(())
    }

    async fn fetch(&self, client: &reqwest::Client) -> Result<Vec<(Option<String>, PublicKey)>, String> {
        let location = match &self.spec.keys {
            Some(location) => location.clone(),
            None => discover(client, &self.spec.issuer).await?,
        };
        let text = if location.contains("://") {
            get(client, &location).await?
        } else {
            std::fs::read(PathBuf::from(&location)).map_err(|e| format!("{location}: {e}"))?
        };
        let set: KeySet = serde_json::from_slice(&text).map_err(|e| format!("{location}: {e}"))?;
        Ok(set.keys.into_iter().filter_map(|key| Some((key.kid.clone(), key.read()?))).collect())
    }
}

/// The part of a discovery document that is of use.
#[derive(Deserialize)]
struct Discovery {
    issuer: String,
    jwks_uri: String,
}

async fn discover(client: &reqwest::Client, issuer: &str) -> Result<String, String> {
    let url = format!("{}/.well-known/openid-configuration", issuer.trim_end_matches('/'));
    let document: Discovery = serde_json::from_slice(&get(client, &url).await?).map_err(|e| format!("{url}: {e}"))?;
    if document.issuer != issuer {
        return Err(format!("{url}: is of another issuer, {:?}", document.issuer));
    }
    let spec = IssuerSpec::parse(&format!("x={}", document.jwks_uri)).filter(|_| document.jwks_uri.contains("://"));
    spec.map(|_| document.jwks_uri).ok_or_else(|| format!("{url}: names keys that can't be fetched safely"))
}

async fn get(client: &reqwest::Client, url: &str) -> Result<Vec<u8>, String> {
    let failed = |e: reqwest::Error| format!("{url}: {e}");
    let mut answer = client.get(url).send().await.and_then(reqwest::Response::error_for_status).map_err(failed)?;
    let mut body = Vec::new();
    while let Some(chunk) = answer.chunk().await.map_err(failed)? {
        body.extend_from_slice(&chunk);
        if body.len() > MAX_ANSWER_BYTES {
            return Err(format!("{url}: the answer is too large"));
        }
    }
    Ok(body)
}

/// A set of keys (RFC 7517).
#[derive(Deserialize)]
struct KeySet {
    keys: Vec<WebKey>,
}

#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
struct WebKey {
    kty: String,
    kid: Option<String>,
    r#use: Option<String>,
    crv: String,
    n: String,
    e: String,
    x: String,
    y: String,
}

impl WebKey {
    /// The key; none for kinds that are not understood and for keys that do not sign.
    fn read(&self) -> Option<PublicKey> {
        let bytes = |text: &str| URL_SAFE_NO_PAD.decode(text.trim_end_matches('=')).ok().filter(|bytes| !bytes.is_empty());
        let point = || Some([vec![4], bytes(&self.x)?, bytes(&self.y)?].concat());
        if self.r#use.as_deref().is_some_and(|r#use| r#use != "sig") {
            return None;
        }
        match (self.kty.as_str(), self.crv.as_str()) {
            ("RSA", _) => Some(jwt::PublicKey::Rsa { n: bytes(&self.n)?, e: bytes(&self.e)? }),
            ("EC", "P-256") => point().map(PublicKey::P256),
            ("EC", "P-384") => point().map(PublicKey::P384),
            ("OKP", "Ed25519") => bytes(&self.x).map(PublicKey::Ed25519),
            _ => None,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_provider_is_reached_over_tls_or_on_the_own_machine() {
        for text in [
            "https://accounts.example.com",
            "https://accounts.example.com/realms/shop",
            "http://localhost:8080/realms/shop",
            "http://127.0.0.1:1",
            "kubernetes/serviceaccount=/etc/keys.json",
            "https://kubernetes.default.svc=https://10.0.0.1/openid/v1/jwks",
        ] {
            assert_eq!(IssuerSpec::parse(text).unwrap().to_string(), text);
        }
        for text in ["", "https://", "http://example.com", "http://localhost.example.com", "ftp://x", "x=", "=y", "x=http://y"] {
            assert_eq!(IssuerSpec::parse(text), None, "{text}");
        }
    }

    #[test]
    fn keys_that_do_not_sign_are_left_out() {
        let read = |text: &str| serde_json::from_str::<WebKey>(text).unwrap().read();
        assert!(read(r#"{"kty":"RSA","n":"AQAB","e":"AQAB","use":"sig","alg":"RS256"}"#).is_some());
        assert!(read(r#"{"kty":"EC","crv":"P-256","x":"AQAB","y":"AQAB"}"#).is_some());
        assert!(read(r#"{"kty":"RSA","n":"AQAB","e":"AQAB","use":"enc"}"#).is_none());
        assert!(read(r#"{"kty":"RSA","e":"AQAB"}"#).is_none());
        assert!(read(r#"{"kty":"oct","k":"AQAB"}"#).is_none());
    }
}
