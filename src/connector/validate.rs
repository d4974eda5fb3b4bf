//! Checks of single fields, shared by every request that carries them. Sources: the public reference of each field and the
//! quota page; the texts are those users' tests know.
//!
//! What this server does not honour is refused in [`unsupported`] and nowhere else.

use super::{
    Error, Options,
    draft::{DeadLetterDraft, RetryDraft, Span},
};
use crate::{
    model::{
        DeadLetterPolicy, ExpirationPolicy, RetryPolicy, StoragePolicy, TopicName,
        limits::{
            DEFAULT_EXPIRATION_SECONDS, DEFAULT_MIN_BACKOFF_SECONDS, DEFAULT_RETENTION_SECONDS, MAX_ACK_DEADLINE_SECONDS,
            MAX_BACKOFF_SECONDS, MAX_DELIVERY_ATTEMPTS, MAX_LABEL_CHARS, MAX_LABELS, MAX_RETENTION_SECONDS, MAX_SNAPSHOT_SECONDS,
            MIN_ACK_DEADLINE_SECONDS, MIN_DELIVERY_ATTEMPTS, MIN_EXPIRATION_SECONDS, MIN_RETENTION_SECONDS,
        },
        resource::Labels,
        text::clipped,
    },
    rules::filter::Filter,
};

mod push;

pub use push::push_config;

/// Bytes of a KMS key's name. Four path segments of at most 255 and their collections; a bound against abuse.
const MAX_KMS_KEY_BYTES: usize = 1200;
/// Regions of a storage policy; a bound against abuse, there are about fifty.
const MAX_REGIONS: usize = 100;
/// Bytes of a region's name; a bound against abuse.
const MAX_REGION_BYTES: usize = 63;

/// The one place for refusals of what is legal in the API but not done here. Remove a function when its feature exists.
pub mod unsupported {
    use super::Error;

    /// Import topics.
    pub fn ingestion(present: bool) -> Result<(), Error> {
        if present { Err(Error::Unsupported("ingestion_data_source_settings")) } else { Ok(()) }
    }

