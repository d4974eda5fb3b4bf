//! Resource records, and the changes that go with them.
//!
//! A change touches the record's slot, the queue's and the topic's. It is noted beside the record first, then its effect is
//! carried out, then the record is written and the note removed (see `lua/records.lua`). Every effect may be repeated, so a
//! note that a dead node left behind is completed by whoever meets it.

use std::sync::Arc;

use bytes::Bytes;
use redis::Value;

use super::{
    codec::Reader,
    connection::Request,
    engine::{Engine, NEVER, array, bytes},
    library::function,
    queue::{queue_key, topic_key},
    slots::slot_of,
};
use crate::broker::{
    Attached, BrokerError, Change, Effect, Expect, Kind, QueueConfig, QueueRef, Record, Route, TopicConfig, TopicRef,
};

/// Where all records lie.
pub const CATALOG: &str = "gcp.catalog.{landline}";
/// Version of what is stored; the same as in `lua/library.lua`.
const FORMAT: u32 = 1;
/// How often a change looks again after it met another one under way: each look completes that one.
const MAX_LOOKS: usize = 20;
/// Notes of changes older than this are taken for left behind: far longer than a change takes.
pub const STALE_NOTE_SECONDS: u64 = 10;

fn code(kind: Kind) -> &'static str {
    match kind {
        Kind::Topic => "t",
        Kind::Subscription => "s",
        Kind::Snapshot => "n",
        Kind::Schema => "c",
        Kind::Policy => "p",
        Kind::System => "y",
    }
}

/// The kind a code stands for.
pub fn kind_of(code: u8) -> Option<Kind> {
    [Kind::Topic, Kind::Subscription, Kind::Snapshot, Kind::Schema, Kind::Policy, Kind::System]
        .into_iter()
        .find(|kind| super::records::code(*kind).as_bytes() == [code])
}

/// The channel on which changes are told. Databases share channels, so it names the database.
pub fn events_channel(database: i64) -> String {
    format!("gcp.events:{database}")
}

/// A noted change: what must be done to complete it.
#[derive(serde::Serialize, serde::Deserialize)]
struct Note {
    effect: Effect,
    creates: bool,
}

/// The keys a change leaves something at, one a slot that may be on a server of its own.
fn touched(effect: &Effect) -> Vec<String> {
    let mut keys = vec![CATALOG.to_owned()];
    match effect {
        Effect::None => {}
        Effect::OpenTopic(config) => keys.push(topic_key(&config.topic)),
        Effect::CloseTopic(topic) | Effect::DropSnapshot { topic, .. } => keys.push(topic_key(topic)),
        Effect::OpenQueue(config) => keys.extend([queue_key(&config.queue), topic_key(&config.topic)]),
        Effect::DetachQueue(queue) | Effect::CloseQueue(queue) | Effect::TakeSnapshot { queue, .. } => {
            keys.push(queue_key(queue))
        }
    }
    keys
}

fn record(name: String, stored: &[u8]) -> Result<Record, BrokerError> {
    let mut from = Reader(stored);
    let version = from.u64()?;
    Ok(Record { name, version, body: Bytes::copy_from_slice(from.0) })
}

fn text(value: &Value) -> Result<String, BrokerError> {
    String::from_utf8(bytes(value)?.to_vec()).map_err(|_| BrokerError::Damaged("a stored name is not UTF-8".into()))
}

impl Engine {
    pub async fn catalog(&self, request: redis::Cmd) -> Result<Vec<Value>, BrokerError> {
        Ok(self.shards.call(slot_of(CATALOG), &Request::One(request)).await?)
    }

    /// Looks at the version of what is stored.
    ///
    /// # Errors
    /// [`BrokerError::Damaged`] when it is newer than this server's.
    pub async fn check_format(&self) -> Result<(), BrokerError> {
        let mut get = redis::cmd("HGET");
        get.arg(CATALOG).arg("v");
        let Some(Value::BulkString(found)) = self.catalog(get).await?.pop() else { return Ok(()) };
        if found == FORMAT.to_string().into_bytes() {
            return Ok(());
        }
        let found = String::from_utf8_lossy(&found);
        Err(BrokerError::Damaged(format!("the data in Redis have format {found}, this server knows {FORMAT}")))
    }

    /// Reads one record.
    ///
    /// # Errors
    /// What the port says, for all functions here.
    pub async fn get(&self, kind: Kind, name: &str) -> Result<Option<Record>, BrokerError> {
        let mut get = redis::cmd("HGET");
        get.arg(format!("{CATALOG}:b:{}", code(kind))).arg(name);
        match self.catalog(get).await?.pop() {
            Some(Value::BulkString(stored)) => record(name.to_owned(), &stored).map(Some),
            _ => Ok(None),
        }
    }

