//! What runs beside the calls: timers, notices of other nodes, and recovery after a lost connection.

use std::{
    sync::{Arc, Weak, atomic::Ordering},
    time::Duration,
};

use futures::StreamExt;
use redis::Cmd;
use tokio::sync::mpsc;

use super::{
    codec::Reader,
    connection::{Happened, Request},
    engine::{Engine, NEVER},
    library::function,
    queue::{QueueView, queue_of},
    records::{events_channel, kind_of},
    slots::slot_of,
    watch::{PING, node_channel, run_rounds},
};
use crate::broker::{BrokerError, Event};

/// A lease that this node believes over for this long, without having been told how it ended, is looked up.
const OVERDUE_MS: u64 = 1000;
/// Pause before the notice channel is opened again.
const RESUBSCRIBE: Duration = Duration::from_millis(200);
/// A queue that can't be reached is tried again after this long.
const SWEEP_RETRY_MS: u64 = 200;

impl Engine {
    /// Carries out what is due at a queue.
    pub(super) async fn sweep(self: &Arc<Self>, queue: &Arc<QueueView>, what: &'static str) {
        let call = |call: &mut Cmd, _| {
            call.arg(what);
        };
        match self.on_queue(queue, "landline_sweep", call).await {
            Ok(_) => {
                let now = self.now_ms();
                if self.check_overdue(queue, now.saturating_sub(OVERDUE_MS)).await.is_err() {
                    self.arm(&queue.key, now + SWEEP_RETRY_MS);
                } else if let Some(deadline) = queue.first_deadline() {
                    self.arm(&queue.key, deadline.max(now) + OVERDUE_MS + 1);
                }
            }
            Err(BrokerError::Gone) => {
                // Nobody holds anything of a queue that is no more.
                let _ = self.check_overdue(queue, NEVER).await;
                self.queues.lock().remove(&queue.key);
            }
            Err(e) => {
                tracing::debug!(queue = %queue.key, error = %e, "could not look at a queue");
                self.arm(&queue.key, self.now_ms() + SWEEP_RETRY_MS);
            }
        }
    }

    pub async fn touch(&self, queue: &crate::broker::QueueRef) -> Result<(), BrokerError> {
        let queue = self.queue(queue);
        let call = |call: &mut Cmd, _| {
            call.arg("4");
        };
        self.on_queue(&queue, "landline_sweep", call).await.map(drop)
    }

