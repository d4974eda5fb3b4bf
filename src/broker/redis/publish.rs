//! Appending: small publishes that arrive while another is under way go out together as one chunk.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use bytes::Bytes;
use parking_lot::Mutex;
use redis::{Cmd, Value, cmd};
use tokio::sync::oneshot;

use super::{
    codec::{Part, Reader, encode_chunk},
    connection::{Failure, Request},
    engine::{Engine, array, bytes},
    library::{function, function_over},
    queue::{queue_key, topic_key},
    slots::slot_of,
};
use crate::broker::{Append, Appended, BrokerError, Target};

/// Messages gathered into one chunk: the most one publish may bring, and few enough for a message that stays behind not to
/// hold much memory.
const MAX_GATHERED: usize = 1000;
/// Bytes gathered into one chunk.
const MAX_GATHERED_BYTES: usize = 1 << 20;
const RETRY_FOR: Duration = Duration::from_secs(1);
const RETRY_PAUSE: Duration = Duration::from_millis(50);

type Answer = oneshot::Sender<Result<Appended, BrokerError>>;

#[derive(Default)]
struct Line {
    waiting: VecDeque<(Append, Answer)>,
    busy: bool,
}

/// A topic's publishes from this node, one call at a time: their order is kept, and those that wait form a batch.
pub struct Publisher {
    key: String,
    slot: u16,
    line: Mutex<Line>,
}

/// Several publishes as one.
struct Batch {
    /// The topic remembers this node's last one, so that it can be asked about it.
    number: u64,
    appends: Vec<(usize, Answer)>,
    append: Append,
}

fn size(append: &Append) -> usize {
    append.messages.iter().map(|m| m.wire().len()).sum()
}

impl Publisher {
    fn next(&self, number: u64) -> Option<Batch> {
        let mut line = self.line.lock();
        let Some((mut append, answer)) = line.waiting.pop_front() else {
            line.busy = false;
            return None;
        };
        let mut total = size(&append);
        let mut appends = vec![(append.messages.len(), answer)];
        while let Some((next, _)) = line.waiting.front() {
            let bytes = size(next);
            let fits = append.messages.len() + next.messages.len() <= MAX_GATHERED && total + bytes <= MAX_GATHERED_BYTES;
            let same = next.route_version == append.route_version
                && next.targets.len() == append.targets.len()
                && next.targets.iter().zip(&append.targets).all(|(a, b)| a.queue == b.queue);
            if !(fits && same) {
                break;
            }
            let Some((next, answer)) = line.waiting.pop_front() else { break };
            let shift = append.messages.len() as u32;
            appends.push((next.messages.len(), answer));
            append.messages.extend(next.messages);
            for (into, from) in append.targets.iter_mut().zip(next.targets) {
                into.filtered.extend(from.filtered.into_iter().map(|index| index + shift));
            }
            total += bytes;
        }
        Some(Batch { number, appends, append })
    }
}

/// The topic's log keeps which queues left out which messages, for seeking: count, then incarnation, count and indexes each.
fn left_out(targets: &[Target]) -> Vec<u8> {
    let mut out = Vec::new();
    for target in targets.iter().filter(|t| !t.filtered.is_empty()) {
        out.extend_from_slice(&target.queue.incarnation.to_le_bytes());
        out.extend_from_slice(&(target.filtered.len() as u16).to_le_bytes());
        for index in &target.filtered {
            out.extend_from_slice(&(*index as u16).to_le_bytes());
        }
    }
    out
}

fn set(key: &str, id: u64, part: &Part) -> Cmd {
    let mut set = cmd("SET");
    set.arg(format!("{key}:p:{id:016x}")).arg(part.payload.as_slice());
    set
}

impl Engine {
    /// Appends, together with others where it can.
    ///
    /// # Errors
    /// What the port says.
    pub async fn append(self: &Arc<Self>, append: Append) -> Result<Appended, BrokerError> {
        let key: Arc<str> = topic_key(&append.topic).into();
        let publisher = {
            let mut publishers = self.publishers.lock();
            let new = || Arc::new(Publisher { slot: slot_of(&key), key: key.to_string(), line: Mutex::default() });
            publishers.entry(key.clone()).or_insert_with(new).clone()
        };
        let (answer, answered) = oneshot::channel();
        let first = {
            let mut line = publisher.line.lock();
            line.waiting.push_back((append, answer));
            !std::mem::replace(&mut line.busy, true)
        };
        if first {
            let engine = self.clone();
            tokio::spawn(async move {
                while let Some(batch) = publisher.next(engine.publish_number()) {
                    let result = engine.publish(&publisher, &batch).await;
                    batch.settle(&result);
                }
            });
        }
        answered.await.map_err(|_| BrokerError::Unavailable("the broker is closed".into()))?
    }

