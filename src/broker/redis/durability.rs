//! What a confirmed write survives, and whether the servers are set up for it.

use std::{collections::HashMap, time::Duration};

use redis::{aio::MultiplexedConnection, cmd};

use super::replicas::connected;
use crate::broker::BrokerError;

/// What must have happened to a write before it is confirmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// Redis has done with it what it is set up for; less than its disk is warned about.
    #[default]
    AsConfigured,
    /// Redis has it in memory.
    None,
    /// Redis has written it to its disk. Needs `appendonly yes` and `appendfsync always`.
    Fsync,
    /// All replicas that are connected have it too, and at least this many.
    Replicas(u32),
}

/// Longest wait for replicas. Beyond it the write is not confirmed, though it may have been made.
pub const REPLICA_TIMEOUT: Duration = Duration::from_secs(2);

fn settings(answer: redis::RedisResult<HashMap<String, String>>) -> HashMap<String, String> {
    answer.unwrap_or_default()
}

/// Names the run of a server: another one after a restart.
///
/// # Errors
/// The connection's.
pub async fn run_id(connection: &mut MultiplexedConnection) -> redis::RedisResult<String> {
    let info: String = cmd("INFO").arg("server").query_async(connection).await?;
    Ok(info.lines().find_map(|line| line.strip_prefix("run_id:")).unwrap_or_default().trim().to_owned())
}

/// Looks at a server before it is used.
///
/// # Errors
/// [`BrokerError::Unavailable`] when it is no master or can't give the durability that was asked for.
pub async fn check(connection: &mut MultiplexedConnection, server: &str, durability: Durability) -> Result<(), BrokerError> {
    let role: redis::RedisResult<redis::Value> = cmd("ROLE").query_async(connection).await;
    if let Ok(redis::Value::Array(parts)) = &role
        && let Some(redis::Value::BulkString(role)) = parts.first()
        && role != b"master"
    {
        return Err(BrokerError::Unavailable(format!("{server} is a {}, not a master", String::from_utf8_lossy(role))));
    }
    // A managed service may forbid CONFIG; then nothing is known and nothing is claimed.
    let config = settings(cmd("CONFIG").arg("GET").arg("append*").query_async(connection).await);
    let appendonly = config.get("appendonly").map(String::as_str);
    let appendfsync = config.get("appendfsync").map(String::as_str);
    match (durability, appendonly, appendfsync) {
        (Durability::Fsync, Some(only), Some(sync)) if only != "yes" || sync != "always" => {
            return Err(BrokerError::Unavailable(format!(
                "{server}: durability fsync needs appendonly yes and appendfsync always, found {only} and {sync}"
            )));
        }
        (Durability::Fsync, None, _) => tracing::warn!(server, "CONFIG can't be read: durability fsync is not verified"),
        (Durability::AsConfigured, Some("no"), _) => {
            tracing::warn!(server, "appendonly is no: messages are lost when this Redis stops");
        }
        (Durability::AsConfigured, Some(_), Some(sync)) if sync != "always" => {
            tracing::warn!(
                server,
                appendfsync = sync,
                "confirmed messages of the last moments are lost when this Redis's machine fails"
            );
        }
        _ => {}
    }
    if let Durability::Replicas(wanted) = durability {
        let info: String = cmd("INFO").arg("replication").query_async(connection).await.unwrap_or_default();
        let online = connected(&info);
        if online < wanted {
            return Err(BrokerError::Unavailable(format!(
                "{server}: durability replicas:{wanted} needs as many replicas, {online} are connected"
            )));
        }
    }
    let policy = settings(cmd("CONFIG").arg("GET").arg("maxmemory-policy").query_async(connection).await);
    if let Some(policy) = policy.get("maxmemory-policy").filter(|p| *p != "noeviction") {
        let memory = settings(cmd("CONFIG").arg("GET").arg("maxmemory").query_async(connection).await);
        let limited = memory.get("maxmemory").is_some_and(|m| m != "0");
        if limited {
            return Err(BrokerError::Unavailable(format!(
                "{server}: maxmemory-policy is {policy}, which deletes messages; it must be noeviction"
            )));
        }
    }
    Ok(())
}
