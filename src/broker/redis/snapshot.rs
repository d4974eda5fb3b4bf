//! Snapshots, and seeks that need more than the queue's own index.
//!
//! A snapshot lies in its topic's slot: copies of the messages that were unacknowledged, and the last message id before it;
//! from then on the topic's log keeps everything. A queue is moved to a snapshot, or to a time that the topic's retention
//! reaches, by a plan: which of its own entries stay and with which messages, and what is copied in (see `lua/seek.lua`). No
//! step of it keeps Redis for longer than some milliseconds.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use bytes::Bytes;
use redis::{Cmd, Value, cmd};

use super::{
    chunk::{Chunk, Entry},
    codec::{Reader, Set},
    connection::Request,
    engine::{Engine, NEVER, array, bytes},
    queue::{QueueView, topic_key},
    slots::slot_of,
};
use crate::broker::{BrokerError, QueueRef, SeekTarget, TopicRef};

/// Entries read at once: a few megabytes of descriptions at most.
const PAGE: usize = 500;
/// Payloads copied at once.
const COPY_BATCH: usize = 32;
/// Entries that are looked at before others get their turn on this thread.
const TURN: usize = 16;
/// A plan that is not carried out within this is forgotten with what was copied for it.
const PLAN_LIFE_MS: u64 = 600_000;

/// A queue as a survey found it.
struct Survey {
    next_seq: u64,
    cursor: u64,
    skip: u16,
    retain: bool,
    retention_ms: u64,
    /// Names what the survey holds in the index; 0 when another already holds more.
    pin: u64,
    /// What is unacknowledged of entries the cursor has reached.
    started: HashMap<u64, Option<Set>>,
    /// Messages that no seek brings back.
    gone: HashMap<u64, Set>,
    /// Messages that count as acknowledged since the last seek.
    aside: HashMap<u64, Set>,
}

impl Survey {
    fn read(answer: &[Value]) -> Result<Self, BrokerError> {
        let unknown = || BrokerError::Damaged("a survey was answered in an unknown form".into());
        let [_, _, _, state, Value::Array(started)] = answer else { return Err(unknown()) };
        let mut from = Reader(bytes(state)?);
        let mut survey = Self {
            next_seq: from.u64()?,
            cursor: from.u64()?,
            skip: from.u32()? as u16,
            retain: from.u8()? == 1,
            retention_ms: from.u64()?,
            pin: from.u64()?,
            started: HashMap::new(),
            gone: HashMap::new(),
            aside: HashMap::new(),
        };
        for value in started {
            let mut from = Reader(bytes(value)?);
            let chunk = from.u64()?;
            let set = if from.is_empty() { None } else { Some(Set::read(&mut from)?) };
            survey.started.insert(chunk, set);
        }
        Ok(survey)
    }

    fn is_gone(&self, chunk: u64, index: u16) -> bool {
        self.gone.get(&chunk).is_some_and(|set| set.contains(index))
    }

    fn is_unacked(&self, chunk: u64, index: u16) -> bool {
        if let Some(set) = self.started.get(&chunk) {
            return set.as_ref().is_some_and(|s| s.contains(index));
        }
        (chunk > self.cursor || (chunk == self.cursor && index >= self.skip))
            && !self.is_gone(chunk, index)
            && !self.aside.get(&chunk).is_some_and(|set| set.contains(index))
    }
}

/// What a survey holds in the index.
#[derive(Clone, Copy)]
enum Pin {
    /// What is there, until it is released.
    Present = 1,
    /// Everything, until a new index takes the place of this one, and not for ever.
    All = 2,
}

/// What a seek wants, and where it comes from.
struct Wanted {
    /// Ids that come from elsewhere when the queue has them not.
    sources: Vec<Source>,
    target: Target,
}

enum Target {
    Time(u64),
    Snapshot { held: HashSet<u64>, boundary: u64 },
}

impl Wanted {
    /// Publish time that messages to come must have to be delivered; 0 for any.
    fn floor(&self, now_ms: u64) -> u64 {
        if let Target::Time(time_ms) = self.target { Some(time_ms).filter(|t| *t > now_ms).unwrap_or(0).min(NEVER) } else { 0 }
    }
}