    async fn publish(&self, publisher: &Publisher, batch: &Batch) -> Result<Appended, BrokerError> {
        let (first_id, publish_time_ms) = if self.shards.is_cluster() {
            self.publish_in_steps(publisher, batch).await?
        } else {
            self.publish_at_once(publisher, batch).await?
        };
        let count = batch.append.messages.len() as u64;
        Ok(Appended { message_ids: (first_id..first_id + count).collect(), publish_time_ms })
    }

    /// All keys are on one server: one transaction writes the payload and takes it into every queue.
    async fn publish_at_once(&self, publisher: &Publisher, batch: &Batch) -> Result<(u64, u64), BrokerError> {
        let append = &batch.append;
        let mark = self.mark(publisher.slot).await?;
        let id = self.payload_id();
        let whole = encode_chunk(id, &append.messages, &[]).ok_or_else(|| BrokerError::Damaged("an empty publish".into()))?;
        let mut commands = vec![set(&publisher.key, id, &whole)];
        let keys: Vec<String> = append.targets.iter().map(|t| queue_key(&t.queue)).collect();
        let mut names = vec![publisher.key.as_str()];
        names.extend(keys.iter().map(String::as_str));
        let mut call = function_over("landline_publish", &names);
        call.arg(self.header(0)).arg(append.route_version).arg(append.messages.len()).arg(self.node_hex()).arg(batch.number);
        call.arg(whole.description.as_slice()).arg(left_out(&append.targets));
        call.arg(append.targets.iter().filter(|t| t.filtered.is_empty()).count());
        for (target, key) in append.targets.iter().zip(&keys) {
            if target.filtered.is_empty() {
                call.arg("");
                continue;
            }
            let id = self.payload_id();
            match encode_chunk(id, &append.messages, &target.filtered) {
                Some(part) => {
                    commands.push(set(key, id, &part));
                    call.arg(part.description.as_slice());
                }
                None => {
                    call.arg("-");
                }
            }
        }
        commands.push(call);
        let request = Request::Atomic(commands);
        let answer = self.send_once(publisher, batch.number, &request).await?;
        let mut from = Reader(&answer.0);
        let (first_id, ms, now) = (from.u64()?, from.u64()?, from.u64()?);
        self.observe(now);
        for (target, head) in append.targets.iter().zip(&answer.1) {
            let head = bytes(head)?;
            if !head.is_empty() {
                self.take_short_head(&self.queue(&target.queue), head)?;
            }
        }
        self.barrier(publisher.slot, &publisher.key, mark).await?;
        Ok((first_id, ms))
    }

    /// Sends a publish; when its answer is lost, asks whether it happened before it is sent again.
    async fn send_once(&self, publisher: &Publisher, number: u64, request: &Request) -> Result<(Bytes, Vec<Value>), BrokerError> {
        let started = tokio::time::Instant::now();
        let mut lost = false;
        loop {
            if lost {
                let mut asked = function("landline_published", &[&publisher.key]);
                asked.arg(self.header(0)).arg(self.node_hex()).arg(number);
                match self.shards.call(publisher.slot, &Request::One(asked)).await {
                    Ok(values) => {
                        let found = values.first().map(bytes).transpose()?.unwrap_or_default();
                        if !found.is_empty() {
                            return Ok((Bytes::copy_from_slice(found), Vec::new()));
                        }
                    }
                    Err(Failure::Lost(text) | Failure::Unsent(text)) if started.elapsed() >= RETRY_FOR => {
                        return Err(BrokerError::Unavailable(text));
                    }
                    Err(Failure::Lost(_) | Failure::Unsent(_)) => {
                        tokio::time::sleep(RETRY_PAUSE).await;
                        continue;
                    }
                    Err(failure) => return Err(failure.into()),
                }
            }
            match self.shards.call(publisher.slot, request).await {
                Ok(values) => {
                    let list = array(values)?;
                    let head = list.first().map(bytes).transpose()?.unwrap_or_default();
                    return Ok((Bytes::copy_from_slice(head), list.into_iter().skip(1).collect()));
                }
                Err(Failure::Lost(text)) if started.elapsed() >= RETRY_FOR => return Err(BrokerError::Unavailable(text)),
                Err(Failure::Lost(_)) => lost = true,
                Err(failure) => return Err(failure.into()),
            }
        }
    }

