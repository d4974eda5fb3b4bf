//! Access tokens that Landline gives for a signed assertion (RFC 7523), and takes back.
//!
//! They are a statement and its MAC under the cluster's secret, so that every node knows them and none keeps them.

use aws_lc_rs::hmac;
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};

use super::Invalid;

/// Begins every access token, with its format.
const PREFIX: &str = "ll1.";
/// Life of an access token; that of Google's own.
pub const LIFE_SECONDS: u64 = 3600;
/// The only grant.
pub const GRANT: &str = "urn:ietf:params:oauth:grant-type:jwt-bearer";

/// What a token states.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statement {
    /// The key whose holder asked for the token.
    pub key: String,
    /// Seconds since the epoch.
    pub expires: u64,
}

/// Makes and reads access tokens.
pub struct Tokens {
    key: hmac::Key,
}

impl Tokens {
    /// `secret` is the cluster's.
    pub fn new(secret: &[u8]) -> Self {
        // A key of their own: what one MAC shows says nothing of others under the same secret.
        let own = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), b"access token");
        Self { key: hmac::Key::new(hmac::HMAC_SHA256, own.as_ref()) }
    }

    /// True for what looks like an access token of Landline.
    pub fn is_own(token: &str) -> bool {
        token.starts_with(PREFIX)
    }

    /// A token for a statement.
    pub fn write(&self, statement: &Statement) -> String {
        let body = URL_SAFE_NO_PAD.encode(serde_json::json!(statement).to_string());
        let mac = hmac::sign(&self.key, body.as_bytes());
        format!("{PREFIX}{body}.{}", URL_SAFE_NO_PAD.encode(mac.as_ref()))
    }

    /// What a token states.
    ///
    /// # Errors
    /// [`Invalid::Malformed`], or [`Invalid::Signature`] for a token that another cluster, or nobody, made.
    pub fn read(&self, token: &str) -> Result<Statement, Invalid> {
        let (body, mac) = token.strip_prefix(PREFIX).and_then(|rest| rest.split_once('.')).ok_or(Invalid::Malformed)?;
        let mac = URL_SAFE_NO_PAD.decode(mac).map_err(|_| Invalid::Malformed)?;
        hmac::verify(&self.key, body.as_bytes(), &mac).map_err(|_| Invalid::Signature)?;
        let body = URL_SAFE_NO_PAD.decode(body).map_err(|_| Invalid::Malformed)?;
        serde_json::from_slice(&body).map_err(|_| Invalid::Malformed)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_by_the_cluster_that_made_it_and_only_unchanged() {
        let (own, other) = (Tokens::new(&[1; 32]), Tokens::new(&[2; 32]));
        let statement = Statement { key: "k".into(), expires: 7 };
        let token = own.write(&statement);
        assert!(Tokens::is_own(&token));
        assert_eq!(own.read(&token).unwrap(), statement);
        assert_eq!(other.read(&token), Err(Invalid::Signature));
        let forged = own.write(&Statement { key: "k".into(), expires: 8 });
        let mixed = format!("{}.{}", forged.rsplit_once('.').unwrap().0, token.rsplit_once('.').unwrap().1);
        assert_eq!(own.read(&mixed), Err(Invalid::Signature));
        for text in ["", "ll1.", "ll1..", "ll2.a.b", "ll1.é.é"] {
            assert!(own.read(text).is_err(), "{text}");
        }
    }
}
