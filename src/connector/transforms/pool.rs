//! The threads that run functions. Requests wait for them, but never run a function themselves.
//!
//! A function that is caught within a built-in of the language, where the interpreter can't interrupt it, costs its thread:
//! the thread is given up and another takes its place, and the function is not run again by this process. Only so many
//! threads can be lost.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};
use tokio::sync::{Semaphore, oneshot};

use crate::{
    model::{EncodedMessage, MessageTransform},
    rules::transform::{Instance, Metadata, THREAD_STACK, TransformError},
};

/// Most threads. More would only take the cores from everything else.
const MAX_THREADS: usize = 8;
/// Jobs for each thread that may wait in its queue; others wait for a place.
const QUEUED_PER_THREAD: usize = 2;
/// Interpreters that a thread keeps for the next message of the same function.
const KEPT_INSTANCES: usize = 8;
/// Messages that one interpreter sees before it is replaced, so that what a function piles up stays small.
const MAX_CALLS: usize = 1000;
/// A thread whose function gives no sign of life for this long is given up. The interpreter gives one every few milliseconds
/// of processor time, so that this is no matter of how busy the machine is.
const WEDGED: Duration = Duration::from_secs(10);
/// How long after its time an answer is waited for: until a thread that is wedged must have been given up.
const LAST_WAIT: Duration = Duration::from_secs(15);
/// How often the threads are looked at.
const LOOK: Duration = Duration::from_millis(500);
/// Threads that may be lost; after that a lost one is not replaced.
const MAX_LOST: usize = 16;
/// Functions remembered as not to be run again.
const MAX_BANNED: usize = 256;

/// The functions of one topic or subscription, in order.
pub type Pipeline = Arc<[MessageTransform]>;

/// A message for a pipeline.
#[derive(Debug, Clone)]
pub struct Input {
    pub message: EncodedMessage,
    pub metadata: Metadata,
}

/// What became of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Passed(EncodedMessage),
    Dropped,
    /// Which function failed, and why.
    Failed {
        function: String,
        error: TransformError,
    },
}

/// Why a job was not done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undone {
    /// All threads were busy for too long.
    Busy,
    /// One of the functions does not end and can't be ended.
    Wedged,
}

enum Work {
    Run { pipeline: Pipeline, inputs: Vec<Input>, reply: Reply<Vec<Outcome>> },
    Check { transform: MessageTransform, reply: Reply<Result<(), TransformError>> },
}

/// An answer that is sent by the thread or dropped by whoever gives the thread up.
type Reply<T> = oneshot::Sender<T>;

struct Job {
    work: Work,
    /// Messages after this are left undone.
    until: Instant,
}

/// The pool. Its threads start when they are first needed and end with it.
pub struct Pool {
    shared: Arc<Shared>,
    places: Semaphore,
}

struct Shared {
    size: usize,
    state: Mutex<State>,
    /// There is a job, or the pool is closed.
    work: Condvar,
    /// A thread has begun something, or the pool is closed.
    watch: Condvar,
    begun: Instant,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    threads: Vec<Arc<Seat>>,
    idle: usize,
    lost: usize,
    banned: VecDeque<MessageTransform>,
    watched: bool,
    closed: bool,
}

/// What is known of one thread.
struct Seat {
    /// Milliseconds since the pool began at the last sign of life; 0 while it runs no function.
    alive: AtomicU64,
    given_up: AtomicBool,
    now: Mutex<Option<Current>>,
    #[cfg(target_os = "linux")]
    thread: std::sync::OnceLock<rustix::process::Pid>,
}

/// What a thread does now.
struct Current {
    transform: Option<MessageTransform>,
    /// Dropped when the thread is given up.
    reply: Option<Answer>,
}

enum Answer {
    Run(Reply<Vec<Outcome>>),
    Check(Reply<Result<(), TransformError>>),
}

impl Pool {
    pub fn new() -> Self {
        let size = thread::available_parallelism().map_or(2, usize::from).clamp(2, MAX_THREADS);
        Self {
            places: Semaphore::new(size * (1 + QUEUED_PER_THREAD)),
            shared: Arc::new(Shared {
                size,
                state: Mutex::new(State::default()),
                work: Condvar::new(),
                watch: Condvar::new(),
                begun: Instant::now(),
            }),
        }
    }

    /// Runs messages through a pipeline. Answers one outcome each, fewer when the time is over before.
    pub async fn run(&self, pipeline: Pipeline, inputs: Vec<Input>, until: Instant) -> Result<Vec<Outcome>, Undone> {
        let (reply, outcomes) = oneshot::channel();
        self.submit(Work::Run { pipeline, inputs, reply }, until, outcomes).await
    }