/// A chunk in the topic's slot and the messages of it that the queue may get.
struct Source {
    entry: Entry,
    indexes: Vec<u16>,
}

/// Where a step stands in a plan: the first message it brings; own entries before copied ones; a number.
type Rank = (u64, u8, u64);

/// The step that keeps an entry without some of its messages: until the next seek where they are retained, or else for good.
fn keep(entry: &Entry, masked: &[u16], retain: bool) -> Vec<u8> {
    let mut step = vec![b'K'];
    step.extend_from_slice(&entry.sequence.to_le_bytes());
    step.push(match masked {
        [] => b'n',
        _ if retain => b'm',
        _ => b'g',
    });
    if !masked.is_empty() {
        Set::from_sorted(masked).write(&mut step);
    }
    step
}

impl Engine {
    /// Moves a queue.
    ///
    /// # Errors
    /// What the port says, for all functions here.
    pub async fn seek(self: &Arc<Self>, queue: &QueueRef, target: SeekTarget) -> Result<(), BrokerError> {
        let view = self.queue(queue);
        let mark = self.mark(view.slot).await?;
        let (topic, _) = self.topic_of(queue).await?.ok_or(BrokerError::Gone)?;
        let snapshot = if let SeekTarget::Snapshot(id) = target { format!("{id:x}") } else { String::new() };
        let info = array(
            self.on_topic(&topic, "landline_topic_info", |call| {
                call.arg(&snapshot);
            })
            .await?,
        )?;
        let retention = if let Some(Value::Int(ms)) = info.first() { *ms as u64 } else { 0 };
        match target {
            SeekTarget::Time(time_ms) if retention == 0 => {
                let mut from = 0;
                loop {
                    let call = |call: &mut Cmd, _| {
                        call.arg(time_ms.min(NEVER)).arg(from);
                    };
                    let answer = self.on_queue(&view, "landline_seek_time", call).await?;
                    match answer.get(3) {
                        Some(Value::Int(next @ 1..)) => from = *next,
                        _ => break,
                    }
                }
            }
            SeekTarget::Time(time_ms) => {
                let sources = self.log_since(&topic, queue.incarnation, |entry, now| {
                    entry.publish_ms >= time_ms && entry.publish_ms + retention > now
                });
                let wanted = Wanted { sources: sources.await?, target: Target::Time(time_ms) };
                self.carry_out_plan(&view, &topic, wanted).await?;
            }
            SeekTarget::Snapshot(_) => {
                let boundary = match info.get(2) {
                    Some(Value::BulkString(text)) => std::str::from_utf8(text).ok().and_then(|t| t.parse().ok()),
                    _ => None,
                };
                let boundary: u64 = boundary.ok_or(BrokerError::Gone)?;
                let mut sources = Vec::new();
                let mut held = HashSet::new();
                for (turn, entry) in self.entries(&format!("{topic}:sn:{snapshot}"), &topic, NEVER).await?.into_iter().enumerate()
                {
                    if turn % TURN == 0 {
                        tokio::task::yield_now().await;
                    }
                    let ids = self.ids(&topic, &entry).await?;
                    held.extend(ids);
                    sources.push(Source { indexes: (0..entry.count).collect(), entry });
                }
                sources.extend(self.log_since(&topic, queue.incarnation, |entry, _| entry.first_id > boundary).await?);
                let wanted = Wanted { sources, target: Target::Snapshot { held, boundary } };
                self.carry_out_plan(&view, &topic, wanted).await?;
            }
        }
        self.barrier(view.slot, &view.key, mark).await
    }

    /// The chunks of an index, oldest first, up to the sequence `end`.
    async fn entries(&self, name: &str, key: &str, end: u64) -> Result<Vec<Entry>, BrokerError> {
        let of_queue = name.ends_with(":cx") && key.starts_with("gcp.sub.");
        let (mut entries, mut from) = (Vec::new(), String::from("-"));
        loop {
            let mut range = cmd("XRANGE");
            range.arg(name).arg(&from).arg("+").arg("COUNT").arg(PAGE);
            let rows = array(self.shards.call(slot_of(key), &Request::One(range)).await?)?;
            for row in &rows {
                let (id, entry) = Entry::read(row, of_queue)?;
                if entry.sequence >= end {
                    return Ok(entries);
                }
                from = format!("({id}");
                entries.push(entry);
            }
            if rows.len() < PAGE {
                return Ok(entries);
            }
        }
    }

