//! What days do to messages, snapshots and subscriptions, on a server whose wall clock the test moves.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use landline::api::proto::pubsub::{
    CreateSnapshotRequest, ExpirationPolicy, GetSnapshotRequest, ListTopicSubscriptionsRequest, Snapshot,
};
use tonic::Code;

use crate::{
    fixture::{
        Api, Backend, Failure, Fixture, Received, eventually, message, message::Build, seconds, timestamp, wait::assert_took,
    },
    for_one_backend,
};

for_one_backend!(
    messages_past_their_retention_are_gone,
    a_snapshot_lives_as_long_as_its_oldest_message,
    an_idle_subscription_expires_and_a_used_one_does_not,
    a_clock_that_is_set_back_neither_lengthens_leases_nor_turns_time_around,
);

const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;
/// The server looks for what has expired some seconds after its start.
const UPKEEP: Duration = Duration::from_secs(30);

/// A server with a clock of its own.
struct Aging {
    fixture: Fixture,
    clock: PathBuf,
}

impl Aging {
    fn start(backend: Backend) -> Self {
        let library = library();
        let fixture = Fixture::try_start_in(backend, &[], |folder| {
            let clock = folder.join("clock");
            fs::write(&clock, "+0s").unwrap();
            // Time that is waited for passes as ever; only the time of day moves.
            let words = ["FAKETIME_DONT_FAKE_MONOTONIC=1", "DONT_FAKE_MONOTONIC=1", "FAKETIME_NO_CACHE=1"];
            let own = [format!("LD_PRELOAD={library}"), format!("FAKETIME_TIMESTAMP_FILE={}", clock.display())];
            [["env"].map(str::to_owned).to_vec(), words.map(str::to_owned).to_vec(), own.to_vec()].concat()
        });
        let fixture = fixture.unwrap_or_else(|e| panic!("{e}"));
        let clock = fixture.folder.path().join("clock");
        Self { fixture, clock }
    }

    /// Makes it `seconds` after the start of the test.
    fn now_is(&self, seconds: i64) {
        let next = self.clock.with_extension("next");
        fs::write(&next, format!("{seconds:+}s")).unwrap();
        fs::rename(next, &self.clock).unwrap();
    }
}

/// The library that moves a process's clock (Debian package `faketime`).
pub fn library() -> String {
    let folders =
        fs::read_dir("/usr/lib").unwrap().filter_map(|entry| Some(entry.ok()?.path().join("faketime/libfaketimeMT.so.1")));
    let found = folders.into_iter().find(|path| path.exists());
    found.expect("libfaketime: install the package faketime").display().to_string()
}

async fn snapshot(api: &Api, id: &str, subscription: &str) -> Result<Snapshot, Failure> {
    let request = CreateSnapshotRequest { name: api.snapshot(id), subscription: subscription.to_owned(), ..Default::default() };
    api.call(request).await
}

/// C188, on one machine.
async fn a_clock_that_is_set_back_neither_lengthens_leases_nor_turns_time_around(backend: Backend) {
    let server = Aging::start(backend);
    let api = server.fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.enable_message_ordering = true).await;
    api.publish(&topic, [message("m1").key("k")]).await;
    let since = Instant::now();
    let first = api.pull(&subscription, 1).await.remove(0);
    server.now_is(-HOUR);
    api.publish(&topic, [message("m2").key("k")]).await;
    let mut stream = api.stream(&subscription).await;
    let again = stream.message().await;
    assert_eq!(again.text(), "m1");
    assert_took(since, 9.9, 2.5, "the lease of 10 s");
    let second = stream.message().await;
    assert_eq!(second.text(), "m2");
    let time = |received: &Received| {
        let time = received.message.publish_time.unwrap();
        (time.seconds, time.nanos)
    };
    assert!(time(&second) >= time(&first), "{second:?} was published before {first:?}");
}

