//! Files that settings name and that can't be used: told by the setting.

use super::Error;
use crate::settings::{
    Settings,
    keys::{ENVIRONMENT_PREFIX, files},
};

/// The same error with the setting it comes from, where it tells of a file that one names.
pub fn blame(settings: &Settings, error: Error) -> Error {
    if !matches!(
        error,
        Error::Tls(_) | Error::Auth(_) | Error::Console(_) | Error::Preload(..) | Error::Push(_) | Error::Telemetry(_)
    ) {
        return error;
    }
    let text = error.to_string();
    let named = files(settings).filter(|(_, path)| text.contains(path.as_str()));
    // A certificate and its key may be in one file.
    let is_key = text.contains("private key");
    let Some((key, path)) = named.max_by_key(|(key, path)| (path.len(), is_key == (key.name == "TLS_KEY_FILE"))) else {
        return error;
    };
    let why = text.split_once(&format!("{path}: ")).map_or(text.as_str(), |(_, why)| why);
    Error::File(format!("{ENVIRONMENT_PREFIX}{}={path:?}: must be {}: {why}", key.name, key.range))
}
