//! Waiting for a position. Hundreds of publishers wait for the same write, and waking a task of another thread costs a
//! system call, so the log's thread wakes one waiter of each lane (in effect of each runtime thread) and that one wakes
//! its neighbours, for which this is a push to its own run queue.

use std::{
    collections::BTreeMap,
    future::Future,
    pin::Pin,
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    task::{Context, Poll, Waker},
};

use parking_lot::Mutex;

use super::types::LogError;

/// More than runtime threads on most machines; threads beyond share lanes, which costs only some of the saving.
const LANES: usize = 16;

/// A growing position and those who wait for it.
pub(super) struct Waiters {
    reached: AtomicU64,
    /// Counts failures: a wait that began before one ends with it.
    failures: AtomicU64,
    failure: Mutex<Option<LogError>>,
    lanes: [Lane; LANES],
}

#[derive(Default)]
struct Lane {
    state: Mutex<LaneState>,
    /// There is something in `due`.
    owing: AtomicBool,
}

#[derive(Default)]
struct LaneState {
    waiting: BTreeMap<(u64, u64), Waker>,
    next_key: u64,
    /// Their position is reached; the next waiter that runs, or the log's thread in the end, wakes them.
    due: Vec<Waker>,
}

impl Lane {
    fn wake_due(&self) {
        if self.owing.load(Ordering::Acquire) {
            let due = {
                let mut state = self.state.lock();
                self.owing.store(false, Ordering::Release);
                std::mem::take(&mut state.due)
            };
            due.into_iter().for_each(Waker::wake);
        }
    }

    /// Wakes one of `woken` now and leaves the others to it, and wakes all that were left from before.
    fn hand_out(&self, mut state: parking_lot::MutexGuard<'_, LaneState>, mut woken: BTreeMap<(u64, u64), Waker>) {
        let left = std::mem::take(&mut state.due);
        let first = woken.pop_first();
        state.due.extend(woken.into_values());
        self.owing.store(!state.due.is_empty(), Ordering::Release);
        drop(state);
        if let Some((_, waker)) = first {
            waker.wake();
        }
        left.into_iter().for_each(Waker::wake);
    }
}

fn lane_of_this_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static LANE: usize = NEXT.fetch_add(1, Ordering::Relaxed) % LANES;
    }
    LANE.with(|lane| *lane)
}

impl Waiters {
    pub fn new(reached: u64) -> Self {
        Self {
            reached: AtomicU64::new(reached),
            failures: AtomicU64::new(0),
            failure: Mutex::new(None),
            lanes: std::array::from_fn(|_| Lane::default()),
        }
    }

    pub fn reached(&self) -> u64 {
        self.reached.load(Ordering::Acquire)
    }

    /// Moves the position forward. Answers whether it did.
    pub fn advance(&self, position: u64) -> bool {
        self.reached.fetch_max(position, Ordering::SeqCst) < position
    }

    /// Wakes those whose position is reached.
    pub fn wake(&self) {
        let reached = self.reached();
        for lane in &self.lanes {
            let mut state = lane.state.lock();
            if state.waiting.is_empty() && state.due.is_empty() {
                continue;
            }
            let later = state.waiting.split_off(&(reached + 1, 0));
            let woken = std::mem::replace(&mut state.waiting, later);
            lane.hand_out(state, woken);
        }
    }

    /// Ends every wait with an error, and new ones too until [`recover`](Self::recover).
    pub fn fail(&self, error: LogError) {
        *self.failure.lock() = Some(error);
        self.failures.fetch_add(1, Ordering::SeqCst);
        for lane in &self.lanes {
            let mut state = lane.state.lock();
            let woken = std::mem::take(&mut state.waiting);
            lane.hand_out(state, woken);
        }
    }

    /// New waits are possible again.
    pub fn recover(&self) {
        *self.failure.lock() = None;
    }

    /// Wakes whoever was left to a waiter that did not get to run soon.
    pub fn wake_left(&self) {
        self.lanes.iter().for_each(Lane::wake_due);
    }

    /// Whether a waiter still has others to wake.
    pub fn owes(&self) -> bool {
        self.lanes.iter().any(|lane| lane.owing.load(Ordering::Acquire))
    }

    /// Resolves once `position` is reached.
    pub fn wait(&self, position: u64) -> Wait<'_> {
        Wait { waiters: self, position, failures: self.failures.load(Ordering::SeqCst), lane: 0, key: None }
    }
}

/// See [`Waiters::wait`].
pub(super) struct Wait<'a> {
    waiters: &'a Waiters,
    position: u64,
    failures: u64,
    lane: usize,
    key: Option<u64>,
}

impl Wait<'_> {
    fn result(&self) -> Option<Result<(), LogError>> {
        if self.waiters.reached.load(Ordering::SeqCst) >= self.position {
            return Some(Ok(()));
        }
        // Whoever waits during a failure is told at once, whoever waited when it came is told even if it has passed.
        let failure = self.waiters.failure.lock().clone();
        if failure.is_none() && self.waiters.failures.load(Ordering::SeqCst) == self.failures {
            return None;
        }
        let passed = || LogError::Unavailable("writing the log failed; it goes on again".into());
        Some(Err(failure.unwrap_or_else(passed)))
    }
}

