//! Resources as a caller sent them: the API's shape, nothing checked yet. The transports fill them in, [`super::validate`]
//! turns them into the model's types.

use std::fmt;

use crate::model::{Encoding, PushConfig, SchemaType, StoragePolicy, resource::Labels};

/// A duration, or a point in time since the epoch, as a caller gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Span {
    pub seconds: i64,
    /// Legal values have the sign of the seconds and stay below one second.
    pub nanos: i32,
}

/// Nanoseconds of a second.
const NANOS: i64 = 1_000_000_000;
/// The farthest second from zero that a protocol buffer duration reaches: about 10,000 years. Source: duration.proto.
const MAX_SPAN_SECONDS: i64 = 315_576_000_000;

impl Span {
    /// A whole number of seconds.
    pub const fn seconds(seconds: i64) -> Self {
        Self { seconds, nanos: 0 }
    }

    /// A number of milliseconds.
    pub fn from_ms(ms: u64) -> Self {
        Self { seconds: (ms / 1000) as i64, nanos: (ms % 1000 * 1_000_000) as i32 }
    }

    /// True when both parts are in the range of a protocol buffer duration and agree in sign.
    pub fn is_legal(self) -> bool {
        self.seconds.abs() <= MAX_SPAN_SECONDS
            && i64::from(self.nanos).abs() < NANOS
            && i64::from(self.nanos) * self.seconds.signum() >= 0
    }

    /// All of it in nanoseconds.
    pub fn total_nanos(self) -> i128 {
        i128::from(self.seconds) * i128::from(NANOS) + i128::from(self.nanos)
    }

    /// Whole milliseconds, rounded down; 0 when negative.
    pub fn whole_ms(self) -> u64 {
        (self.total_nanos() / 1_000_000).clamp(0, i128::from(u64::MAX)) as u64
    }

    /// Whole milliseconds, rounded up; 0 when negative.
    pub fn ms_rounded_up(self) -> u64 {
        (self.total_nanos().max(0) as u128).div_ceil(1_000_000).min(u128::from(u64::MAX)) as u64
    }

    /// Seconds with a fraction if there is one, for example `601s`.
    pub fn in_seconds(self) -> String {
        let total = self.total_nanos();
        let sign = if total < 0 { "-" } else { "" };
        let (whole, fraction) = (total.unsigned_abs() / NANOS as u128, total.unsigned_abs() % NANOS as u128);
        if fraction == 0 {
            format!("{sign}{whole}s")
        } else {
            format!("{sign}{whole}.{}s", format!("{fraction:09}").trim_end_matches('0'))
        }
    }
}

/// Hours, minutes and seconds, without those that are zero: `9m59s`, `744h`.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.total_nanos();
        if total < i128::from(NANOS) {
            return f.write_str(&self.in_seconds());
        }
        let (hours, minutes) = (self.seconds / 3600, self.seconds / 60 % 60);
        let rest = Self { seconds: self.seconds % 60, nanos: self.nanos };
        if hours > 0 {
            write!(f, "{hours}h")?;
        }
        if minutes > 0 {
            write!(f, "{minutes}m")?;
        }
        if rest.total_nanos() > 0 {
            f.write_str(&rest.in_seconds())?;
        }
        Ok(())
    }
}

/// A topic as a caller sent it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TopicDraft {
    pub name: String,
    pub labels: Labels,
    pub message_storage_policy: Option<StoragePolicy>,
    pub kms_key_name: String,
    pub schema_settings: Option<SchemaDraft>,
    pub message_retention: Option<Span>,
    /// The caller sent ingestion settings, whatever they are.
    pub ingestion: bool,
    pub message_transforms: Vec<TransformDraft>,
}

/// Schema settings as a caller sent them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SchemaDraft {
    pub schema: String,
    /// None when the caller named none, or one that does not exist.
    pub encoding: Option<Encoding>,
    pub first_revision_id: String,
    pub last_revision_id: String,
}

