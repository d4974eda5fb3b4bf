//! What a node does about queues that nothing happens at, and about nodes that are no more.

use std::sync::atomic::Ordering;

use super::{proxy::Proxy, server::Server, *};

/// Commands that a server has carried out, those of functions included.
fn commands(server: &Server) -> u64 {
    let info = server.info("stats");
    let line = info.lines().find_map(|line| line.strip_prefix("total_commands_processed:"));
    line.and_then(|count| count.trim().parse().ok()).unwrap()
}

/// However many queues there are, a round of a node asks only so much: for its notes of changes and its own channel, who is
/// there, who listens, and a part of the queues.
const COMMANDS_OF_A_ROUND: u64 = 10;

#[tokio::test]
async fn idle_queues_write_nothing_and_cost_next_to_nothing() {
    let server = Server::start(&[]);
    let mut rig = Rig::on(&server.url(0), None).await;
    let options = Options { set_clock: Some(rig.clock.clone()), ..Options::default() };
    let other = Redis::start(&server.url(0), options).await.unwrap();
    let nodes = [rig.broker.clone(), other];
    let mut sessions = Vec::new();
    for n in 1..=100 {
        let queue = rig.queue(n, |_| {}).await;
        let waiting = nodes.clone().map(|broker| {
            let session = Session::new(next_session_id());
            broker.attach(&queue, &session);
            (broker, session)
        });
        for (broker, session) in &waiting {
            assert!(broker.lease(lease_request(&queue, session, 5)).await.unwrap().is_empty());
        }
        sessions.push((queue, waiting));
    }
    let dirty = || {
        let info = server.info("persistence");
        let line = info.lines().find_map(|line| line.strip_prefix("rdb_changes_since_last_save:")).unwrap().to_owned();
        line.trim().parse::<u64>().unwrap()
    };
    let mut watches = [watch::Watch::default(), watch::Watch::default()];
    // In the first ones all queues are looked at.
    for _ in 0..2 {
        for (node, watch) in nodes.iter().zip(&mut watches) {
            node.engine.round(watch).await.unwrap();
        }
    }
    let (before, earlier) = (dirty(), commands(&server));
    for _ in 0..5 {
        for (node, watch) in nodes.iter().zip(&mut watches) {
            node.engine.round(watch).await.unwrap();
        }
    }
    assert_eq!(dirty(), before);
    // Each node's own rounds go on besides, one or two of them here.
    let count = commands(&server) - earlier;
    assert!(count <= 14 * COMMANDS_OF_A_ROUND, "{count} commands in ten rounds for 100 queues that nothing happens at");
    // And a session is still found by what comes.
    rig.publish(&["m"]).await;
    for (queue, waiting) in &sessions {
        tokio::time::timeout(Duration::from_secs(5), async {
            loop {
                for (broker, session) in waiting {
                    if !broker.lease(lease_request(queue, session, 5)).await.unwrap().is_empty() {
                        return;
                    }
                }
                let [first, second] = waiting;
                tokio::select! {
                    () = first.1.woken() => {}
                    () = second.1.woken() => {}
                }
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
    engine.round(&mut watch).await.unwrap();
    eventually("the ping", async || engine.heard.load(Ordering::Acquire) == 3).await;
    assert_eq!(engine.opened.load(Ordering::Acquire), 2);
}

#[tokio::test]
async fn a_notice_channel_that_works_stays_open_from_the_first_round_on() {
    let server = Server::start(&[]);
    let rig = Rig::on(&server.url(0), None).await;
    let engine = &rig.broker.engine;
    let mut watch = watch::Watch::default();
    // The first round may come before the channel is open.
    for number in 0..4 {
        engine.round(&mut watch).await.unwrap();
        eventually("the channel", async || engine.opened.load(Ordering::Acquire) > 0).await;
        eventually("the ping", async || engine.heard.load(Ordering::Acquire) >= number).await;
    }
    assert_eq!(engine.opened.load(Ordering::Acquire), 1);
}

#[tokio::test]
async fn nodes_that_start_together_do_not_take_each_other_for_dead() {
    let server = Server::start(&[]);
    let url = server.url(0);
    let nodes = futures::future::join_all((0..6).map(|_| Redis::start(&url, Options::default()))).await;
    let nodes: Vec<_> = nodes.into_iter().map(Result::unwrap).collect();
    let mut watches: Vec<_> = nodes.iter().map(|_| watch::Watch::default()).collect();
    for _ in 0..20 {
        for (node, watch) in nodes.iter().zip(&mut watches) {
            // Everyone who is announced can be reached.
            let all: Vec<String> = server.command(0, &["SMEMBERS", "gcp.catalog.{landline}:nodes"]);
            node.engine.round(watch).await.unwrap();
            let left: Vec<String> = server.command(0, &["SMEMBERS", "gcp.catalog.{landline}:nodes"]);
            assert!(all.iter().all(|node| left.contains(node)), "{all:?} became {left:?}");
        }
    }
    eventually("all nodes", async || server.command::<u64>(0, &["SCARD", "gcp.catalog.{landline}:nodes"]) == 6).await;
}
