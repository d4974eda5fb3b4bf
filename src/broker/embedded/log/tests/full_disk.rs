use std::process::Command;

use super::*;

/// A small file system of its own.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount(bytes: u32) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let size = format!("size={bytes}");
        let status = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(directory.path()).status();
        let mounted = status.is_ok_and(|status| status.success());
        assert!(mounted, "this test mounts a small tmpfs and must be run by a user who may do that (root)");
        Self(directory)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

const SEGMENT_BYTES: u32 = 256 << 10;

fn small_options(directory: &Path) -> LogOptions {
    LogOptions { segment_bytes: SEGMENT_BYTES, ..options(directory) }
}

/// Appends messages until they are refused for want of space.
fn fill(log: &Log) -> Vec<Appended> {
    let mut written = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match append(log, AppendKind::Data, b"h", &[&[written.len() as u8; 2000]]) {
            Ok(appended) => written.push(appended),
            Err(LogError::Full(_)) => break,
            Err(LogError::Unavailable(text)) => assert!(Instant::now() < deadline, "{text}"),
            Err(other) => panic!("{other}"),
        }
        std::thread::yield_now();
    }
    block_on(log.durable(log.position())).unwrap();
    written
}

fn check_full_disk(options: LogOptions) {
    let (log, _) = open_after(options.clone(), 0).unwrap();
    let mut written = fill(&log);
    assert!(log.short_of_space());
    // Acknowledgements go on: even of so small a segment the reserve holds hundreds.
    for n in 0..500u32 {
        log.admit(AppendKind::Control).unwrap();
        let ack = append(&log, AppendKind::Control, &n.to_le_bytes(), &[]).unwrap();
        block_on(log.durable(ack.position)).unwrap();
    }
    // What was taken is all there.
    for (n, appended) in written.iter().enumerate() {
        assert_eq!(block_on(log.read(&appended.bodies)).unwrap(), [vec![n as u8; 2000]]);
    }
    // Space comes free, and messages are taken again without a restart; this can go on for ever.
    for _ in 0..5 {
        let checkpoint = log.position();
        log.trim(checkpoint, &|_| false);
        wait_until("the next segment", || !log.short_of_space());
        written = fill(&log);
        assert!(!written.is_empty());
        let copied = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(options.directory.as_ref().unwrap()).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), copied.path().join(entry.file_name())).unwrap();
        }
        let (_copy, found) = open_after(small_options(copied.path()), checkpoint).unwrap();
        assert_eq!(found.len(), written.len());
    }
    drop(log);
    // A start needs no space either.
    let (log, _) = open_after(options, written[0].position).unwrap();
    log.admit(AppendKind::Control).unwrap();
}

#[test]
fn on_a_full_disk_messages_are_refused_and_everything_else_goes_on() {
    // Room for three segments, not for four.
    let disk = SmallDisk::mount(3 * SEGMENT_BYTES + SEGMENT_BYTES / 2);
    check_full_disk(small_options(disk.path()));
}

#[test]
fn a_log_at_its_own_bound_refuses_messages_and_everything_else_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    check_full_disk(LogOptions { max_bytes: Some(3 * u64::from(SEGMENT_BYTES)), ..small_options(directory.path()) });
    let files: u64 = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    assert!(files < 4 * u64::from(SEGMENT_BYTES));
}

#[test]
fn a_log_that_can_not_be_created_says_so() {
    let disk = SmallDisk::mount(SEGMENT_BYTES / 2);
    let refusal = open_after(small_options(disk.path()), 0).map(|_| ()).unwrap_err();
    assert!(matches!(&refusal, LogError::Unavailable(text) if text.contains("No space left")), "{refusal}");
    assert!(!segment_file(disk.path(), 1).exists());
}
