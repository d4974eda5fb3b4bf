//! The store goes away and comes back.

use std::time::Duration;

use tonic::Code;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use crate::{
    fixture::{
        Backend, Fixture,
        api::{channel, publish_request},
        certificates::Authority,
        eventually, message,
        message::texts,
        node::{Node, NodeSpec},
        ports,
        redis::{Redis, RedisCluster},
        wait::SOON,
    },
    for_redis,
};

for_redis!(
    a_dead_redis_makes_the_server_unavailable_and_loses_nothing,
    a_frozen_redis_makes_calls_fail_and_not_hang,
    leases_stay_valid_across_a_restart_of_redis,
    a_server_that_starts_first_waits_for_its_redis,
    a_redis_behind_tls_needs_the_right_certificates,
    a_cluster_behind_tls_is_used_like_any_other,
    a_redis_that_lost_everything_is_filled_anew,
);

async fn serving(fixture: &Fixture) -> bool {
    let mut client = HealthClient::new(channel(fixture.nodes[0].address));
    let answer = client.check(HealthCheckRequest::default()).await.unwrap().into_inner();
    answer.status == ServingStatus::Serving as i32
}

/// Rule of the connector: not ready means NOT_SERVING and UNAVAILABLE, nothing half done, and then as before.
async fn a_dead_redis_makes_the_server_unavailable_and_loses_nothing(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    api.publish_texts(&topic, &["m1"]).await;
    let mut stream = api.stream(&subscription).await;
    let received = stream.message().await;
    stream.ack(&received);
    assert!(serving(&fixture).await);
    fixture.redis.as_mut().unwrap().kill();
    eventually("the health service says NOT_SERVING", SOON, async || !serving(&fixture).await).await;
    assert_eq!(api.fails(publish_request(&topic, [message("lost")])).await, Code::Unavailable);
    assert_eq!(api.fails(crate::fixture::api::pull(&subscription, 1)).await, Code::Unavailable);
    fixture.redis.as_mut().unwrap().restart();
    eventually("the health service says SERVING", SOON, async || serving(&fixture).await).await;
    eventually("publishing works", SOON, async || api.call(publish_request(&topic, [message("m2")])).await.is_ok()).await;
    // An open stream goes on, or was ended with UNAVAILABLE and its client opens the next.
    let mut next = api.stream(&subscription).await;
    drop(stream);
    assert_eq!(next.message().await.text(), "m2");
}

/// Every call has its bound, also against a Redis that accepts and says nothing.
async fn a_frozen_redis_makes_calls_fail_and_not_hang(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    fixture.redis.as_ref().unwrap().pause();
    let publish =
        crate::fixture::within(Duration::from_secs(30), "an answer", api.call(publish_request(&topic, [message("m1")])));
    let failure = publish.await.unwrap_err();
    assert!([Code::Unavailable, Code::DeadlineExceeded].contains(&failure.code), "{failure:?}");
    eventually("the health service says NOT_SERVING", SOON, async || !serving(&fixture).await).await;
    fixture.redis.as_ref().unwrap().resume();
    eventually("the health service says SERVING", SOON, async || serving(&fixture).await).await;
    eventually("publishing works", SOON, async || api.call(publish_request(&topic, [message("m2")])).await.is_ok()).await;
    // What failed in doubt may have been stored; what was confirmed was.
    let mut got = Vec::new();
    while !got.contains(&"m2".to_owned()) {
        let received = api.pull(&subscription, 1).await;
        got.extend(texts(&received).into_iter().map(str::to_owned));
        api.ack(&subscription, &received).await;
    }
}

/// Redis kept its data, so leases are what they were.
async fn leases_stay_valid_across_a_restart_of_redis(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api
        .pair_with(|s| {
            s.ack_deadline_seconds = 600;
            s.enable_exactly_once_delivery = true;
        })
        .await;
    api.publish(&topic, (0..10).map(|n| message(n.to_string()))).await;
    let received = api.pull(&subscription, 10).await;
    api.ack(&subscription, &received[..5]).await;
    fixture.redis.as_mut().unwrap().restart();
    eventually("the health service says SERVING", SOON, async || serving(&fixture).await).await;
    assert!(api.pull_now(&subscription, 10).await.is_empty(), "acked or leased messages came again");
    api.ack(&subscription, &received[5..]).await;
    api.assert_drained(&topic, &subscription).await;
}

/// The order in which things start does not matter.
async fn a_server_that_starts_first_waits_for_its_redis(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    fixture.redis.as_mut().unwrap().kill();
    fixture.nodes[0].restart();
    let api = fixture.api_of_node(0, &api).await;
    assert!(!serving(&fixture).await);
    assert_eq!(api.fails(publish_request(&topic, [message("lost")])).await, Code::Unavailable);
    fixture.redis.as_mut().unwrap().restart();
    eventually("the health service says SERVING", SOON, async || serving(&fixture).await).await;
    api.publish_texts(&topic, &["m1"]).await;
    assert_eq!(api.take(&subscription).await.text(), "m1");
}

