//! Counting: what the metrics are made of. Cheap enough for every call, exact, and never waiting for anybody.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Upper bounds of a histogram's buckets, microseconds. From a publish into memory to a long poll's end; each is about 2.5
/// times the one before it.
pub const BOUNDS_MICROS: [u64; 16] = [
    100,
    250,
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    10_000_000,
    100_000_000,
];

/// How long something took, in buckets.
#[derive(Debug, Default)]
pub struct Histogram {
    /// The last one is for what is beyond every bound.
    buckets: [AtomicU64; BOUNDS_MICROS.len() + 1],
    sum_micros: AtomicU64,
}

impl Histogram {
    /// Counts one duration.
    pub fn observe(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_MICROS.partition_point(|bound| *bound < micros);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_micros.fetch_add(micros, Ordering::Relaxed);
    }

    /// What was counted so far.
    pub fn view(&self) -> HistogramView {
        HistogramView {
            buckets: std::array::from_fn(|index| self.buckets[index].load(Ordering::Relaxed)),
            sum: Duration::from_micros(self.sum_micros.load(Ordering::Relaxed)),
        }
    }
}

/// A histogram at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HistogramView {
    /// Counts by bucket, not cumulated; the last is for what is beyond every bound.
    pub buckets: [u64; BOUNDS_MICROS.len() + 1],
    pub sum: Duration,
}

/// Adds to a counter.
pub fn add(counter: &AtomicU64, count: u64) {
    // A store that changes nothing would still take the cache line from others.
    if count > 0 {
        counter.fetch_add(count, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_counted_in_the_first_bucket_that_holds_it() {
        let histogram = Histogram::default();
        for micros in [0, 100, 101, 1_000_000, 100_000_001] {
            histogram.observe(Duration::from_micros(micros));
        }
        let view = histogram.view();
        let filled: Vec<_> = view.buckets.iter().enumerate().filter(|(_, count)| **count > 0).collect();
        assert_eq!(filled, [(0, &2), (1, &1), (12, &1), (16, &1)]);
        assert_eq!(view.sum, Duration::from_micros(101_000_202));
    }
}
