//! The short form of resources to create at the start: `project,topic:subscription:subscription,topic`.

use std::fmt;

use crate::model::{SubscriptionName, TopicName};

/// Topics with their subscriptions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Preload {
    pub topics: Vec<(TopicName, Vec<SubscriptionName>)>,
    text: String,
}

impl Preload {
    /// Reads projects separated by semicolons; `None` when an id is not a legal one.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut topics = Vec::new();
        for project in text.split(';').map(str::trim).filter(|p| !p.is_empty()) {
            let (project, items) = project.split_once(',')?;
            for item in items.split(',').map(str::trim) {
                let mut ids = item.split(':').map(str::trim);
                let topic = TopicName::new(project, ids.next().unwrap_or_default()).ok()?;
                let subscriptions = ids.map(|id| SubscriptionName::new(project, id)).collect::<Result<_, _>>().ok()?;
                topics.push((topic, subscriptions));
            }
        }
        Some(Self { topics, text: text.to_owned() })
    }
}

impl fmt::Display for Preload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
