//! What operators see of a pair while it is copied: lines on standard error.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// A trouble is told again after this time if it is still the same one.
const REPEAT: Duration = Duration::from_secs(30);

/// Counters of one pair.
pub struct Progress {
    name: String,
    /// Confirmed by the destination.
    pub copied: AtomicU64,
    pub bytes: AtomicU64,
    /// Copies of the other direction, acknowledged without being copied.
    pub skipped: AtomicU64,
    /// Delivered again while or after they were copied, and not copied again.
    pub repeated: AtomicU64,
    /// Turned down by the destination and given back.
    pub refused: AtomicU64,
    /// Publishes that were tried again.
    pub retries: AtomicU64,
    /// Received and not yet confirmed.
    pub waiting: AtomicU64,
    last: Mutex<(Instant, u64)>,
    told: Mutex<Option<(String, Instant)>>,
}

impl Progress {
    pub fn new(name: String) -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            name,
            copied: zero(),
            bytes: zero(),
            skipped: zero(),
            repeated: zero(),
            refused: zero(),
            retries: zero(),
            waiting: zero(),
            last: Mutex::new((Instant::now(), 0)),
            told: Mutex::new(None),
        }
    }

    /// Prints a line.
    pub fn report(&self) {
        let copied = self.copied.load(Relaxed);
        let rate = {
            let mut last = self.last.lock();
            let rate = (copied - last.1) as f64 / last.0.elapsed().as_secs_f64().max(1e-3);
            *last = (Instant::now(), copied);
            rate
        };
        let load = |counter: &AtomicU64| counter.load(Relaxed);
        eprintln!(
            "mirror {}: copied={copied} bytes={} per_second={rate:.0} skipped={} repeated={} refused={} retries={} waiting={}",
            self.name,
            load(&self.bytes),
            load(&self.skipped),
            load(&self.repeated),
            load(&self.refused),
            load(&self.retries),
            load(&self.waiting),
        );
    }

    /// Tells of a trouble, once in a while.
    pub fn tell(&self, text: &str) {
        let mut told = self.told.lock();
        if told.as_ref().is_none_or(|(last, at)| last != text || at.elapsed() > REPEAT) {
            eprintln!("mirror {}: {text}", self.name);
            *told = Some((text.to_owned(), Instant::now()));
        }
    }
}
