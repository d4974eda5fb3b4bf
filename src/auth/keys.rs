//! Service-account keys that Landline issues.
//!
//! The public halves are in a file, the same on every node, that `landline keys` writes and running servers read again when
//! it changes. The private half is in the key file that the client gets, and nowhere else.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

use aws_lc_rs::{
    encoding::{AsDer, Pkcs8V1Der, PublicKeyX509Der},
    rsa::{KeyPair, KeySize},
    signature::KeyPair as _,
};
use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};

use super::jwt::PublicKey;

/// Format of the file of public keys written by this version.
const FORMAT: u32 = 1;
/// Characters of a line of PEM.
const PEM_LINE: usize = 64;

/// Why keys can't be read, made or kept. Names files, never what they hold.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    #[error("{path}: {source}", path = .0.display(), source = .1)]
    File(PathBuf, #[source] io::Error),
    #[error("{path}: {text}", path = .0.display(), text = .1)]
    Content(PathBuf, String),
    #[error("the key can't be made: {0}")]
    Make(&'static str),
    #[error("there is no key {0}")]
    Unknown(String),
}

/// One key's public half.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IssuedKey {
    /// What tokens name it by.
    pub id: String,
    /// Whose key it is; policies call its holder `serviceAccount:` and this.
    pub email: String,
    /// Seconds since the epoch.
    pub created: u64,
    /// `SubjectPublicKeyInfo`, PEM.
    public_key: String,
}

impl IssuedKey {
    /// The key itself.
    pub fn public_key(&self) -> Option<PublicKey> {
        unpem(&self.public_key).map(PublicKey::RsaInfo)
    }
}

#[derive(Serialize, Deserialize)]
struct Stored {
    format: u32,
    keys: Vec<IssuedKey>,
}

/// The public halves of all keys.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Registry {
    pub keys: Vec<IssuedKey>,
}

impl Registry {
    /// Reads the file; without one there are no keys.
    ///
    /// # Errors
    /// When there is one that can't be read.
    pub fn load(path: &Path) -> Result<Self, KeysError> {
        let text = match fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(KeysError::File(path.to_owned(), error)),
        };
        let content = |text: String| KeysError::Content(path.to_owned(), text);
        let stored: Stored = serde_json::from_slice(&text).map_err(|e| content(e.to_string()))?;
        if stored.format > FORMAT {
            return Err(content(format!("has format {}; this version reads formats up to {FORMAT}", stored.format)));
        }
        if let Some(key) = stored.keys.iter().find(|key| key.public_key().is_none()) {
            return Err(content(format!("the key {} has no public key in PEM form", key.id)));
        }
        Ok(Self { keys: stored.keys })
    }

    /// The key of an id.
    pub fn find(&self, id: &str) -> Option<&IssuedKey> {
        self.keys.iter().find(|key| key.id == id)
    }

    /// Changes the file: under a lock, and in one step for those who read it.
    ///
    /// # Errors
    /// When it can't be read or written, or the change itself fails.
    pub fn change(path: &Path, change: impl FnOnce(&mut Self) -> Result<(), KeysError>) -> Result<(), KeysError> {
        let failed = |error| KeysError::File(path.to_owned(), error);
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder).map_err(failed)?;
        }
        let lock = File::create(path.with_extension("lock")).map_err(failed)?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).map_err(|e| failed(e.into()))?;
        let mut registry = Self::load(path)?;
        change(&mut registry)?;
        let stored = Stored { format: FORMAT, keys: registry.keys };
        let mut text = serde_json::to_vec_pretty(&stored).map_err(|e| failed(e.into()))?;
        text.push(b'\n');
        let next = path.with_extension("new");
        let mut file = File::create(&next).map_err(failed)?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(failed)?;
        fs::rename(&next, path).map_err(failed)
    }
}

/// A key file as Google's client libraries load it.
#[derive(Serialize, Deserialize)]
pub struct KeyFile {
    r#type: String,
    project_id: String,
    pub(super) private_key_id: String,
    private_key: String,
    pub client_email: String,
    #[serde(default)]
    client_id: String,
    #[serde(default)]
    token_uri: String,
    // Keys of older days have none.
    #[serde(default)]
    universe_domain: String,
}

