//! How many requests may be under way to one endpoint, and when the next may start.
//!
//! Slow start: the window doubles with every window's worth of successes and halves with a failure, down to a few; while
//! nothing succeeds the pause before the next few doubles from 100 ms to 60 s. Source: the push page of the public
//! documentation.

use std::time::Duration;

/// Requests of a new or failing endpoint.
const FIRST: usize = 4;
/// Requests of a healthy endpoint; production allows 3,000 a region.
const MOST: usize = 1000;
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The state of one endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    size: usize,
    /// Successes since the last growth.
    grown: usize,
    pause: Duration,
}

impl Default for Window {
    fn default() -> Self {
        Self { size: FIRST, grown: 0, pause: Duration::ZERO }
    }
}

impl Window {
    /// Requests that may be under way.
    pub fn size(&self) -> usize {
        self.size
    }

    /// How long to wait before the next request starts.
    pub fn pause(&self) -> Duration {
        self.pause
    }

    /// A request was answered: with success, or not. `pausing` tells that a pause is under way: the failures of requests that
    /// were under way together lengthen it once.
    pub fn answered(&mut self, success: bool, pausing: bool) {
        if !success {
            self.size = (self.size / 2).max(FIRST);
            self.grown = 0;
            if !pausing {
                self.pause = (self.pause * 2).clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
            }
            return;
        }
        self.pause = Duration::ZERO;
        self.grown += 1;
        if self.grown >= self.size {
            self.size = (self.size * 2).min(MOST);
            self.grown = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn successes_open_the_window_and_failures_close_it() {
        let mut window = Window::default();
        for _ in 0..FIRST {
            window.answered(true, false);
        }
        assert_eq!(window.size(), 2 * FIRST);
        for _ in 0..100_000 {
            window.answered(true, false);
        }
        assert_eq!(window.size(), MOST);
        for _ in 0..20 {
            window.answered(false, false);
        }
        assert_eq!((window.size(), window.pause()), (FIRST, LONGEST_PAUSE));
        window.answered(true, false);
        assert_eq!((window.size(), window.pause()), (FIRST, Duration::ZERO));
    }

    #[test]
    fn pauses_double_from_a_tenth_of_a_second() {
        let mut window = Window::default();
        let pauses: Vec<u128> = (0..4)
            .map(|_| {
                window.answered(false, false);
                window.pause().as_millis()
            })
            .collect();
        assert_eq!(pauses, [100, 200, 400, 800]);
        window.answered(false, true);
        assert_eq!(window.pause().as_millis(), 800, "the others of the last few");
    }
}