    pub async fn list(&self, kind: Kind, prefix: &str, after: &str, limit: usize) -> Result<Vec<Record>, BrokerError> {
        let mut call = function("landline_list", &[CATALOG]);
        call.arg(code(kind)).arg(prefix).arg(after).arg(limit);
        let answer = array(self.catalog(call).await?)?;
        let [Value::Array(names), Value::Array(bodies)] = answer.as_slice() else {
            return Err(BrokerError::Damaged("a list of records was answered in an unknown form".into()));
        };
        let found = names.iter().zip(bodies).filter(|(_, body)| matches!(body, Value::BulkString(_)));
        found.map(|(name, body)| record(text(name)?, bytes(body)?)).collect()
    }

    /// Carries out a change, and answers once it is as durable as was asked for wherever it left something.
    pub async fn change(self: &Arc<Self>, change: Change) -> Result<u64, BrokerError> {
        let keys = touched(&change.effect);
        let mut marks = Vec::with_capacity(keys.len());
        for key in &keys {
            marks.push(self.mark(slot_of(key)).await?);
        }
        let version = self.change_now(change).await?;
        for (key, mark) in keys.iter().zip(marks) {
            self.barrier(slot_of(key), key, mark).await?;
        }
        Ok(version)
    }

    async fn change_now(self: &Arc<Self>, change: Change) -> Result<u64, BrokerError> {
        let kind = code(change.kind);
        let creates = change.expect == Expect::Absent;
        let note = match &change.effect {
            Effect::None => Vec::new(),
            effect => postcard::to_allocvec(&Note { effect: effect.clone(), creates })
                .map_err(|e| BrokerError::Damaged(format!("an effect can't be encoded: {e}")))?,
        };
        for _ in 0..MAX_LOOKS {
            let mut begin = function("landline_begin_change", &[CATALOG]);
            begin.arg(kind).arg(&change.name);
            match change.expect {
                Expect::Absent => begin.arg(""),
                Expect::Version(version) => begin.arg(version),
            };
            begin.arg(u8::from(change.body.is_some())).arg(change.body.as_deref().unwrap_or_default()).arg(&note[..]);
            begin.arg(events_channel(self.shards.database()));
            let answer = array(self.catalog(begin).await?)?;
            match answer.as_slice() {
                [Value::Int(0), Value::Int(version)] => {
                    let version = *version as u64;
                    if !note.is_empty() {
                        self.complete(kind, &change.name, version, &change.effect, creates).await?;
                    }
                    return Ok(version);
                }
                // Another change of this record is under way, or was left behind: it comes first.
                [Value::Int(1), pending] => self.complete_note(kind, &change.name, bytes(pending)?).await?,
                _ => return Err(BrokerError::Damaged("a change was answered in an unknown form".into())),
            }
        }
        Err(BrokerError::Unavailable(format!("too many changes of {} at once", change.name)))
    }

    /// Notes a change and does no more, as a node that dies then.
    #[cfg(test)]
    pub async fn leave_behind(&self, kind: Kind, name: &str, effect: &Effect) {
        let note = postcard::to_allocvec(&Note { effect: effect.clone(), creates: true }).unwrap();
        let mut begin = function("landline_begin_change", &[CATALOG]);
        begin.arg(code(kind)).arg(name).arg("").arg(1).arg("{}").arg(note).arg(events_channel(self.shards.database()));
        self.catalog(begin).await.unwrap();
    }

