//! IAM policies.

use landline::api::proto::{
    iam::{AuditConfig, Binding, GetIamPolicyRequest, GetPolicyOptions, Policy, SetIamPolicyRequest, TestIamPermissionsRequest},
    pubsub::{CreateSchemaRequest, CreateSnapshotRequest, Schema, schema},
};
use tonic::Code;

use crate::{
    fixture::{Api, Backend, Fixture},
    for_every_backend, for_one_backend,
};

for_every_backend!(a_policy_is_kept_as_set, a_stale_etag_is_refused);
for_one_backend!(what_would_not_be_acted_on_is_refused);

fn get(resource: &str) -> GetIamPolicyRequest {
    GetIamPolicyRequest { resource: resource.to_owned(), options: Some(GetPolicyOptions { requested_policy_version: 3 }) }
}

fn set(resource: &str, policy: Policy) -> SetIamPolicyRequest {
    SetIamPolicyRequest { resource: resource.to_owned(), policy: Some(policy), update_mask: None }
}

fn binding(role: &str, members: &[&str]) -> Binding {
    Binding { role: role.into(), members: members.iter().map(|m| m.to_string()).collect(), condition: None }
}

/// One resource of each kind.
async fn resources(api: &Api) -> [String; 4] {
    let (topic, subscription) = api.pair().await;
    let name = api.snapshot("snap");
    let snapshot = api.ok(CreateSnapshotRequest { name, subscription: subscription.clone(), ..Default::default() }).await.name;
    let schema = Schema {
        r#type: schema::Type::Avro as i32,
        definition: r#"{"type":"record","name":"R","fields":[{"name":"f","type":"string"}]}"#.into(),
        ..Default::default()
    };
    let request = CreateSchemaRequest { parent: api.parent(), schema: Some(schema), schema_id: "shape".into() };
    [topic, subscription, snapshot, api.ok(request).await.name]
}

/// C166
async fn a_policy_is_kept_as_set(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        for resource in resources(&api).await {
            let fresh = api.ok(get(&resource)).await;
            // As in production: `{"etag": "ACAB"}`.
            assert_eq!(fresh, Policy { etag: vec![0x00, 0x20, 0x01].into(), ..Default::default() }, "{resource}");
            let mut bindings = vec![
                binding("roles/pubsub.publisher", &["user:a@example.com", "group:b@example.com"]),
                binding("roles/pubsub.viewer", &["allUsers"]),
            ];
            let mut sent = bindings.clone();
            sent.push(binding("roles/pubsub.editor", &[]));
            let policy = Policy { bindings: sent, etag: fresh.etag.clone(), ..Default::default() };
            let stored = api.ok(set(&resource, policy)).await;
            assert_ne!(stored.etag, fresh.etag);
            assert_eq!(stored.version, 1);
            let mut got = api.ok(get(&resource)).await;
            assert_eq!(got, stored);
            got.bindings.sort_by(|a, b| a.role.cmp(&b.role));
            bindings.sort_by(|a, b| a.role.cmp(&b.role));
            assert_eq!(got.bindings, bindings);
            let collection = resource.split('/').nth(2).unwrap();
            let permissions = vec![format!("pubsub.{collection}.get"), format!("pubsub.{collection}.delete")];
            let request = TestIamPermissionsRequest { resource: resource.clone(), permissions: permissions.clone() };
            let mut allowed = api.ok(request).await.permissions;
            allowed.sort_unstable_by_key(|p| permissions.iter().position(|q| p == q));
            assert_eq!(allowed, permissions);
        }
        for missing in [api.topic("none"), api.subscription("none"), api.snapshot("none"), api.schema("none")] {
            assert_eq!(api.fails(get(&missing)).await, Code::NotFound, "{missing}");
            assert_eq!(api.fails(set(&missing, Policy::default())).await, Code::NotFound, "{missing}");
            let request = TestIamPermissionsRequest { resource: missing, permissions: vec!["pubsub.topics.get".into()] };
            assert!(api.ok(request).await.permissions.is_empty());
        }
    }
}

/// C167
async fn a_stale_etag_is_refused(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let topic = api.create_topic("orders").await;
        let read = api.ok(get(&topic)).await;
        let policy = |member: &str, etag: &[u8]| Policy {
            bindings: vec![binding("roles/pubsub.publisher", &[member])],
            etag: etag.to_vec().into(),
            ..Default::default()
        };
        api.ok(set(&topic, policy("user:a@example.com", &read.etag))).await;
        assert_eq!(api.fails(set(&topic, policy("user:b@example.com", &read.etag))).await, Code::Aborted);
        let stored = api.ok(get(&topic)).await;
        assert_eq!(stored.bindings[0].members, ["user:a@example.com"]);
        api.ok(set(&topic, policy("user:c@example.com", b""))).await;
        assert_eq!(api.ok(get(&topic)).await.bindings[0].members, ["user:c@example.com"]);
        // A policy goes with its resource.
        api.delete_topic(&topic).await;
        assert_eq!(api.fails(get(&topic)).await, Code::NotFound);
        api.create_topic("orders").await;
        assert!(api.ok(get(&topic)).await.bindings.is_empty());
    }
}

/// Roles of one's own, conditions and audit settings would be promises that nothing keeps.
async fn what_would_not_be_acted_on_is_refused(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let topic = api.create_topic("orders").await;
        let good = binding("roles/pubsub.publisher", &["user:a@example.com"]);
        api.ok(set(&topic, Policy { bindings: vec![good.clone()], ..Default::default() })).await;
        let audit = AuditConfig { service: "pubsub.googleapis.com".into(), ..Default::default() };
        let role = |role: &str| vec![good.clone(), binding(role, &["user:a@example.com"])];
        let member = |member: &str| vec![binding("roles/pubsub.viewer", &[member])];
        for (bindings, audit_configs, told) in [
            (role("projects/shop/roles/shipper"), vec![], "'projects/shop/roles/shipper'; it must be roles/pubsub.admin"),
            (role("organizations/1/roles/shipper"), vec![], "other roles are not known to this server"),
            (role("roles/storage.admin"), vec![], "'roles/storage.admin'"),
            (role(""), vec![], "policy.bindings.role"),
            (member("jane"), vec![], "policy.bindings.members"),
            (
                vec![Binding { condition: Some(Default::default()), ..good.clone() }],
                vec![],
                "policy.bindings.condition is not supported",
            ),
            (vec![good.clone()], vec![audit], "policy.audit_configs is not supported"),
        ] {
            let failure = api.failure(set(&topic, Policy { bindings, audit_configs, ..Default::default() })).await;
            assert_eq!(failure.code, Code::InvalidArgument, "{failure:?}");
            assert!(failure.message.contains(told), "{told}: {failure:?}");
        }
        assert_eq!(api.ok(get(&topic)).await.bindings, [good]);
    }
}
