//! The cluster's secret: keys the MACs of ack ids and page tokens, the same on every node of one store.

use std::fmt;

use base64::{Engine, engine::general_purpose::STANDARD};
use rand::TryRngCore;

use super::{Error, record};
use crate::broker::{Broker, BrokerError, Change, Effect, Expect, Kind, Record};

const RECORD: &str = "secret";
const SECRET_BYTES: usize = 32;

/// 32 random bytes, drawn once in the life of a store.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; SECRET_BYTES]);

impl Secret {
    /// Reads the secret, or creates it in a new store. When several nodes start at once, one creates it and the others read.
    pub(super) async fn load_or_create(broker: &dyn Broker) -> Result<Self, Error> {
        if let Some(found) = broker.get(Kind::System, RECORD).await? {
            return Self::read(&found);
        }
        let mut bytes = [0; SECRET_BYTES];
        rand::rngs::OsRng.try_fill_bytes(&mut bytes).map_err(|e| Error::Internal(format!("no random bytes: {e}")))?;
        let change = Change {
            kind: Kind::System,
            name: RECORD.into(),
            expect: Expect::Absent,
            body: Some(record::encode(&STANDARD.encode(bytes))?),
            effect: Effect::None,
        };
        match broker.change(change).await {
            Ok(_) => Ok(Self(bytes)),
            Err(BrokerError::Conflict(_)) => match broker.get(Kind::System, RECORD).await? {
                Some(found) => Self::read(&found),
                None => Err(Error::Internal("the record secret was deleted while it was read".into())),
            },
            Err(error) => Err(error.into()),
        }
    }

    fn read(found: &Record) -> Result<Self, Error> {
        let text: String = record::decode(found)?;
        let bytes = STANDARD.decode(text).ok().and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or_else(|| Error::Internal(format!("the record secret does not hold {SECRET_BYTES} bytes")))
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8; SECRET_BYTES] {
        &self.0
    }

    /// A 16-byte key for one purpose. Keys of different purposes are unrelated, so what one MAC shows says nothing of another.
    pub fn key(&self, purpose: &str) -> [u8; 16] {
        use siphasher::sip128::{Hasher128, SipHasher24};
        use std::hash::Hasher;
        let mut key = [0; 16];
        for (half, part) in self.0.chunks_exact(16).enumerate() {
            let mut hasher = SipHasher24::new_with_key(part.try_into().unwrap_or(&[0; 16]));
            hasher.write(purpose.as_bytes());
            hasher.write_u8(half as u8);
            for (byte, hashed) in key.iter_mut().zip(hasher.finish128().as_bytes()) {
                *byte ^= hashed;
            }
        }
        key
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_depend_on_the_purpose_and_on_every_byte_of_the_secret() {
        let mut seen = vec![Secret([7; 32]).key("ack"), Secret([7; 32]).key("page")];
        for at in 0..32 {
            let mut bytes = [7; 32];
            bytes[at] = 8;
            seen.push(Secret(bytes).key("ack"));
        }
        let count = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), count);
        assert_eq!(Secret([7; 32]).key("ack"), Secret([7; 32]).key("ack"));
    }

    #[test]
    fn a_secret_does_not_show_itself() {
        assert_eq!(format!("{:?}", Secret([7; 32])), "Secret");
    }
}
