//! The fields of a subscription: which update paths there are, what each copies, and how each field is checked and set.

use crate::{
    connector::{
        Error, Options,
        draft::{DeadLetterDraft, RetryDraft, Span, SubscriptionDraft},
        mask::{Path, Paths, path},
        validate,
    },
    model::{ExpirationPolicy, OidcToken, PushWrapper, Subscription},
};

pub const DEAD_LETTER: &str = "dead_letter_policy";
pub const DEAD_LETTER_TOPIC: &str = "dead_letter_policy.dead_letter_topic";

/// The fields that are checked and set one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field {
    Push,
    Exports,
    AckDeadline,
    RetainAcked,
    Retention,
    Labels,
    Expiration,
    DeadLetter,
    Retry,
    ExactlyOnce,
    Transforms,
}

pub const FIELDS: [Field; 11] = [
    Field::Push,
    Field::Exports,
    Field::AckDeadline,
    Field::RetainAcked,
    Field::Retention,
    Field::Labels,
    Field::Expiration,
    Field::DeadLetter,
    Field::Retry,
    Field::ExactlyOnce,
    Field::Transforms,
];

const BIGQUERY: &[&str] =
    &["table", "use_topic_schema", "write_metadata", "drop_unknown_fields", "state", "use_table_schema", "service_account_email"];
const CLOUD_STORAGE: &[&str] = &[
    "bucket",
    "filename_prefix",
    "filename_suffix",
    "filename_datetime_format",
    "text_config",
    "avro_config",
    "avro_config.write_metadata",
    "avro_config.use_topic_schema",
    "max_duration",
    "max_bytes",
    "max_messages",
    "state",
    "service_account_email",
];
const BIGTABLE: &[&str] = &["table", "app_profile_id", "service_account_email", "write_metadata", "state"];

