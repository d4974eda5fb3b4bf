//! Faults under load, with an audit of every promise that was confirmed.
//!
//! A run lasts some seconds on each kind of store; `LANDLINE_CRASH_SECONDS` asks for more, as `tests/crash` does.

mod audit;
mod faults;
mod load;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use landline::api::proto::pubsub::ListTopicsRequest;

use self::{
    audit::Audit,
    faults::Fault,
    load::{Load, SUBSCRIPTIONS, Target},
};
use crate::{
    fixture::{Backend, Fixture, eventually},
    for_one_backend, tests_on,
};

tests_on! {
    [embedded Embedded, redis Redis, redis_cluster RedisCluster, two_nodes TwoNodes, sentinel Sentinel]
    faults_break_no_promise
}
for_one_backend!(a_full_disk_refuses_publishes_and_loses_nothing);

/// Two minutes over the five kinds of store.
const SECONDS: u64 = 24;

fn duration() -> Duration {
    let asked = std::env::var("LANDLINE_CRASH_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(asked.unwrap_or(SECONDS))
}

/// No confirmed publish is lost, no confirmed ack comes back, leases, backoffs, attempts and order hold, ids are unique.
async fn faults_break_no_promise(backend: Backend) {
    let mut fixture = Fixture::start_with(backend, backend.durability()).await;
    let api = Arc::new(fixture.api().await);
    // A server with a sentinel starts before it has found the master.
    eventually("the store is there", Duration::from_secs(60), async || {
        api.call(ListTopicsRequest { project: api.parent(), ..Default::default() }).await.is_ok()
    })
    .await;
    let (audit, target) = (Arc::new(Audit::new(&SUBSCRIPTIONS)), Arc::new(Target::create(&api).await));
    let (end, mut round) = (Instant::now() + duration(), 0);
    let replaced = |fixture: &Fixture| fixture.sentinel.as_ref().map_or(0, |sentinel| sentinel.replaced());
    while Instant::now() < end {
        let before = replaced(&fixture);
        let load = Load::start(&api, &target, &audit);
        // Anything from the first requests of a fresh server to a busy one.
        tokio::time::sleep(Duration::from_millis(20 + rand::random_range(0..900))).await;
        let fault = Fault::choose(&fixture);
        if fault.forgets_leases() {
            audit.forgetting(true);
        }
        fault.strike(&mut fixture).await;
        if fault.forgets_leases() {
            audit.forgetting(false);
        }
        tokio::time::sleep(Duration::from_millis(rand::random_range(0..900))).await;
        load.stop().await;
        // On a busy machine a master may seem dead to the sentinel.
        if replaced(&fixture) > before + usize::from(fault == Fault::FailedOver) {
            audit.forgot();
        }
        audit.check();
        round += 1;
        eprintln!("round {round}: {fault:?}, {}", audit.progress());
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
