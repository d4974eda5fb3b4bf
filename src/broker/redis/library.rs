//! The function library and how it gets into a server.

use redis::{Cmd, aio::MultiplexedConnection, cmd};

use crate::broker::BrokerError;

/// Version of the library's functions: raised with every change of what they take, answer or store. A server that already
/// has a newer one is refused, because an older node would misread what it finds.
pub const VERSION: u32 = 1;

/// The library's text; the order matters, later parts use the local functions of earlier ones.
const PARTS: [&str; 10] = [
    include_str!("lua/library.lua"),
    include_str!("lua/queue.lua"),
    include_str!("lua/ordering.lua"),
    include_str!("lua/time.lua"),
    include_str!("lua/lease.lua"),
    include_str!("lua/settle.lua"),
    include_str!("lua/append.lua"),
    include_str!("lua/manage.lua"),
    include_str!("lua/seek.lua"),
    include_str!("lua/records.lua"),
];

/// The whole library. It names its own content, so that a change of its text is noticed without a change of the version.
fn text() -> String {
    let body = PARTS.concat();
    let sum = crc32c::crc32c(body.as_bytes());
    format!("#!lua name=landline\n{}", body.replace("LANDLINE_VERSION", &format!("{VERSION}.{sum:08x}")))
}

fn own_version() -> String {
    format!("{VERSION}.{:08x}", crc32c::crc32c(PARTS.concat().as_bytes()))
}

/// A call of one of the library's functions.
pub fn function(name: &str, keys: &[&str]) -> Cmd {
    let mut call = cmd("FCALL");
    call.arg(name).arg(keys.len());
    for key in keys {
        call.arg(*key);
    }
    call
}

/// Makes sure that the server has this library. Replacing it is atomic, and calls under way finish with the old one.
///
/// # Errors
/// [`BrokerError::Damaged`] when the server has a newer library; [`BrokerError::Unavailable`] when it can't be loaded.
pub async fn ensure(connection: &mut MultiplexedConnection) -> Result<(), BrokerError> {
    let found: Option<String> = function("landline_version", &[]).query_async(connection).await.ok();
    let own = own_version();
    if let Some(found) = &found {
        if *found == own {
            return Ok(());
        }
        let version: u32 = found.split('.').next().and_then(|v| v.parse().ok()).unwrap_or(0);
        if version > VERSION {
            return Err(BrokerError::Damaged(format!(
                "Redis holds function library version {version}, newer than this server's {VERSION}"
            )));
        }
    }
    let mut load = cmd("FUNCTION");
    load.arg("LOAD").arg("REPLACE").arg(text());
    let loaded: redis::RedisResult<String> = load.query_async(connection).await;
    loaded
        .map(drop)
        .map_err(|e| BrokerError::Unavailable(format!("the function library can't be loaded (Redis 7 or newer is needed): {e}")))
}
