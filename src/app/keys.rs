//! `landline keys`: issues, lists and takes back service-account keys.

use std::io::Write;

use super::{
    Error,
    cli::{CreateKey, KeysCommand},
};
use crate::{
    auth::{KeyFile, KeysError, Registry},
    settings::Settings,
};

/// Carries out what was asked; the answer goes to standard output.
///
/// # Errors
/// When the keys can't be read or written.
pub fn run(command: &KeysCommand, settings: &Settings) -> Result<(), Error> {
    let path = settings.keys_file();
    if path.as_os_str().is_empty() {
        return Err(Error::Auth("AUTH_KEYS_FILE: must be given with this broker: where the public halves of keys are".into()));
    }
    let text = match command {
        KeysCommand::Create(create) => {
            let (file, key) = KeyFile::create(&email(create), &create.project, &token_uri(create, settings))?;
            // The client's half first: a public half without it could be used by nobody.
            file.write(&create.out)?;
            let (id, email) = (key.id.clone(), key.email.clone());
            Registry::change(&path, |registry| {
                registry.keys.push(key);
                Ok(())
            })?;
            format!("{}: key {id} of serviceAccount:{email}\n", create.out.display())
        }
        KeysCommand::List => {
            let keys = Registry::load(&path)?.keys;
            keys.iter().map(|key| format!("{} serviceAccount:{}\n", key.id, key.email)).collect()
        }
        KeysCommand::Delete { id } => {
            Registry::change(&path, |registry| {
                let before = registry.keys.len();
                registry.keys.retain(|key| key.id != *id);
                if registry.keys.len() == before { Err(KeysError::Unknown(id.clone())) } else { Ok(()) }
            })?;
            format!("deleted {id}\n")
        }
    };
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Error::Output)
}

fn email(create: &CreateKey) -> String {
    create.email.clone().unwrap_or_else(|| format!("client-{:08x}@landline.local", rand::random::<u32>()))
}

/// Where the client exchanges assertions for tokens.
fn token_uri(create: &CreateKey, settings: &Settings) -> String {
    let scheme = if settings.tls.is_set() { "https" } else { "http" };
    let address = match (&create.endpoint, settings.advertised_endpoint.as_str()) {
        (Some(endpoint), _) if endpoint.contains("://") => return format!("{}/token", endpoint.trim_end_matches('/')),
        (Some(endpoint), _) => endpoint.clone(),
        (None, "") => format!("localhost:{}", settings.port),
        (None, advertised) => advertised.to_owned(),
    };
    format!("{scheme}://{address}/token")
}
