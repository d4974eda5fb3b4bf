//! How much one stream may hold: the client's limits, the server's ceiling and what the next response may carry.

/// Messages of one streamed response. Larger ones only delay the first message: from about a hundred on, the cost of a
/// response no longer shows.
pub const MAX_RESPONSE_MESSAGES: usize = 1000;

/// Encoded bytes of the messages in one streamed response, unless a single message is larger. The Rust client refuses
/// responses above 4 MiB, and sending larger ones than this costs more per message.
pub const MAX_RESPONSE_BYTES: u64 = 1 << 20;

/// Outstanding messages and bytes a stream may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    messages: u64,
    bytes: u64,
}

/// What may be leased next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// At least 1.
    pub messages: usize,
    /// At least 1; the message that reaches it is still sent.
    pub bytes: u64,
}

impl Limits {
    /// From `max_outstanding_messages` and `max_outstanding_bytes` of a stream's first request. Zero or less asks for no
    /// limit: of messages the stream then gets `ceiling`, of bytes as many as these messages have.
    pub fn new(max_outstanding_messages: i64, max_outstanding_bytes: i64, ceiling: u64) -> Self {
        let positive = |value: i64| u64::try_from(value).ok().filter(|value| *value > 0);
        Self {
            messages: positive(max_outstanding_messages).unwrap_or(ceiling.max(1)),
            bytes: positive(max_outstanding_bytes).unwrap_or(u64::MAX),
        }
    }

    /// What one response may carry while so much is outstanding; `None` when a limit is reached. The limit of bytes is
    /// checked before sending, so one message may overshoot it, and a stream with nothing outstanding always gets one.
    pub fn budget(&self, outstanding_messages: u64, outstanding_bytes: u64) -> Option<Budget> {
        if outstanding_messages == 0 {
            let messages = self.messages.min(MAX_RESPONSE_MESSAGES as u64) as usize;
            return Some(Budget { messages, bytes: self.bytes.min(MAX_RESPONSE_BYTES) });
        }
        let messages = self.messages.saturating_sub(outstanding_messages).min(MAX_RESPONSE_MESSAGES as u64) as usize;
        let bytes = self.bytes.saturating_sub(outstanding_bytes).min(MAX_RESPONSE_BYTES);
        (messages > 0 && bytes > 0).then_some(Budget { messages, bytes })
    }
}

/// How many of the leading messages, given by their sizes, make up one response: as many as fit `max_bytes`, and one in
/// any case.
pub fn fitting(sizes: impl IntoIterator<Item = usize>, max_bytes: u64) -> usize {
    let mut total = 0u64;
    sizes
        .into_iter()
        .enumerate()
        .take_while(|(index, size)| {
            total = total.saturating_add(*size as u64);
            *index == 0 || total <= max_bytes
        })
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_without_limits_gets_the_ceiling_of_messages_and_no_limit_of_bytes() {
        for none in [0, -1, i64::MIN] {
            let limits = Limits::new(none, none, 1500);
            assert_eq!(limits.budget(1499, u64::MAX - 1), Some(Budget { messages: 1, bytes: 1 }));
            assert_eq!(limits.budget(1500, 0), None);
        }
    }

    #[test]
    fn the_clients_own_limit_may_exceed_the_ceiling() {
        assert_eq!(Limits::new(5000, 0, 10).budget(4999, 1).map(|b| b.messages), Some(1));
    }

    #[test]
    fn a_response_is_bounded_whatever_the_limits() {
        let budget = Limits::new(i64::MAX, i64::MAX, 1).budget(0, 0).unwrap();
        assert_eq!(budget, Budget { messages: MAX_RESPONSE_MESSAGES, bytes: MAX_RESPONSE_BYTES });
    }

    #[test]
    fn sending_stops_when_either_limit_is_reached() {
        let limits = Limits::new(10, 1000, 1);
        assert_eq!(limits.budget(9, 999), Some(Budget { messages: 1, bytes: 1 }));
        assert_eq!(limits.budget(10, 10), None);
        assert_eq!(limits.budget(1, 1000), None);
        assert_eq!(limits.budget(1, 5000), None);
    }

    #[test]
    fn a_stream_with_nothing_outstanding_is_never_stuck() {
        assert_eq!(Limits::new(1, 1, 1).budget(0, 0), Some(Budget { messages: 1, bytes: 1 }));
        // Bytes can't be outstanding without messages; a count that says so must not block.
        assert!(Limits::new(1, 1, 1).budget(0, 99).is_some());
    }

    #[test]
    fn a_response_takes_what_fits_and_at_least_one_message() {
        assert_eq!(fitting([5, 5, 1], 10), 2);
        assert_eq!(fitting([50, 1], 10), 1);
        assert_eq!(fitting([], 10), 0);
        assert_eq!(fitting([10], 10), 1);
    }
}
