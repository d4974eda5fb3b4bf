//! The identity that push requests prove: this server is an OpenID Connect issuer of its own, with a discovery document and a
//! key set on its port. Claims as Google's tokens have them. Source: the page on authentication of push subscriptions.

use std::{collections::HashMap, hash::Hasher, sync::Arc};

use http::HeaderValue;
use parking_lot::Mutex;
use serde::Serialize;
use siphasher::sip::SipHasher13;

use super::keys::{JWKS_SECONDS, Keys};
use crate::{
    connector::{Connector, Error},
    model::Subscription,
};

/// Where the discovery document is, below the issuer's URL. Source: OpenID Connect Discovery.
const DISCOVERY: &str = "/.well-known/openid-configuration";
/// Where the key set is.
const JWKS: &str = "/.well-known/jwks.json";
/// Life of a token.
const LIFE_SECONDS: u64 = 3600;
/// A token is used again for this long, so that endpoints see none that is about to end.
const REUSE_MS: u64 = 1_800_000;
/// Tokens remembered; beyond it all are signed anew.
const MAX_TOKENS: usize = 10_000;

/// Signs tokens and answers for them.
pub struct Issuer {
    connector: Arc<Connector>,
    keys: Keys,
    url: String,
    tokens: Mutex<HashMap<(String, String), Token>>,
}

#[derive(Clone)]
struct Token {
    header: HeaderValue,
    until_ms: u64,
}

#[derive(Serialize)]
struct Claims<'a> {
    iss: &'a str,
    aud: &'a str,
    azp: &'a str,
    sub: &'a str,
    email: &'a str,
    email_verified: bool,
    iat: u64,
    exp: u64,
}

/// A public document of the issuer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// JSON.
    pub body: String,
    /// How long it may be remembered.
    pub max_age_seconds: u64,
}

/// Whether a path is that of one of the issuer's documents.
pub fn has_page(path: &str) -> bool {
    path == DISCOVERY || path == JWKS
}

impl Issuer {
    /// An issuer by this URL, without a slash at its end.
    pub fn new(connector: Arc<Connector>, url: String) -> Self {
        Self { keys: Keys::new(connector.clone()), connector, url, tokens: Mutex::default() }
    }

    /// The document at a path that [has one](has_page).
    ///
    /// # Errors
    /// The broker's.
    pub async fn page(&self, path: &str) -> Result<Page, Error> {
        let json = if path == JWKS {
            serde_json::to_string(&self.keys.current().await?.jwks())
        } else {
            let jwks = format!("{}{JWKS}", self.url);
            serde_json::to_string(&serde_json::json!({
                "issuer": self.url,
                "jwks_uri": jwks,
                "response_types_supported": ["id_token"],
                "subject_types_supported": ["public"],
                "id_token_signing_alg_values_supported": ["RS256"],
                "claims_supported": ["aud", "azp", "email", "email_verified", "exp", "iat", "iss", "sub"],
            }))
        };
        let body = json.map_err(|e| Error::Internal(format!("a document of the issuer can't be written: {e}")))?;
        Ok(Page { body, max_age_seconds: JWKS_SECONDS })
    }

    /// The `Authorization` header of a subscription's pushes; none when it asks for no token.
    ///
    /// # Errors
    /// The broker's, when the keys can't be read.
    pub async fn authorization(&self, subscription: &Subscription) -> Result<Option<HeaderValue>, Error> {
        let config = &subscription.push_config;
        let Some(wanted) = &config.oidc_token else { return Ok(None) };
        let audience = if wanted.audience.is_empty() { &config.endpoint } else { &wanted.audience };
        let email = &wanted.service_account_email;
        let now_ms = self.connector.broker().now_ms();
        let key = (email.clone(), audience.clone());
        if let Some(token) = self.tokens.lock().get(&key)
            && now_ms < token.until_ms
        {
            return Ok(Some(token.header.clone()));
        }
        let account = account_number(email);
        let iat = now_ms / 1000;
        let claims = Claims {
            iss: &self.url,
            aud: audience,
            azp: &account,
            sub: &account,
            email,
            email_verified: true,
            iat,
            exp: iat + LIFE_SECONDS,
        };
        let token = self.keys.current().await?.sign(&claims, now_ms)?;
        let mut header = HeaderValue::try_from(format!("Bearer {token}"))
            .map_err(|_| Error::Internal("a push token is no legal header".into()))?;
        header.set_sensitive(true);
        let mut tokens = self.tokens.lock();
        if tokens.len() >= MAX_TOKENS {
            tokens.clear();
        }
        tokens.insert(key, Token { header: header.clone(), until_ms: now_ms + REUSE_MS });
        Ok(Some(header))
    }
}