impl Future for Wait<'_> {
    type Output = Result<(), LogError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let mut result = this.result();
        if result.is_none() {
            if this.key.is_none() {
                this.lane = lane_of_this_thread();
            }
            let mut state = this.waiters.lanes[this.lane].state.lock();
            // The position moves before the lanes are looked through, so it can't pass by unnoticed from here on.
            result = this.result();
            if result.is_none() {
                let key = this.key.unwrap_or(state.next_key);
                state.next_key = state.next_key.max(key + 1);
                this.key = Some(key);
                state.waiting.insert((this.position, key), cx.waker().clone());
                return Poll::Pending;
            }
        }
        if let Some(key) = this.key.take() {
            let lane = &this.waiters.lanes[this.lane];
            lane.state.lock().waiting.remove(&(this.position, key));
            lane.wake_due();
        }
        result.map_or(Poll::Pending, Poll::Ready)
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            let lane = &self.waiters.lanes[self.lane];
            let waited = lane.state.lock().waiting.remove(&(self.position, key)).is_some();
            if !waited {
                lane.wake_due();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    };

    use futures::{future::join_all, task::ArcWake};

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl ArcWake for Count {
        fn wake_by_ref(this: &Arc<Self>) {
            this.0.fetch_add(1, SeqCst);
        }
    }

    fn poll(wait: &mut Wait<'_>, count: &Arc<Count>) -> Poll<Result<(), LogError>> {
        Pin::new(wait).poll(&mut Context::from_waker(&futures::task::waker(count.clone())))
    }

    #[test]
    fn the_first_woken_waiter_wakes_the_others() {
        let (waiters, count) = (Waiters::new(0), Arc::new(Count::default()));
        let mut waits: Vec<_> = (0..5).map(|_| waiters.wait(7)).collect();
        assert!(waits.iter_mut().all(|w| poll(w, &count).is_pending()));
        waiters.advance(6);
        waiters.wake();
        assert_eq!(count.0.load(SeqCst), 0);
        waiters.advance(7);
        waiters.wake();
        assert_eq!(count.0.load(SeqCst), 1);
        assert_eq!(poll(&mut waits[3], &count), Poll::Ready(Ok(())));
        assert_eq!(count.0.load(SeqCst), 5);
    }

    #[test]
    fn a_dropped_waiter_passes_its_duty_on() {
        let (waiters, count) = (Waiters::new(0), Arc::new(Count::default()));
        let mut waits: Vec<_> = (0..3).map(|_| waiters.wait(1)).collect();
        assert!(waits.iter_mut().all(|w| poll(w, &count).is_pending()));
        waiters.advance(1);
        waiters.wake();
        drop(waits.remove(0));
        assert_eq!(count.0.load(SeqCst), 3);
    }

    #[test]
    fn a_waiter_that_does_not_run_holds_nobody_up() {
        let (waiters, count) = (Waiters::new(0), Arc::new(Count::default()));
        let mut waits: Vec<_> = (0..3).map(|_| waiters.wait(1)).collect();
        assert!(waits.iter_mut().all(|w| poll(w, &count).is_pending()));
        waiters.advance(1);
        waiters.wake();
        assert!(waiters.owes());
        waiters.wake_left();
        assert_eq!(count.0.load(SeqCst), 3);
    }

    #[test]
    fn a_dropped_wait_leaves_no_waker_behind() {
        let (waiters, count) = (Waiters::new(0), Arc::new(Count::default()));
        let mut wait = waiters.wait(1);
        assert!(poll(&mut wait, &count).is_pending());
        drop(wait);
        assert!(waiters.lanes.iter().all(|lane| lane.state.lock().waiting.is_empty()));
    }

    #[test]
    fn a_failure_ends_waits_before_and_during_it_but_not_after() {
        let (waiters, count) = (Waiters::new(0), Arc::new(Count::default()));
        let mut before = waiters.wait(1);
        assert!(poll(&mut before, &count).is_pending());
        let error = LogError::Unavailable("broken".into());
        waiters.fail(error.clone());
        assert_eq!(count.0.load(SeqCst), 1);
        assert_eq!(poll(&mut waiters.wait(1), &count), Poll::Ready(Err(error)));
        waiters.recover();
        assert!(matches!(poll(&mut before, &count), Poll::Ready(Err(LogError::Unavailable(_)))));
        let mut after = waiters.wait(1);
        assert!(poll(&mut after, &count).is_pending());
        waiters.advance(1);
        assert_eq!(poll(&mut after, &count), Poll::Ready(Ok(())));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn no_wake_is_lost_between_threads() {
        let waiters = Arc::new(Waiters::new(0));
        let tasks = (0..64u64).map(|n| {
            let waiters = waiters.clone();
            tokio::spawn(async move {
                for position in (n % 7 + 1)..=2000 {
                    waiters.wait(position).await.unwrap();
                }
            })
        });
        let tasks = tokio::spawn(join_all(tasks));
        let driver = waiters.clone();
        std::thread::spawn(move || {
            for position in 1..=2000 {
                driver.advance(position);
                driver.wake();
                std::thread::yield_now();
            }
            // What the log's thread does when it goes idle.
            while driver.owes() {
                driver.wake_left();
            }
        });
        let done = tokio::time::timeout(std::time::Duration::from_secs(60), tasks).await.unwrap().unwrap();
        assert!(done.into_iter().all(|task| task.is_ok()));
    }
}