    /// The part of a topic's log that satisfies `wanted`, without what the queue's filter left out.
    async fn log_since(&self, topic: &str, queue: u64, wanted: impl Fn(&Entry, u64) -> bool) -> Result<Vec<Source>, BrokerError> {
        let now = self.now_ms();
        let entries = self.entries(&format!("{topic}:cx"), topic, NEVER).await?;
        let chosen = entries.into_iter().filter(|entry| wanted(entry, now)).map(|entry| {
            let left_out: HashSet<u16> = entry.left_out(queue).into_iter().collect();
            Source { indexes: (0..entry.count).filter(|index| !left_out.contains(index)).collect(), entry }
        });
        Ok(chosen.filter(|source| !source.indexes.is_empty()).collect())
    }

    /// The message ids of a chunk, in order.
    async fn ids(&self, key: &str, entry: &Entry) -> Result<Vec<u64>, BrokerError> {
        if !entry.has_gaps() {
            return Ok((entry.first_id..entry.first_id + u64::from(entry.count)).collect());
        }
        let count = usize::from(entry.count);
        let mut get = cmd("GETRANGE");
        get.arg(entry.payload_key(key)).arg(count * 4).arg(count * 6 - 1);
        let values = self.shards.call(slot_of(key), &Request::One(get)).await?;
        let table = values.first().map(bytes).transpose()?.unwrap_or_default();
        Ok(table.chunks_exact(2).map(|b| entry.first_id + u64::from(u16::from_le_bytes([b[0], b[1]]))).collect())
    }

    async fn survey(&self, queue: &QueueView, pin: Pin) -> Result<Survey, BrokerError> {
        let call = |call: &mut Cmd, _| {
            call.arg(pin as u8);
        };
        let mut survey = Survey::read(&self.on_queue(queue, "landline_survey", call).await?)?;
        survey.gone = self.masks(queue, "gm").await?;
        survey.aside = self.masks(queue, "mk").await?;
        Ok(survey)
    }

    /// Reads masks. What is acknowledged while they are read counts as either.
    async fn masks(&self, queue: &QueueView, name: &str) -> Result<HashMap<u64, Set>, BrokerError> {
        let unknown = || BrokerError::Damaged("masks were answered in an unknown form".into());
        let (mut masks, mut cursor) = (HashMap::new(), String::from("0"));
        loop {
            let mut scan = cmd("HSCAN");
            scan.arg(format!("{}:{name}", queue.key)).arg(&cursor).arg("COUNT").arg(PAGE);
            let answer = array(self.shards.call(queue.slot, &Request::One(scan)).await?)?;
            let [next, Value::Array(pairs)] = answer.as_slice() else { return Err(unknown()) };
            for pair in pairs.chunks_exact(2) {
                let chunk = std::str::from_utf8(bytes(&pair[0])?).ok().and_then(|c| c.parse().ok()).ok_or_else(unknown)?;
                let mask = bytes(&pair[1])?;
                masks.insert(chunk, if mask == b"*" { Set::everything() } else { Set::read(&mut Reader(mask))? });
            }
            cursor = String::from_utf8(bytes(next)?.to_vec()).map_err(|_| unknown())?;
            if cursor == "0" {
                return Ok(masks);
            }
        }
    }

    async fn release_pin(&self, queue: &QueueView, pin: u64) -> Result<(), BrokerError> {
        if pin == 0 {
            return Ok(());
        }
        let call = |call: &mut Cmd, _| {
            call.arg(pin);
        };
        self.on_queue(queue, "landline_release_pin", call).await.map(drop)
    }

