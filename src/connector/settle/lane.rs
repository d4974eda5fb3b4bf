//! Coalescing: while one call of the broker is under way for a subscription, the requests that arrive meanwhile collect
//! and go together in the next.

use std::{future::Future, pin::Pin, sync::Arc};

use parking_lot::Mutex;
use tokio::{
    runtime::Handle,
    sync::{Semaphore, oneshot},
};
use tokio_util::task::TaskTracker;

use crate::broker::{Broker, BrokerError, DeadlineChange, LeaseToken, Outcome, QueueRef};

/// Items of one broker call: four of the clients' largest requests. More would only hold up the first of them.
const MAX_BATCH: usize = 10_000;

/// Items that wait or are under way; whoever brings more waits outside. A hundred of the clients' usual requests.
const MAX_WAITING: usize = 100_000;

type Answer = Result<Vec<Outcome>, BrokerError>;

/// A call of the broker that takes any number of items.
pub trait Operation: Send + Sync + 'static {
    type Item: Copy + Send + Sync + 'static;

    fn run<'a>(
        broker: &'a dyn Broker,
        queue: &'a QueueRef,
        items: &'a [Self::Item],
    ) -> Pin<Box<dyn Future<Output = Answer> + Send + 'a>>;
}

/// Acknowledgements.
pub struct Acks;

impl Operation for Acks {
    type Item = LeaseToken;

    fn run<'a>(
        broker: &'a dyn Broker,
        queue: &'a QueueRef,
        items: &'a [LeaseToken],
    ) -> Pin<Box<dyn Future<Output = Answer> + Send + 'a>> {
        broker.acknowledge(queue, items)
    }
}

/// Changes of deadlines, nacks included.
pub struct Changes;

impl Operation for Changes {
    type Item = DeadlineChange;

    fn run<'a>(
        broker: &'a dyn Broker,
        queue: &'a QueueRef,
        items: &'a [DeadlineChange],
    ) -> Pin<Box<dyn Future<Output = Answer> + Send + 'a>> {
        broker.modify_deadlines(queue, items)
    }
}

/// One subscription's calls of one kind.
pub struct Lane<O: Operation> {
    broker: Arc<dyn Broker>,
    queue: QueueRef,
    tasks: TaskTracker,
    room: Semaphore,
    state: Mutex<State<O::Item>>,
}

struct State<I> {
    /// Somebody calls the broker, and will take care of whoever waits.
    busy: bool,
    waiting: Vec<Waiting<I>>,
}

struct Waiting<I> {
    items: Vec<I>,
    reply: oneshot::Sender<Answer>,
}

impl<O: Operation> Lane<O> {
    pub fn new(broker: Arc<dyn Broker>, queue: QueueRef, tasks: TaskTracker) -> Arc<Self> {
        let state = Mutex::new(State { busy: false, waiting: Vec::new() });
        Arc::new(Self { broker, queue, tasks, room: Semaphore::new(MAX_WAITING), state })
    }

    /// Runs the operation on the items, alone or with others'. Answers one outcome an item, in order.
    ///
    /// If the future is dropped, the items are settled or not.
    pub async fn run(self: &Arc<Self>, items: Vec<O::Item>) -> Answer {
        if items.is_empty() {
            return Ok(Vec::new());
        }
        let _room = self.room.acquire_many(items.len().min(MAX_WAITING) as u32).await;
        let items = match self.enter(items) {
            Entry::First(items) => items,
            Entry::Waits(answer) => return answer.await.unwrap_or_else(|_| Err(stopping())),
        };
        let turn = Turn(self.clone());
        let answer = O::run(&*self.broker, &self.queue, &items).await;
        drop(turn);
        answer
    }

    fn enter(&self, items: Vec<O::Item>) -> Entry<O::Item> {
        let mut state = self.state.lock();
        if state.busy {
            let (reply, answer) = oneshot::channel();
            state.waiting.push(Waiting { items, reply });
            Entry::Waits(answer)
        } else {
            state.busy = true;
            Entry::First(items)
        }
    }

    /// Takes the next batch of those who wait; with nobody waiting, the lane is free.
    fn next(&self) -> Vec<Waiting<O::Item>> {
        let mut state = self.state.lock();
        let mut count = 0;
        let mut total = 0;
        for waiting in &state.waiting {
            total += waiting.items.len();
            if count > 0 && total > MAX_BATCH {
                break;
            }
            count += 1;
        }
        state.busy = count > 0;
        state.waiting.drain(..count).collect()
    }

    async fn run_waiting(&self, mut batch: Vec<Waiting<O::Item>>) {
        while !batch.is_empty() {
            let mut items = Vec::with_capacity(batch.iter().map(|waiting| waiting.items.len()).sum());
            batch.iter().for_each(|waiting| items.extend_from_slice(&waiting.items));
            let answer = O::run(&*self.broker, &self.queue, &items).await;
            let mut from = 0;
            for waiting in batch {
                let to = from + waiting.items.len();
                // Whoever no longer listens has gone away; the work is done all the same.
                let _ = waiting.reply.send(share(&answer, from..to));
                from = to;
            }
            batch = self.next();
        }
    }
}

enum Entry<I> {
    First(Vec<I>),
    Waits(oneshot::Receiver<Answer>),
}

fn share(answer: &Answer, part: std::ops::Range<usize>) -> Answer {
    match answer {
        Ok(outcomes) => {
            let outcomes = outcomes.get(part).map(<[Outcome]>::to_vec);
            outcomes.ok_or_else(|| BrokerError::Unavailable("fewer outcomes than items".into()))
        }
        Err(error) => Err(error.clone()),
    }
}

fn stopping() -> BrokerError {
    BrokerError::Unavailable("the server is stopping".into())
}

/// The call of whoever found the lane free. However it ends, those who came meanwhile are served.
struct Turn<O: Operation>(Arc<Lane<O>>);

impl<O: Operation> Drop for Turn<O> {
    fn drop(&mut self) {
        let batch = self.0.next();
        if batch.is_empty() {
            return;
        }
        let lane = self.0.clone();
        match Handle::try_current() {
            Ok(runtime) => {
                let tasks = lane.tasks.clone();
                tasks.spawn_on(async move { lane.run_waiting(batch).await }, &runtime);
            }
            // The process ends: dropping the replies tells those who wait.
            Err(_) => {
                let mut state = lane.state.lock();
                state.waiting.clear();
                state.busy = false;
            }
        }
    }
}

#[cfg(test)]
mod tests;
