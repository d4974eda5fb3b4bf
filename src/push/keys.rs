//! The keys that sign push tokens. They are a system record of the broker, so that every node signs with the same ones and
//! answers for those of the others.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use aws_lc_rs::{
    encoding::{AsDer, Pkcs8V1Der},
    rand::SystemRandom,
    rsa::{KeyPair, KeySize},
    signature::{KeyPair as _, RSA_PKCS1_SHA256},
};
use base64::{
    Engine,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

use crate::{
    broker::{BrokerError, Change, Effect, Expect, Kind},
    connector::{Connector, Error, record},
};

const RECORD: &str = "push-keys";
/// A new key is drawn when the newest is this old; Google's are about as old.
const ROTATION_MS: u64 = 7 * 86_400_000;
/// A new key signs only after verifiers had the time to see it: twice what they may remember the key set, see
/// [`JWKS_SECONDS`].
const LEAD_MS: u64 = 2 * JWKS_SECONDS * 1000;
/// A key stays in the set for this long after its successor took over; its tokens live for an hour.
const REST_MS: u64 = 86_400_000;
/// How long verifiers may remember the key set.
pub const JWKS_SECONDS: u64 = 3600;
/// How often the record is read again.
const REFRESH: Duration = Duration::from_secs(300);
/// Attempts while other nodes write the record.
const TRIES: usize = 8;

/// A key as stored.
#[derive(Clone, Serialize, Deserialize)]
struct Stored {
    id: String,
    /// PKCS #8 in base64.
    pkcs8: String,
    created_ms: u64,
}

/// A key that can sign.
struct Key {
    id: String,
    created_ms: u64,
    pair: KeyPair,
    modulus: String,
    exponent: String,
}

/// Public halves, as RFC 7517 writes them.
#[derive(Serialize)]
pub struct Jwks<'a> {
    keys: Vec<Jwk<'a>>,
}

#[derive(Serialize)]
struct Jwk<'a> {
    kty: &'static str,
    alg: &'static str,
    r#use: &'static str,
    kid: &'a str,
    n: &'a str,
    e: &'a str,
}

/// All keys at a time.
pub struct KeySet {
    /// The oldest first.
    keys: Vec<Key>,
}

/// The keys of the store.
pub struct Keys {
    connector: Arc<Connector>,
    known: Mutex<Option<(Instant, Arc<KeySet>)>>,
}

impl Keys {
    pub fn new(connector: Arc<Connector>) -> Self {
        Self { connector, known: Mutex::new(None) }
    }

    /// The keys now; draws and drops keys as their time comes.
    ///
    /// # Errors
    /// The broker's, or a record that can't be read.
    pub async fn current(&self) -> Result<Arc<KeySet>, Error> {
        let mut known = self.known.lock().await;
        if let Some((at, keys)) = &*known
            && at.elapsed() < REFRESH
        {
            return Ok(keys.clone());
        }
        let keys = Arc::new(self.load().await?);
        *known = Some((Instant::now(), keys.clone()));
        Ok(keys)
    }

