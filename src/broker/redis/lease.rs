//! Leasing: the library picks messages, then their payloads are read natively and sealed.

use std::sync::Arc;

use bytes::Bytes;
use redis::{Cmd, Value, cmd};

use super::{
    codec::{FLAG_GAPS, FLAG_PICKED, Reader, Set, Stored},
    connection::{Failure, Request},
    engine::{Engine, array, bytes},
    library::function,
    queue::QueueView,
};
use crate::broker::{BrokerError, DeadLetter, LeaseRequest, LeaseToken, Leased, QueueRef};

/// Leased messages on their way to the caller. Those that never arrive are given back.
pub struct Delivery {
    engine: Arc<Engine>,
    queue: QueueRef,
    leased: Vec<Leased>,
}

impl Delivery {
    /// The caller has them now.
    pub fn take(mut self) -> Vec<Leased> {
        std::mem::take(&mut self.leased)
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        if !self.leased.is_empty() {
            let tokens: Vec<LeaseToken> = self.leased.iter().map(|l| l.token).collect();
            self.engine.release_later(self.queue.clone(), tokens);
        }
    }
}

/// A chunk's messages as the library picked them.
struct Picked {
    stored: Stored,
    set: Set,
    /// Of redelivered ones: index, failed deliveries, failed deliveries under a dead-letter policy.
    redelivered: Vec<(u16, u16, u16)>,
}

impl Picked {
    fn read(answer: &[u8]) -> Result<Self, BrokerError> {
        let mut from = Reader(answer);
        let stored = Stored::read(&mut from)?;
        let redelivered_bytes = usize::from(from.u16()?);
        let set = Set::read(&mut from)?;
        let mut list = Reader(from.bytes(redelivered_bytes)?);
        let mut redelivered = Vec::new();
        while !list.is_empty() {
            redelivered.push((list.u16()?, list.u16()?, list.u16()?));
        }
        Ok(Self { stored, set, redelivered })
    }
}

/// The commands that read what is wanted of a chunk.
fn reads(key: &str, stored: &Stored, set: &Set, into: &mut Vec<Cmd>) {
    let name = format!("{key}:p:{:016x}", stored.payload);
    if stored.is_whole() {
        let mut get = cmd("GET");
        get.arg(name);
        into.push(get);
        return;
    }
    // Of the tables only the entries that are needed: the end of the message before, and those of the messages themselves.
    let first = usize::from(set.lo.saturating_sub(1));
    let mut ends = cmd("GETRANGE");
    ends.arg(&name).arg(first * 4).arg(usize::from(set.hi) * 4 + 3);
    into.push(ends);
    let header = stored.header_bytes();
    let mut gaps = cmd("GETRANGE");
    let count = usize::from(stored.count);
    if header > count * 4 {
        gaps.arg(&name).arg(count * 4 + usize::from(set.lo) * 2).arg(count * 4 + usize::from(set.hi) * 2 + 1);
        into.push(gaps);
    }
    let mut data = cmd("GETRANGE");
    data.arg(&name).arg(header + stored.from as usize).arg(header + stored.to as usize - 1);
    into.push(data);
}

/// What the library read already of the first chunks of an answer.
#[derive(Default)]
pub(super) struct Given {
    /// Of so many chunks.
    count: usize,
    /// What the commands of [`reads`] would answer, one chunk's after the other's.
    values: Vec<Value>,
}

/// How many commands read what is wanted of a chunk.
fn values_of(stored: &Stored) -> usize {
    match (stored.is_whole(), stored.flags & FLAG_GAPS) {
        (true, _) => 1,
        (false, 0) => 2,
        (false, _) => 3,
    }
}