/// C127
async fn messages_past_their_retention_are_gone(backend: Backend) {
    let server = Aging::start(backend);
    let api = server.fixture.api().await;
    let (topic, short) = api.pair_with(|s| s.message_retention_duration = Some(seconds(600))).await;
    let long = api.create_subscription("long", &topic).await;
    api.publish_texts(&topic, &["waiting", "leased"]).await;
    let leased = api.pull(&short, 1).await;
    server.now_is(599);
    // The lease has expired long ago, the message has not.
    assert_eq!(api.pull(&short, 2).await.len(), 2);
    server.now_is(601);
    api.assert_drained(&topic, &short).await;
    api.extend(&short, &leased, 600).await;
    assert!(api.pull_now(&short, 10).await.is_empty());
    assert_eq!(api.pull(&long, 3).await.len(), 3, "seven days are the default");
}

/// C122
async fn a_snapshot_lives_as_long_as_its_oldest_message(backend: Backend) {
    let server = Aging::start(backend);
    let api = server.fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let started = timestamp(0).seconds;
    let lifetime = |snapshot: &Snapshot, now: i64| snapshot.expire_time.as_ref().unwrap().seconds - started - now;
    let fresh = snapshot(&api, "fresh", &subscription).await.unwrap();
    assert!((7 * DAY - 60..=7 * DAY + 60).contains(&lifetime(&fresh, 0)), "{fresh:?}");
    api.publish_texts(&topic, &["old"]).await;
    server.now_is(3 * DAY);
    let older = snapshot(&api, "older", &subscription).await.unwrap();
    assert!((4 * DAY - 60..=4 * DAY + 60).contains(&lifetime(&older, 3 * DAY)), "{older:?}");
    server.now_is(7 * DAY - HOUR / 2);
    let refused = snapshot(&api, "oldest", &subscription).await.unwrap_err();
    assert_eq!(refused.code, Code::FailedPrecondition, "{refused:?}");
    // Both end at the same moment.
    server.now_is(7 * DAY + 120);
    for name in ["fresh", "older"] {
        let request = GetSnapshotRequest { snapshot: api.snapshot(name) };
        eventually("an expired snapshot vanishes", UPKEEP, async || {
            api.call(request.clone()).await.is_err_and(|failure| failure.code == Code::NotFound)
        })
        .await;
    }
}

/// C128
async fn an_idle_subscription_expires_and_a_used_one_does_not(backend: Backend) {
    let mut server = Aging::start(backend);
    let api = server.fixture.api().await;
    let topic = api.create_topic("topic").await;
    let mut subscriptions = Vec::new();
    for id in ["idle", "pulled", "streamed", "forever"] {
        let expiring = |ttl| Some(ExpirationPolicy { ttl });
        let policy = expiring((id != "forever").then(|| seconds(DAY)));
        subscriptions.push(api.create_subscription_with(id, &topic, |s| s.expiration_policy = policy).await);
    }
    let [idle, pulled, streamed, forever] = &subscriptions[..] else { unreachable!() };
    let stream = api.stream(streamed).await;
    server.now_is(23 * HOUR);
    api.publish_texts(&topic, &["m"]).await;
    api.pull(pulled, 1).await;
    server.now_is(25 * HOUR);
    server.fixture.crash_and_restart();
    eventually("the idle subscription is gone", UPKEEP, async || {
        // Asking for the subscription itself would be a use of it.
        let listed = api.ok(ListTopicSubscriptionsRequest { topic: topic.clone(), ..Default::default() }).await;
        !listed.subscriptions.contains(idle)
    })
    .await;
    assert_eq!(api.get_subscription(idle).await.unwrap_err().code, Code::NotFound);
    for kept in [pulled, streamed, forever] {
        api.get_subscription(kept).await.unwrap_or_else(|e| panic!("{kept}: {e:?}"));
    }
    api.get_topic(&topic).await.unwrap();
    drop(stream);
}