    /// Export subscriptions.
    pub fn exports(present: &[&'static str]) -> Result<(), Error> {
        present.first().map_or(Ok(()), |field| Err(Error::Unsupported(field)))
    }

    /// Exactly-once delivery is for pull subscriptions.
    pub fn exactly_once_push(exactly_once: bool, endpoint: &str) -> Result<(), Error> {
        if exactly_once && !endpoint.is_empty() {
            let why = "must not be true for a subscription with a push_endpoint";
            return Err(Error::argument("enable_exactly_once_delivery", why));
        }
        Ok(())
    }
}

/// Labels: at most 64; keys of 1 to 63 characters that start with a letter, values of 0 to 63; lower-case and caseless
/// letters, digits, `_` and `-`.
pub fn labels(labels: &Labels) -> Result<Labels, Error> {
    let invalid = |what: String| Error::argument("Invalid labels", what);
    if labels.len() > MAX_LABELS {
        return Err(invalid(format!("there are {}, but the maximum is {MAX_LABELS}", labels.len())));
    }
    for (key, value) in labels {
        if !key.chars().next().is_some_and(is_label_letter) {
            return Err(invalid(format!("the key '{}' does not start with a lower-case letter", clipped(key))));
        }
        for (part, text) in [("key", key), ("value", value)] {
            if text.chars().count() > MAX_LABEL_CHARS {
                return Err(invalid(format!("the {part} '{}' is longer than {MAX_LABEL_CHARS} characters", clipped(text))));
            }
            if let Some(bad) = text.chars().find(|c| !is_label_char(*c)) {
                return Err(invalid(format!("the {part} '{}' has the character {bad:?}", clipped(text))));
            }
        }
    }
    Ok(labels.clone())
}

/// Lower-case letters and letters of scripts without case.
fn is_label_letter(c: char) -> bool {
    c.is_alphabetic() && c.to_lowercase().eq([c])
}

fn is_label_char(c: char) -> bool {
    is_label_letter(c) || c.is_numeric() || c == '_' || c == '-'
}

fn legal(field: &'static str, span: Span) -> Result<Span, Error> {
    if span.is_legal() { Ok(span) } else { Err(Error::argument(field, "not a legal duration")) }
}

fn bounded(field: &'static str, given: Span, low: i64, high: i64, show: fn(Span) -> String) -> Result<u64, Error> {
    let span = legal(field, given)?.total_nanos();
    let (low, high) = (Span::seconds(low), Span::seconds(high));
    if span < low.total_nanos() || span > high.total_nanos() {
        return Err(Error::OutOfBounds { field, passed: show(given), low: show(low), high: show(high) });
    }
    Ok(given.whole_ms())
}

/// Retention of a topic or a subscription, 10 minutes to 31 days.
fn retention(given: Span) -> Result<u64, Error> {
    let show = |span: Span| span.to_string();
    bounded("message retention duration", given, MIN_RETENTION_SECONDS, MAX_RETENTION_SECONDS, show)
}

/// Retention of a topic; none keeps nothing.
pub fn topic_retention_ms(given: Option<Span>) -> Result<Option<u64>, Error> {
    given.map(retention).transpose()
}

/// Retention of a subscription, 7 days unless named.
pub fn subscription_retention_ms(given: Option<Span>) -> Result<u64, Error> {
    retention(given.unwrap_or(Span::seconds(DEFAULT_RETENTION_SECONDS)))
}

/// The ack deadline of a subscription, 10 to 600 s; 0 means the default.
pub fn ack_deadline_seconds(given: i32, options: &Options) -> Result<u32, Error> {
    let (low, high) = (MIN_ACK_DEADLINE_SECONDS, MAX_ACK_DEADLINE_SECONDS);
    match u32::try_from(given) {
        Ok(0) => Ok(options.default_ack_deadline_seconds),
        Ok(seconds) if (low..=high).contains(&seconds) => Ok(seconds),
        _ => Err(Error::OutOfBounds {
            field: "ack_deadline_seconds",
            passed: given.to_string(),
            low: low.to_string(),
            high: high.to_string(),
        }),
    }
}

/// The expiration policy: absent means 31 days, present without a time to live never, otherwise at least one day.
pub fn expiration(given: Option<Option<Span>>) -> Result<ExpirationPolicy, Error> {
    let ttl = match given {
        None => Span::seconds(DEFAULT_EXPIRATION_SECONDS),
        Some(None) => return Ok(ExpirationPolicy::Never),
        Some(Some(ttl)) => legal("expiration_policy.ttl", ttl)?,
    };
    let minimum = Span::seconds(MIN_EXPIRATION_SECONDS);
    if ttl.total_nanos() < minimum.total_nanos() {
        return Err(Error::TooSmall { field: "expiration duration", passed: ttl.to_string(), minimum: "24h".into() });
    }
    Ok(ExpirationPolicy::After { seconds: ttl.seconds, nanos: ttl.nanos })
}

/// The filter: empty, or at most 256 bytes in the filter language.
pub fn filter(text: &str) -> Result<String, Error> {
    if !text.is_empty() {
        Filter::parse(text).map_err(|e| Error::argument("filter", e.to_string().trim_end_matches('.')))?;
    }
    Ok(text.to_owned())
}

/// The retry policy: both halves 0 to 600 s, 10 s and 600 s where one is missing, the minimum not above the maximum.
pub fn retry(given: Option<&RetryDraft>) -> Result<Option<RetryPolicy>, Error> {
    let Some(draft) = given else { return Ok(None) };
    let minimum = draft.minimum_backoff.unwrap_or(Span::seconds(DEFAULT_MIN_BACKOFF_SECONDS));
    let maximum = draft.maximum_backoff.unwrap_or(Span::seconds(MAX_BACKOFF_SECONDS));
    let minimum_backoff_ms = bounded("minimum_backoff", minimum, 0, MAX_BACKOFF_SECONDS, Span::in_seconds)?;
    let maximum_backoff_ms = bounded("maximum_backoff", maximum, 0, MAX_BACKOFF_SECONDS, Span::in_seconds)?;
    if minimum.total_nanos() > maximum.total_nanos() {
        let why = format!("minimum_backoff {} is above maximum_backoff {}", minimum.in_seconds(), maximum.in_seconds());
        return Err(Error::argument("retry_policy", why));
    }
    Ok(Some(RetryPolicy { minimum_backoff_ms, maximum_backoff_ms }))
}

/// The dead-letter policy: a topic (whose existence is the caller's to check) and 5 to 100 attempts, 0 meaning 5. A policy
/// lacks a topic only after an update that cleared just the topic.
pub fn dead_letter(given: Option<&DeadLetterDraft>) -> Result<Option<DeadLetterPolicy>, Error> {
    let Some(draft) = given else { return Ok(None) };
    let dead_letter_topic = match draft.dead_letter_topic.as_str() {
        "" if draft.topic_cleared => None,
        name => Some(TopicName::parse(name)?),
    };
    let attempts = if draft.max_delivery_attempts == 0 { MIN_DELIVERY_ATTEMPTS } else { draft.max_delivery_attempts };
    let (field, passed) = ("max_delivery_attempts", attempts.to_string());
    if attempts < MIN_DELIVERY_ATTEMPTS {
        return Err(Error::TooSmall { field, passed, minimum: MIN_DELIVERY_ATTEMPTS.to_string() });
    }
    if attempts > MAX_DELIVERY_ATTEMPTS {
        return Err(Error::TooLarge { field, passed, maximum: MAX_DELIVERY_ATTEMPTS.to_string() });
    }
    Ok(Some(DeadLetterPolicy { dead_letter_topic, max_delivery_attempts: attempts as u32 }))
}

/// A point in time: from the year 1 to the year 9999. Source: timestamp.proto.
pub fn timestamp(field: &'static str, given: Span) -> Result<Span, Error> {
    const YEARS_1_TO_9999: std::ops::RangeInclusive<i64> = -62_135_596_800..=253_402_300_799;
    let legal = YEARS_1_TO_9999.contains(&given.seconds) && (0..1_000_000_000).contains(&given.nanos);
    if legal { Ok(given) } else { Err(Error::argument(field, "not a legal timestamp")) }
}

/// The end of a snapshot's life, set by an update: in the future, and as for new ones at most 7 days away.
pub fn expire_time_ms(given: Option<Span>, now_ms: u64) -> Result<u64, Error> {
    let given = given.ok_or_else(|| Error::argument("expire_time", "must be set"))?;
    let at_ms = timestamp("expire_time", given)?.whole_ms();
    if at_ms <= now_ms || at_ms > now_ms + MAX_SNAPSHOT_SECONDS as u64 * 1000 {
        return Err(Error::argument("expire_time", "must be in the future, but no more than 168h from now"));
    }
    Ok(at_ms)
}

/// The name of a KMS key: empty, or `projects/*/locations/*/keyRings/*/cryptoKeys/*`. Stored and echoed, not applied.
pub fn kms_key_name(name: &str) -> Result<String, Error> {
    const COLLECTIONS: [&str; 4] = ["projects", "locations", "keyRings", "cryptoKeys"];
    let parts: Vec<_> = name.split('/').collect();
    let shaped = parts.len() == 2 * COLLECTIONS.len()
        && parts.chunks(2).zip(COLLECTIONS).all(|(part, collection)| part[0] == collection && !part[1].is_empty());
    if name.is_empty() || shaped && name.len() <= MAX_KMS_KEY_BYTES {
        return Ok(name.to_owned());
    }
    Err(Error::argument("kms_key_name", "must be projects/*/locations/*/keyRings/*/cryptoKeys/*"))
}

/// The storage policy: at least one region when present. Stored and echoed; the operator chooses the place.
pub fn storage_policy(given: Option<&StoragePolicy>) -> Result<Option<StoragePolicy>, Error> {
    const FIELD: &str = "message_storage_policy.allowed_persistence_regions";
    let Some(policy) = given else { return Ok(None) };
    let regions = &policy.allowed_persistence_regions;
    if regions.is_empty() || regions.len() > MAX_REGIONS {
        return Err(Error::argument(FIELD, format!("there are {}, but there must be 1 to {MAX_REGIONS}", regions.len())));
    }
    let legal = |region: &String| {
        (1..=MAX_REGION_BYTES).contains(&region.len()) && region.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    match regions.iter().find(|region| !legal(region)) {
        Some(region) => Err(Error::argument(FIELD, format!("'{}' is not the name of a region", clipped(region)))),
        None => Ok(Some(policy.clone())),
    }
}

#[cfg(test)]
mod tests;