    /// Loads a function without running it.
    pub async fn check(&self, transform: MessageTransform, until: Instant) -> Result<Result<(), TransformError>, Undone> {
        let (reply, outcome) = oneshot::channel();
        self.submit(Work::Check { transform, reply }, until, outcome).await
    }

    async fn submit<T>(&self, work: Work, until: Instant, answer: oneshot::Receiver<T>) -> Result<T, Undone> {
        let place = tokio::time::timeout_at(until.into(), self.places.acquire()).await;
        let _place = place.map_err(|_| Undone::Busy)?.map_err(|_| Undone::Busy)?;
        self.shared.push(Job { work, until });
        // A thread answers in time or is given up in time; this is for when there are no threads left.
        let answer = tokio::time::timeout_at((until + LAST_WAIT).into(), answer).await.map_err(|_| Undone::Busy)?;
        answer.map_err(|_| Undone::Wedged)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.work.notify_all();
        self.shared.watch.notify_all();
    }
}

impl Shared {
    fn push(self: &Arc<Self>, job: Job) {
        let mut state = self.state.lock();
        state.queue.push_back(job);
        if state.idle < state.queue.len() && state.threads.len() < self.size {
            self.start(&mut state);
        }
        self.work.notify_one();
    }

    /// Starts a thread and, with the first one, the one that watches them. A thread that can't be had is missed, not mourned:
    /// the others do its work.
    fn start(self: &Arc<Self>, state: &mut State) {
        if !state.watched {
            let shared = self.clone();
            state.watched = thread::Builder::new().name("transform-watch".into()).spawn(move || shared.watch()).is_ok();
        }
        let seat = Arc::new(Seat {
            alive: AtomicU64::new(0),
            given_up: AtomicBool::new(false),
            now: Mutex::new(None),
            #[cfg(target_os = "linux")]
            thread: std::sync::OnceLock::new(),
        });
        let (shared, own) = (self.clone(), seat.clone());
        let thread = thread::Builder::new().name("transform".into()).stack_size(THREAD_STACK);
        match thread.spawn(move || shared.serve(&own)) {
            Ok(_) => state.threads.push(seat),
            Err(error) => tracing::error!(%error, "no thread for message transforms"),
        }
    }

