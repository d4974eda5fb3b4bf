//! The metadata of a trigger.

use std::collections::BTreeMap;

use crate::{
    broker::QueueStats,
    connector::Error,
    model::{SubscriptionName, text::clipped},
};

/// The target where neither `value` nor `subscriptionSize` is given, as KEDA's own scaler has it.
const DEFAULT_TARGET: f64 = 10.0;

/// What to look at and what to make of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Trigger {
    pub subscription: SubscriptionName,
    pub mode: Mode,
    /// How much of the metric one replica should have.
    pub target: f64,
    /// Beyond this there is work.
    activation: f64,
    /// Stands for the metric of a subscription that does not exist.
    pub if_null: Option<f64>,
}

/// Which of a subscription's numbers is meant: those that the broker knows for all nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    UndeliveredMessages,
    OldestUnackedAge,
    OutstandingMessages,
    BacklogBytes,
    RetainedAckedMessages,
}

/// Modes by their names, which are those of Google's metrics; the first is an older name of the second.
const MODES: [(&str, Mode); 6] = [
    ("SubscriptionSize", Mode::UndeliveredMessages),
    ("NumUndeliveredMessages", Mode::UndeliveredMessages),
    ("OldestUnackedMessageAge", Mode::OldestUnackedAge),
    ("NumOutstandingMessages", Mode::OutstandingMessages),
    ("BacklogBytes", Mode::BacklogBytes),
    ("NumRetainedAckedMessages", Mode::RetainedAckedMessages),
];

impl Mode {
    fn parse(text: &str) -> Result<Self, Error> {
        // `num_undelivered_messages` is what the names become in Google's metrics, and is taken as well.
        let plain = |text: &str| text.replace('_', "").to_ascii_lowercase();
        match MODES.iter().find(|(name, _)| plain(name) == plain(text)) {
            Some((_, mode)) => Ok(*mode),
            None => {
                let known: Vec<_> = MODES.iter().map(|(name, _)| *name).collect();
                let (known, text) = (known.join(", "), clipped(text));
                let why = format!(
                    "{text:?} is not one of {known}; counts and latencies are each node's own: scale by them with KEDA's \
                     prometheus trigger"
                );
                Err(wrong("mode", &why))
            }
        }
    }

    /// The number itself; ages in seconds.
    pub fn of(self, stats: &QueueStats, now_ms: u64) -> f64 {
        match self {
            Self::UndeliveredMessages => stats.undelivered_messages as f64,
            Self::OldestUnackedAge => {
                stats.oldest_unacked_ms.map_or(0.0, |published_ms| now_ms.saturating_sub(published_ms) as f64 / 1000.0)
            }
            Self::OutstandingMessages => stats.outstanding_messages as f64,
            Self::BacklogBytes => stats.backlog_bytes as f64,
            Self::RetainedAckedMessages => stats.retained_acked_messages as f64,
        }
    }
}

fn wrong(key: &str, why: &str) -> Error {
    Error::argument(&format!("scalerMetadata.{key}"), why)
}

/// Values of one trigger by key. What is empty is not there, and what is not known here is KEDA's own affair.
struct Metadata<'m>(&'m BTreeMap<String, String>);

impl<'m> Metadata<'m> {
    fn get(&self, key: &str) -> Option<&'m str> {
        self.0.get(key).map(|value| value.trim()).filter(|value| !value.is_empty())
    }

    /// The value, or the one that KEDA took from the environment of what it scales.
    fn get_or_from_env(&self, key: &str) -> Option<&'m str> {
        self.get(key).or_else(|| self.get(&format!("{key}FromEnv")))
    }

    fn number(&self, key: &str, least: f64) -> Result<Option<f64>, Error> {
        let Some(text) = self.get(key) else { return Ok(None) };
        let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && *number >= least);
        number.map(Some).ok_or_else(|| wrong(key, &format!("{:?} is not a number from {least}", clipped(text))))
    }
}

impl Trigger {
    /// Reads a trigger's metadata.
    ///
    /// # Errors
    /// [`Error::Argument`] with the key and what is wrong with it.
    pub fn parse(metadata: &BTreeMap<String, String>) -> Result<Self, Error> {
        let metadata = Metadata(metadata);
        for key in ["aggregation", "timeHorizon"] {
            if metadata.get(key).is_some() {
                return Err(wrong(key, "is not supported: the value is that of this moment, leave it out"));
            }
        }
        if metadata.get_or_from_env("topicName").is_some() {
            return Err(wrong(
                "topicName",
                "is not supported: topics only count, and each node for itself; give subscriptionName",
            ));
        }
        let size = metadata.number("subscriptionSize", 0.0)?.filter(|size| *size > 0.0);
        let mode = match metadata.get("mode") {
            Some(text) => Mode::parse(text)?,
            None => Mode::UndeliveredMessages,
        };
        // The older key settles both, as it does in KEDA.
        let (mode, target) = match size {
            Some(size) => (Mode::UndeliveredMessages, size),
            None => (mode, metadata.number("value", 0.0)?.unwrap_or(DEFAULT_TARGET)),
        };
        if target <= 0.0 {
            return Err(wrong("value", "must be more than 0"));
        }
        Ok(Self {
            subscription: subscription(&metadata)?,
            mode,
            target,
            activation: metadata.number("activationValue", 0.0)?.unwrap_or(0.0),
            if_null: metadata.number("valueIfNull", 0.0)?,
        })
    }