pub const PATHS: Paths<SubscriptionDraft, Field> = Paths {
    resource: "Subscription",
    mutable: &[
        path("push_config", Field::Push, |to, from| to.push_config.clone_from(&from.push_config)),
        path("push_config.push_endpoint", Field::Push, |to, from| {
            to.push_config.endpoint.clone_from(&from.push_config.endpoint);
        }),
        path("push_config.attributes", Field::Push, |to, from| {
            to.push_config.attributes.clone_from(&from.push_config.attributes);
        }),
        path("push_config.oidc_token", Field::Push, |to, from| {
            to.push_config.oidc_token.clone_from(&from.push_config.oidc_token);
        }),
        path("push_config.oidc_token.service_account_email", Field::Push, |to, from| {
            set_token(to, |token| token.service_account_email = token_of(from).service_account_email);
        }),
        path("push_config.oidc_token.audience", Field::Push, |to, from| {
            set_token(to, |token| token.audience = token_of(from).audience);
        }),
        path("push_config.pubsub_wrapper", Field::Push, |to, from| {
            copy_wrapper(to, from, |wrapper| matches!(wrapper, PushWrapper::Pubsub));
        }),
        path("push_config.no_wrapper", Field::Push, |to, from| {
            copy_wrapper(to, from, |wrapper| matches!(wrapper, PushWrapper::None { .. }));
        }),
        path("push_config.no_wrapper.write_metadata", Field::Push, |to, from| {
            let write_metadata = matches!(from.push_config.wrapper, Some(PushWrapper::None { write_metadata: true }));
            to.push_config.wrapper = Some(PushWrapper::None { write_metadata });
        }),
        export("bigquery_config", BIGQUERY, |to, from| copy_export(to, from, "bigquery_config")),
        export("cloud_storage_config", CLOUD_STORAGE, |to, from| copy_export(to, from, "cloud_storage_config")),
        export("bigtable_config", BIGTABLE, |to, from| copy_export(to, from, "bigtable_config")),
        path("ack_deadline_seconds", Field::AckDeadline, |to, from| to.ack_deadline_seconds = from.ack_deadline_seconds),
        path("retain_acked_messages", Field::RetainAcked, |to, from| to.retain_acked_messages = from.retain_acked_messages),
        path("message_retention_duration", Field::Retention, |to, from| to.message_retention = from.message_retention),
        path("labels", Field::Labels, |to, from| to.labels.clone_from(&from.labels)),
        path("expiration_policy", Field::Expiration, |to, from| to.expiration_policy = from.expiration_policy),
        path("expiration_policy.ttl", Field::Expiration, |to, from| {
            to.expiration_policy = Some(from.expiration_policy.flatten());
        }),
        path(DEAD_LETTER, Field::DeadLetter, |to, from| to.dead_letter_policy.clone_from(&from.dead_letter_policy)),
        path(DEAD_LETTER_TOPIC, Field::DeadLetter, |to, from| {
            let given = from.dead_letter_policy.as_ref().map(|p| p.dead_letter_topic.clone()).unwrap_or_default();
            set_dead_letter(to, |policy| {
                policy.topic_cleared = given.is_empty();
                policy.dead_letter_topic = given;
            });
        }),
        path("dead_letter_policy.max_delivery_attempts", Field::DeadLetter, |to, from| {
            let given = from.dead_letter_policy.as_ref().map(|p| p.max_delivery_attempts).unwrap_or_default();
            set_dead_letter(to, |policy| policy.max_delivery_attempts = given);
        }),
        path("retry_policy", Field::Retry, |to, from| to.retry_policy = from.retry_policy),
        path("retry_policy.minimum_backoff", Field::Retry, |to, from| {
            set_retry(to, |policy| policy.minimum_backoff = from.retry_policy.and_then(|p| p.minimum_backoff));
        }),
        path("retry_policy.maximum_backoff", Field::Retry, |to, from| {
            set_retry(to, |policy| policy.maximum_backoff = from.retry_policy.and_then(|p| p.maximum_backoff));
        }),
        path("enable_exactly_once_delivery", Field::ExactlyOnce, |to, from| {
            to.enable_exactly_once_delivery = from.enable_exactly_once_delivery;
        }),
        path("message_transforms", Field::Transforms, |to, from| to.message_transforms.clone_from(&from.message_transforms)),
    ],
    immutable: &[
        "name",
        "topic",
        "filter",
        "enable_message_ordering",
        "detached",
        "state",
        "topic_message_retention_duration",
        "analytics_hub_subscription_info",
        "analytics_hub_subscription_info.listing",
        "analytics_hub_subscription_info.subscription",
        "tags",
    ],
};

type Copy = fn(&mut SubscriptionDraft, &SubscriptionDraft);

