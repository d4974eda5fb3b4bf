//! Checkpoints: the state written out, so that the log before it can go and a start need not repeat it.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use super::{
    Shared,
    state::{State, StoredState},
};
use crate::broker::BrokerError;

const MAGIC: &[u8; 8] = b"LLCKPT\0\0";
const FORMAT: u32 = 1;
const HEADER: usize = 8 + 4 + 8 + 8 + 4;
const NAME: &str = "checkpoint";
/// How often the thread looks whether a checkpoint is worth its cost.
const PERIOD: Duration = Duration::from_secs(5);
/// Log bytes that always make one worth it; a start repeats this much in well under a second.
const LOG_BYTES: u64 = 128 << 20;
/// After this long any growth makes one worth it: the space of what was consumed comes back.
const IDLE: Duration = Duration::from_secs(60);

/// Reads a directory's checkpoint: the state, and the log position after it.
pub fn read(directory: &Path) -> Result<(State, Option<u64>), BrokerError> {
    let path = directory.join(NAME);
    let damaged = |text: &str| BrokerError::Damaged(format!("{}: {text}", path.display()));
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok((State::default(), None)),
        Err(e) => return Err(BrokerError::Unavailable(format!("{}: {e}", path.display()))),
    };
    if bytes.len() < HEADER || &bytes[..8] != MAGIC {
        return Err(damaged("not a checkpoint"));
    }
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
    let short = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap_or_default());
    if short(8) > FORMAT {
        return Err(damaged(&format!("format {} is newer than this version's {FORMAT}", short(8))));
    }
    let (position, length, crc) = (number(12), number(20), short(28));
    let body = &bytes[HEADER..];
    if body.len() as u64 != length || crc32c::crc32c(body) != crc {
        return Err(damaged("checksum does not match"));
    }
    let stored: StoredState = postcard::from_bytes(body).map_err(|e| damaged(&e.to_string()))?;
    Ok((State::load(stored), Some(position)))
}

/// Writes the state out and lets go of the log before it. Answers the checkpoint's bytes.
pub(super) fn write(shared: &Shared, directory: Option<&Path>) -> Result<u64, BrokerError> {
    let (stored, position) = {
        let mut state = shared.state.lock();
        let now_ms = shared.tick(&mut state);
        state.reclaim(now_ms);
        // Appends take their ids outside of the lock; only a replay counts them in the state.
        state.next_message_id = shared.next_message_id.load(Ordering::Relaxed);
        (state.store(), shared.log.position())
    };
    let used = stored.used_segments();
    let mut size = 0;
    if let Some(directory) = directory {
        let body = postcard::to_allocvec(&stored).map_err(|e| BrokerError::Unavailable(e.to_string()))?;
        drop(stored);
        futures::executor::block_on(shared.log.durable(position))?;
        size = body.len() as u64;
        replace(directory, position, &body).map_err(|e| BrokerError::Full(format!("checkpoint: {e}")))?;
    }
    shared.log.trim(position, &|segment| used.contains(&segment));
    Ok(size)
}

/// Puts the new file in the old one's place, so that there is always a whole one.
fn replace(directory: &Path, position: u64, body: &[u8]) -> std::io::Result<()> {
    let (path, next) = (directory.join(NAME), directory.join(format!("{NAME}.new")));
    let written = (|| {
        let mut file = File::create(&next)?;
        file.write_all(MAGIC)?;
        file.write_all(&FORMAT.to_le_bytes())?;
        file.write_all(&position.to_le_bytes())?;
        file.write_all(&(body.len() as u64).to_le_bytes())?;
        file.write_all(&crc32c::crc32c(body).to_le_bytes())?;
        file.write_all(body)?;
        file.sync_all()
    })();
    if let Err(error) = written {
        // Leave the space to others.
        let _ = fs::remove_file(&next);
        return Err(error);
    }
    fs::rename(&next, &path)?;
    File::open(directory)?.sync_all()
}

pub(super) fn spawn(shared: &Arc<Shared>, directory: Option<PathBuf>) -> JoinHandle<()> {
    let shared = shared.clone();
    std::thread::spawn(move || {
        let directory = directory.as_deref();
        let (mut last, mut size, mut at) = (shared.log.position(), 0, Instant::now());
        loop {
            let go_on = shared.timer.pause(PERIOD);
            let grown = shared.log.position().saturating_sub(last);
            let worth = match go_on {
                true => grown > LOG_BYTES.max(2 * size) || shared.log.short_of_space() || at.elapsed() > IDLE,
                false => shared.orderly.load(Ordering::Acquire),
            };
            if worth && grown > 0 {
                at = Instant::now();
                let position = shared.log.position();
                match write(&shared, directory) {
                    Ok(written) => (last, size) = (position, written),
                    Err(error) => tracing::warn!(%error, "checkpoint not written; the log before it stays"),
                }
                if go_on && let Err(error) = super::gather::gather(&shared) {
                    tracing::debug!(%error, "sparse segments of the log stay for now");
                }
            }
            if !go_on {
                return;
            }
        }
    })
}
