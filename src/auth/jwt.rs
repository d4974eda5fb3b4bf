//! JSON Web Tokens (RFC 7519): read, checked and, for our own clients, signed.

use std::{
    fmt,
    time::{SystemTime, UNIX_EPOCH},
};

use aws_lc_rs::{
    rand::SystemRandom,
    rsa::{KeyPair, PublicKeyComponents},
    signature::{self, UnparsedPublicKey, VerificationAlgorithm},
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::Deserialize;

use super::Invalid;

/// Bytes of a token. Identity providers put groups into theirs, and still stay under the usual 8 KiB of a header.
pub const MAX_TOKEN_BYTES: usize = 16 * 1024;
/// Clocks of two machines may differ by this much.
pub const SKEW_SECONDS: u64 = 60;

/// A token whose signature has not been checked yet.
pub struct Unverified<'t> {
    pub header: Header,
    pub claims: Claims,
    signed: &'t str,
    signature: Vec<u8>,
}

/// What the token says about its signature.
#[derive(Debug, Default, Deserialize)]
pub struct Header {
    pub alg: String,
    #[serde(default)]
    pub kid: Option<String>,
}

/// What the token says of its holder. Times are seconds since the epoch.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Claims {
    pub iss: String,
    pub sub: String,
    pub aud: Audience,
    pub exp: Option<f64>,
    pub iat: Option<f64>,
    pub nbf: Option<f64>,
    /// Scopes separated by spaces.
    pub scope: String,
    pub email: String,
    pub email_verified: bool,
    pub groups: Vec<String>,
}

/// Whom the token is for: one, several or nobody in particular.
#[derive(Debug, Default, Deserialize)]
#[serde(untagged)]
pub enum Audience {
    One(String),
    Several(Vec<String>),
    #[default]
    Nobody,
}

impl Audience {
    /// An empty one, as Go's client sends beside a scope, is nobody.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        let several = match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Several(several) => several,
            Self::Nobody => &[],
        };
        several.iter().map(String::as_str).filter(|audience| !audience.is_empty())
    }
}

impl<'t> Unverified<'t> {
    /// Takes a token apart.
    ///
    /// # Errors
    /// [`Invalid::Malformed`].
    pub fn parse(token: &'t str) -> Result<Self, Invalid> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(Invalid::Malformed);
        }
        let (signed, signature) = token.rsplit_once('.').ok_or(Invalid::Malformed)?;
        let (header, claims) = signed.split_once('.').ok_or(Invalid::Malformed)?;
        let bytes = |text: &str| URL_SAFE_NO_PAD.decode(text.trim_end_matches('=')).map_err(|_| Invalid::Malformed);
        Ok(Self {
            header: serde_json::from_slice(&bytes(header)?).map_err(|_| Invalid::Malformed)?,
            claims: serde_json::from_slice(&bytes(claims)?).map_err(|_| Invalid::Malformed)?,
            signed,
            signature: bytes(signature)?,
        })
    }

    /// Checks the signature; false also when the key is of another kind than the token says. Only then do the claims count.
    pub fn is_signed_by(&self, key: &PublicKey) -> bool {
        key.verify(&self.header.alg, self.signed.as_bytes(), &self.signature)
    }
}

impl Claims {
    /// Checks the times; answers when the token ends.
    ///
    /// # Errors
    /// [`Invalid::Expired`] or [`Invalid::NotYet`]; [`Invalid::Malformed`] for a token without an end.
    pub fn check_times(&self, now: u64) -> Result<u64, Invalid> {
        let seconds = |time: f64| if time.is_finite() { Ok(time as u64) } else { Err(Invalid::Malformed) };
        let end = seconds(self.exp.ok_or(Invalid::Malformed)?)?;
        if end.saturating_add(SKEW_SECONDS) <= now {
            return Err(Invalid::Expired);
        }
        for begin in self.iat.into_iter().chain(self.nbf) {
            if seconds(begin)? > now + SKEW_SECONDS {
                return Err(Invalid::NotYet);
            }
        }
        Ok(end)
    }
}

/// Seconds since the epoch.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// A key that checks signatures. Which algorithms it may be used with follows from its kind, never from the token alone.
#[derive(Clone, PartialEq, Eq)]
pub enum PublicKey {
    /// Modulus and exponent.
    Rsa {
        n: Vec<u8>,
        e: Vec<u8>,
    },
    /// A `SubjectPublicKeyInfo` with an RSA key.
    RsaInfo(Vec<u8>),
    /// An uncompressed point on P-256.
    P256(Vec<u8>),
    /// An uncompressed point on P-384.
    P384(Vec<u8>),
    Ed25519(Vec<u8>),
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PublicKey")
    }
}

impl PublicKey {
    fn verify(&self, algorithm: &str, signed: &[u8], signature: &[u8]) -> bool {
        let with = |algorithm: &'static dyn VerificationAlgorithm, key: &[u8]| {
            UnparsedPublicKey::new(algorithm, key).verify(signed, signature).is_ok()
        };
        let rsa = match algorithm {
            "RS256" => Some(&signature::RSA_PKCS1_2048_8192_SHA256),
            "RS384" => Some(&signature::RSA_PKCS1_2048_8192_SHA384),
            "RS512" => Some(&signature::RSA_PKCS1_2048_8192_SHA512),
            "PS256" => Some(&signature::RSA_PSS_2048_8192_SHA256),
            _ => None,
        };
        match (self, algorithm) {
            (Self::Rsa { n, e }, _) => rsa.is_some_and(|rsa| PublicKeyComponents { n, e }.verify(rsa, signed, signature).is_ok()),
            (Self::RsaInfo(info), _) => rsa.is_some_and(|rsa| with(rsa, info)),
            (Self::P256(point), "ES256") => with(&signature::ECDSA_P256_SHA256_FIXED, point),
            (Self::P384(point), "ES384") => with(&signature::ECDSA_P384_SHA384_FIXED, point),
            (Self::Ed25519(key), "EdDSA") => with(&signature::ED25519, key),
            _ => false,
        }
    }
}

/// Signs claims with an RSA key as RS256. The key's id may be empty.
///
/// # Errors
/// When the system has no random bytes, or the claims can't be written.
pub fn sign(key: &KeyPair, key_id: &str, claims: &serde_json::Value) -> Result<String, String> {
    let mut header = serde_json::json!({ "alg": "RS256", "typ": "JWT" });
    if !key_id.is_empty() {
        header["kid"] = key_id.into();
    }
    let part = |value: &serde_json::Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let signed = format!("{}.{}", part(&header), part(claims));
    let mut signature = vec![0; key.public_modulus_len()];
    key.sign(&signature::RSA_PKCS1_SHA256, &SystemRandom::new(), signed.as_bytes(), &mut signature)
        .map_err(|_| "the token can't be signed".to_owned())?;
    Ok(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature)))
}