    /// Whether this much of the metric is work.
    pub fn is_active(&self, value: f64) -> bool {
        value > self.activation
    }

    /// The metric's name for Kubernetes: the mode and the subscription, in letters, digits and hyphens.
    pub fn metric_name(&self) -> String {
        let mode = MODES.iter().rev().find(|(_, mode)| *mode == self.mode).map_or("", |(name, _)| name);
        let name = format!("landline-{mode}-{}-{}", self.subscription.project(), self.subscription.id());
        name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' }).collect()
    }
}

fn subscription(metadata: &Metadata<'_>) -> Result<SubscriptionName, Error> {
    let Some(given) = metadata.get_or_from_env("subscriptionName") else {
        return Err(wrong("subscriptionName", "is missing: an id with projectId, or projects/PROJECT/subscriptions/ID"));
    };
    if given.contains('/') {
        return Ok(SubscriptionName::parse(given)?);
    }
    let Some(project) = metadata.get_or_from_env("projectId") else {
        return Err(wrong("projectId", "is missing: it goes with a subscriptionName that is only an id"));
    };
    Ok(SubscriptionName::new(project, given)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parse(given: &[(&str, &str)]) -> Result<Trigger, Error> {
        Trigger::parse(&given.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    }

    const FULL: (&str, &str) = ("subscriptionName", "projects/shop/subscriptions/billing");

    #[test]
    fn a_subscription_is_named_in_full_or_by_its_project() {
        let full = parse(&[FULL]).unwrap();
        assert_eq!((full.mode, full.target, full.activation), (Mode::UndeliveredMessages, 10.0, 0.0));
        assert_eq!(parse(&[("subscriptionName", "billing"), ("projectId", "shop")]).unwrap(), full);
        assert_eq!(parse(&[("subscriptionNameFromEnv", FULL.1), ("scalerAddress", "x:1")]).unwrap(), full);
        assert_eq!(full.metric_name(), "landline-numundeliveredmessages-shop-billing");
    }

    #[test]
    fn modes_have_the_names_of_googles_metrics() {
        let mode = |text| parse(&[FULL, ("mode", text)]).unwrap().mode;
        assert_eq!(mode("SubscriptionSize"), Mode::UndeliveredMessages);
        assert_eq!(mode("OldestUnackedMessageAge"), Mode::OldestUnackedAge);
        assert_eq!(mode("backlog_bytes"), Mode::BacklogBytes);
        let stats = QueueStats { oldest_unacked_ms: Some(1500), undelivered_messages: 3, ..QueueStats::default() };
        assert_eq!(Mode::OldestUnackedAge.of(&stats, 4000), 2.5);
        assert_eq!(Mode::OldestUnackedAge.of(&QueueStats::default(), 4000), 0.0);
        assert_eq!(Mode::UndeliveredMessages.of(&stats, 4000), 3.0);
    }

    #[test]
    fn the_older_key_settles_mode_and_target() {
        let trigger = parse(&[FULL, ("subscriptionSize", "7"), ("mode", "BacklogBytes"), ("value", "3")]).unwrap();
        assert_eq!((trigger.mode, trigger.target), (Mode::UndeliveredMessages, 7.0));
        let trigger = parse(&[FULL, ("value", "2.5"), ("activationValue", "4")]).unwrap();
        assert_eq!(trigger.target, 2.5);
        assert!(!trigger.is_active(4.0) && trigger.is_active(4.1));
    }

    #[test]
    fn a_mistake_is_named_with_its_key() {
        for (given, key) in [
            (&[][..], "subscriptionName"),
            (&[("subscriptionName", "billing")], "projectId"),
            (&[FULL, ("mode", "PushRequestLatencies")], "mode"),
            (&[FULL, ("value", "0")], "value"),
            (&[FULL, ("value", "ten")], "value"),
            (&[FULL, ("activationValue", "-1")], "activationValue"),
            (&[FULL, ("valueIfNull", "NaN")], "valueIfNull"),
            (&[FULL, ("aggregation", "max")], "aggregation"),
            (&[FULL, ("timeHorizon", "2m")], "timeHorizon"),
            (&[("topicName", "orders")], "topicName"),
        ] {
            let error = parse(given).unwrap_err();
            assert!(error.to_string().contains(&format!("scalerMetadata.{key}: ")), "{given:?}: {error}");
        }
        assert!(matches!(parse(&[("subscriptionName", "projects/shop/topics/orders")]), Err(Error::Name(_))));
    }
}