    async fn complete_note(self: &Arc<Self>, kind: &str, name: &str, pending: &[u8]) -> Result<(), BrokerError> {
        let mut from = Reader(pending);
        let (version, _, _) = (from.u64()?, from.u64()?, from.u8()?);
        let length = from.u32()? as usize;
        let note: Note = postcard::from_bytes(from.bytes(length)?)
            .map_err(|e| BrokerError::Damaged(format!("the note of a change of {name}: {e}")))?;
        match self.complete(kind, name, version, &note.effect, note.creates).await {
            Ok(()) | Err(BrokerError::Gone) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Completes the changes that nodes left behind when they died.
    pub async fn complete_left_behind(self: &Arc<Self>) -> Result<(), BrokerError> {
        let mut all = redis::cmd("HGETALL");
        all.arg(format!("{CATALOG}:i"));
        let mut list: Vec<Value> = Vec::new();
        match self.catalog(all).await?.pop() {
            Some(Value::Array(values)) => list = values,
            Some(Value::Map(pairs)) => list = pairs.into_iter().flat_map(|(k, v)| [k, v]).collect(),
            _ => {}
        }
        for pair in list.chunks_exact(2) {
            let (name, pending) = (text(&pair[0])?, bytes(&pair[1])?);
            let mut from = Reader(pending);
            let (_, noted_seconds) = (from.u64()?, from.u64()?);
            let (kind, name) = name.split_at(1);
            if noted_seconds + STALE_NOTE_SECONDS < self.now_ms() / 1000 {
                tracing::info!(name, "completing a change that was left behind");
                self.complete_note(kind, name, pending).await?;
            }
        }
        Ok(())
    }

    async fn complete(
        self: &Arc<Self>,
        kind: &str,
        name: &str,
        version: u64,
        effect: &Effect,
        creates: bool,
    ) -> Result<(), BrokerError> {
        let done = self.carry_out(name, effect, creates).await;
        let (registered, given_up) = match (&done, effect) {
            (Err(BrokerError::Gone), _) => (String::new(), true),
            (Err(e), _) => return Err(e.clone()),
            (Ok(()), Effect::OpenQueue(config)) => (format!("+{}", queue_key(&config.queue)), false),
            (Ok(()), Effect::CloseQueue(queue)) => (format!("-{}", queue_key(queue)), false),
            (Ok(()), Effect::OpenTopic(config)) => (format!("+{}", topic_key(&config.topic)), false),
            (Ok(()), Effect::CloseTopic(topic)) => (format!("-{}", topic_key(topic)), false),
            _ => (String::new(), false),
        };
        let mut end = function("landline_end_change", &[CATALOG]);
        end.arg(kind).arg(name).arg(version).arg(registered).arg(events_channel(self.shards.database())).arg(u8::from(given_up));
        self.catalog(end).await?;
        if done.is_ok() && !creates {
            self.renew(version, effect).await?;
        }
        done
    }

    /// Tells queue or topic that a record was written, so that nodes that act on an older one are refused there. Only now,
    /// because they read the record then, and before the change is answered.
    async fn renew(&self, version: u64, effect: &Effect) -> Result<(), BrokerError> {
        let renewed = match effect {
            Effect::OpenTopic(config) => self.on_topic(&topic_key(&config.topic), "landline_renew_topic", |_| {}).await,
            Effect::OpenQueue(QueueConfig { queue, .. }) | Effect::DetachQueue(queue) => self.renew_queue(queue, version).await,
            Effect::CloseQueue(queue) => self.renew_queue(queue, NEVER).await,
            Effect::None | Effect::CloseTopic(_) | Effect::TakeSnapshot { .. } | Effect::DropSnapshot { .. } => return Ok(()),
        };
        match renewed {
            // It was deleted meanwhile, or is purged already.
            Ok(_) | Err(BrokerError::Gone) => Ok(()),
            Err(e) => Err(e),
        }
    }

    async fn renew_queue(&self, queue: &QueueRef, version: u64) -> Result<Vec<Value>, BrokerError> {
        let call = |call: &mut redis::Cmd, _| {
            call.arg(version);
        };
        self.on_queue(&self.queue(queue), "landline_renew_queue", call).await
    }

    /// Carries out a change's effect. May be repeated.
    async fn carry_out(self: &Arc<Self>, name: &str, effect: &Effect, creates: bool) -> Result<(), BrokerError> {
        match effect {
            Effect::None => Ok(()),
            Effect::OpenTopic(config) => self.open_topic(config).await,
            Effect::CloseTopic(topic) => self.close_topic(topic).await,
            Effect::OpenQueue(config) => self.open_queue(name, config, creates).await,
            Effect::DetachQueue(queue) => self.detach_queue(queue).await,
            Effect::CloseQueue(queue) => {
                self.detach_queue(queue).await?;
                self.purge_later(queue_key(queue));
                Ok(())
            }
            Effect::TakeSnapshot { snapshot, queue } => self.take_snapshot(*snapshot, queue).await,
            Effect::DropSnapshot { snapshot, topic } => self.drop_snapshot(*snapshot, topic).await,
        }
    }

    pub async fn on_topic(
        &self,
        topic: &str,
        name: &str,
        build: impl FnOnce(&mut redis::Cmd),
    ) -> Result<Vec<Value>, BrokerError> {
        let mut call = function(name, &[topic]);
        call.arg(self.header(0));
        build(&mut call);
        Ok(self.shards.call(slot_of(topic), &Request::One(call)).await?)
    }

    async fn open_topic(self: &Arc<Self>, config: &TopicConfig) -> Result<(), BrokerError> {
        let (key, retention) = (topic_key(&config.topic), config.retention_ms.unwrap_or(0));
        self.on_topic(&key, "landline_open_topic", |call| {
            call.arg(retention);
        })
        .await?;
        self.purge_later(key);
        Ok(())
    }

    async fn close_topic(self: &Arc<Self>, topic: &TopicRef) -> Result<(), BrokerError> {
        let key = topic_key(topic);
        self.on_topic(&key, "landline_close_topic", |_| {}).await?;
        self.publishers.lock().remove(key.as_str());
        self.purge_later(key);
        Ok(())
    }

    async fn open_queue(&self, name: &str, config: &QueueConfig, creates: bool) -> Result<(), BrokerError> {
        let (queue, topic) = (self.queue(&config.queue), topic_key(&config.topic));
        let known = if creates { false } else { self.topic_of(&config.queue).await?.is_some() };
        if !known {
            self.route(&config.topic).await?;
        }
        let retry = config.retry.map_or((NEVER, NEVER), |r| (r.minimum_backoff_ms, r.maximum_backoff_ms));
        let call = |call: &mut redis::Cmd, _| {
            call.arg(u8::from(config.ordered)).arg(u8::from(config.exactly_once)).arg(retry.0).arg(retry.1);
            call.arg(config.max_delivery_attempts.unwrap_or(0))
                .arg(config.retention_ms.min(NEVER))
                .arg(u8::from(config.retain_acked));
            call.arg(&topic).arg(name);
        };
        self.on_queue(&queue, "landline_open_queue", call).await?;
        if known {
            return Ok(());
        }
        let attached = self
            .on_topic(&topic, "landline_attach", |call| {
                call.arg(name).arg(&*queue.key).arg("1");
            })
            .await;
        if let Err(BrokerError::Gone) = attached {
            // The topic went away meanwhile, so there is nothing this queue could hold.
            self.on_queue(&queue, "landline_detach_queue", |_, _| {}).await?;
        }
        attached.map(drop)
    }

    /// The topic a queue was made for, and the subscription's name; nothing when there is no such queue.
    pub async fn topic_of(&self, queue: &QueueRef) -> Result<Option<(String, String)>, BrokerError> {
        let key = queue_key(queue);
        let mut get = redis::cmd("HMGET");
        get.arg(&key).arg("t").arg("n");
        match array(self.shards.call(slot_of(&key), &Request::One(get)).await?)?.as_slice() {
            [topic @ Value::BulkString(_), name @ Value::BulkString(_)] => Ok(Some((text(topic)?, text(name)?))),
            _ => Ok(None),
        }
    }

    async fn detach_queue(&self, queue: &QueueRef) -> Result<(), BrokerError> {
        let (topic, name) = self.topic_of(queue).await?.ok_or(BrokerError::Gone)?;
        let view = self.queue(queue);
        // First off the topic, so that no publish that starts from now on finds it.
        self.on_topic(&topic, "landline_attach", |call| {
            call.arg(name).arg(&*view.key).arg("0");
        })
        .await?;
        self.on_queue(&view, "landline_detach_queue", |_, _| {}).await.map(drop)
    }

    pub async fn route(&self, topic: &TopicRef) -> Result<Route, BrokerError> {
        let values = self.on_topic(&topic_key(topic), "landline_route", |_| {}).await;
        let answer = array(values?)?;
        let [Value::Int(version), Value::Array(pairs)] = answer.as_slice() else {
            return Err(BrokerError::Damaged("a route was answered in an unknown form".into()));
        };
        let mut subscriptions = Vec::new();
        for pair in pairs.chunks_exact(2) {
            let queue =
                super::queue::queue_of(&text(&pair[1])?).ok_or_else(|| BrokerError::Damaged("a route names no queue".into()))?;
            subscriptions.push(Attached { name: text(&pair[0])?, incarnation: queue.incarnation });
        }
        subscriptions.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Route { version: *version as u64, subscriptions })
    }

    /// The keys of all queues and topics there are.
    pub async fn registered(&self) -> Result<Vec<String>, BrokerError> {
        let mut keys = redis::cmd("HKEYS");
        keys.arg(format!("{CATALOG}:q"));
        array(self.catalog(keys).await?)?.iter().map(text).collect()
    }
}