    /// Gives a turn that nobody here can use to another node.
    pub fn pass_on(self: &Arc<Self>, queue: Arc<QueueView>) {
        let engine = self.clone();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { engine.sweep(&queue, "2").await });
        }
    }

    /// Removes in the background what a closed queue left, or what a topic need not keep any more.
    pub fn purge_later(self: &Arc<Self>, key: String) {
        let engine = self.clone();
        let name = if queue_of(&key).is_some() { "landline_purge" } else { "landline_trim" };
        tokio::spawn(async move {
            loop {
                let mut call = function(name, &[&key]);
                call.arg(engine.header(0));
                match engine.shards.call(slot_of(&key), &Request::One(call)).await {
                    Ok(values) if matches!(values.first(), Some(redis::Value::Int(1))) => {}
                    Ok(_) => return,
                    Err(e) => {
                        tracing::warn!(key, error = ?e, "what a deleted queue left could not be removed");
                        return;
                    }
                }
            }
        });
    }

    // ---- notices

    fn notice(self: &Arc<Self>, message: &[u8]) -> Result<(), BrokerError> {
        let mut from = Reader(message);
        let what = from.u8()?;
        if what == PING {
            self.heard.fetch_max(from.u64()?, Ordering::AcqRel);
            return Ok(());
        }
        let number = match what {
            b'W' => u64::from(from.u32()?),
            b'T' | b'S' => from.u64()?,
            _ => 0,
        };
        let length = usize::from(from.u16()?);
        let key = String::from_utf8_lossy(from.bytes(length)?).into_owned();
        let Some(queue) = self.known_queue(&key) else { return Ok(()) };
        match what {
            b'W' => {
                if !queue.wake(number as usize) {
                    self.pass_on(queue);
                }
            }
            b'T' => self.arm(&queue.key, number),
            b'S' => queue.wake_session((number >> 32) as u32),
            b'E' => queue.ended(from.0)?,
            _ => tracing::debug!(key, "an unknown notice, perhaps of a newer node"),
        }
        Ok(())
    }

    async fn follow(self: &Arc<Self>, first: bool) -> Result<(), BrokerError> {
        let unavailable = |e: redis::RedisError| BrokerError::Unavailable(e.to_string());
        let client = self.shards.client().await?;
        let mut channel = client.get_async_pubsub().await.map_err(unavailable)?;
        let events = events_channel(self.shards.database());
        channel.subscribe(&events).await.map_err(unavailable)?;
        channel.subscribe(node_channel(&self.node_hex())).await.map_err(unavailable)?;
        self.opened.fetch_add(1, Ordering::AcqRel);
        self.join().await?;
        if !first {
            // Notices may have been missed.
            let _ = self.events.send(Event::Reset);
            self.look_again();
        }
        let mut messages = channel.on_message();
        loop {
            let message = tokio::select! {
                message = messages.next() => message,
                () = self.deaf.notified() => return Err(BrokerError::Unavailable("notices do not arrive any more".into())),
            };
            let Some(message) = message else { break };
            let payload = message.get_payload_bytes();
            if message.get_channel_name() == events {
                if let Some((code, name)) = payload.split_first()
                    && let Some(kind) = kind_of(*code)
                {
                    let name = String::from_utf8_lossy(name).into_owned();
                    let _ = self.events.send(Event::RecordChanged { kind, name });
                }
            } else if let Err(e) = self.notice(payload) {
                tracing::warn!(error = %e, "a notice could not be read");
            }
        }
        Err(BrokerError::Unavailable("the notice channel was closed".into()))
    }

    /// Looks at every queue this node has something to do with.
    fn look_again(self: &Arc<Self>) {
        let queues: Vec<Arc<QueueView>> = self.queues.lock().values().filter(|q| q.is_in_use()).cloned().collect();
        let engine = self.clone();
        tokio::spawn(async move {
            for queue in queues {
                for session in queue.suspects() {
                    let _ = engine.recover(&queue, session).await;
                }
                let _ = engine.check_overdue(&queue, NEVER).await;
                queue.wake(usize::MAX);
            }
        });
    }
}

/// Starts everything that runs beside the calls.
pub fn start(engine: &Arc<Engine>, happened: mpsc::UnboundedReceiver<Happened>) {
    let stop = engine.shards.stopped().clone();
    let tasks: [std::pin::Pin<Box<dyn Future<Output = ()> + Send>>; 4] = [
        Box::pin(run_timers(Arc::downgrade(engine))),
        Box::pin(run_notices(Arc::downgrade(engine))),
        Box::pin(run_recovery(Arc::downgrade(engine), happened)),
        Box::pin(run_rounds(Arc::downgrade(engine))),
    ];
    for task in tasks {
        let stop = stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = task => {}
                () = stop.cancelled() => {}
            }
        });
    }
}

async fn run_timers(engine: Weak<Engine>) {
    loop {
        let Some(engine) = engine.upgrade() else { return };
        let now = engine.now_ms();
        let due = engine.timers.lock().take_due(now);
        for key in due {
            if let Some(queue) = engine.known_queue(&key) {
                let engine = engine.clone();
                tokio::spawn(async move { engine.sweep(&queue, "0").await });
            }
        }
        let next = engine.timers.lock().next();
        let changed = engine.timer_changed.notified();
        match next {
            Some(at) => {
                let wait = Duration::from_millis(at.saturating_sub(engine.now_ms()).max(1));
                let _ = tokio::time::timeout(wait, changed).await;
            }
            None => changed.await,
        }
    }
}

async fn run_notices(engine: Weak<Engine>) {
    let mut first = true;
    loop {
        let Some(engine) = engine.upgrade() else { return };
        if let Err(e) = engine.follow(first).await {
            tracing::debug!(error = %e, "the notice channel is down");
        }
        first = false;
        drop(engine);
        tokio::time::sleep(RESUBSCRIBE).await;
    }
}

async fn run_recovery(engine: Weak<Engine>, mut happened: mpsc::UnboundedReceiver<Happened>) {
    while let Some(what) = happened.recv().await {
        let Some(engine) = engine.upgrade() else { return };
        match what {
            Happened::Lost => {}
            // Notices come from the new master.
            Happened::Moved => engine.deaf.notify_waiters(),
            Happened::Restored => {
                let _ = engine.events.send(Event::Reset);
                engine.look_again();
            }
        }
    }
}
