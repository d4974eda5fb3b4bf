//! Subscriptions.

use super::{DELETED_TOPIC, duration, duration_ms, span, transform, transform_draft};
use crate::{
    api::proto::pubsub as pb,
    connector::{
        SubscriptionView,
        draft::{DeadLetterDraft, RetryDraft, Span, SubscriptionDraft},
    },
    model::{ExpirationPolicy, OidcToken, PushConfig, PushWrapper, RetryPolicy},
};

/// A subscription as a caller sent it. Tags are accepted and not kept: they belong to an organisation's resource manager.
pub fn subscription_draft(subscription: pb::Subscription) -> SubscriptionDraft {
    let exports = [
        ("bigquery_config", subscription.bigquery_config.is_some()),
        ("cloud_storage_config", subscription.cloud_storage_config.is_some()),
        ("bigtable_config", subscription.bigtable_config.is_some()),
    ];
    SubscriptionDraft {
        name: subscription.name,
        topic: subscription.topic,
        push_config: push_config(subscription.push_config),
        exports: exports.into_iter().filter(|(_, present)| *present).map(|(field, _)| field).collect(),
        ack_deadline_seconds: subscription.ack_deadline_seconds,
        retain_acked_messages: subscription.retain_acked_messages,
        message_retention: subscription.message_retention_duration.map(span),
        labels: subscription.labels,
        enable_message_ordering: subscription.enable_message_ordering,
        expiration_policy: subscription.expiration_policy.map(|policy| policy.ttl.map(span)),
        filter: subscription.filter,
        dead_letter_policy: subscription.dead_letter_policy.map(|policy| DeadLetterDraft {
            dead_letter_topic: policy.dead_letter_topic,
            max_delivery_attempts: policy.max_delivery_attempts,
            topic_cleared: false,
        }),
        retry_policy: subscription.retry_policy.map(|policy| RetryDraft {
            minimum_backoff: policy.minimum_backoff.map(span),
            maximum_backoff: policy.maximum_backoff.map(span),
        }),
        enable_exactly_once_delivery: subscription.enable_exactly_once_delivery,
        message_transforms: subscription.message_transforms.into_iter().map(transform_draft).collect(),
    }
}

/// A push configuration as a caller sent it; an absent one is an empty one.
pub fn push_config(config: Option<pb::PushConfig>) -> PushConfig {
    let config = config.unwrap_or_default();
    PushConfig {
        endpoint: config.push_endpoint,
        attributes: config.attributes,
        oidc_token: config.authentication_method.map(|pb::push_config::AuthenticationMethod::OidcToken(token)| OidcToken {
            service_account_email: token.service_account_email,
            audience: token.audience,
        }),
        wrapper: config.wrapper.map(|wrapper| match wrapper {
            pb::push_config::Wrapper::PubsubWrapper(_) => PushWrapper::Pubsub,
            pb::push_config::Wrapper::NoWrapper(wrapper) => PushWrapper::None { write_metadata: wrapper.write_metadata },
        }),
    }
}

/// A subscription as callers see it, defaults filled in.
pub fn subscription(view: SubscriptionView) -> pb::Subscription {
    let SubscriptionView { subscription, topic } = view;
    pb::Subscription {
        name: subscription.name.to_string(),
        topic: if topic.is_some() { subscription.topic.to_string() } else { DELETED_TOPIC.into() },
        push_config: Some(shown_push_config(subscription.push_config)),
        ack_deadline_seconds: subscription.ack_deadline_seconds as i32,
        retain_acked_messages: subscription.retain_acked_messages,
        message_retention_duration: Some(duration_ms(subscription.message_retention_ms)),
        labels: subscription.labels,
        enable_message_ordering: subscription.enable_message_ordering,
        expiration_policy: Some(expiration_policy(subscription.expiration_policy)),
        filter: subscription.filter,
        dead_letter_policy: subscription.dead_letter_policy.map(|policy| pb::DeadLetterPolicy {
            dead_letter_topic: policy.dead_letter_topic.map(|name| name.to_string()).unwrap_or_default(),
            max_delivery_attempts: policy.max_delivery_attempts as i32,
        }),
        retry_policy: subscription.retry_policy.map(retry_policy),
        detached: subscription.detached,
        enable_exactly_once_delivery: subscription.enable_exactly_once_delivery,
        topic_message_retention_duration: topic.and_then(|topic| topic.topic.message_retention_ms).map(duration_ms),
        state: pb::subscription::State::Active.into(),
        message_transforms: subscription.message_transforms.into_iter().map(transform).collect(),
        ..pb::Subscription::default()
    }
}

fn expiration_policy(policy: ExpirationPolicy) -> pb::ExpirationPolicy {
    let ttl = match policy {
        ExpirationPolicy::Never => None,
        ExpirationPolicy::After { seconds, nanos } => Some(duration(Span { seconds, nanos })),
    };
    pb::ExpirationPolicy { ttl }
}

fn retry_policy(policy: RetryPolicy) -> pb::RetryPolicy {
    pb::RetryPolicy {
        minimum_backoff: Some(duration_ms(policy.minimum_backoff_ms)),
        maximum_backoff: Some(duration_ms(policy.maximum_backoff_ms)),
    }
}

fn shown_push_config(config: PushConfig) -> pb::PushConfig {
    use pb::push_config::{AuthenticationMethod, NoWrapper, PubsubWrapper, Wrapper};
    pb::PushConfig {
        push_endpoint: config.endpoint,
        attributes: config.attributes,
        authentication_method: config.oidc_token.map(|token| {
            AuthenticationMethod::OidcToken(pb::push_config::OidcToken {
                service_account_email: token.service_account_email,
                audience: token.audience,
            })
        }),
        wrapper: config.wrapper.map(|wrapper| match wrapper {
            PushWrapper::Pubsub => Wrapper::PubsubWrapper(PubsubWrapper {}),
            PushWrapper::None { write_metadata } => Wrapper::NoWrapper(NoWrapper { write_metadata }),
        }),
    }
}