const fn export(path: &'static str, nested: &'static [&'static str], copy: Copy) -> Path<SubscriptionDraft, Field> {
    Path { path, nested, field: Field::Exports, copy }
}

fn copy_export(to: &mut SubscriptionDraft, from: &SubscriptionDraft, name: &'static str) {
    if from.exports.contains(&name) {
        to.exports.push(name);
    }
}

fn token_of(draft: &SubscriptionDraft) -> OidcToken {
    draft.push_config.oidc_token.clone().unwrap_or(OidcToken { service_account_email: String::new(), audience: String::new() })
}

/// Changes a part of the token; a token whose parts are all cleared is none.
fn set_token(draft: &mut SubscriptionDraft, change: impl FnOnce(&mut OidcToken)) {
    let mut token = token_of(draft);
    change(&mut token);
    let cleared = token.service_account_email.is_empty() && token.audience.is_empty();
    draft.push_config.oidc_token = (!cleared).then_some(token);
}

/// Takes over the wrapper if it is of the named kind; clears it if it was of that kind and no longer is.
fn copy_wrapper(to: &mut SubscriptionDraft, from: &SubscriptionDraft, named: fn(&PushWrapper) -> bool) {
    let is_named = |draft: &SubscriptionDraft| draft.push_config.wrapper.as_ref().is_some_and(named);
    if is_named(from) {
        to.push_config.wrapper = from.push_config.wrapper;
    } else if is_named(to) {
        to.push_config.wrapper = None;
    }
}

/// Changes a part of the policy; a policy whose parts are all cleared is none.
fn set_dead_letter(draft: &mut SubscriptionDraft, change: impl FnOnce(&mut DeadLetterDraft)) {
    let mut policy = draft.dead_letter_policy.clone().unwrap_or_default();
    change(&mut policy);
    let cleared = policy.dead_letter_topic.is_empty() && policy.max_delivery_attempts == 0;
    draft.dead_letter_policy = (!cleared).then_some(policy);
}

/// Changes a half of the policy; clearing a half of no policy makes none.
fn set_retry(draft: &mut SubscriptionDraft, change: impl FnOnce(&mut RetryDraft)) {
    let mut policy = draft.retry_policy.unwrap_or_default();
    change(&mut policy);
    if draft.retry_policy.is_some() || policy != RetryDraft::default() {
        draft.retry_policy = Some(policy);
    }
}

/// Checks one field of a draft and sets it.
pub fn set(sub: &mut Subscription, field: Field, draft: &SubscriptionDraft, options: &Options) -> Result<(), Error> {
    match field {
        Field::Push => sub.push_config = validate::push_config(&draft.push_config)?,
        Field::Exports => validate::unsupported::exports(&draft.exports)?,
        Field::AckDeadline => sub.ack_deadline_seconds = validate::ack_deadline_seconds(draft.ack_deadline_seconds, options)?,
        Field::RetainAcked => sub.retain_acked_messages = draft.retain_acked_messages,
        Field::Retention => sub.message_retention_ms = validate::subscription_retention_ms(draft.message_retention)?,
        Field::Labels => sub.labels = validate::labels(&draft.labels)?,
        Field::Expiration => sub.expiration_policy = validate::expiration(draft.expiration_policy)?,
        Field::DeadLetter => sub.dead_letter_policy = validate::dead_letter(draft.dead_letter_policy.as_ref())?,
        Field::Retry => sub.retry_policy = validate::retry(draft.retry_policy.as_ref())?,
        Field::ExactlyOnce => sub.enable_exactly_once_delivery = draft.enable_exactly_once_delivery,
        // Tried on threads of their own: the caller's to do.
        Field::Transforms => {}
    }
    Ok(())
}

/// A stored subscription in the shape of a request, so that parts of it can be replaced.
pub fn to_draft(sub: &Subscription) -> SubscriptionDraft {
    SubscriptionDraft {
        name: sub.name.to_string(),
        topic: sub.topic.to_string(),
        push_config: sub.push_config.clone(),
        exports: Vec::new(),
        ack_deadline_seconds: sub.ack_deadline_seconds as i32,
        retain_acked_messages: sub.retain_acked_messages,
        message_retention: Some(Span::from_ms(sub.message_retention_ms)),
        labels: sub.labels.clone(),
        enable_message_ordering: sub.enable_message_ordering,
        expiration_policy: Some(match sub.expiration_policy {
            ExpirationPolicy::Never => None,
            ExpirationPolicy::After { seconds, nanos } => Some(Span { seconds, nanos }),
        }),
        filter: sub.filter.clone(),
        dead_letter_policy: sub.dead_letter_policy.as_ref().map(|policy| DeadLetterDraft {
            dead_letter_topic: policy.dead_letter_topic.as_ref().map(ToString::to_string).unwrap_or_default(),
            max_delivery_attempts: policy.max_delivery_attempts as i32,
            topic_cleared: policy.dead_letter_topic.is_none(),
        }),
        retry_policy: sub.retry_policy.map(|policy| RetryDraft {
            minimum_backoff: Some(Span::from_ms(policy.minimum_backoff_ms)),
            maximum_backoff: Some(Span::from_ms(policy.maximum_backoff_ms)),
        }),
        enable_exactly_once_delivery: sub.enable_exactly_once_delivery,
        message_transforms: Vec::new(),
    }
}
