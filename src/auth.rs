//! Authentication and authorization: token or certificate -> caller -> permission.
//!
//! Credentials come from keys that Landline issues ([`keys`]), identity providers (`oidc`) and client certificates. The
//! transport authenticates a request before it reads the body; the API asks [`Guard`] for each permission a call needs.

mod caller;
mod guard;
pub mod jwt;
pub mod keys;
mod limits;
mod oidc;
mod policy;
mod token;

use std::{
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::{Mutex, RwLock};

pub use caller::{Caller, CallerRef};
pub use guard::{Guard, Need, Refusal};
pub use keys::{KeyFile, KeysError, Registry};
pub use limits::{Cost, Creating, Exceeded, Limits, Refused};
pub use oidc::IssuerSpec;
pub use policy::{MEMBERS, ProjectPolicies, is_member};
pub use token::GRANT;

use self::{
    jwt::Unverified,
    oidc::Issuers,
    token::{LIFE_SECONDS, Statement, Tokens},
};

/// What is done about callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Nobody is asked who they are; everyone may do everything.
    Off,
    /// What enforce would refuse is logged and counted, and carried out.
    Audit,
    /// A call without credentials or permission is refused.
    Enforce,
}

/// Settings of authentication and authorization.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// None: off, which is for loopback addresses.
    pub mode: Option<Mode>,
    /// Public halves of the keys that Landline issued; empty for none.
    pub keys_file: PathBuf,
    /// Policies of projects; empty for none.
    pub policy_file: PathBuf,
    /// Members that may do everything in every project.
    pub admins: Vec<String>,
    pub issuers: Vec<IssuerSpec>,
    /// Whom tokens of identity providers must be for, and tokens of Landline-issued keys may be for.
    pub audiences: Vec<String>,
    /// Roots of the identity providers' certificates, beside the machine's own; empty for none.
    pub issuer_roots: PathBuf,
    pub limits: Limits,
}

impl Options {
    pub fn mode(&self) -> Mode {
        self.mode.unwrap_or(Mode::Off)
    }
}

/// Why credentials are not valid. The text is for the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("the request has no credentials")]
    Missing,
    #[error("the token can't be read")]
    Malformed,
    #[error("the token's signature is not valid")]
    Signature,
    #[error("the token has expired")]
    Expired,
    #[error("the token is not valid yet; do the clocks differ?")]
    NotYet,
    #[error("the token's key is not known")]
    UnknownKey,
    #[error("the token's issuer is not trusted")]
    Issuer,
    #[error("the token is for another audience")]
    Audience,
    #[error("the identity provider does not answer")]
    Provider,
}

/// Scopes that let a token of a Landline-issued key be for this service.
const SCOPES: [&str; 2] = ["https://www.googleapis.com/auth/cloud-platform", "https://www.googleapis.com/auth/pubsub"];
/// Hosts that Google's clients put into the audience of a token for this service, whatever address they call.
const OWN_HOSTS: [&str; 4] = ["pubsub.googleapis.com", "localhost", "127.0.0.1", "[::1]"];
/// Audiences of the assertions that Google's clients exchange for a token, whatever address they send them to.
const TOKEN_HOSTS: [&str; 3] = ["oauth2.googleapis.com", "accounts.google.com", "www.googleapis.com"];
/// Longest life of a token that a key signs by itself; an hour is what the clients use.
const MAX_LIFE_SECONDS: u64 = LIFE_SECONDS + jwt::SKEW_SECONDS;

/// Keys of one holder that are tried for a token that names none; each costs some ten microseconds.
const MAX_TRIED_KEYS: usize = 16;

/// Checks credentials; one per process.
pub struct Authenticator {
    mode: Mode,
    registry: RwLock<Registry>,
    /// Counts changes of the registry: what was checked before a change is checked again.
    generation: AtomicU64,
    issuers: Issuers,
    audiences: Vec<String>,
    tokens: OnceLock<Tokens>,
    unauthenticated: AtomicU64,
    denied: AtomicU64,
}

/// What a connection remembers of its callers, so that a token is checked once and not with every call.
#[derive(Default)]
pub struct Peer {
    /// The holder of the connection's client certificate.
    certificate: Option<Arc<Caller>>,
    seen: Mutex<Vec<Seen>>,
}

struct Seen {
    authorization: Box<[u8]>,
    caller: Arc<Caller>,
    generation: u64,
}

/// Tokens a connection remembers. A client uses one; a proxy may bring the calls of several over one connection.
const SEEN_TOKENS: usize = 8;

impl Peer {
    /// A connection whose client showed a certificate of this name.
    pub fn new(certificate: Option<&str>) -> Self {
        Self { certificate: certificate.map(|name| Arc::new(Caller::certificate(name))), seen: Mutex::default() }
    }

    fn find(&self, authorization: &[u8], generation: u64) -> Option<Arc<Caller>> {
        let mut seen = self.seen.lock();
        let index = seen.iter().position(|seen| *seen.authorization == *authorization)?;
        let found = &seen[index];
        if found.generation == generation && !found.caller.has_expired(jwt::now()) {
            return Some(found.caller.clone());
        }
        seen.remove(index);
        None
    }

