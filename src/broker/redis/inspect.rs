//! A look at one subscription's keys, for an operator. It changes nothing that is not due anyway.

use std::{fmt::Write, sync::Arc};

use redis::{Cmd, Value, cmd};
use tokio::sync::mpsc;

use super::{
    address::Address,
    codec::{Reader, Set},
    connection::{Request, Shards},
    durability::Durability,
    engine::{Engine, array, bytes},
    queue::queue_of,
    records::CATALOG,
    slots::slot_of,
};
use crate::broker::BrokerError;

/// The keys of a queue by the end of their names, what they hold, and the command that counts it.
const KEYS: [(&str, &str, &str); 13] = [
    (":cx", "chunks in the index", "XLEN"),
    (":ch", "chunks in delivery", "HLEN"),
    (":ls", "chunks with leases", "ZCARD"),
    (":rt", "messages delivered before", "HLEN"),
    (":rd", "ready for redelivery", "LLEN"),
    (":dl", "waiting for their backoff", "ZCARD"),
    (":dd", "dead letters", "ZCARD"),
    (":ky", "ordering keys in use", "HLEN"),
    (":kb", "ordering keys in backoff", "ZCARD"),
    (":gm", "chunks with messages gone for good", "HLEN"),
    (":mk", "chunks with messages set aside by a seek", "HLEN"),
    (":sd", "settled redeliveries remembered", "HLEN"),
    (":wt", "nodes that wait for messages", "ZCARD"),
];
/// Leases shown; an operator at night reads no more.
const MAX_LEASES: usize = 50;

/// Describes a subscription, named in full.
///
/// # Errors
/// [`BrokerError::Gone`] when there is none of this name, otherwise what keeps the servers from being read.
pub async fn inspect(url: &str, subscription: &str) -> Result<String, BrokerError> {
    let (told, _happened) = mpsc::unbounded_channel();
    let address = Address::parse(url).map_err(BrokerError::Unavailable)?;
    let shards = Shards::open(address, Durability::None, told).await?;
    let engine = Engine::new(shards, Durability::None, None);
    engine.learn_time().await?;
    engine.check_format().await?;
    let mut out = String::new();
    for key in keys_of(&engine, subscription).await? {
        describe(&engine, subscription, &key, &mut out).await?;
    }
    engine.shards.close();
    if out.is_empty() { Err(BrokerError::Gone) } else { Ok(out) }
}

/// The queues registered under a name: one, or two for a moment while one is deleted and made anew.
async fn keys_of(engine: &Engine, subscription: &str) -> Result<Vec<String>, BrokerError> {
    let mut all = cmd("HGETALL");
    all.arg(format!("{CATALOG}:q"));
    let list = array(engine.shards.call(slot_of(CATALOG), &Request::One(all)).await?)?;
    let mut keys = Vec::new();
    for pair in list.chunks_exact(2) {
        let (key, name) = (bytes(&pair[0])?, bytes(&pair[1])?);
        let key = String::from_utf8_lossy(key).into_owned();
        if name == subscription.as_bytes() && queue_of(&key).is_some() {
            keys.push(key);
        }
    }
    Ok(keys)
}

async fn describe(engine: &Arc<Engine>, subscription: &str, key: &str, out: &mut String) -> Result<(), BrokerError> {
    let queue = queue_of(key).ok_or(BrokerError::Gone)?;
    let (view, stats) = (engine.queue(&queue), engine.stats(&queue).await?);
    let now_ms = engine.now_ms();
    let mut line = |name: &str, value: String| {
        // Writing to a string does not fail.
        let _ = writeln!(out, "{name:<42} {value}");
    };
    line("subscription", subscription.to_owned());
    line("key", format!("{key} in slot {}", view.slot));
    line("unacknowledged", format!("{} messages, {} bytes", stats.undelivered_messages, stats.backlog_bytes));
    line("leased", stats.outstanding_messages.to_string());
    let oldest = stats.oldest_unacked_ms.map(|ms| format!("published {} s ago", now_ms.saturating_sub(ms) / 1000));
    line("oldest unacknowledged message", oldest.unwrap_or_else(|| "none".to_owned()));
    line("acknowledged and kept for seeking", stats.retained_acked_messages.to_string());
    let counts = KEYS.map(|(end, _, count)| {
        let mut command = cmd(count);
        command.arg(format!("{key}{end}"));
        command
    });
    let counts = engine.shards.call(view.slot, &Request::Many(counts.into())).await?;
    for ((end, what, _), count) in KEYS.iter().zip(&counts) {
        let count = if let Value::Int(count) = count { *count } else { 0 };
        line(what, format!("{count:<10} {key}{end}"));
    }
    let mut leases = leases(engine, view.slot, key).await?;
    leases.sort();
    for lease in leases.iter().take(MAX_LEASES) {
        let left = lease.deadline_ms as i64 - now_ms as i64;
        let what = format!("{} messages of chunk {} for node {}", lease.count, lease.chunk, lease.node);
        line(&format!("lease {}", lease.number), format!("{what}, {:.1} s left", left as f64 / 1000.0));
    }
    if leases.len() > MAX_LEASES {
        line("further leases", (leases.len() - MAX_LEASES).to_string());
    }
    Ok(())
}

/// A lease as it is stored; the first to end comes first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Lease {
    deadline_ms: u64,
    number: u64,
    chunk: u64,
    node: String,
    count: usize,
}

async fn leases(engine: &Engine, slot: u16, key: &str) -> Result<Vec<Lease>, BrokerError> {
    let mut first: Cmd = cmd("ZRANGE");
    first.arg(format!("{key}:ls")).arg(0).arg(MAX_LEASES);
    let due = array(engine.shards.call(slot, &Request::One(first)).await?)?;
    let mut leases = Vec::new();
    for chunk in &due {
        let chunk = String::from_utf8_lossy(bytes(chunk)?).into_owned();
        let mut get = cmd("HGET");
        get.arg(format!("{key}:ch")).arg(&chunk);
        if let Some(Value::BulkString(stored)) = engine.shards.call(slot, &Request::One(get)).await?.first() {
            read_leases(stored, chunk.parse().unwrap_or(0), &mut leases)?;
        }
    }
    Ok(leases)
}

/// Reads what `lua/queue.lua` writes as `CHUNK` and `LEASE`.
fn read_leases(stored: &[u8], chunk: u64, into: &mut Vec<Lease>) -> Result<(), BrokerError> {
    let mut from = Reader(stored);
    from.bytes(8 + 2 + 2 + 4 + 8 + 8 + 1)?;
    let keys = usize::from(from.u16()?);
    from.bytes(keys)?;
    while !from.is_empty() {
        let number = from.u64()?;
        let node = from.bytes(8)?[..4].iter().map(|byte| format!("{byte:02x}")).collect();
        from.u64()?;
        let deadline_ms = from.u64()?;
        from.u8()?;
        let count = Set::read(&mut from)?.iter().count();
        into.push(Lease { deadline_ms, number, chunk, node, count });
    }
    Ok(())
}