    async fn carry_out_plan(self: &Arc<Self>, queue: &QueueView, topic: &str, wanted: Wanted) -> Result<(), BrokerError> {
        self.tidy(queue).await?;
        let survey = self.survey(queue, Pin::All).await?;
        let name = format!("{:016x}", rand::random::<u64>());
        let (pin, floor) = (survey.pin, wanted.floor(self.now_ms()));
        let rebuilt = async {
            let plan = self.plan(queue, topic, &name, &survey, wanted).await?;
            self.rebuild(queue, &name, &survey, plan, floor).await
        };
        let rebuilt = rebuilt.await;
        if rebuilt.is_err() {
            // It ends by itself, but till then nothing that is acknowledged is removed.
            let _ = self.release_pin(queue, pin).await;
        }
        rebuilt?;
        // The next seek does what this leaves undone.
        let _ = self.tidy(queue).await;
        Ok(())
    }

    /// Decides what becomes of each entry of the queue and copies in what it lacks.
    async fn plan(
        &self,
        queue: &QueueView,
        topic: &str,
        name: &str,
        survey: &Survey,
        wanted: Wanted,
    ) -> Result<Vec<Vec<u8>>, BrokerError> {
        let now = self.now_ms();
        // In the order of the message ids, so that the queue is again in the order of publishing.
        let mut steps: BTreeMap<Rank, Vec<u8>> = BTreeMap::new();
        let (mut own, mut unused) = (HashMap::new(), Vec::new());
        let entries = self.entries(&format!("{}:cx", queue.key), &queue.key, survey.next_seq).await?;
        let mut kept: HashMap<Rank, (&Entry, usize)> = HashMap::new();
        for (turn, entry) in entries.iter().enumerate() {
            if turn % TURN == 0 {
                tokio::task::yield_now().await;
            }
            let ids = self.ids(&queue.key, entry).await?;
            let retained = survey.retain && entry.publish_ms + survey.retention_ms > now;
            let wants = |index: u16, id: u64| match &wanted.target {
                Target::Time(time_ms) => {
                    let eligible =
                        if retained { !survey.is_gone(entry.sequence, index) } else { survey.is_unacked(entry.sequence, index) };
                    entry.publish_ms >= *time_ms && eligible
                }
                Target::Snapshot { held, boundary } => id > *boundary || held.contains(&id),
            };
            let (brought, masked): (Vec<_>, Vec<_>) = (0..entry.count).zip(&ids).partition(|(index, id)| wants(*index, **id));
            if brought.is_empty() && !survey.retain {
                unused.push(entry.payload_id().to_vec());
                continue;
            }
            let rank = (brought.first().map_or(entry.first_id, |(_, id)| **id), 0, entry.sequence);
            own.extend(brought.iter().map(|(_, id)| (**id, rank)));
            kept.insert(rank, (entry, brought.len()));
            let masked: Vec<u16> = masked.into_iter().map(|(index, _)| index).collect();
            steps.insert(rank, keep(entry, &masked, survey.retain));
        }
        let mut missing = Vec::new();
        for (turn, mut source) in wanted.sources.into_iter().enumerate() {
            if turn % TURN == 0 {
                tokio::task::yield_now().await;
            }
            let ids = self.ids(topic, &source.entry).await?;
            source.indexes.retain(|index| usize::from(*index) < ids.len());
            let ranks: Vec<Option<Rank>> = source.indexes.iter().map(|i| own.get(&ids[usize::from(*i)]).copied()).collect();
            if ranks.iter().all(Option::is_some) {
                continue;
            }
            // Of a publish that is there in part, all comes anew: what is there would stand before or behind what lies between.
            let there: HashSet<Rank> = ranks.iter().flatten().copied().collect();
            let is_all = |rank: &Rank| {
                kept.get(rank).is_some_and(|(_, brought)| ranks.iter().filter(|r| **r == Some(*rank)).count() == *brought)
            };
            if there.iter().all(is_all) {
                for rank in there {
                    let Some((entry, _)) = kept.remove(&rank) else { continue };
                    steps.remove(&rank);
                    if survey.retain {
                        steps.insert(rank, keep(entry, &(0..entry.count).collect::<Vec<_>>(), true));
                    } else {
                        unused.push(entry.payload_id().to_vec());
                    }
                }
            } else {
                let mut lacks = ranks.iter().map(Option::is_none);
                source.indexes.retain(|_| lacks.next().unwrap_or_default());
            }
            let Some(first) = source.indexes.first().map(|index| ids[usize::from(*index)]) else { continue };
            own.extend(source.indexes.iter().map(|index| (ids[usize::from(*index)], (first, 1, 0))));
            missing.push((first, source));
        }
        for sources in missing.chunks(COPY_BATCH) {
            self.copy_in(queue, topic, sources, &mut steps).await?;
        }
        self.push(queue, &format!("{}:sg:{name}:d", queue.key), &unused).await?;
        Ok(std::iter::once(vec![b'N']).chain(steps.into_values()).collect())
    }

