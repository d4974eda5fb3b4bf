//! What a deployment sets: resources from the start, addresses, clocks.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::{Duration, Instant},
};

use landline::api::proto::pubsub::{ListSubscriptionsRequest, ListTopicsRequest, SeekRequest, seek_request::Target};

use crate::{
    fixture::{
        Api, Backend, Fixture, Transport, message,
        node::{Node, NodeSpec},
        ports, rest, timestamp,
        wait::SOON,
    },
    for_durable_backends, for_every_backend,
};

for_durable_backends!(preloaded_resources_are_there_at_once_and_after_a_restart);
for_every_backend!(a_client_with_a_wrong_clock_is_served);

/// C178
async fn preloaded_resources_are_there_at_once_and_after_a_restart(backend: Backend) {
    let preload = "shop,orders:billing:audit,returns;other,events:sink";
    let mut fixture = Fixture::start_with(backend, &[("PRELOAD", preload)]).await;
    for round in 0..2 {
        // The fixture waited for the ready line and for nothing else.
        let address = [fixture.nodes[0].address];
        let shop = Api::connect(&address, "shop".into(), Transport::Grpc).await;
        let other = Api::connect(&address, "other".into(), Transport::Grpc).await;
        let topics = shop.ok(ListTopicsRequest { project: shop.parent(), ..Default::default() }).await.topics;
        assert_eq!(topics.iter().map(|t| &t.name).collect::<Vec<_>>(), [&shop.topic("orders"), &shop.topic("returns")]);
        let subscriptions = shop.ok(ListSubscriptionsRequest { project: shop.parent(), ..Default::default() }).await;
        let names: Vec<_> = subscriptions.subscriptions.into_iter().map(|s| (s.name, s.topic)).collect();
        let expected = ["audit", "billing"].map(|id| (shop.subscription(id), shop.topic("orders")));
        assert_eq!(names, expected);
        if round == 1 {
            // A restart creates nothing anew: the backlog is still there.
            assert_eq!(other.take(&other.subscription("sink")).await.text(), "m1");
        }
        other.publish_texts(&other.topic("events"), &["m1"]).await;
        fixture.crash_and_restart();
    }
}

/// Starts a server on some addresses and looks from which of two loopback addresses it can be reached.
async fn reachable(bind: &str) -> (bool, bool) {
    let folder = tempfile::tempdir().unwrap();
    let port = ports::reserve();
    let broker = ("BROKER_URL", "memory:".to_owned());
    // Beyond the loopback addresses it must be said whether callers are asked who they are.
    let env = [broker, ("PORT", port.to_string()), ("BIND", bind.to_owned()), ("AUTH", "off".to_owned())];
    let env = env.map(|(k, v)| (format!("CONNECTORS_GCP_{k}"), v)).to_vec();
    let node = Node::start(NodeSpec { wrapper: Vec::new(), env, log: folder.path().join("log") }).unwrap();
    assert_eq!(node.address.port(), port);
    let look = async |address: IpAddr| {
        let address = SocketAddr::new(address, port);
        if tokio::net::TcpStream::connect(address).await.is_err() {
            return false;
        }
        assert_eq!(rest::get(address, "/").await.status, 200);
        true
    };
    (look(Ipv4Addr::LOCALHOST.into()).await, look(Ipv6Addr::LOCALHOST.into()).await)
}

/// C179
#[tokio::test]
async fn a_server_listens_on_the_addresses_it_was_given() {
    assert_eq!(reachable("localhost").await, (true, true));
    assert_eq!(reachable("127.0.0.1").await, (true, false));
    assert_eq!(reachable("0.0.0.0").await, (true, false));
    assert_eq!(reachable("[::1]").await, (false, true));
    assert_eq!(reachable("127.0.0.1,[::1]").await, (true, true));
    assert!(reachable("[::]").await.1);
    assert_eq!(reachable("0.0.0.0,[::]").await, (true, true));
}

/// C187: leases count from the receipt of a call, whatever the client believes the time to be, and a seek compares the
/// given time with publish times of the server.
async fn a_client_with_a_wrong_clock_is_served(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("MIN_ACK_EXTENSION_SECONDS", "0")]).await;
    for api in fixture.apis().await {
        let (topic, subscription) = api.pair_with(|s| s.retain_acked_messages = true).await;
        let seek = async |offset: i64| {
            let target = Some(Target::Time(timestamp(offset)));
            api.ok(SeekRequest { subscription: subscription.clone(), target }).await;
        };
        api.publish(&topic, [message("m1")]).await;
        // A clock that is five minutes slow takes the message for a later one, one that is fast for an earlier one.
        seek(-300).await;
        assert_eq!(api.take(&subscription).await.text(), "m1");
        seek(-300).await;
        let received = api.pull(&subscription, 1).await;
        let since = Instant::now();
        api.extend(&subscription, &received, 1).await;
        assert_eq!(api.take(&subscription).await.text(), "m1");
        assert!((Duration::from_millis(950)..SOON).contains(&since.elapsed()), "{:?}", since.elapsed());
        api.publish(&topic, [message("m2")]).await;
        seek(300).await;
        assert!(api.pull_now(&subscription, 10).await.is_empty());
    }
}