/// A schema's definition as a caller sent it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DefinitionDraft {
    /// None when the caller named none, or one that does not exist.
    pub kind: Option<SchemaType>,
    pub text: String,
    pub compiled: Option<CompiledDraft>,
}

/// Compiled protocol buffer files as a caller sent them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CompiledDraft {
    pub root_message: String,
    pub files: Vec<u8>,
}

/// A message transform as a caller sent it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransformDraft {
    pub kind: TransformKind,
    pub disabled: bool,
    pub enabled: bool,
}

/// What a transform does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TransformKind {
    JavaScript {
        function_name: String,
        code: String,
    },
    /// One that names no transform, or one that is unknown here.
    Unknown,
    Compression,
    AiInference,
}

/// A subscription as a caller sent it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SubscriptionDraft {
    pub name: String,
    pub topic: String,
    pub push_config: PushConfig,
    /// Names of the export configurations that the caller sent, for example `bigquery_config`.
    pub exports: Vec<&'static str>,
    pub ack_deadline_seconds: i32,
    pub retain_acked_messages: bool,
    pub message_retention: Option<Span>,
    pub labels: Labels,
    pub enable_message_ordering: bool,
    /// Present without a time to live: never.
    pub expiration_policy: Option<Option<Span>>,
    pub filter: String,
    pub dead_letter_policy: Option<DeadLetterDraft>,
    pub retry_policy: Option<RetryDraft>,
    pub enable_exactly_once_delivery: bool,
    pub message_transforms: Vec<TransformDraft>,
}

/// A dead-letter policy as a caller sent it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeadLetterDraft {
    pub dead_letter_topic: String,
    pub max_delivery_attempts: i32,
    /// An update cleared the topic and nothing else, which is how some tools begin to change a policy.
    pub topic_cleared: bool,
}

/// A retry policy as a caller sent it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RetryDraft {
    pub minimum_backoff: Option<Span>,
    pub maximum_backoff: Option<Span>,
}

/// A snapshot as a caller sent it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SnapshotDraft {
    pub name: String,
    pub labels: Labels,
    /// Since the epoch.
    pub expire_time: Option<Span>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_written_as_in_the_service_texts() {
        let texts = [(599, 0, "9m59s"), (600, 0, "10m"), (2_678_400, 0, "744h"), (3600, 0, "1h"), (0, 0, "0s"), (-5, 0, "-5s")];
        for (seconds, nanos, text) in texts {
            assert_eq!(Span { seconds, nanos }.to_string(), text);
        }
        assert_eq!(Span { seconds: 3661, nanos: 500_000_000 }.to_string(), "1h1m1.5s");
        assert_eq!(Span { seconds: 0, nanos: -1_000_000 }.to_string(), "-0.001s");
        assert_eq!(Span::seconds(601).in_seconds(), "601s");
    }

    #[test]
    fn milliseconds_are_rounded_down_or_up_on_demand() {
        let span = Span { seconds: 5, nanos: 1 };
        assert_eq!((span.whole_ms(), span.ms_rounded_up()), (5000, 5001));
        assert_eq!((Span::seconds(-5).whole_ms(), Span::seconds(-5).ms_rounded_up()), (0, 0));
        assert_eq!(Span::from_ms(5001), Span { seconds: 5, nanos: 1_000_000 });
    }

    #[test]
    fn parts_out_of_range_or_of_different_sign_are_not_legal() {
        assert!(Span { seconds: 1, nanos: 999_999_999 }.is_legal());
        assert!(Span { seconds: -1, nanos: -1 }.is_legal());
        for (seconds, nanos) in [(1, -1), (-1, 1), (0, 1_000_000_000), (i64::MAX, 0), (i64::MIN + 1, 0)] {
            assert!(!Span { seconds, nanos }.is_legal(), "{seconds} {nanos}");
        }
    }
}