/// What stands for the unique number of a service account: 21 digits, the same for the same email everywhere.
fn account_number(email: &str) -> String {
    let mut hasher = SipHasher13::new();
    hasher.write(email.as_bytes());
    format!("1{:020}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
    use serde_json::Value;

    use super::*;
    use crate::{
        broker::embedded::Embedded,
        model::{OidcToken, PushConfig, SubscriptionName, TopicName},
    };

    fn subscription(token: Option<OidcToken>) -> Subscription {
        let push_config = PushConfig { endpoint: "https://a/push?x".into(), oidc_token: token, ..PushConfig::default() };
        let (name, topic) = (SubscriptionName::new("p1", "sub").unwrap(), TopicName::new("p1", "topic").unwrap());
        Subscription { push_config, ..Subscription::plain(name, 1, topic, 1) }
    }

    async fn issuer() -> Issuer {
        let connector = Connector::open(Embedded::memory(), Default::default()).await.unwrap();
        Issuer::new(connector, "http://localhost:8085".into())
    }

    fn wanted(audience: &str) -> Option<OidcToken> {
        Some(OidcToken { service_account_email: "a@b.example".into(), audience: audience.into() })
    }

    fn claims(header: &HeaderValue) -> Value {
        let token = header.to_str().unwrap().strip_prefix("Bearer ").unwrap();
        serde_json::from_slice(&URL_SAFE_NO_PAD.decode(token.split('.').nth(1).unwrap()).unwrap()).unwrap()
    }

    #[tokio::test]
    async fn a_token_has_the_claims_of_google_s() {
        let issuer = issuer().await;
        let header = issuer.authorization(&subscription(wanted(""))).await.unwrap().unwrap();
        let found = claims(&header);
        assert_eq!((&found["aud"], &found["iss"]), (&"https://a/push?x".into(), &"http://localhost:8085".into()));
        assert_eq!((&found["email"], &found["email_verified"]), (&"a@b.example".into(), &true.into()));
        assert_eq!(found["sub"], found["azp"]);
        assert_eq!(found["sub"].as_str().unwrap().len(), 21);
        assert_eq!(found["exp"].as_u64().unwrap() - found["iat"].as_u64().unwrap(), 3600);
        let named = issuer.authorization(&subscription(wanted("my service"))).await.unwrap().unwrap();
        assert_eq!(claims(&named)["aud"], "my service");
        assert_eq!(issuer.authorization(&subscription(wanted(""))).await.unwrap().unwrap(), header);
        assert_eq!(issuer.authorization(&subscription(None)).await.unwrap(), None);
    }

    #[tokio::test]
    async fn the_discovery_document_leads_to_the_keys() {
        let issuer = issuer().await;
        let discovery: Value = serde_json::from_str(&issuer.page(DISCOVERY).await.unwrap().body).unwrap();
        assert_eq!(discovery["issuer"], "http://localhost:8085");
        let path = discovery["jwks_uri"].as_str().unwrap().strip_prefix("http://localhost:8085").unwrap();
        assert!(has_page(path) && has_page(DISCOVERY) && !has_page("/.well-known/"));
        let jwks: Value = serde_json::from_str(&issuer.page(path).await.unwrap().body).unwrap();
        assert_eq!(jwks["keys"].as_array().unwrap().len(), 1);
    }
}