/// Both sides show certificates of an authority that the system does not know.
async fn a_redis_behind_tls_needs_the_right_certificates(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let folder = fixture.folder.path().to_owned();
    let (authority, port) = (Authority::new(), ports::reserve().to_string());
    let (server, client) = (authority.issue(&folder, "server"), authority.issue(&folder, "client"));
    let ca = folder.join("redis-ca.pem");
    std::fs::write(&ca, authority.pem()).unwrap();
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let options = [
        ["--tls-port", &port],
        ["--tls-cert-file", &path(&server.certificate)],
        ["--tls-key-file", &path(&server.key)],
        ["--tls-ca-cert-file", &path(&ca)],
        ["--tls-auth-clients", "yes"],
    ];
    let _redis = Redis::start_with(&folder, options.as_flattened());
    let url = format!(
        "rediss://localhost:{port}?tls_ca={}&tls_cert={}&tls_key={}",
        path(&ca),
        path(&client.certificate),
        path(&client.key)
    );
    let start = |url: String, name: &str| {
        let env = [("BROKER_URL", url), ("PORT", ports::reserve().to_string())];
        let env = env.map(|(key, value)| (format!("CONNECTORS_GCP_{key}"), value)).into();
        Node::start(NodeSpec { wrapper: Vec::new(), env, log: folder.join(name) }).unwrap()
    };
    fixture.nodes.push(start(url.clone(), "trusting.log"));
    let like = fixture.api().await;
    let api = fixture.api_of_node(1, &like).await;
    let (topic, subscription) = api.pair().await;
    api.publish_texts(&topic, &["m1"]).await;
    assert_eq!(api.take(&subscription).await.text(), "m1");
    // One that trusts only the system's authorities starts, says why it can't serve, and goes on trying.
    let stranger = start(format!("rediss://localhost:{port}"), "stranger.log");
    eventually("the reason is logged", SOON, async || stranger.log_tail().to_lowercase().contains("certificate")).await;
}

/// Every server of a Cluster is spoken to over TLS, also those that the Cluster names.
async fn a_cluster_behind_tls_is_used_like_any_other(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let folder = fixture.folder.path().to_owned();
    let authority = Authority::new();
    let (server, client) = (authority.issue(&folder, "server"), authority.issue(&folder, "client"));
    let ca = authority.write(&folder, "cluster-ca");
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let options = [
        ["--tls-port", "0"],
        ["--tls-cluster", "yes"],
        ["--tls-cert-file", &path(&server.certificate)],
        ["--tls-key-file", &path(&server.key)],
        ["--tls-ca-cert-file", &path(&ca)],
        ["--tls-auth-clients", "yes"],
    ];
    let own = [["--cacert", &path(&ca)], ["--cert", &path(&client.certificate)], ["--key", &path(&client.key)]];
    let cluster = RedisCluster::start_with(&folder, options.as_flattened(), &[&["--tls"], own.as_flattened()].concat());
    let url = format!(
        "{}?tls_ca={}&tls_cert={}&tls_key={}",
        cluster.url().replace("redis+cluster", "rediss+cluster"),
        path(&ca),
        path(&client.certificate),
        path(&client.key)
    );
    let env = [("BROKER_URL", url), ("PORT", ports::reserve().to_string()), ("ADMIN_ADDRESS", String::new())];
    let env = env.map(|(key, value)| (format!("CONNECTORS_GCP_{key}"), value)).into();
    fixture.nodes.push(Node::start(NodeSpec { wrapper: Vec::new(), env, log: folder.join("cluster.log") }).unwrap());
    let like = fixture.api().await;
    let api = fixture.api_of_node(1, &like).await;
    // Enough resources that every server has some.
    for n in 0..12 {
        let topic = api.create_topic(&format!("topic-{n}")).await;
        let subscription = api.create_subscription(&format!("sub-{n}"), &topic).await;
        api.publish_texts(&topic, &["m1"]).await;
        let received = api.pull(&subscription, 1).await;
        assert_eq!(texts(&received), ["m1"]);
        api.ack(&subscription, &received).await;
    }
    drop(fixture);
    drop(cluster);
}

/// A Redis without its data is an empty service: what was known before is forgotten everywhere, and may be made again.
async fn a_redis_that_lost_everything_is_filled_anew(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    api.publish_texts(&topic, &["m1", "m2"]).await;
    let leased = api.pull(&subscription, 1).await;
    let mut stream = api.stream(&subscription).await;
    fixture.redis.as_mut().unwrap().restart_empty();
    eventually("the health service says SERVING", SOON, async || serving(&fixture).await).await;
    eventually("the topic is gone", SOON, async || {
        api.call(publish_request(&topic, [message("lost")])).await.is_err_and(|failure| failure.code == Code::NotFound)
    })
    .await;
    assert_eq!(api.fails(crate::fixture::api::pull(&subscription, 1)).await, Code::NotFound);
    // It may notice the restart before the loss.
    let end = stream.end_code().await;
    assert!(matches!(end, Code::NotFound | Code::Unavailable), "{end:?}");
    let short = |name: &str| name.rsplit('/').next().unwrap().to_owned();
    api.create_topic(&short(&topic)).await;
    api.create_subscription(&short(&subscription), &topic).await;
    api.publish_texts(&topic, &["m3"]).await;
    // An ack id of the earlier life settles nothing of this one.
    let _ = api.call(crate::fixture::api::acknowledge(&subscription, &leased)).await;
    let received = api.pull(&subscription, 1).await;
    assert_eq!(texts(&received), ["m3"]);
    api.ack(&subscription, &received).await;
    api.assert_drained(&topic, &subscription).await;
}
