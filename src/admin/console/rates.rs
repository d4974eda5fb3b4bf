//! How fast counters grow: the difference to when they were last looked at.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// Looks closer together than this share one rate, and one older than this says nothing of now.
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);
/// Counters that are remembered; all are forgotten beyond it, which costs a few pages their rates once.
const MAX_NAMES: usize = 1000;

#[derive(Clone, Copy)]
struct Look {
    at: Instant,
    counts: [u64; 2],
    /// A second, since the look before.
    rates: Option<[f64; 2]>,
}

/// What was seen of counters, by name.
#[derive(Default)]
pub struct Rates {
    looks: Mutex<HashMap<Arc<str>, Look>>,
}

impl Rates {
    /// Rates a second of a pair of counters; none at the first look.
    pub fn look(&self, name: &Arc<str>, counts: [u64; 2]) -> Option<[f64; 2]> {
        self.look_at(name, counts, Instant::now())
    }

    fn look_at(&self, name: &Arc<str>, counts: [u64; 2], now: Instant) -> Option<[f64; 2]> {
        let mut looks = self.looks.lock();
        let known = looks.get(name).copied().filter(|look| now.duration_since(look.at) <= LONGEST);
        let rates = match known {
            Some(look) if now.duration_since(look.at) < SHORTEST => return look.rates,
            Some(look) => {
                let seconds = now.duration_since(look.at).as_secs_f64();
                let rate = |at: usize| counts[at].saturating_sub(look.counts[at]) as f64 / seconds;
                Some([rate(0), rate(1)])
            }
            None => None,
        };
        if looks.len() >= MAX_NAMES {
            looks.clear();
        }
        looks.insert(name.clone(), Look { at: now, counts, rates });
        rates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_the_growth_since_the_last_look() {
        let (rates, name, start) = (Rates::default(), Arc::from("p/s"), Instant::now());
        let look = |counts, seconds: f64| rates.look_at(&name, counts, start + Duration::from_secs_f64(seconds));
        assert_eq!(look([10, 0], 0.0), None);
        assert_eq!(look([30, 4], 2.0), Some([10.0, 2.0]));
        assert_eq!(look([99, 9], 2.5), Some([10.0, 2.0]));
        assert_eq!(look([30, 4], 4.0), Some([0.0, 0.0]));
        assert_eq!(look([30, 4], 90.0), None);
    }
}