    /// Appends to a list of the plan.
    async fn push(&self, queue: &QueueView, name: &str, values: &[Vec<u8>]) -> Result<(), BrokerError> {
        for part in values.chunks(PAGE) {
            let mut push = cmd("RPUSH");
            push.arg(name);
            for value in part {
                push.arg(value.as_slice());
            }
            let mut expire = cmd("PEXPIRE");
            expire.arg(name).arg(PLAN_LIFE_MS);
            self.shards.call(queue.slot, &Request::Atomic(vec![push, expire])).await?;
        }
        Ok(())
    }

    /// Has a plan carried out, in parts between which others are served.
    async fn rebuild(
        &self,
        queue: &QueueView,
        name: &str,
        survey: &Survey,
        plan: Vec<Vec<u8>>,
        floor: u64,
    ) -> Result<(), BrokerError> {
        self.push(queue, &format!("{}:sg:{name}", queue.key), &plan).await?;
        let superseded =
            || BrokerError::Unavailable("another seek of the subscription has begun, or this one took too long".into());
        let part = |call: &mut Cmd, _| {
            call.arg(survey.next_seq).arg(survey.pin).arg(name);
        };
        loop {
            match self.on_queue(queue, "landline_seek_part", part).await?.get(3) {
                Some(Value::Int(0)) => {}
                Some(Value::Int(1)) => break,
                _ => return Err(superseded()),
            }
        }
        let switch = |call: &mut Cmd, _| {
            call.arg(floor).arg(survey.pin).arg(name);
        };
        match self.on_queue(queue, "landline_seek_switch", switch).await?.get(3) {
            Some(Value::Int(1)) => Ok(()),
            _ => Err(superseded()),
        }
    }

    /// Removes the payloads that a new index left without an entry.
    async fn tidy(&self, queue: &QueueView) -> Result<(), BrokerError> {
        while let Some(Value::Int(1)) = self.on_queue(queue, "landline_seek_tidy", |_, _| {}).await?.get(3) {}
        Ok(())
    }

    /// Copies messages that the queue lacks into its slot and adds them to the plan.
    async fn copy_in(
        &self,
        queue: &QueueView,
        topic: &str,
        sources: &[(u64, Source)],
        steps: &mut BTreeMap<Rank, Vec<u8>>,
    ) -> Result<(), BrokerError> {
        let mut writes = Vec::new();
        for ((first, source), chunk) in sources.iter().zip(self.chunks(topic, sources.iter().map(|(_, s)| &s.entry)).await?) {
            let Some(chunk) = chunk else { continue };
            let id = self.payload_id();
            let part = chunk.part(id, &source.indexes);
            let mut set = cmd("SET");
            set.arg(format!("{}:p:{id:016x}", queue.key)).arg(part.payload.as_slice()).arg("PX").arg(PLAN_LIFE_MS);
            writes.push(set);
            let mut step = vec![b'I'];
            step.extend_from_slice(&source.entry.first_id.to_le_bytes());
            step.extend_from_slice(&source.entry.publish_ms.to_le_bytes());
            step.extend_from_slice(&part.description);
            steps.insert((*first, 1, id), step);
        }
        if !writes.is_empty() {
            self.shards.call(queue.slot, &Request::Many(writes)).await?;
        }
        Ok(())
    }

