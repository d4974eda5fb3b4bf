//! The log on disk against the bare minimum for the same bytes: a loop that overwrites a file of zeros and syncs it.
//!
//! `cargo bench --bench log`. Both sides of a pair run one after the other on the same disk; only their ratio means much.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    sync::Arc,
    time::{Duration, Instant},
};

use criterion::{Bencher, Criterion, Throughput, criterion_group, criterion_main};
use landline::broker::embedded::log::{AppendKind, Durability, Log, LogError, LogOptions};
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};

/// A message of 100 bytes with two attributes, as it is stored.
const BODY: [u8; 170] = [b'x'; 170];
/// The operation that comes with a batch.
const HEADER: [u8; 24] = [b'h'; 24];
const FILE_BYTES: u64 = 64 << 20;
/// Records between two trims.
const TRIM_EVERY: u64 = 256;

fn directory() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("the target directory takes files")
}

/// The bare minimum.
struct Raw {
    _directory: TempDir,
    file: File,
    at: u64,
}

impl Raw {
    fn new() -> Self {
        let directory = directory();
        let file = File::create(directory.path().join("raw")).expect("the target directory takes files");
        let zeros = vec![0; 1 << 20];
        for at in (0..FILE_BYTES).step_by(zeros.len()) {
            file.write_all_at(&zeros, at).expect("the disk has room");
        }
        file.sync_all().expect("the disk works");
        Self { _directory: directory, file, at: 0 }
    }

    fn commit(&mut self, bytes: &[u8], sync: bool) {
        if self.at + bytes.len() as u64 > FILE_BYTES {
            self.at = 0;
        }
        self.file.write_all_at(bytes, self.at).expect("the disk works");
        if sync {
            self.file.sync_data().expect("the disk works");
        }
        self.at += bytes.len() as u64;
    }
}

struct Subject {
    _directory: TempDir,
    log: Arc<Log>,
    runtime: Runtime,
}

impl Subject {
    fn new(durability: Durability) -> Self {
        let directory = directory();
        let options = LogOptions::on_disk(directory.path(), durability);
        let log = Log::open(options, None, |_, _| Ok(())).expect("a new log opens");
        // As the server has it: each runtime on one thread.
        let runtime = Builder::new_current_thread().build().expect("a runtime starts");
        let subject = Self { _directory: directory, log, runtime };
        // Beyond the first segment, whose blocks are only reserved, as after a while of use.
        subject.publish(1, 1000, 700);
        subject
    }

    /// `publishers` tasks, each with one batch in flight, until `batches` are confirmed.
    fn publish(&self, publishers: u64, batch: usize, batches: u64) -> Duration {
        let body = BODY.repeat(batch);
        let lengths = vec![BODY.len() as u32; batch];
        self.runtime.block_on(async {
            let begin = Instant::now();
            let tasks: Vec<_> = (0..publishers.min(batches))
                .map(|n| {
                    let (log, body, lengths) = (self.log.clone(), body.clone(), lengths.clone());
                    let share = batches / publishers + u64::from(n < batches % publishers);
                    tokio::spawn(async move { publish_share(&log, &body, &lengths, share).await })
                })
                .collect();
            for task in tasks {
                task.await.expect("publishers don't panic");
            }
            begin.elapsed()
        })
    }
}

async fn publish_share(log: &Log, body: &[u8], lengths: &[u32], batches: u64) {
    for n in 1..=batches {
        let position = loop {
            match log.append(AppendKind::Data, true, &HEADER, body, lengths) {
                Ok(appended) => break appended.position,
                Err(LogError::Unavailable(_)) => tokio::task::yield_now().await,
                Err(error) => panic!("{error}"),
            }
        };
        log.durable(position).await.expect("the disk works");
        if n % TRIM_EVERY == 0 {
            log.trim(position, &|_| false);
        }
    }
}

fn pair(c: &mut Criterion, publishers: u64, batch: usize, durability: Durability) {
    let name = if durability == Durability::Fsync { "synced" } else { "written" };
    let mut group = c.benchmark_group(format!("{name}/{publishers}x{batch}"));
    group.throughput(Throughput::Elements(batch as u64));
    let subject = Subject::new(durability);
    let mut raw = Raw::new();
    // The loop gets what all publishers have in flight as one write.
    let bytes = [HEADER.to_vec(), BODY.repeat(batch)].concat().repeat(publishers as usize);
    let mut control = |b: &mut Bencher<'_>| {
        b.iter_custom(|batches| {
            let commits = batches.div_ceil(publishers);
            let begin = Instant::now();
            (0..commits).for_each(|_| raw.commit(&bytes, durability == Durability::Fsync));
            begin.elapsed().mul_f64(batches as f64 / (commits * publishers) as f64)
        });
    };
    group.bench_function("loop", &mut control);
    group.bench_function("log", |b| b.iter_custom(|batches| subject.publish(publishers, batch, batches)));
    group.bench_function("loop-again", control);
    group.finish();
}

fn compare(c: &mut Criterion) {
    for (publishers, batch) in [(1, 1), (1, 100), (1, 1000), (256, 1), (16, 100)] {
        pair(c, publishers, batch, Durability::Fsync);
    }
    for (publishers, batch) in [(1, 1), (256, 1)] {
        pair(c, publishers, batch, Durability::None);
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().measurement_time(Duration::from_secs(3)).warm_up_time(Duration::from_secs(1)).sample_size(20);
    targets = compare
}
criterion_main!(benches);