/// Puts what was read together; nothing when the payload is gone. `picked` says that it holds the messages of the set alone.
fn assemble(
    stored: &Stored,
    set: &Set,
    values: &mut impl Iterator<Item = Value>,
    picked: bool,
) -> Result<Option<Vec<Bytes>>, BrokerError> {
    let mut next = || match values.next() {
        Some(Value::BulkString(bytes)) => Some(bytes),
        _ => None,
    };
    if stored.is_whole() {
        let Some(payload) = next() else { return Ok(None) };
        let header = stored.header_bytes();
        let (header, data) =
            payload.split_at_checked(header).ok_or_else(|| BrokerError::Damaged("a payload is cut off".into()))?;
        return stored.seal(header, data, set).map(Some);
    }
    let (ends, gaps) = (next(), (stored.header_bytes() > usize::from(stored.count) * 4).then(&mut next));
    let (Some(ends), Some(data)) = (ends, next()) else { return Ok(None) };
    if ends.is_empty() {
        return Ok(None);
    }
    if picked {
        return stored.seal_picked(&ends, &data, set).map(Some);
    }
    // The tables as if they had been read whole, so that sealing finds each entry at its place.
    let mut header = vec![0; stored.header_bytes()];
    let first = usize::from(set.lo.saturating_sub(1)) * 4;
    let damaged = || BrokerError::Damaged("a payload's tables are cut off".into());
    header.get_mut(first..first + ends.len()).ok_or_else(damaged)?.copy_from_slice(&ends);
    if let Some(Some(gaps)) = gaps {
        let at = usize::from(stored.count) * 4 + usize::from(set.lo) * 2;
        header.get_mut(at..at + gaps.len()).ok_or_else(damaged)?.copy_from_slice(&gaps);
    }
    stored.seal(&header, &data, set).map(Some)
}

impl Engine {
    /// Leases in a task of its own, so that a caller who goes away loses nothing.
    ///
    /// # Errors
    /// What the port says.
    pub async fn lease(self: &Arc<Self>, request: LeaseRequest) -> Result<Vec<Leased>, BrokerError> {
        let (answer, answered) = tokio::sync::oneshot::channel();
        let engine = self.clone();
        tokio::spawn(async move {
            let leased = engine.lease_now(&request).await;
            let _ = answer.send(leased.map(|leased| Delivery { engine, queue: request.queue, leased }));
        });
        let delivery = answered.await.map_err(|_| BrokerError::Unavailable("the broker is closed".into()))??;
        Ok(delivery.take())
    }

    async fn lease_now(self: &Arc<Self>, request: &LeaseRequest) -> Result<Vec<Leased>, BrokerError> {
        let queue = self.queue(&request.queue);
        let session = &request.session;
        if queue.is_suspect(session.id) {
            self.recover(&queue, session.id).await?;
        }
        let (others, idle, waits) = queue.asking(session);
        let mut call = function("landline_lease", &[&queue.key]);
        call.arg(self.header(queue.seen())).arg(&self.session_name(session.id)[..]).arg(request.max_messages);
        // Numbers stay below what the library can count with.
        let most = |n: u64| n.min(super::engine::NEVER);
        call.arg(most(request.max_bytes))
            .arg(request.deadline_ms)
            .arg(most(request.max_inflight))
            .arg(others)
            .arg(u8::from(waits))
            .arg(request.record_version)
            .arg(u8::from(idle));
        let called = self.shards.call(queue.slot, &Request::One(call)).await;
        queue.answered(session);
        let mut answer = match called {
            Ok(values) => array(values)?,
            Err(failure) => {
                queue.fed(session);
                if let Failure::Lost(_) = &failure {
                    queue.suspect(session.id);
                }
                return Err(failure.into());
            }
        };
        let mut from = Reader(answer.get(3).map(bytes).transpose()?.unwrap_or_default());
        let (lease, deadline_at_ms, max_attempts) = (from.u64()?, from.u64()?, from.u32()?);
        // Whether exactly-once and ordered; then of how many of the first chunks the payloads are given along.
        from.bytes(2)?;
        let count = usize::from(from.u8()?);
        let read = |value: &Value| Picked::read(bytes(value)?);
        let mut picked = answer.iter().skip(4).take(count).map(read).collect::<Result<Vec<_>, _>>()?;
        let values: usize = picked.iter().map(|p| values_of(&p.stored)).sum();
        let given = Given { count, values: answer.split_off(answer.len().saturating_sub(values)) };
        for value in answer.iter().skip(4 + count) {
            picked.push(read(value)?);
        }
        if !picked.is_empty() {
            queue.fed(session);
        }
        let read = self.read(&queue, picked.iter().map(|p| (&p.stored, &p.set)), given).await;
        let leased = read.map(|messages| {
            let mut leased = Vec::new();
            for (picked, messages) in picked.iter().zip(messages) {
                let Some(messages) = messages else {
                    report_gone(&queue, &picked.stored);
                    continue;
                };
                let sizes: Vec<u32> = messages.iter().map(|m| m.len() as u32).collect();
                queue.hold(session, picked.stored.chunk, lease, &picked.set, &sizes, deadline_at_ms);
                leased.extend(deliver(picked, messages, lease, deadline_at_ms, max_attempts > 0));
            }
            leased
        });
        if leased.is_err() {
            // The payloads can't be read now: nobody has these leases.
            queue.suspect(session.id);
        }
        // After the leases are noted, because the same answer may end some of them.
        self.take_head(&queue, &answer)?;
        leased
    }

