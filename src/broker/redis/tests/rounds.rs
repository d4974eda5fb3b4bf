//! What a node does about queues that nothing happens at, and about nodes that are no more.

use std::sync::atomic::Ordering;

use super::{proxy::Proxy, server::Server, *};

/// Commands that a server has carried out, those of functions included.
fn commands(server: &Server) -> u64 {
    let info = server.info("stats");
    let line = info.lines().find_map(|line| line.strip_prefix("total_commands_processed:"));
    line.and_then(|count| count.trim().parse().ok()).unwrap()
}

#[tokio::test]
async fn idle_queues_write_nothing() {
    let server = Server::start(&[]);
    let mut rig = Rig::on(&server.url(0), None).await;
    let mut sessions = Vec::new();
    for n in 1..=20 {
        let queue = rig.queue(n, |_| {}).await;
        let session = rig.session(&queue);
        assert!(rig.lease(&queue, &session, 5).await.is_empty());
        sessions.push((queue, session));
    }
    let dirty = || {
        let info = server.info("persistence");
        let line = info.lines().find_map(|line| line.strip_prefix("rdb_changes_since_last_save:")).unwrap().to_owned();
        line.trim().parse::<u64>().unwrap()
    };
    let mut watch = watch::Watch::default();
    rig.broker.engine.round(&mut watch).await.unwrap();
    let (before, earlier) = (dirty(), commands(&server));
    rig.broker.engine.round(&mut watch).await.unwrap();
    assert_eq!(dirty(), before);
    let count = commands(&server) - earlier;
    assert!(count < 20, "{count} commands for 20 queues that nothing happens at");
    // And each session is still found by what comes.
    rig.publish(&["m"]).await;
    for (queue, session) in &sessions {
        tokio::time::timeout(Duration::from_secs(5), async {
            while rig.lease(queue, session, 5).await.is_empty() {
                session.woken().await;
            }
        })
        .await
        .unwrap();
    }
}

#[tokio::test]
async fn what_a_dead_node_left_is_looked_at_by_the_others() {
    let server = Server::start(&[]);
    let mut rig = Rig::on(&server.url(0), None).await;
    let queue = rig.queue(1, |_| {}).await;
    let options = Options { set_clock: Some(rig.clock.clone()), ..Options::default() };
    let other = Redis::start(&server.url(0), options).await.unwrap();
    // Looked at before the first one, should a round come to it by itself.
    for n in 2..6 {
        rig.queue(n, |_| {}).await;
    }
    let mut watch = watch::Watch::default();
    eventually("both nodes", async || server.command::<u64>(0, &["SCARD", "gcp.catalog.{landline}:nodes"]) == 2).await;
    other.engine.round(&mut watch).await.unwrap();
    rig.publish(&["m"]).await;
    let leased = rig.pull(&queue, 1).await;
    other.engine.timers.lock().take_due(u64::MAX);
    let channel = watch::node_channel(&rig.broker.engine.node_hex());
    let listeners = || server.command::<(String, u64)>(0, &["PUBSUB", "NUMSUB", &channel]).1;
    other.engine.round(&mut watch).await.unwrap();
    let armed = || other.engine.timers.lock().next().is_some_and(|at| at <= leased[0].deadline_at_ms);
    assert!(!armed(), "the node that gave the lease still watches over it");
    rig.broker.close().await;
    eventually("the end of the node", async || listeners() == 0).await;
    other.engine.round(&mut watch).await.unwrap();
    assert!(armed());
    assert_eq!(server.command::<u64>(0, &["SCARD", "gcp.catalog.{landline}:nodes"]), 1);
}

#[tokio::test]
async fn a_notice_channel_that_went_silent_is_opened_again() {
    let server = Server::start(&[]);
    let proxy = Proxy::start(server.port);
    let rig = Rig::on(&proxy.url(), None).await;
    let engine = &rig.broker.engine;
    let mut watch = watch::Watch::default();
    let channel = watch::node_channel(&engine.node_hex());
    let listeners = || server.command::<(String, u64)>(0, &["PUBSUB", "NUMSUB", &channel]).1;
    eventually("the channel", async || listeners() == 1).await;
    engine.round(&mut watch).await.unwrap();
    eventually("the ping", async || engine.heard.load(Ordering::Acquire) == 1).await;
    let mut events = rig.broker.events();
    // The next ping gets lost on its way, though nothing is closed.
    proxy.lose_notices(true);
    engine.round(&mut watch).await.unwrap();
    eventually("the loss", async || proxy.lost() > 0).await;
    proxy.lose_notices(false);
    assert_eq!(engine.heard.load(Ordering::Acquire), 1);
    engine.round(&mut watch).await.unwrap();
    while events.recv().await.unwrap() != Event::Reset {}
    eventually("the channel", async || listeners() == 1).await;
}
