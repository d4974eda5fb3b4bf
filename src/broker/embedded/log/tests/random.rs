//! Random histories against a model.

use proptest::{collection::vec, prelude::*, test_runner::Config};

use super::*;

#[derive(Debug, Clone)]
enum Step {
    Append { sync: bool, bodies: Vec<u16> },
    Settle,
    Reopen,
    Kill,
    Trim,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (any::<bool>(), vec(0u16..3000, 0..5)).prop_map(|(sync, bodies)| Step::Append { sync, bodies }),
        3 => Just(Step::Settle),
        1 => Just(Step::Reopen),
        1 => Just(Step::Kill),
        1 => Just(Step::Trim),
    ]
}

/// A log and what must be in it.
struct Subject {
    directory: tempfile::TempDir,
    log: Option<Arc<Log>>,
    /// Records after the checkpoint, with their positions.
    records: Vec<(u64, Record)>,
    checkpoint: u64,
    count: u8,
}

impl Subject {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let log = Some(open(directory.path()).0);
        Self { directory, log, records: Vec::new(), checkpoint: 0, count: 0 }
    }

    fn log(&self) -> &Log {
        self.log.as_ref().unwrap()
    }

    fn apply(&mut self, step: &Step) {
        match step {
            Step::Append { sync, bodies } => self.append(*sync, bodies),
            Step::Settle => block_on(self.log().durable(self.log().position())).unwrap(),
            Step::Reopen => {
                drop(self.log.take());
                self.start();
            }
            Step::Kill => {
                block_on(self.log().written(self.log().position())).unwrap();
                let killed = copy(self.directory.path());
                drop(self.log.take());
                self.directory = killed;
                self.start();
            }
            Step::Trim => {
                block_on(self.log().durable(self.log().position())).unwrap();
                self.checkpoint = self.log().position();
                self.log().trim(self.checkpoint, &|_| false);
                self.records.clear();
            }
        }
    }

    fn append(&mut self, sync: bool, bodies: &[u16]) {
        self.count = self.count.wrapping_add(1);
        let bodies: Vec<Vec<u8>> = bodies.iter().map(|length| vec![self.count; usize::from(*length)]).collect();
        let lengths: Vec<u32> = bodies.iter().map(|body| body.len() as u32).collect();
        let log = self.log.clone().unwrap();
        wait_until("room", || log.admit(AppendKind::Data).is_ok());
        // Still refused when the next segment is needed at once and not ready.
        let appended = log.append(AppendKind::Data, sync, &[self.count], &bodies.concat(), &lengths);
        if let Ok(appended) = appended {
            self.records.push((appended.position, (vec![self.count], bodies)));
        }
    }

    fn start(&mut self) {
        let (log, found) = open_after(options(self.directory.path()), self.checkpoint).unwrap();
        assert!(found.iter().eq(self.records.iter().map(|(_, record)| record)));
        self.log = Some(log);
    }

    /// Stops like a killed process. Answers the directory it leaves, and what its last frame says is durable.
    fn kill(mut self) -> (Self, u64) {
        block_on(self.log().written(self.log().position())).unwrap();
        // Between these two lines the log may note once more how far it is durable, never less.
        let durable = shared(self.log()).marked.load(SeqCst);
        let killed = copy(self.directory.path());
        drop(self.log.take());
        self.directory = killed;
        (self, durable)
    }

    /// Opens a log to which something bad has happened: all there is or nothing.
    fn survives(&self, durable: u64) {
        match open_after(options(self.directory.path()), self.checkpoint) {
            Err(error) => assert!(matches!(error, LogError::Damaged(_)), "{error}"),
            Ok((_, found)) => {
                assert!(found.len() <= self.records.len());
                assert!(found.iter().zip(&self.records).all(|(found, (_, expected))| found == expected));
                let lost = &self.records[found.len()..];
                assert!(lost.iter().all(|(position, _)| *position > durable), "durable records were cut");
            }
        }
    }
}

proptest! {
    #![proptest_config(Config { cases: 40, ..Config::default() })]

    #[test]
    fn any_history_reads_back(steps in vec(step(), 1..60)) {
        let mut subject = Subject::new();
        for step in &steps {
            subject.apply(step);
        }
        subject.apply(&Step::Kill);
        subject.apply(&Step::Reopen);
    }

    #[test]
    fn any_damaged_byte_is_found_or_in_the_tail(
        steps in vec(step(), 1..40),
        file in any::<prop::sample::Index>(),
        offset in any::<prop::sample::Index>(),
    ) {
        let mut subject = Subject::new();
        steps.iter().for_each(|step| subject.apply(step));
        let (subject, durable) = subject.kill();
        let files = segment_files(subject.directory.path());
        let path = file.get(&files);
        flip(path, offset.index(fs::metadata(path).unwrap().len() as usize) as u64);
        subject.survives(durable);
    }

    #[test]
    fn any_cut_is_found_or_in_the_tail(steps in vec(step(), 1..40), file in any::<prop::sample::Index>(), length in 4096u64..65536) {
        let mut subject = Subject::new();
        steps.iter().for_each(|step| subject.apply(step));
        let (subject, _) = subject.kill();
        let files = segment_files(subject.directory.path());
        let path = file.get(&files);
        fs::OpenOptions::new().write(true).open(path).unwrap().set_len(length).unwrap();
        // A cut takes frames along that say what was durable.
        subject.survives(0);
    }
}

fn segment_files(directory: &Path) -> Vec<std::path::PathBuf> {
    let mut files: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "log"));
    files.sort();
    files
}
