//! Kills under load, with an audit of every promise that was confirmed.
//!
//! A run has a dozen rounds; `LANDLINE_CRASH_ROUNDS` asks for more, as `tests/crash` does.

mod audit;
mod load;

use std::{sync::Arc, time::Duration};

use self::{
    audit::Audit,
    load::{Load, Target},
};
use crate::{
    fixture::{Backend, Fixture},
    for_durable_backends, for_one_backend,
};

for_durable_backends!(killing_the_server_breaks_no_promise);
for_one_backend!(a_full_disk_refuses_publishes_and_loses_nothing);

fn rounds() -> usize {
    std::env::var("LANDLINE_CRASH_ROUNDS").ok().and_then(|r| r.parse().ok()).unwrap_or(12)
}

/// No confirmed publish is lost, no confirmed ack comes back, leases and attempts survive, ids are unique.
async fn killing_the_server_breaks_no_promise(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let api = Arc::new(fixture.api().await);
    let (audit, target) = (Arc::new(Audit::default()), Target::create(&api).await);
    for round in 0..rounds() {
        let load = Load::start(&api, &target, &audit);
        // Anything from the first requests of a fresh server to a busy one.
        let moment = Duration::from_millis(20 + rand::random_range(0..400));
        tokio::time::sleep(moment).await;
        let before = audit.progress();
        fixture.nodes[0].kill();
        load.stop().await;
        fixture.nodes[0].restart();
        audit.check();
        eprintln!("round {round}: killed after {moment:?}, {before}");
    }
    target.drain(&api, &audit).await;
    audit.check();
    audit.check_complete();
}

fn large_batch(topic: &str) -> landline::api::proto::pubsub::PublishRequest {
    crate::fixture::api::publish_request(topic, (0..4).map(|n| crate::fixture::message(vec![b'a' + n; 240_000])))
}

/// The same promises on a disk that fills up; space comes back as messages are acknowledged.
async fn a_full_disk_refuses_publishes_and_loses_nothing(backend: Backend) {
    // The server runs in a mount namespace of its own with 200 MB under its folder: room for three segments of the log.
    let wrapper = |folder: &std::path::Path| {
        let data = folder.join("data");
        let script = format!("mkdir -p {0} && mount -t tmpfs -o size=200m tmpfs {0} && exec \"$0\"", data.display());
        ["unshare", "--map-root-user", "--mount", "sh", "-c", &script].map(str::to_owned).to_vec()
    };
    let fixture = Fixture::try_start_in(backend, &[], wrapper).unwrap_or_else(|e| panic!("{e}"));
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.ack_deadline_seconds = 600).await;
    for round in 0..2 {
        let mut confirmed = Vec::new();
        let refused = loop {
            match api.call(large_batch(&topic)).await {
                Ok(answer) => confirmed.extend(answer.message_ids),
                Err(failure) => break failure,
            }
            assert!(confirmed.len() < 2000, "200 MB took 480 MB");
        };
        let expected = [tonic::Code::ResourceExhausted, tonic::Code::Unavailable];
        assert!(expected.contains(&refused.code), "round {round}: {refused:?}");
        assert!(confirmed.len() > 100, "round {round}: only {} messages fit into 200 MB: {refused:?}", confirmed.len());
        let received = api.pull(&subscription, confirmed.len()).await;
        let mut got: Vec<_> = received.iter().map(|r| r.id().to_owned()).collect();
        got.sort_unstable();
        confirmed.sort_unstable();
        assert!(got == confirmed, "round {round}: {} of {} messages", got.len(), confirmed.len());
        // Acks are what makes room, so they work on a full disk.
        for part in received.chunks(50) {
            api.ack(&subscription, part).await;
        }
        crate::fixture::eventually("there is room again", Duration::from_secs(30), async || {
            let Ok(answer) = api.call(large_batch(&topic)).await else { return false };
            let received = api.pull(&subscription, answer.message_ids.len()).await;
            api.ack(&subscription, &received).await;
            true
        })
        .await;
    }
}
