//! Access policies of topics, subscriptions, snapshots and schemas: stored, versioned by etag, gone with their resource.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::{Connector, Error, record};
use crate::{
    broker::{BrokerError, Change, Effect, Expect, Kind},
    model::{
        Name, NameError,
        access::{AccessPolicy, Binding, PERMISSIONS, PermissionSet},
        names::{Collection, SchemaKind, SnapshotKind, SubscriptionKind, TopicKind},
        text::clipped,
    },
};

/// Etag of a resource that has no policy; production answers the same bytes.
const NO_POLICY: &[u8] = &[0x00, 0x20, 0x01];
/// Members of one policy, as the public limits of access policies say.
const MAX_MEMBERS: usize = 1500;

/// A policy and the resource it was set on.
#[derive(Serialize, Deserialize)]
struct Stored {
    /// The incarnation of the resource; a resource created again under the same name does not inherit the policy.
    incarnation: u64,
    policy: AccessPolicy,
}

/// Any resource's record holds its incarnation under this name.
#[derive(Deserialize)]
struct Identity {
    incarnation: u64,
}

/// A resource that can have a policy.
struct Resource {
    kind: Kind,
    name: String,
    id: String,
}

impl Resource {
    fn parse(name: &str) -> Result<Self, Error> {
        fn of<K: Collection>(kind: Kind, name: &str) -> Result<Resource, NameError> {
            let name = Name::<K>::parse(name)?;
            Ok(Resource { kind, name: name.to_string(), id: name.id().to_owned() })
        }
        let resource = match name.split('/').nth(2) {
            Some("subscriptions") => of::<SubscriptionKind>(Kind::Subscription, name),
            Some("snapshots") => of::<SnapshotKind>(Kind::Snapshot, name),
            Some("schemas") => of::<SchemaKind>(Kind::Schema, name),
            _ => of::<TopicKind>(Kind::Topic, name),
        };
        Ok(resource?)
    }
}

fn etag(version: u64) -> Bytes {
    if version == 0 { Bytes::from_static(NO_POLICY) } else { Bytes::copy_from_slice(&version.to_be_bytes()) }
}

fn check(policy: &AccessPolicy) -> Result<(), Error> {
    if !matches!(policy.version, 0 | 1 | 3) {
        return Err(Error::argument("policy.version", format!("{}; it must be 0, 1 or 3", policy.version)));
    }
    let members: usize = policy.bindings.iter().map(|b| b.members.len()).sum();
    if members > MAX_MEMBERS {
        let (passed, maximum) = (members.to_string(), MAX_MEMBERS.to_string());
        return Err(Error::TooLarge { field: "policy.bindings.members", passed, maximum });
    }
    policy.bindings.iter().try_for_each(check_binding)
}

/// What the server would not act on is refused, not stored: a role of one's own says nothing here.
fn check_binding(binding: &Binding) -> Result<(), Error> {
    if PermissionSet::of_role(&binding.role).is_none() {
        let roles = "roles/pubsub.admin, .editor, .viewer, .publisher or .subscriber; other roles are not known to this server";
        return Err(Error::argument("policy.bindings.role", format!("'{}'; it must be {roles}", clipped(&binding.role))));
    }
    let known = |member: &str| {
        matches!(member, "allUsers" | "allAuthenticatedUsers")
            || ["user:", "serviceAccount:", "group:", "domain:", "principal://", "principalSet://", "deleted:"]
                .iter()
                .any(|prefix| member.strip_prefix(prefix).is_some_and(|rest| !rest.is_empty()))
    };
    match binding.members.iter().find(|member| !known(member)) {
        Some(member) => Err(Error::argument(
            "policy.bindings.members",
            format!(
                "'{}'; it must be allUsers, allAuthenticatedUsers or have a prefix such as user: or serviceAccount:",
                clipped(member)
            ),
        )),
        None => Ok(()),
    }
}

impl Connector {
    /// The resource's incarnation; none when it does not exist.
    async fn incarnation(&self, resource: &Resource) -> Result<Option<u64>, Error> {
        match self.broker().get(resource.kind, &resource.name).await? {
            Some(found) => Ok(Some(record::decode::<Identity>(&found)?.incarnation)),
            None => Ok(None),
        }
    }

    /// The stored policy, with the version of its record; an empty one and 0 where none was set on this incarnation.
    async fn stored_policy(&self, resource: &Resource, incarnation: u64) -> Result<(AccessPolicy, u64, Expect), Error> {
        let Some(found) = self.broker().get(Kind::Policy, &resource.name).await? else {
            return Ok((AccessPolicy::default(), 0, Expect::Absent));
        };
        let stored: Stored = record::decode(&found)?;
        let expect = Expect::Version(found.version);
        if stored.incarnation == incarnation {
            Ok((stored.policy, found.version, expect))
        } else {
            Ok((AccessPolicy::default(), 0, expect))
        }
    }

    /// Reads a resource's policy and its etag.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is no such resource.
    pub async fn get_policy(&self, resource: &str) -> Result<(AccessPolicy, Bytes), Error> {
        let resource = Resource::parse(resource)?;
        let incarnation = self.incarnation(&resource).await?.ok_or_else(|| Error::NotFound(resource.id.clone()))?;
        let (policy, version, _) = self.stored_policy(&resource, incarnation).await?;
        Ok((policy, etag(version)))
    }

    /// Replaces a resource's policy; with an etag only if it is still the policy's.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::PolicyChanged`] when the etag is out of date, or a part of the policy that is not legal.
    pub async fn set_policy(
        &self,
        resource: &str,
        mut policy: AccessPolicy,
        expected: &[u8],
    ) -> Result<(AccessPolicy, Bytes), Error> {
        let resource = Resource::parse(resource)?;
        check(&policy)?;
        // A role that nobody has.
        policy.bindings.retain(|binding| !binding.members.is_empty());
        let incarnation = self.incarnation(&resource).await?.ok_or_else(|| Error::NotFound(resource.id.clone()))?;
        for _ in 0..super::topics::CHANGE_TRIES {
            let (_, version, expect) = self.stored_policy(&resource, incarnation).await?;
            if !expected.is_empty() && etag(version) != expected {
                return Err(Error::PolicyChanged);
            }
            let body = Some(record::encode(&Stored { incarnation, policy: policy.clone() })?);
            let change = Change { kind: Kind::Policy, name: resource.name.clone(), expect, body, effect: Effect::None };
            match self.broker().change(change).await {
                Ok(version) => return Ok((policy, etag(version))),
                Err(BrokerError::Conflict(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(Error::Contended)
    }

    /// Which of these permissions the caller has: without authentication all of them on a resource that exists, and none on
    /// one that does not.
    ///
    /// # Errors
    /// A permission that the API does not know.
    pub async fn test_permissions(&self, resource: &str, permissions: Vec<String>) -> Result<Vec<String>, Error> {
        let resource = Resource::parse(resource)?;
        if let Some(unknown) = permissions.iter().find(|p| !PERMISSIONS.contains(&p.as_str())) {
            return Err(Error::argument("permissions", format!("'{}' is not a permission of Pub/Sub", clipped(unknown))));
        }
        Ok(if self.incarnation(&resource).await?.is_some() { permissions } else { Vec::new() })
    }
}
