//! Full resource names, `projects/{project}/{collection}/{id}`, parsed once at the edge.
//!
//! Rules: an id has 3 to 255 characters, starts with an ASCII letter, goes on with letters, digits and `-_.~+%`,
//! and does not start with `goog`. Source: the resource-name section of the public Pub/Sub documentation.

use std::{fmt, marker::PhantomData, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::text::clipped;

/// What a name names; fixes the collection segment and the error text.
pub trait Collection: Send + Sync + 'static {
    /// The path segment, for example `topics`.
    const SEGMENT: &'static str;
}

macro_rules! collection {
    ($(#[$doc:meta])* $marker:ident, $alias:ident, $segment:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $marker;
        impl Collection for $marker {
            const SEGMENT: &'static str = $segment;
        }
        $(#[$doc])*
        pub type $alias = Name<$marker>;
    };
}

collection!(
    /// A topic's full name.
    TopicKind, TopicName, "topics"
);
collection!(
    /// A subscription's full name.
    SubscriptionKind, SubscriptionName, "subscriptions"
);
collection!(
    /// A snapshot's full name.
    SnapshotKind, SnapshotName, "snapshots"
);
collection!(
    /// A schema's full name, without a revision.
    SchemaKind, SchemaName, "schemas"
);

/// A checked full resource name; cheap to clone.
pub struct Name<K> {
    full: Arc<str>,
    /// Byte length of the project part, so that both parts are slices of `full`.
    project_len: u32,
    kind: PhantomData<fn() -> K>,
}

/// A name that does not follow the rules; carries the name as it was given, [clipped].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "Invalid resource name given (name={0}). Refer to https://cloud.google.com/pubsub/docs/pubsub-basics#resource_names for more information."
)]
pub struct NameError(String);

impl NameError {
    /// `text` is no legal name.
    pub fn new(text: &str) -> Self {
        Self(clipped(text).into_owned())
    }
}

const PREFIX: &str = "projects/";

/// True for a project id, a project number or a domain-scoped id such as `example.com:shop`.
pub fn is_project_id(text: &str) -> bool {
    (1..=255).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:~+%".contains(&b))
}

fn is_resource_id(text: &str) -> bool {
    (3..=255).contains(&text.len())
        && text.as_bytes()[0].is_ascii_alphabetic()
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.~+%".contains(&b))
        && !text.starts_with("goog")
}

impl<K: Collection> Name<K> {
    /// Parses a full name such as `projects/shop/topics/orders`.
    ///
    /// # Errors
    /// [`NameError`] when the shape, the project or the id is not legal.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        let error = || NameError::new(text);
        let (project, rest) = text.strip_prefix(PREFIX).and_then(|t| t.split_once('/')).ok_or_else(error)?;
        let (segment, id) = rest.split_once('/').ok_or_else(error)?;
        if segment != K::SEGMENT || !is_project_id(project) || !is_resource_id(id) {
            return Err(error());
        }
        Ok(Self { full: text.into(), project_len: project.len() as u32, kind: PhantomData })
    }

    /// Builds a name from its two parts.
    ///
    /// # Errors
    /// [`NameError`] when either part is not legal.
    pub fn new(project: &str, id: &str) -> Result<Self, NameError> {
        Self::parse(&format!("{PREFIX}{project}/{}/{id}", K::SEGMENT))
    }

    /// The whole name.
    pub fn as_str(&self) -> &str {
        &self.full
    }

    /// The whole name, shared.
    pub fn shared(&self) -> Arc<str> {
        self.full.clone()
    }

    /// The project part.
    pub fn project(&self) -> &str {
        &self.full[PREFIX.len()..PREFIX.len() + self.project_len as usize]
    }

    /// The id part.
    pub fn id(&self) -> &str {
        &self.full[PREFIX.len() + self.project_len as usize + K::SEGMENT.len() + 2..]
    }
}

impl SubscriptionName {
    /// The broker channel of this subscription, `gcp.sub.{project/id}`; the braces are literal and make every key of
    /// the channel share one Redis Cluster slot.
    pub fn channel(&self) -> String {
        format!("gcp.sub.{{{}/{}}}", self.project(), self.id())
    }
}

impl TopicName {
    /// The broker channel of this topic's retained log, `gcp.topic.{project/id}`.
    pub fn channel(&self) -> String {
        format!("gcp.topic.{{{}/{}}}", self.project(), self.id())
    }
}

impl<K> Clone for Name<K> {
    fn clone(&self) -> Self {
        Self { full: self.full.clone(), project_len: self.project_len, kind: PhantomData }
    }
}

impl<K> PartialEq for Name<K> {
    fn eq(&self, other: &Self) -> bool {
        self.full == other.full
    }
}

impl<K> Eq for Name<K> {}

impl<K> PartialOrd for Name<K> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<K> Ord for Name<K> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.full.cmp(&other.full)
    }
}

impl<K> std::hash::Hash for Name<K> {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.full.hash(state);
    }
}

impl<K> fmt::Debug for Name<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.full)
    }
}

impl<K> fmt::Display for Name<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.full)
    }
}

impl<K> Serialize for Name<K> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.full)
    }
}

impl<'de, K: Collection> Deserialize<'de> for Name<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_splits_into_project_and_id() {
        let name = TopicName::parse("projects/example.com:shop/topics/a%b+c~d.e").unwrap();
        assert_eq!(name.project(), "example.com:shop");
        assert_eq!(name.id(), "a%b+c~d.e");
        assert_eq!(name.channel(), "gcp.topic.{example.com:shop/a%b+c~d.e}");
    }

    #[test]
    fn ids_outside_the_rules_are_refused_with_the_name_in_the_text() {
        let long = "a".repeat(256);
        for id in ["ab", "1abc", "goog-x", "googx", "a b", "a*b", "a^b", "a/b", "", long.as_str()] {
            let full = format!("projects/p1/topics/{id}");
            let error = TopicName::parse(&full).unwrap_err();
            assert!(error.to_string().starts_with(&format!("Invalid resource name given (name={full})")), "{error}");
        }
        for full in ["t1", "projects/p1/topic/t11", "projects//topics/t11", "", "projects/p1/subscriptions/t11"] {
            assert!(TopicName::parse(full).is_err(), "{full}");
        }
    }

    #[test]
    fn the_shortest_and_the_longest_id_are_accepted() {
        assert!(TopicName::new("p1", "abc").is_ok());
        assert!(TopicName::new("p1", &"a".repeat(255)).is_ok());
    }
}