    /// Reads whole chunks; nothing stands for one that is gone.
    async fn chunks<'a>(
        &self,
        key: &str,
        entries: impl Iterator<Item = &'a Entry> + Clone,
    ) -> Result<Vec<Option<Chunk>>, BrokerError> {
        let gets: Vec<Cmd> = entries
            .clone()
            .map(|entry| {
                let mut get = cmd("GET");
                get.arg(entry.payload_key(key));
                get
            })
            .collect();
        if gets.is_empty() {
            return Ok(Vec::new());
        }
        let values = self.shards.call(slot_of(key), &Request::Many(gets)).await?;
        let read = values.into_iter().zip(entries).map(|(value, entry)| match value {
            Value::BulkString(payload) => Chunk::read(entry, Bytes::from(payload)).map(Some),
            _ => Ok(None),
        });
        read.collect()
    }

    /// Copies a queue's unacknowledged messages.
    pub async fn take_snapshot(self: &Arc<Self>, snapshot: u64, queue: &QueueRef) -> Result<(), BrokerError> {
        let (topic, _) = self.topic_of(queue).await?.ok_or(BrokerError::Gone)?;
        let mark = self.mark(slot_of(&topic)).await?;
        let view = self.queue(queue);
        let id = format!("{snapshot:x}");
        let name = format!("{topic}:sn:{id}");
        let opened = self
            .on_topic(&topic, "landline_open_snapshot", |call| {
                call.arg(&id);
            })
            .await?;
        let boundary = opened.first().map(bytes).transpose()?.and_then(|t| std::str::from_utf8(t).ok()?.parse::<u64>().ok());
        let boundary = boundary.ok_or_else(|| BrokerError::Damaged("a snapshot has no boundary".into()))?;
        let survey = self.survey(&view, Pin::Present).await?;
        let copied = self.copy_out(&view, &topic, &name, &survey, boundary).await;
        self.release_pin(&view, survey.pin).await?;
        copied?;
        self.barrier(slot_of(&topic), &topic, mark).await
    }

    async fn copy_out(
        &self,
        queue: &QueueView,
        topic: &str,
        name: &str,
        survey: &Survey,
        boundary: u64,
    ) -> Result<(), BrokerError> {
        // What an attempt that was broken off left.
        let mut clear = cmd("UNLINK");
        clear.arg(name);
        self.shards.call(slot_of(topic), &Request::One(clear)).await?;
        let mut wanted = Vec::new();
        for entry in self.entries(&format!("{}:cx", queue.key), &queue.key, survey.next_seq).await? {
            if entry.first_id > boundary {
                continue; // in the topic's log
            }
            let indexes: Vec<u16> = (0..entry.count).filter(|index| survey.is_unacked(entry.sequence, *index)).collect();
            if !indexes.is_empty() {
                wanted.push(Source { entry, indexes });
            }
        }
        for sources in wanted.chunks(COPY_BATCH) {
            let mut writes = Vec::new();
            for (source, chunk) in sources.iter().zip(self.chunks(&queue.key, sources.iter().map(|s| &s.entry)).await?) {
                let Some(chunk) = chunk else { continue };
                let id = self.payload_id();
                let part = chunk.part(id, &source.indexes);
                let mut set = cmd("SET");
                set.arg(format!("{topic}:p:{id:016x}")).arg(part.payload.as_slice());
                let mut add = cmd("XADD");
                add.arg(name).arg("*").arg("d").arg(source.entry.describe(&part));
                writes.extend([set, add]);
            }
            if !writes.is_empty() {
                self.shards.call(slot_of(topic), &Request::Atomic(writes)).await?;
            }
        }
        Ok(())
    }

    /// Forgets a snapshot, and what the topic kept only for it.
    pub async fn drop_snapshot(self: &Arc<Self>, snapshot: u64, topic: &TopicRef) -> Result<(), BrokerError> {
        let key = topic_key(topic);
        loop {
            let answer = self
                .on_topic(&key, "landline_drop_snapshot", |call| {
                    call.arg(format!("{snapshot:x}"));
                })
                .await?;
            if !matches!(answer.first(), Some(Value::Int(1))) {
                break;
            }
        }
        self.purge_later(key);
        Ok(())
    }
}
