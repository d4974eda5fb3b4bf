//! The directory of a log: its lock, the names of its files, and making their appearance durable.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

use super::types::LogError;

const LOCK: &str = "lock";
const SUFFIX: &str = ".log";
/// A segment that is not ready; one that a crash left behind is removed.
const TEMPORARY_SUFFIX: &str = ".log.new";

/// A process that is just ending may still write its last records; one that stays is reported after this time.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);
const LOCK_POLL: Duration = Duration::from_millis(5);

/// A locked directory.
pub(super) struct Directory {
    path: PathBuf,
    handle: File,
    /// Holds the lock as long as it is open.
    lock: Mutex<Option<File>>,
    #[cfg(test)]
    pub faults: super::tests::Faults,
}

impl Directory {
    /// Creates the directory where it is missing, and locks it.
    pub fn open(path: &Path) -> Result<Self, LogError> {
        let failed = |error: io::Error| LogError::Unavailable(format!("log directory {}: {error}", path.display()));
        let created = !path.exists();
        fs::create_dir_all(path).map_err(failed)?;
        let handle = File::open(path).map_err(failed)?;
        if created && let Some(parent) = path.canonicalize().map_err(failed)?.parent() {
            File::open(parent).and_then(|parent| parent.sync_all()).map_err(failed)?;
        }
        let lock = lock(path)?;
        Ok(Self {
            path: path.into(),
            handle,
            lock: Mutex::new(Some(lock)),
            #[cfg(test)]
            faults: Default::default(),
        })
    }

    /// Lets another process have the directory.
    pub fn unlock(&self) {
        self.lock.lock().take();
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn segment_path(&self, number: u32) -> PathBuf {
        self.path.join(format!("{number:010}{SUFFIX}"))
    }

    pub fn temporary_path(&self, number: u32) -> PathBuf {
        self.path.join(format!("{number:010}{TEMPORARY_SUFFIX}"))
    }

    /// Makes created, renamed and removed files so for good.
    pub fn sync(&self) -> io::Result<()> {
        self.handle.sync_all()
    }

    /// The numbers of the segment files, ascending. Removes half-made ones.
    pub fn segments(&self) -> io::Result<Vec<u32>> {
        let mut numbers = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            let number = |suffix| name.strip_suffix(suffix).filter(|n| n.len() == 10).and_then(|n| n.parse::<u32>().ok());
            if let Some(number) = number(SUFFIX) {
                numbers.push(number);
            } else if number(TEMPORARY_SUFFIX).is_some() {
                fs::remove_file(entry.path())?;
            }
        }
        numbers.sort_unstable();
        Ok(numbers)
    }
}

fn lock(directory: &Path) -> Result<File, LogError> {
    let path = directory.join(LOCK);
    let failed = |error: io::Error| LogError::Unavailable(format!("lock file {}: {error}", path.display()));
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(failed)?;
    let deadline = Instant::now() + LOCK_PATIENCE;
    while let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
        if error != Errno::WOULDBLOCK {
            return Err(failed(error.into()));
        }
        if Instant::now() >= deadline {
            let mut holder = String::new();
            // Only for the message: whoever holds the lock wrote its process id.
            let _ = file.read_to_string(&mut holder);
            let holder = holder.trim();
            let holder = if holder.is_empty() { "another process".to_owned() } else { format!("process {holder}") };
            return Err(LogError::Unavailable(format!("log directory {} is in use by {holder}", directory.display())));
        }
        thread::sleep(LOCK_POLL);
    }
    file.set_len(0).map_err(failed)?;
    writeln!(file, "{}", std::process::id()).map_err(failed)?;
    Ok(file)
}
