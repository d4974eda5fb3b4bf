//! The function library and how it gets into a server.

use redis::{Cmd, aio::MultiplexedConnection, cmd};

use crate::broker::BrokerError;

/// Version of the library's functions: raised with every change of what they take or answer. It is part of their names, so
/// that nodes of two versions work on the same data side by side, each with its own functions. What is stored has a version
/// of its own (`FORMAT` in `lua/library.lua`), which every function checks.
pub const VERSION: u32 = 3;

/// The library's text; the order matters, later parts use the local functions of earlier ones.
const PARTS: [&str; 11] = [
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
    include_str!("lua/peek.lua"),
];

/// The whole library. It names its own content, so that a change of its text is noticed without a change of the version.
fn text() -> String {
    text_of(VERSION)
}

/// The same under another version's names.
pub fn text_of(version: u32) -> String {
    let body = PARTS.concat();
    let body = body.replace("register('landline_", &format!("register('landline{version}_"));
    format!("#!lua name=landline{version}\n{}", body.replace("LANDLINE_VERSION", &own_version()))
}

/// The version, and a sum of the text: builds of one version may differ in it while they are developed.
pub fn own_version() -> String {
    format!("{VERSION}.{:08x}", crc32c::crc32c(PARTS.concat().as_bytes()))
}

/// A call of one of the library's functions, named without its version.
///
/// A function uses more keys than the one it is given, all of the same slot. While a cluster moves that slot, some of them
/// are on one server and some on the other, and the function would take those that are elsewhere for empty. So a second key
/// is named that never exists: a server that has only some of the keys a call names refuses it until the slot has moved.
pub fn function(name: &str, keys: &[&str]) -> Cmd {
    match keys {
        [only] => function_over(name, &[only, &format!("{only}:-")]),
        _ => function_over(name, keys),
    }
}

/// A call with these keys and no other, for a function that looks at how many there are.
pub fn function_over(name: &str, keys: &[&str]) -> Cmd {
    let mut call = cmd("FCALL");
    call.arg(format!("landline{VERSION}{}", name.strip_prefix("landline").unwrap_or(name))).arg(keys.len());
    for key in keys {
        call.arg(*key);
    }
    call
}

/// Makes sure that the server has this library. Replacing it is atomic, and calls under way finish with the old one.
///
/// # Errors
/// [`BrokerError::Unavailable`] when it can't be loaded.
pub async fn ensure(connection: &mut MultiplexedConnection) -> Result<(), BrokerError> {
    let found: Option<String> = function("landline_version", &[]).query_async(connection).await.ok();
    if found.is_some_and(|found| found == own_version()) {
        return Ok(());
    }
    let mut load = cmd("FUNCTION");
    load.arg("LOAD").arg("REPLACE").arg(text());
    let loaded: redis::RedisResult<String> = load.query_async(connection).await;
    loaded
        .map(drop)
        .map_err(|e| BrokerError::Unavailable(format!("the function library can't be loaded (Redis 7 or newer is needed): {e}")))
}
