//! The broker's clock.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

/// Milliseconds since the epoch.
#[derive(Debug, Clone)]
pub enum Clock {
    /// The machine's clock.
    System,
    /// A clock that stands still until it is set: days pass at once in tests.
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// Whether time passes by itself.
    pub fn is_steady(&self) -> bool {
        matches!(self, Self::System)
    }

    pub fn now_ms(&self) -> u64 {
        match self {
            Self::System => SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64),
            Self::Manual(now) => now.load(Ordering::Acquire),
        }
    }
}
