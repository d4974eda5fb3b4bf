//! Access policies: who may do what with one resource.

use serde::{Deserialize, Serialize};

/// The policy of one topic, subscription, snapshot or schema.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccessPolicy {
    pub version: i32,
    pub bindings: Vec<Binding>,
}

/// A role given to members.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binding {
    /// `roles/pubsub.publisher`; records of earlier versions may hold roles that are not known, which give nothing.
    pub role: String,
    /// `user:a@example.com`, `serviceAccount:…`, `group:…`, `allUsers` and so on.
    pub members: Vec<String>,
}

macro_rules! permissions {
    ($($variant:ident = $name:literal,)*) => {
        /// A permission of the API, as the public reference of roles and permissions lists them.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Permission {
            $($variant,)*
        }

        /// The names of all permissions, in their order.
        pub const PERMISSIONS: &[&str] = &[$($name,)*];

        const ALL: &[Permission] = &[$(Permission::$variant,)*];
    };
}

permissions! {
    MessageTransformsValidate = "pubsub.messageTransforms.validate",
    SchemasAttach = "pubsub.schemas.attach",
    SchemasCommit = "pubsub.schemas.commit",
    SchemasCreate = "pubsub.schemas.create",
    SchemasDelete = "pubsub.schemas.delete",
    SchemasGet = "pubsub.schemas.get",
    SchemasGetIamPolicy = "pubsub.schemas.getIamPolicy",
    SchemasList = "pubsub.schemas.list",
    SchemasListRevisions = "pubsub.schemas.listRevisions",
    SchemasRollback = "pubsub.schemas.rollback",
    SchemasSetIamPolicy = "pubsub.schemas.setIamPolicy",
    SchemasValidate = "pubsub.schemas.validate",
    SnapshotsCreate = "pubsub.snapshots.create",
    SnapshotsDelete = "pubsub.snapshots.delete",
    SnapshotsGet = "pubsub.snapshots.get",
    SnapshotsGetIamPolicy = "pubsub.snapshots.getIamPolicy",
    SnapshotsList = "pubsub.snapshots.list",
    SnapshotsSeek = "pubsub.snapshots.seek",
    SnapshotsSetIamPolicy = "pubsub.snapshots.setIamPolicy",
    SnapshotsUpdate = "pubsub.snapshots.update",
    SubscriptionsConsume = "pubsub.subscriptions.consume",
    SubscriptionsCreate = "pubsub.subscriptions.create",
    SubscriptionsDelete = "pubsub.subscriptions.delete",
    SubscriptionsGet = "pubsub.subscriptions.get",
    SubscriptionsGetIamPolicy = "pubsub.subscriptions.getIamPolicy",
    SubscriptionsList = "pubsub.subscriptions.list",
    SubscriptionsSetIamPolicy = "pubsub.subscriptions.setIamPolicy",
    SubscriptionsUpdate = "pubsub.subscriptions.update",
    TopicsAttachSubscription = "pubsub.topics.attachSubscription",
    TopicsCreate = "pubsub.topics.create",
    TopicsDelete = "pubsub.topics.delete",
    TopicsDetachSubscription = "pubsub.topics.detachSubscription",
    TopicsGet = "pubsub.topics.get",
    TopicsGetIamPolicy = "pubsub.topics.getIamPolicy",
    TopicsList = "pubsub.topics.list",
    TopicsPublish = "pubsub.topics.publish",
    TopicsSetIamPolicy = "pubsub.topics.setIamPolicy",
    TopicsUpdate = "pubsub.topics.update",
    TopicsUpdateTag = "pubsub.topics.updateTag",
}

impl Permission {
    /// The name, `pubsub.topics.publish`.
    pub fn name(self) -> &'static str {
        PERMISSIONS[self as usize]
    }

    /// The permission of a name.
    pub fn parse(name: &str) -> Option<Self> {
        PERMISSIONS.iter().position(|known| *known == name).map(|index| ALL[index])
    }
}

/// Some permissions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PermissionSet(u64);

// One bit a permission.
const _: () = assert!(ALL.len() <= 64);

impl PermissionSet {
    /// Every permission.
    pub fn all() -> Self {
        Self::of(ALL)
    }

    pub fn of(permissions: &[Permission]) -> Self {
        Self(permissions.iter().fold(0, |bits, permission| bits | 1 << *permission as u32))
    }

    pub fn contains(self, permission: Permission) -> bool {
        self.0 & 1 << permission as u32 != 0
    }

    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// What a predefined role allows, as the public reference of roles and permissions says; none for a role that says
    /// nothing of Pub/Sub.
    pub fn of_role(role: &str) -> Option<Self> {
        use Permission as P;
        let publish = Self::of(&[P::TopicsPublish]);
        let subscribe = Self::of(&[P::SnapshotsSeek, P::SubscriptionsConsume, P::TopicsAttachSubscription]);
        let view = Self::of(&[
            P::MessageTransformsValidate,
            P::SchemasGet,
            P::SchemasList,
            P::SchemasListRevisions,
            P::SchemasValidate,
            P::SnapshotsGet,
            P::SnapshotsList,
            P::SubscriptionsGet,
            P::SubscriptionsList,
            P::TopicsGet,
            P::TopicsList,
        ]);
        let edit = Self::of(&[
            P::SchemasAttach,
            P::SchemasCommit,
            P::SchemasCreate,
            P::SchemasDelete,
            P::SchemasRollback,
            P::SnapshotsCreate,
            P::SnapshotsDelete,
            P::SnapshotsUpdate,
            P::SubscriptionsCreate,
            P::SubscriptionsDelete,
            P::SubscriptionsUpdate,
            P::TopicsCreate,
            P::TopicsDelete,
            P::TopicsDetachSubscription,
            P::TopicsUpdate,
            P::TopicsUpdateTag,
        ]);
        match role {
            "roles/pubsub.publisher" => Some(publish),
            "roles/pubsub.subscriber" => Some(subscribe),
            "roles/pubsub.viewer" | "roles/viewer" => Some(view),
            "roles/pubsub.editor" | "roles/editor" => Some(publish.union(subscribe).union(view).union(edit)),
            "roles/pubsub.admin" | "roles/owner" => Some(Self::all()),
            _ => None,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_permission_is_found_by_its_name() {
        for (name, permission) in PERMISSIONS.iter().zip(ALL) {
            assert_eq!(Permission::parse(name), Some(*permission));
            assert_eq!(permission.name(), *name);
            assert!(PermissionSet::all().contains(*permission));
            assert!(!PermissionSet::default().contains(*permission));
        }
        assert_eq!(Permission::parse("pubsub.topics.*"), None);
    }

    #[test]
    fn an_editor_may_do_all_but_change_policies() {
        let editor = PermissionSet::of_role("roles/pubsub.editor").unwrap();
        for permission in ALL {
            assert_eq!(editor.contains(*permission), !permission.name().ends_with("IamPolicy"), "{}", permission.name());
        }
        assert_eq!(PermissionSet::of_role("roles/pubsub.admin"), Some(PermissionSet::all()));
        assert_eq!(PermissionSet::of_role("roles/storage.admin"), None);
    }
}
