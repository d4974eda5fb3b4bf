//! Tests of the log as a whole: through its own interface, on real files.

mod crash;
mod damage;
mod faults;
mod full_disk;
mod memory;
mod ordinary;
mod random;

use std::{
    fs, io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use futures::executor::block_on;

use super::{AppendKind, Appended, Backend, Durability, Log, LogError, LogOptions, MIN_SEGMENT_BYTES, disk::Shared};

/// Failures and delays that tests ask for.
#[derive(Default)]
pub(super) struct Faults {
    pub fail_writes: AtomicBool,
    pub fail_syncs: AtomicBool,
    /// Milliseconds that each sync takes longer.
    pub slow_syncs: AtomicU64,
    /// Syncs so far.
    pub syncs: AtomicU64,
}

impl Faults {
    pub fn write(&self) -> io::Result<()> {
        if self.fail_writes.load(SeqCst) { Err(io::Error::other("write fault")) } else { Ok(()) }
    }

    pub fn sync(&self) -> io::Result<()> {
        self.syncs.fetch_add(1, SeqCst);
        std::thread::sleep(Duration::from_millis(self.slow_syncs.load(SeqCst)));
        if self.fail_syncs.load(SeqCst) { Err(io::Error::other("sync fault")) } else { Ok(()) }
    }
}

/// A replayed record: header and bodies.
type Record = (Vec<u8>, Vec<Vec<u8>>);

fn options(directory: &Path) -> LogOptions {
    LogOptions { segment_bytes: MIN_SEGMENT_BYTES, ..LogOptions::on_disk(directory, Durability::Fsync) }
}

/// Opens a log and answers the records after `after`, bodies read back through the log.
fn open_after(options: LogOptions, after: u64) -> Result<(Arc<Log>, Vec<Record>), LogError> {
    let mut found = Vec::new();
    let log = Log::open(options, Some(after), |header, bodies| {
        found.push((header.to_vec(), bodies.to_vec()));
        Ok(())
    })?;
    let read = |(header, bodies): (Vec<u8>, Vec<_>)| {
        let bodies = block_on(log.read(&bodies))?.into_iter().map(|body| body.to_vec()).collect();
        Ok((header, bodies))
    };
    let records = found.into_iter().map(read).collect::<Result<Vec<_>, LogError>>()?;
    Ok((log, records))
}

fn open(directory: &Path) -> (Arc<Log>, Vec<Record>) {
    open_after(options(directory), 0).unwrap()
}

fn append(log: &Log, kind: AppendKind, header: &[u8], bodies: &[&[u8]]) -> Result<Appended, LogError> {
    let lengths: Vec<u32> = bodies.iter().map(|body| body.len() as u32).collect();
    log.append(kind, true, header, &bodies.concat(), &lengths)
}

/// Appends a record with one body and waits until it is durable.
fn put(log: &Log, body: &[u8]) -> Appended {
    let appended = append(log, AppendKind::Data, b"h", &[body]).unwrap();
    block_on(log.durable(appended.position)).unwrap();
    appended
}

/// Like [`put`], and waits where the next segment is not ready yet.
fn append_waiting(log: &Log, body: &[u8]) -> Appended {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match append(log, AppendKind::Data, b"h", &[body]) {
            Ok(appended) => {
                block_on(log.durable(appended.position)).unwrap();
                return appended;
            }
            Err(LogError::Unavailable(text)) => assert!(Instant::now() < deadline, "still refused: {text}"),
            Err(other) => panic!("{other}"),
        }
        std::thread::yield_now();
    }
}

fn record(body: &[u8]) -> Record {
    (b"h".to_vec(), vec![body.to_vec()])
}

fn shared(log: &Log) -> &Arc<Shared> {
    match &log.backend {
        Backend::Disk(disk) => disk.shared(),
        Backend::Memory(_) => panic!("the log is in memory"),
    }
}

/// What a killed process would leave of a log at this moment.
fn copy(directory: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        // A segment may be removed or renamed meanwhile.
        match fs::copy(entry.path(), copy.path().join(entry.file_name())) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => _ = other.unwrap(),
        }
    }
    copy
}

fn segment_file(directory: &Path, number: u32) -> std::path::PathBuf {
    directory.join(format!("{number:010}.log"))
}

fn flip(path: &Path, offset: u64) {
    use std::os::unix::fs::FileExt;
    let file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x55], offset).unwrap();
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "{what} did not happen within 30 seconds");
        std::thread::yield_now();
    }
}

fn damage(result: Result<(Arc<Log>, Vec<Record>), LogError>) -> String {
    match result {
        Err(LogError::Damaged(text)) => text,
        Err(other) => panic!("another error: {other}"),
        Ok((_, records)) => panic!("accepted with {} records", records.len()),
    }
}
