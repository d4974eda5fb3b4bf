//! The thread that notices what is due: expired leases, ended backoffs, retention. It sleeps until the next such time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use parking_lot::{Condvar, Mutex};

use super::{Clock, Shared};
use crate::broker::Event;

/// The longest sleep; also how soon a clock that was set by hand is looked at.
const LONGEST: Duration = Duration::from_secs(5);
const LONGEST_MANUAL: Duration = Duration::from_millis(20);

/// When the thread wakes next.
pub struct Timer {
    armed_ms: AtomicU64,
    stopped: AtomicBool,
    lock: Mutex<()>,
    changed: Condvar,
    ended: Condvar,
}

impl Default for Timer {
    fn default() -> Self {
        Self {
            armed_ms: AtomicU64::new(u64::MAX),
            stopped: AtomicBool::new(false),
            lock: Mutex::new(()),
            changed: Condvar::new(),
            ended: Condvar::new(),
        }
    }
}

impl Timer {
    /// Something is due then; the thread wakes at that time or earlier.
    pub fn arm(&self, due_ms: Option<u64>) {
        if let Some(due_ms) = due_ms
            && due_ms < self.armed_ms.fetch_min(due_ms, Ordering::AcqRel)
        {
            drop(self.lock.lock());
            self.changed.notify_all();
        }
    }

    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        drop(self.lock.lock());
        self.changed.notify_all();
        self.ended.notify_all();
    }

    pub fn stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Sleeps until the armed time. True when it slept as long as it was to, false when it was woken; none at the end.
    fn wait(&self, clock: &Clock) -> Option<bool> {
        let mut guard = self.lock.lock();
        if self.stopped() {
            return None;
        }
        let mut slept = true;
        let longest = if matches!(clock, Clock::Manual(_)) { LONGEST_MANUAL } else { LONGEST };
        let left = self.armed_ms.load(Ordering::Acquire).saturating_sub(clock.now_ms());
        if left > 0 {
            slept = self.changed.wait_for(&mut guard, Duration::from_millis(left).min(longest)).timed_out();
        }
        (!self.stopped()).then_some(slept)
    }

    /// Sleeps for `time`; false at the end.
    pub fn pause(&self, time: Duration) -> bool {
        let mut guard = self.lock.lock();
        let until = std::time::Instant::now() + time;
        while !self.stopped() {
            if self.ended.wait_until(&mut guard, until).timed_out() {
                return true;
            }
        }
        false
    }
}

pub(super) fn spawn(shared: &Arc<Shared>) -> JoinHandle<()> {
    let shared = shared.clone();
    std::thread::spawn(move || {
        while let Some(slept) = shared.timer.wait(&shared.clock) {
            // After a sleep the clock may have been set back, and something is due by the new time.
            if !slept && shared.timer.armed_ms.load(Ordering::Acquire) > shared.clock.now_ms() {
                continue;
            }
            let dead = {
                let mut state = shared.state.lock();
                let now_ms = shared.tick(&mut state);
                let dead = state.advance(now_ms);
                shared.timer.armed_ms.store(state.next_due_ms().unwrap_or(u64::MAX), Ordering::Release);
                dead
            };
            for queue in dead {
                let _ = shared.events.send(Event::DeadLetters(queue));
            }
        }
    })
}