    fn next(&self, seat: &Seat) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if state.closed || seat.given_up.load(Ordering::Acquire) {
                return None;
            }
            if let Some(job) = state.queue.pop_front() {
                return Some(job);
            }
            state.idle += 1;
            self.work.wait(&mut state);
            state.idle -= 1;
        }
    }

    fn serve(&self, seat: &Arc<Seat>) {
        #[cfg(target_os = "linux")]
        let _ = seat.thread.set(rustix::thread::gettid());
        let mut kept = Vec::new();
        while let Some(Job { work, until }) = self.next(seat) {
            match work {
                Work::Run { pipeline, inputs, reply } => {
                    self.begin(seat, Answer::Run(reply));
                    let outcomes = self.run_all(seat, &mut kept, &pipeline, inputs, until);
                    if let Some(Answer::Run(reply)) = self.end(seat) {
                        let _ = reply.send(outcomes);
                    }
                    // After the answer: nobody waits for it.
                    kept.retain(|kept: &Kept| kept.instance.is_lean());
                }
                Work::Check { transform, reply } => {
                    self.begin(seat, Answer::Check(reply));
                    let outcome = self.load(seat, &transform).map(drop);
                    if let Some(Answer::Check(reply)) = self.end(seat) {
                        let _ = reply.send(outcome);
                    }
                }
            }
        }
    }

    fn begin(&self, seat: &Seat, reply: Answer) {
        *seat.now.lock() = Some(Current { transform: None, reply: Some(reply) });
        seat.beat(self.begun);
        self.watch.notify_one();
    }

    fn end(&self, seat: &Seat) -> Option<Answer> {
        seat.alive.store(0, Ordering::Release);
        seat.now.lock().take().and_then(|now| now.reply)
    }

    fn load(&self, seat: &Arc<Seat>, transform: &MessageTransform) -> Result<Instance, TransformError> {
        if let Some(now) = &mut *seat.now.lock() {
            now.transform = Some(transform.clone());
        }
        if self.state.lock().banned.iter().any(|banned| banned.same_code(transform)) {
            let text = "the function did not end and could not be ended; it is not run again until it is changed";
            return Err(TransformError::Code(text.into()));
        }
        let (own, begun) = (seat.clone(), self.begun);
        seat.beat(begun);
        Instance::new(transform, move || own.beat(begun))
    }

    fn run_all(
        &self,
        seat: &Arc<Seat>,
        kept: &mut Vec<Kept>,
        pipeline: &Pipeline,
        inputs: Vec<Input>,
        until: Instant,
    ) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(inputs.len());
        for Input { mut message, metadata } in inputs {
            if Instant::now() >= until {
                break;
            }
            let mut outcome = None;
            for transform in pipeline.iter() {
                match self.call(seat, kept, transform, &message, &metadata) {
                    Ok(Some(changed)) => message = changed,
                    Ok(None) => outcome = Some(Outcome::Dropped),
                    Err(error) => {
                        outcome = Some(Outcome::Failed { function: transform.function_name.clone(), error });
                    }
                }
                if outcome.is_some() {
                    break;
                }
            }
            outcomes.push(outcome.unwrap_or(Outcome::Passed(message)));
        }
        outcomes
    }

    /// Calls one function. Only what fails in an interpreter that has seen no other message has failed: what earlier ones left
    /// behind is nobody's fault.
    fn call(
        &self,
        seat: &Arc<Seat>,
        kept: &mut Vec<Kept>,
        transform: &MessageTransform,
        message: &EncodedMessage,
        metadata: &Metadata,
    ) -> Result<Option<EncodedMessage>, TransformError> {
        loop {
            let at = kept.iter().position(|kept| kept.transform.same_code(transform));
            let mut found = match at.map(|at| kept.remove(at)) {
                Some(found) => found,
                None => Kept { instance: self.load(seat, transform)?, transform: transform.clone(), calls: 0 },
            };
            if let Some(now) = &mut *seat.now.lock()
                && now.transform.as_ref().is_none_or(|known| !known.same_code(transform))
            {
                now.transform = Some(transform.clone());
            }
            seat.beat(self.begun);
            let fresh = found.instance.is_fresh();
            match found.instance.call(message, metadata) {
                Ok(outcome) => {
                    found.calls += 1;
                    if found.calls < MAX_CALLS {
                        kept.push(found);
                    }
                    if kept.len() > KEPT_INSTANCES {
                        kept.remove(0);
                    }
                    return Ok(outcome);
                }
                Err(error) if fresh || matches!(error, TransformError::Shape(_)) => return Err(error),
                Err(_) => {}
            }
        }
    }

    /// Gives up threads that show no sign of life.
    fn watch(self: Arc<Self>) {
        let mut state = self.state.lock();
        while !state.closed {
            if state.threads.iter().all(|seat| seat.alive.load(Ordering::Acquire) == 0) {
                // Longer than needed at worst, in case a beginning was missed.
                self.watch.wait_for(&mut state, WEDGED);
            } else {
                self.watch.wait_for(&mut state, LOOK);
            }
            let now = millis(self.begun);
            let wedged = |seat: &Arc<Seat>| {
                let alive = seat.alive.load(Ordering::Acquire);
                alive != 0 && now.saturating_sub(alive) >= WEDGED.as_millis() as u64
            };
            let (lost, rest): (Vec<_>, Vec<_>) = state.threads.drain(..).partition(wedged);
            state.threads = rest;
            for seat in lost {
                self.give_up(&mut state, &seat);
            }
        }
    }

    fn give_up(self: &Arc<Self>, state: &mut State, seat: &Arc<Seat>) {
        seat.given_up.store(true, Ordering::Release);
        let now = seat.now.lock().take();
        if let Some(transform) = now.and_then(|now| now.transform) {
            tracing::error!(function = transform.function_name, "a message transform can't be ended; it is not run again");
            state.banned.push_back(transform);
            if state.banned.len() > MAX_BANNED {
                state.banned.pop_front();
            }
        }
        // It may turn for hours: only in time that nobody else wants.
        #[cfg(target_os = "linux")]
        if let Some(thread) = seat.thread.get() {
            let _ = rustix::process::setpriority_process(Some(*thread), 19);
        }
        state.lost += 1;
        if state.lost <= MAX_LOST {
            self.start(state);
        }
    }
}

impl Seat {
    fn beat(&self, begun: Instant) {
        if !self.given_up.load(Ordering::Acquire) {
            self.alive.store(millis(begun).max(1), Ordering::Release);
        }
    }
}

fn millis(begun: Instant) -> u64 {
    begun.elapsed().as_millis() as u64
}

/// An interpreter kept for the next message.
struct Kept {
    transform: MessageTransform,
    instance: Instance,
    calls: usize,
}