    /// Topic and queues are on several servers: the topic gives ids and time, then each queue gets its copy. The publish is
    /// answered when all have it; when one can't be reached it fails, and the publisher's repetition gives the others a
    /// second copy under new ids.
    async fn publish_in_steps(&self, publisher: &Publisher, batch: &Batch) -> Result<(u64, u64), BrokerError> {
        let append = &batch.append;
        let mark = self.mark(publisher.slot).await?;
        let mut begin = function("landline_begin_publish", &[&publisher.key]);
        begin.arg(self.header(0)).arg(append.route_version).arg(append.messages.len()).arg(self.node_hex()).arg(batch.number);
        let (answer, _) = self.send_once(publisher, batch.number, &Request::One(begin)).await?;
        let mut from = Reader(&answer);
        let (first_id, ms, now) = (from.u64()?, from.u64()?, from.u64()?);
        self.observe(now);
        let logged = from.u8().unwrap_or(1) == 1;
        let mut steps = Vec::new();
        for target in &append.targets {
            let id = self.payload_id();
            if let Some(part) = encode_chunk(id, &append.messages, &target.filtered) {
                steps.push(self.put(target, id, part, batch.number, first_id, ms));
            }
        }
        let log = async {
            if !logged {
                return Ok(());
            }
            let id = self.payload_id();
            let Some(whole) = encode_chunk(id, &append.messages, &[]) else { return Ok(()) };
            let mut call = function("landline_put_log", &[&publisher.key]);
            call.arg(self.header(0)).arg(first_id).arg(ms).arg(whole.description.as_slice()).arg(left_out(&append.targets));
            let request = Request::Atomic(vec![set(&publisher.key, id, &whole), call]);
            self.shards.call(publisher.slot, &request).await.map(drop).map_err(BrokerError::from)
        };
        let (puts, log) = futures::future::join(futures::future::join_all(steps), log).await;
        puts.into_iter().collect::<Result<Vec<()>, _>>()?;
        log?;
        self.barrier(publisher.slot, &publisher.key, mark).await?;
        Ok((first_id, ms))
    }

    async fn put(&self, target: &Target, id: u64, part: Part, number: u64, first_id: u64, ms: u64) -> Result<(), BrokerError> {
        let queue = self.queue(&target.queue);
        let mark = self.mark(queue.slot).await?;
        let lane = self.node_hex();
        let mut call = function("landline_put", &[&queue.key]);
        call.arg(self.header(0)).arg(&lane).arg(number).arg(first_id).arg(ms).arg(part.description.as_slice());
        let request = Request::Atomic(vec![set(&queue.key, id, &part), call]);
        let started = tokio::time::Instant::now();
        let mut lost = false;
        loop {
            if lost {
                let mut asked = cmd("HGET");
                asked.arg(format!("{}:w", queue.key)).arg(&lane);
                if let Ok(values) = self.shards.call(queue.slot, &Request::One(asked)).await
                    && matches!(values.first(), Some(Value::BulkString(last)) if *last == number.to_string().into_bytes())
                {
                    break;
                }
            }
            match self.shards.call(queue.slot, &request).await {
                Ok(values) => {
                    let list = array(values)?;
                    self.take_head(&queue, &list)?;
                    break;
                }
                // A queue that was deleted meanwhile takes nothing.
                Err(Failure::Refused(code, _)) if code == "LLGONE" => return Ok(()),
                Err(Failure::Lost(_)) if started.elapsed() < RETRY_FOR => {
                    lost = true;
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
                Err(failure) => return Err(failure.into()),
            }
        }
        self.barrier(queue.slot, &queue.key, mark).await
    }

    /// Forgets the publishers of topics nobody publishes to.
    pub fn forget_idle_publishers(&self) {
        self.publishers.lock().retain(|_, p| Arc::strong_count(p) > 1 || p.line.lock().busy);
    }
}

impl Batch {
    fn settle(self, result: &Result<Appended, BrokerError>) {
        let mut from = 0;
        for (count, answer) in self.appends {
            let own = result.as_ref().map_err(Clone::clone).map(|all| Appended {
                message_ids: all.message_ids[from..from + count].to_vec(),
                publish_time_ms: all.publish_time_ms,
            });
            let _ = answer.send(own);
            from += count;
        }
    }
}
