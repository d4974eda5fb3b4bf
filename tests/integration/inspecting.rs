//! `landline inspect`, for an operator at night.

use std::process::Command;

use crate::{
    fixture::{Backend, Fixture, message, node::binary},
    for_redis,
};

for_redis!(a_subscription_shows_its_counts_keys_and_leases);

fn inspect(fixture: &Fixture, subscription: &str) -> Result<String, String> {
    let url = fixture.redis.as_ref().unwrap().url();
    let mut command = Command::new(binary());
    let output = command.args(["inspect", subscription]).env("CONNECTORS_GCP_BROKER_URL", url).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

async fn a_subscription_shows_its_counts_keys_and_leases(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.ack_deadline_seconds = 600).await;
    api.publish(&topic, (0..5).map(|n| message(n.to_string()))).await;
    let received = api.pull(&subscription, 3).await;
    api.ack(&subscription, &received[..1]).await;
    let text = inspect(&fixture, &subscription).unwrap();
    let value = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in\n{text}"));
        line[name.len()..].trim().to_owned()
    };
    assert!(value("unacknowledged").starts_with("4 messages, "), "{text}");
    assert_eq!(value("leased"), "2");
    assert!(value("oldest unacknowledged message").starts_with("published "), "{text}");
    let id = subscription.rsplit('/').next().unwrap();
    assert!(value("key").starts_with(&format!("gcp.sub.{{{}/{id}}}:", api.project)), "{text}");
    assert!(value("chunks in delivery").starts_with("1 "), "{text}");
    let lease = text.lines().find(|line| line.starts_with("lease ")).unwrap();
    assert!(lease.contains("2 messages of chunk") && lease.contains("s left"), "{lease}");
    // The short form of the name does as well.
    assert!(inspect(&fixture, &format!("{}/{id}", api.project)).is_ok());
    let missing = inspect(&fixture, "p/none").unwrap_err();
    assert!(missing.contains("there is no such subscription"), "{missing}");
}