    fn remember(&self, authorization: &[u8], caller: &Arc<Caller>, generation: u64) {
        let mut seen = self.seen.lock();
        if seen.len() >= SEEN_TOKENS {
            seen.remove(0);
        }
        seen.push(Seen { authorization: authorization.into(), caller: caller.clone(), generation });
    }
}

impl Authenticator {
    /// Reads the keys. `advertised` is the address clients know the server by, empty for none.
    ///
    /// # Errors
    /// What is wrong with a file.
    pub fn open(options: &Options, advertised: &str) -> Result<Self, String> {
        let registry = load(&options.keys_file).map_err(|e| e.to_string())?;
        let roots = (!options.issuer_roots.as_os_str().is_empty()).then_some(options.issuer_roots.as_path());
        let mut audiences = options.audiences.clone();
        if !advertised.is_empty() {
            audiences.push(advertised.to_owned());
        }
        Ok(Self {
            mode: options.mode(),
            registry: RwLock::new(registry),
            generation: AtomicU64::new(0),
            issuers: Issuers::new(&options.issuers, roots)?,
            audiences,
            tokens: OnceLock::new(),
            unauthenticated: AtomicU64::new(0),
            denied: AtomicU64::new(0),
        })
    }

    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// From now on access tokens are given and taken, under the cluster's secret.
    pub fn use_secret(&self, secret: &[u8]) {
        let _ = self.tokens.set(Tokens::new(secret));
    }

