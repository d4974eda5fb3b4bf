//! Delivery policies of a subscription.

use serde::{Deserialize, Serialize};

use super::TopicName;

/// Exponential backoff between deliveries of one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetryPolicy {
    /// First wait, milliseconds, 0 to 600,000.
    pub minimum_backoff_ms: u64,
    /// Longest wait, milliseconds, 0 to 600,000 and not below the minimum.
    pub maximum_backoff_ms: u64,
}

impl RetryPolicy {
    /// The wait after the given number of failed deliveries, counted from 1: the minimum, doubled each time, up to the
    /// maximum. Milliseconds.
    pub fn backoff_ms(&self, failures: u32) -> u64 {
        let doublings = failures.saturating_sub(1).min(30);
        // From a minimum of 0 the first doubling starts at a tenth of a second.
        let base = if doublings > 0 { self.minimum_backoff_ms.max(100) } else { self.minimum_backoff_ms };
        (base << doublings).clamp(self.minimum_backoff_ms, self.maximum_backoff_ms)
    }
}

/// Where messages go that were delivered too often.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadLetterPolicy {
    /// Full name of the dead-letter topic; empty when an update cleared only this part.
    pub dead_letter_topic: Option<TopicName>,
    /// Delivery attempts before forwarding, 5 to 100.
    pub max_delivery_attempts: u32,
}

/// When an idle subscription is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExpirationPolicy {
    /// Present without a time to live: the subscription stays.
    Never,
    /// Deleted after this many seconds without activity, at least one day. Nanoseconds are kept for the echo.
    After { seconds: i64, nanos: i32 },
}