    /// Reads the payloads of several chunks in one go; those of the first are `given`. Nothing stands for a chunk whose payload
    /// is gone.
    pub(super) async fn read<'a>(
        self: &Arc<Self>,
        queue: &QueueView,
        chunks: impl Iterator<Item = (&'a Stored, &'a Set)> + Clone,
        mut given: Given,
    ) -> Result<Vec<Option<Vec<Bytes>>>, BrokerError> {
        let mut commands = Vec::new();
        for (stored, set) in chunks.clone().skip(given.count) {
            reads(&queue.key, stored, set, &mut commands);
        }
        if !commands.is_empty() {
            given.values.extend(self.shards.call(queue.slot, &Request::Many(commands)).await?);
        }
        let mut values = given.values.into_iter();
        let mut read = Vec::new();
        for (at, (stored, set)) in chunks.enumerate() {
            let picked = at < given.count && stored.flags & FLAG_PICKED > 0;
            read.push(assemble(stored, set, &mut values, picked)?);
        }
        Ok(read)
    }

    /// Gives back what a session was given by a call whose answer was lost.
    pub async fn recover(self: &Arc<Self>, queue: &QueueView, session: u64) -> Result<(), BrokerError> {
        let _one = queue.recovery.lock().await;
        if !queue.is_suspect(session) {
            return Ok(());
        }
        let known = queue.last_lease(session);
        let name = self.session_name(session);
        let call = |call: &mut Cmd, _| {
            call.arg(&name[..]).arg(known);
        };
        match self.on_queue(queue, "landline_recover", call).await {
            Ok(_) | Err(BrokerError::Gone) => queue.cleared(session),
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Takes dead letters for forwarding.
    ///
    /// # Errors
    /// What the port says.
    pub async fn take_dead_letters(
        self: &Arc<Self>,
        queue: &QueueRef,
        max: usize,
        hold_ms: u64,
    ) -> Result<Vec<DeadLetter>, BrokerError> {
        let queue = self.queue(queue);
        let call = |call: &mut Cmd, _| {
            call.arg(max).arg(hold_ms);
        };
        let answer = self.on_queue(&queue, "landline_take_dead", call).await?;
        let mut taken = Vec::new();
        for value in answer.iter().skip(3) {
            let mut from = Reader(bytes(value)?);
            let stored = Stored::read(&mut from)?;
            let (index, lease, failures, counted) = (from.u16()?, from.u64()?, from.u16()?, from.u16()?);
            let set = Set::from_sorted(&[index]);
            let sequence = stored.chunk + u64::from(index);
            let token = LeaseToken { transaction: stored.chunk, sequence, lease, attempt: u32::from(failures) };
            taken.push((stored, set, token, u32::from(counted)));
        }
        let messages = self.read(&queue, taken.iter().map(|(stored, set, _, _)| (stored, set)), Given::default()).await?;
        let letters = taken.into_iter().zip(messages).filter_map(|((stored, _, token, attempts), messages)| match messages {
            Some(mut messages) => Some(DeadLetter { token, attempts, message: messages.pop()? }),
            None => {
                report_gone(&queue, &stored);
                None
            }
        });
        Ok(letters.collect())
    }
}

fn report_gone(queue: &QueueView, stored: &Stored) {
    tracing::error!(queue = %queue.key, chunk = stored.chunk, "the payload of leased messages is gone from Redis");
}

fn deliver(
    picked: &Picked,
    messages: Vec<Bytes>,
    lease: u64,
    deadline_at_ms: u64,
    counts: bool,
) -> impl Iterator<Item = Leased> + '_ {
    let mut redelivered = picked.redelivered.clone();
    redelivered.sort_unstable();
    picked.set.iter().zip(messages).map(move |(index, message)| {
        let found = redelivered.binary_search_by_key(&index, |(i, _, _)| *i).ok().map(|at| redelivered[at]);
        let (failures, counted) = found.map_or((0, 0), |(_, failures, counted)| (u32::from(failures), u32::from(counted)));
        let chunk = picked.stored.chunk;
        let token = LeaseToken { transaction: chunk, sequence: chunk + u64::from(index), lease, attempt: failures + 1 };
        Leased { token, deadline_at_ms, delivery_attempt: if counts { counted + 1 } else { 0 }, message }
    })
}