    /// Takes over a changed registry. Calls of keys that are gone from it are refused from now on.
    pub fn replace_keys(&self, registry: Registry) {
        *self.registry.write() = registry;
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// True while the credentials a caller came with are still good: its key has not been taken back.
    pub fn is_good(&self, caller: &Caller) -> bool {
        caller.key_id.as_ref().is_none_or(|id| self.registry.read().find(id).is_some())
    }

    /// Calls whose caller lacked a permission; in audit mode they were carried out.
    pub fn denied(&self) -> u64 {
        self.denied.load(Ordering::Relaxed)
    }

    fn count_denied(&self) {
        self.denied.fetch_add(1, Ordering::Relaxed);
    }

    /// Calls that had no valid credentials; in audit mode they were carried out.
    pub fn unauthenticated(&self) -> u64 {
        self.unauthenticated.load(Ordering::Relaxed)
    }

    /// The caller, if it is known without waiting: its token was seen before on this connection.
    pub fn known(&self, authorization: Option<&[u8]>, peer: &Peer) -> Option<Arc<Caller>> {
        match authorization {
            Some(authorization) => peer.find(authorization, self.generation.load(Ordering::Acquire)),
            None => peer.certificate.clone(),
        }
    }

    /// Who calls. A token is stronger than a client certificate. In audit mode everyone passes, as anonymous if need be.
    ///
    /// # Errors
    /// Why the credentials are not valid.
    pub async fn authenticate(&self, authorization: Option<&[u8]>, peer: &Peer) -> Result<Arc<Caller>, Invalid> {
        let generation = self.generation.load(Ordering::Acquire);
        let checked = match (authorization, &peer.certificate) {
            (None, Some(caller)) => return Ok(caller.clone()),
            (None, None) => Err(Invalid::Missing),
            (Some(authorization), _) => match bearer(authorization) {
                Some(token) => self.check(token).await.map(Arc::new),
                None => Err(Invalid::Malformed),
            },
        };
        match (checked, authorization) {
            (Ok(caller), Some(authorization)) => {
                peer.remember(authorization, &caller, generation);
                Ok(caller)
            }
            (Ok(caller), None) => Ok(caller),
            (Err(reason), _) => {
                self.unauthenticated.fetch_add(1, Ordering::Relaxed);
                if self.mode == Mode::Audit {
                    tracing::debug!(%reason, "audit: a call without valid credentials");
                    return Ok(Arc::new(Caller::anonymous()));
                }
                Err(reason)
            }
        }
    }

    async fn check(&self, token: &str) -> Result<Caller, Invalid> {
        if Tokens::is_own(token) {
            return self.check_own(token);
        }
        let unverified = Unverified::parse(token)?;
        if self.issuers.knows(&unverified.claims.iss) {
            return self.check_provider(unverified).await;
        }
        let (claims, key_id, email) = self.verify_issued(unverified)?;
        let end = claims.check_times(jwt::now())?;
        let scoped = claims.scope.split(' ').any(|scope| SCOPES.contains(&scope));
        if claims.aud.iter().any(|audience| self.is_own_audience(audience)) || claims.aud.iter().next().is_none() && scoped {
            Ok(Caller::service_account(&email, &key_id, end))
        } else {
            Err(Invalid::Audience)
        }
    }

    /// An access token that Landline gave.
    fn check_own(&self, token: &str) -> Result<Caller, Invalid> {
        let statement = self.tokens.get().ok_or(Invalid::Provider)?.read(token)?;
        if statement.expires <= jwt::now() {
            return Err(Invalid::Expired);
        }
        let registry = self.registry.read();
        let key = registry.find(&statement.key).ok_or(Invalid::UnknownKey)?;
        Ok(Caller::service_account(&key.email, &key.id, statement.expires))
    }

    /// A token that the holder of a Landline-issued key signed: its claims, and the key's id and holder.
    fn verify_issued(&self, unverified: Unverified<'_>) -> Result<(jwt::Claims, String, String), Invalid> {
        let (id, email) = {
            let registry = self.registry.read();
            let id = unverified.header.kid.as_deref();
            // Some clients name no key in their assertions: those of the issuer are tried.
            let fits = |key: &&keys::IssuedKey| id.map_or(key.email == unverified.claims.iss, |id| key.id == id);
            let mut found = Err(Invalid::UnknownKey);
            for key in registry.keys.iter().filter(fits).take(MAX_TRIED_KEYS) {
                found = Err(Invalid::Signature);
                if key.public_key().is_some_and(|public| unverified.is_signed_by(&public)) {
                    found = Ok((key.id.clone(), key.email.clone()));
                    break;
                }
            }
            found?
        };
        let claims = unverified.claims;
        if claims.iss != email || !claims.sub.is_empty() && claims.sub != email {
            return Err(Invalid::Issuer);
        }
        let now = jwt::now();
        if claims.exp.is_some_and(|end| end > (now + MAX_LIFE_SECONDS) as f64) {
            return Err(Invalid::NotYet);
        }
        Ok((claims, id, email))
    }

    /// A token of an identity provider.
    async fn check_provider(&self, unverified: Unverified<'_>) -> Result<Caller, Invalid> {
        let keys = self.issuers.keys(&unverified.claims.iss, unverified.header.kid.as_deref()).await?;
        if !keys.iter().take(MAX_TRIED_KEYS).any(|key| unverified.is_signed_by(key)) {
            return Err(Invalid::Signature);
        }
        let claims = unverified.claims;
        let end = claims.check_times(jwt::now())?;
        if claims.sub.is_empty() {
            return Err(Invalid::Malformed);
        }
        // Only what the operator named: every provider issues tokens for other services as well.
        if !claims.aud.iter().any(|audience| self.audiences.iter().any(|own| own == audience)) {
            return Err(Invalid::Audience);
        }
        let email = Some(claims.email.as_str()).filter(|email| claims.email_verified && !email.is_empty());
        Ok(Caller::subject(&claims.iss, &claims.sub, email, &claims.groups, end))
    }

    /// True for the address of this service, as a URL, with or without a path, or as the operator named it.
    fn is_own_audience(&self, audience: &str) -> bool {
        let host = host(audience);
        let bare = without_port(host);
        // Java's client leaves the port of the address it calls out.
        self.audiences.iter().any(|own| own == audience || own == host || without_port(own) == host)
            || OWN_HOSTS.contains(&bare)
            || bare.ends_with("-pubsub.googleapis.com")
    }

    /// Exchanges a signed assertion for an access token; answers it and its life in seconds.
    ///
    /// # Errors
    /// Why there is none.
    pub fn exchange(&self, assertion: &str) -> Result<(String, u64), Invalid> {
        let (claims, key, _) = self.verify_issued(Unverified::parse(assertion)?)?;
        let now = jwt::now();
        claims.check_times(now)?;
        let is_token_address = |audience: &str| {
            let host = host(audience);
            audience.ends_with("/token") && (TOKEN_HOSTS.contains(&host) || self.is_own_audience(audience))
        };
        if !claims.aud.iter().any(is_token_address) {
            return Err(Invalid::Audience);
        }
        let tokens = self.tokens.get().ok_or(Invalid::Provider)?;
        Ok((tokens.write(&Statement { key, expires: now + LIFE_SECONDS }), LIFE_SECONDS))
    }
}

/// Reads the registry again whenever its file changes, for ever.
pub async fn follow_keys(authenticator: Arc<Authenticator>, path: PathBuf, changed: impl AsyncFnMut()) {
    let mut changed = changed;
    loop {
        changed().await;
        match load(&path) {
            Ok(registry) => {
                tracing::info!(keys = registry.keys.len(), "the keys file changed and is in use");
                authenticator.replace_keys(registry);
            }
            Err(error) => tracing::warn!(%error, "the keys file changed but can't be used; the former keys stay in use"),
        }
    }
}

fn load(path: &std::path::Path) -> Result<Registry, KeysError> {
    if path.as_os_str().is_empty() { Ok(Registry::default()) } else { Registry::load(path) }
}

/// The token of an `Authorization` header.
fn bearer(authorization: &[u8]) -> Option<&str> {
    let (scheme, token) = std::str::from_utf8(authorization).ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// The host and port of a URL.
fn host(url: &str) -> &str {
    let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://")).unwrap_or(url);
    rest.split('/').next().unwrap_or_default()
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests;