impl KeyFile {
    /// Makes a new key and answers both halves.
    ///
    /// # Errors
    /// [`KeysError::Make`].
    pub fn create(email: &str, project: &str, token_uri: &str) -> Result<(Self, IssuedKey), KeysError> {
        let pair = KeyPair::generate(KeySize::Rsa2048).map_err(|_| KeysError::Make("no random bytes"))?;
        let private: Pkcs8V1Der<'_> = pair.as_der().map_err(|_| KeysError::Make("no PKCS #8 form"))?;
        let public: PublicKeyX509Der<'_> = pair.public_key().as_der().map_err(|_| KeysError::Make("no public form"))?;
        let id = format!("{:032x}", rand::random::<u128>());
        let file = Self {
            r#type: "service_account".into(),
            project_id: project.into(),
            private_key_id: id.clone(),
            private_key: pem("PRIVATE KEY", private.as_ref()),
            client_email: email.into(),
            client_id: id.clone(),
            token_uri: token_uri.into(),
            universe_domain: "googleapis.com".into(),
        };
        let public_key = pem("PUBLIC KEY", public.as_ref());
        Ok((file, IssuedKey { id, email: email.into(), created: super::jwt::now(), public_key }))
    }

    /// Writes the file for its owner alone; it must not exist.
    ///
    /// # Errors
    /// [`KeysError::File`].
    pub fn write(&self, path: &Path) -> Result<(), KeysError> {
        use std::os::unix::fs::OpenOptionsExt;
        let failed = |error| KeysError::File(path.to_owned(), error);
        let mut text = serde_json::to_vec_pretty(self).map_err(|e| failed(e.into()))?;
        text.push(b'\n');
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(failed)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`KeysError::File`] or [`KeysError::Content`].
    pub fn read(path: &Path) -> Result<Self, KeysError> {
        let text = fs::read(path).map_err(|e| KeysError::File(path.to_owned(), e))?;
        // The parser's own text could quote the key.
        let content = |_| KeysError::Content(path.to_owned(), "is not a service-account key in JSON form".into());
        serde_json::from_slice(&text).map_err(content)
    }

    /// A token for an audience, signed with the key, good for an hour.
    ///
    /// # Errors
    /// When the private key is none.
    pub fn sign(&self, audience: &str) -> Result<String, KeysError> {
        let (email, now) = (&self.client_email, super::jwt::now());
        self.sign_claims(&serde_json::json!({"iss": email, "sub": email, "aud": audience, "iat": now, "exp": now + 3600}))
    }

    /// A token with any claims, signed with the key.
    pub(super) fn sign_claims(&self, claims: &serde_json::Value) -> Result<String, KeysError> {
        let faulty = KeysError::Make("the private key is not an RSA key in PKCS #8 form");
        let Some(pair) = unpem(&self.private_key).and_then(|der| KeyPair::from_pkcs8(&der).ok()) else { return Err(faulty) };
        super::jwt::sign(&pair, &self.private_key_id, claims).map_err(|_| KeysError::Make("no random bytes"))
    }
}

fn pem(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let lines: Vec<_> = text.as_bytes().chunks(PEM_LINE).map(String::from_utf8_lossy).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

/// What a PEM text holds, whatever its label.
fn unpem(text: &str) -> Option<Vec<u8>> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let (labels, body): (Vec<_>, Vec<_>) = lines.partition(|line| line.starts_with("-----"));
    (labels.len() == 2).then(|| STANDARD.decode(body.concat()).ok()).flatten()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::auth::jwt::Unverified;

    #[test]
    fn what_a_key_signs_is_verified_by_its_public_half_alone() {
        let (file, key) = KeyFile::create("a@example.com", "shop", "https://h/token").unwrap();
        let (_, other) = KeyFile::create("a@example.com", "shop", "https://h/token").unwrap();
        let token = file.sign("https://pubsub.googleapis.com/").unwrap();
        let unverified = Unverified::parse(&token).unwrap();
        assert_eq!(unverified.header.kid.as_deref(), Some(key.id.as_str()));
        assert_eq!(unverified.claims.iss, "a@example.com");
        assert!(unverified.is_signed_by(&key.public_key().unwrap()));
        assert!(!unverified.is_signed_by(&other.public_key().unwrap()));
        assert!(!serde_json::to_string(&key).unwrap().contains("PRIVATE"));
    }

    #[test]
    fn a_registry_keeps_what_is_added_and_refuses_a_newer_format() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sub/keys.json");
        assert_eq!(Registry::load(&path).unwrap(), Registry::default());
        let (file, key) = KeyFile::create("a@example.com", "shop", "https://h/token").unwrap();
        Registry::change(&path, |registry| {
            registry.keys.push(key.clone());
            Ok(())
        })
        .unwrap();
        assert_eq!(Registry::load(&path).unwrap().find(&key.id), Some(&key));
        fs::write(&path, r#"{"format":2,"keys":[]}"#).unwrap();
        assert!(Registry::load(&path).unwrap_err().to_string().contains("format 2"));

        let out = folder.path().join("key.json");
        file.write(&out).unwrap();
        assert!(file.write(&out).is_err(), "a key file is not overwritten");
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(fs::metadata(&out).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(KeyFile::read(&out).unwrap().client_email, "a@example.com");
    }
}