    async fn load(&self) -> Result<KeySet, Error> {
        let broker = self.connector.broker();
        for _ in 0..TRIES {
            let now_ms = broker.now_ms();
            let (stored, expect) = match broker.get(Kind::System, RECORD).await? {
                Some(found) => (record::decode::<Vec<Stored>>(&found)?, Expect::Version(found.version)),
                None => (Vec::new(), Expect::Absent),
            };
            let Some(next) = rotated(&stored, now_ms).await? else { return KeySet::read(&stored) };
            let (kind, name, body) = (Kind::System, RECORD.to_owned(), Some(record::encode(&next)?));
            match broker.change(Change { kind, name, expect, body, effect: Effect::None }).await {
                Ok(_) => return KeySet::read(&next),
                // Another node was first.
                Err(BrokerError::Conflict(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(Error::Contended)
    }
}

/// What the keys should be now, if it is not what they are.
async fn rotated(stored: &[Stored], now_ms: u64) -> Result<Option<Vec<Stored>>, Error> {
    let is_over = |at: usize| stored.get(at + 1).is_some_and(|next| now_ms >= next.created_ms + LEAD_MS + REST_MS);
    let mut next: Vec<_> = (0..stored.len()).filter(|at| !is_over(*at)).map(|at| stored[at].clone()).collect();
    let due = stored.last().is_none_or(|newest| now_ms >= newest.created_ms + ROTATION_MS);
    if due {
        next.push(draw(now_ms).await?);
    }
    Ok((due || next.len() < stored.len()).then_some(next))
}

/// Draws a key, which takes a moment.
async fn draw(now_ms: u64) -> Result<Stored, Error> {
    let drawn = tokio::task::spawn_blocking(move || {
        let pair = KeyPair::generate(KeySize::Rsa2048)?;
        let pkcs8 = AsDer::<Pkcs8V1Der<'_>>::as_der(&pair)?;
        Ok::<_, aws_lc_rs::error::Unspecified>(STANDARD.encode(pkcs8.as_ref()))
    })
    .await;
    let pkcs8 = match drawn {
        Ok(Ok(pkcs8)) => pkcs8,
        _ => return Err(Error::Internal("a signing key could not be drawn".into())),
    };
    let id: [u8; 20] = rand::random();
    Ok(Stored { id: id.iter().map(|byte| format!("{byte:02x}")).collect(), pkcs8, created_ms: now_ms })
}

impl KeySet {
    fn read(stored: &[Stored]) -> Result<Self, Error> {
        Ok(Self { keys: stored.iter().map(Key::read).collect::<Result<_, _>>()? })
    }

    /// The public halves.
    pub fn jwks(&self) -> Jwks<'_> {
        fn jwk(key: &Key) -> Jwk<'_> {
            Jwk { kty: "RSA", alg: "RS256", r#use: "sig", kid: &key.id, n: &key.modulus, e: &key.exponent }
        }
        Jwks { keys: self.keys.iter().map(jwk).collect() }
    }

    /// Signs claims: a compact JWT of RFC 7519.
    ///
    /// # Errors
    /// [`Error::Internal`].
    pub fn sign(&self, claims: &impl Serialize, now_ms: u64) -> Result<String, Error> {
        let fault = |what: &str| Error::Internal(format!("a push token can't be signed: {what}"));
        let known = |key: &&Key| now_ms >= key.created_ms + LEAD_MS;
        let key = self.keys.iter().rev().find(known).or(self.keys.first()).ok_or_else(|| fault("there is no key"))?;
        let header = serde_json::json!({ "alg": "RS256", "kid": key.id, "typ": "JWT" });
        let part = |json: Result<Vec<u8>, serde_json::Error>| json.map(|json| URL_SAFE_NO_PAD.encode(json));
        let (header, claims) = (part(serde_json::to_vec(&header)), part(serde_json::to_vec(claims)));
        let (Ok(header), Ok(claims)) = (header, claims) else { return Err(fault("its claims")) };
        let text = format!("{header}.{claims}");
        let mut signature = vec![0; key.pair.public_modulus_len()];
        let signed = key.pair.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), text.as_bytes(), &mut signature);
        signed.map_err(|_| fault("the key refuses"))?;
        Ok(format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }
}

impl Key {
    fn read(stored: &Stored) -> Result<Self, Error> {
        let damaged = || Error::Internal(format!("the signing key {} can't be read", stored.id));
        let pkcs8 = STANDARD.decode(&stored.pkcs8).map_err(|_| damaged())?;
        let pair = KeyPair::from_pkcs8(&pkcs8).map_err(|_| damaged())?;
        let (modulus, exponent) = numbers(pair.public_key().as_ref()).ok_or_else(damaged)?;
        let (modulus, exponent) = (URL_SAFE_NO_PAD.encode(modulus), URL_SAFE_NO_PAD.encode(exponent));
        Ok(Self { id: stored.id.clone(), created_ms: stored.created_ms, pair, modulus, exponent })
    }
}

/// Modulus and exponent of an `RSAPublicKey` (RFC 8017), which is a sequence of two integers in DER; without leading zeros.
fn numbers(der: &[u8]) -> Option<(&[u8], &[u8])> {
    let (sequence, _) = element(der, 0x30)?;
    let (modulus, rest) = element(sequence, 0x02)?;
    let (exponent, _) = element(rest, 0x02)?;
    Some((without_zeros(modulus), without_zeros(exponent)))
}

fn without_zeros(number: &[u8]) -> &[u8] {
    &number[number.iter().take_while(|byte| **byte == 0).count()..]
}

/// The content of one DER element and what follows it.
fn element(der: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (found, rest) = der.split_first()?;
    let (first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        short if *short < 0x80 => (usize::from(*short), rest),
        long => {
            let (bytes, rest) = rest.split_at_checked(usize::from(long & 0x7f))?;
            (bytes.iter().try_fold(0usize, |sum, byte| sum.checked_mul(256)?.checked_add(usize::from(*byte)))?, rest)
        }
    };
    if *found == tag { rest.split_at_checked(length) } else { None }
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::{RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey};

    use super::*;

    const DAY_MS: u64 = 86_400_000;

    #[tokio::test]
    async fn keys_rotate_and_sign_only_once_they_are_known() {
        let first = rotated(&[], 1000).await.unwrap().unwrap();
        assert_eq!(first.len(), 1);
        assert!(rotated(&first, 6 * DAY_MS).await.unwrap().is_none());
        let second = rotated(&first, 8 * DAY_MS).await.unwrap().unwrap();
        assert_eq!((second.len(), &second[0].id), (2, &first[0].id));
        let keys = KeySet::read(&second).unwrap();
        let kid = |now_ms| {
            let token = keys.sign(&serde_json::json!({}), now_ms).unwrap();
            let header = URL_SAFE_NO_PAD.decode(token.split('.').next().unwrap()).unwrap();
            serde_json::from_slice::<serde_json::Value>(&header).unwrap()["kid"].as_str().unwrap().to_owned()
        };
        assert_eq!(kid(8 * DAY_MS), second[0].id);
        assert_eq!(kid(8 * DAY_MS + LEAD_MS), second[1].id);
        assert!(rotated(&second, 9 * DAY_MS).await.unwrap().is_none());
        let third = rotated(&second, 8 * DAY_MS + LEAD_MS + REST_MS).await.unwrap().unwrap();
        assert_eq!((third.len(), &third[0].id), (1, &second[1].id));
    }

    #[tokio::test]
    async fn a_token_is_verified_by_the_published_key() {
        let stored = rotated(&[], 1000).await.unwrap().unwrap();
        let keys = KeySet::read(&stored).unwrap();
        let token = keys.sign(&serde_json::json!({ "aud": "x" }), 1000).unwrap();
        let (text, signature) = token.rsplit_once('.').unwrap();
        let signature = URL_SAFE_NO_PAD.decode(signature).unwrap();
        let key = UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, keys.keys[0].pair.public_key().as_ref());
        assert!(key.verify(text.as_bytes(), &signature).is_ok());
        assert!(key.verify(b"another text", &signature).is_err());
        let jwks = serde_json::to_value(keys.jwks()).unwrap();
        assert_eq!((&jwks["keys"][0]["kid"], &jwks["keys"][0]["e"]), (&stored[0].id.as_str().into(), &"AQAB".into()));
        assert_eq!(URL_SAFE_NO_PAD.decode(jwks["keys"][0]["n"].as_str().unwrap()).unwrap().len(), 256);
    }

    #[tokio::test]
    async fn all_nodes_of_a_store_have_the_same_keys() {
        let broker = crate::broker::embedded::Embedded::memory();
        let one = Keys::new(Connector::open(broker.clone(), Default::default()).await.unwrap());
        let other = Keys::new(Connector::open(broker, Default::default()).await.unwrap());
        let (one, other) = tokio::join!(one.current(), other.current());
        let shown = |keys: Arc<KeySet>| serde_json::to_string(&keys.jwks()).unwrap();
        assert_eq!(shown(one.unwrap()), shown(other.unwrap()));
    }
}
