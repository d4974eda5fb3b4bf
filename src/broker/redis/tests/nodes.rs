//! Several nodes on one server behave as one service.

use ledger::Plan;

use super::{proxy::Proxy, server::Server, *};

/// A second node on the same data and clock.
async fn second(rig: &Rig, url: &str) -> Rig {
    let options = Options { set_clock: Some(rig.clock.clone()), ..Options::default() };
    let broker = Redis::start(url, options).await.unwrap();
    Rig { broker, clock: rig.clock.clone(), topic: rig.topic.clone(), versions: rig.versions.clone() }
}

async fn pair() -> (Rig, Rig) {
    let url = server::empty_database();
    let a = Rig::on(&url, None).await;
    let b = second(&a, &url).await;
    (a, b)
}

#[tokio::test]
async fn a_settlement_on_another_node_frees_the_budget_of_the_session_that_has_the_message() {
    let (mut a, b) = pair().await;
    let queue = a.queue(1, |_| {}).await;
    let session = a.session(&queue);
    a.publish(&["one", "two", "three"]).await;
    let leased = a.lease(&queue, &session, 3).await;
    assert_eq!(session.outstanding_messages(), 3);
    assert_eq!(b.ack(&queue, &leased[..1]).await, [Outcome::Done]);
    eventually("the credit", async || session.outstanding_messages() == 2).await;
    b.modify(&queue, &leased[1..2], 0).await;
    b.broker.release(&queue, &[leased[2].token]).await.unwrap();
    eventually("the credit", async || session.outstanding_messages() == 0 && session.outstanding_bytes() == 0).await;
    let mut again = b.texts(&queue, 5).await;
    again.sort();
    assert_eq!(again, ["three", "two"]);
}

#[tokio::test]
async fn a_publish_on_one_node_wakes_a_session_on_another_and_no_more_than_needed() {
    let (mut a, b) = pair().await;
    let queue = a.queue(1, |_| {}).await;
    let sessions: Vec<_> = (0..3).map(|_| b.session(&queue)).collect();
    for session in &sessions {
        session.woken().await;
        assert!(b.lease(&queue, session, 5).await.is_empty());
    }
    a.publish(&["m"]).await;
    let wait = sessions.iter().map(|s| Box::pin(s.woken()));
    let ((), first, rest) = tokio::time::timeout(Duration::from_secs(5), futures::future::select_all(wait)).await.unwrap();
    assert_eq!(b.lease(&queue, &sessions[first], 5).await.len(), 1);
    for other in rest {
        assert!(futures::FutureExt::now_or_never(other).is_none(), "one message wakes one session");
    }
}

#[tokio::test]
async fn a_turn_of_a_node_whose_sessions_have_gone_is_passed_on() {
    let (mut a, b) = pair().await;
    let queue = a.queue(1, |_| {}).await;
    // The publisher's own node waits first, then nobody is there any more.
    let gone = a.session(&queue);
    assert!(a.lease(&queue, &gone, 5).await.is_empty());
    let waits = b.session(&queue);
    waits.woken().await;
    assert!(b.lease(&queue, &waits, 5).await.is_empty());
    a.broker.detach(&queue, &gone);
    a.publish(&["m"]).await;
    tokio::time::timeout(Duration::from_secs(5), waits.woken()).await.unwrap();
    assert_eq!(b.lease(&queue, &waits, 5).await.len(), 1);
}

#[tokio::test]
async fn a_queue_made_on_one_node_gets_what_is_published_on_another_afterwards() {
    let (mut a, b) = pair().await;
    let stale = b.broker.route(&b.topic).await.unwrap();
    let mut events = b.broker.events();
    let queue = a.queue(1, |_| {}).await;
    let message = EncodedMessage::encode(b"m", [], "");
    let append =
        Append { topic: b.topic.clone(), messages: vec![message.clone()], targets: Vec::new(), route_version: stale.version };
    assert_eq!(b.broker.append(append).await, Err(BrokerError::Stale));
    b.append(vec![message], Vec::new()).await.unwrap();
    assert_eq!(a.texts(&queue, 5).await, ["m"]);
    let told =
        async { while events.recv().await.unwrap() != (Event::RecordChanged { kind: Kind::Subscription, name: "s1".into() }) {} };
    tokio::time::timeout(Duration::from_secs(1), told).await.unwrap();
}

#[tokio::test]
async fn ordering_and_the_inflight_cap_hold_over_nodes() {
    let (mut a, b) = pair().await;
    let queue = a.queue(1, |c| c.ordered = true).await;
    a.publish_keyed(&[("k1", "k"), ("k2", "k"), ("free1", ""), ("free2", "")]).await;
    let (here, there) = (a.session(&queue), b.session(&queue));
    assert_eq!(a.lease(&queue, &here, 1).await.iter().map(text).collect::<Vec<_>>(), ["k1"]);
    let request = LeaseRequest { max_inflight: 2, ..lease_request(&queue, &there, 5) };
    let leased = b.broker.lease(request.clone()).await.unwrap();
    assert_eq!(leased.iter().map(text).collect::<Vec<_>>(), ["free1"]);
    assert!(b.broker.lease(request).await.unwrap().is_empty());
    assert_eq!(a.lease(&queue, &here, 1).await.iter().map(text).collect::<Vec<_>>(), ["k2"]);
}

#[tokio::test]
async fn a_record_is_changed_once_by_whoever_comes_first() {
    let (a, b) = pair().await;
    let make = |rig: &Rig| {
        let broker = rig.broker.clone();
        async move { broker.change(change(Kind::Schema, "schema", Expect::Absent, true, Effect::None)).await }
    };
    let (one, two) = tokio::join!(make(&a), make(&b));
    let version = one.clone().or(two.clone()).unwrap();
    assert!(one == Err(BrokerError::Conflict(version)) || two == Err(BrokerError::Conflict(version)), "{one:?} {two:?}");
    let drop = change(Kind::Schema, "schema", Expect::Version(version), false, Effect::None);
    let gone = a.broker.change(drop).await.unwrap();
    assert!(gone > version);
    assert_eq!(b.broker.get(Kind::Schema, "schema").await.unwrap(), None);
    assert!(make(&b).await.unwrap() > gone);
}

#[tokio::test]
async fn records_are_listed_in_the_order_of_their_names() {
    let (a, b) = pair().await;
    for name in ["projects/a/topics/x1", "projects/a/topics/x2", "projects/a/topics/X3", "projects/b/topics/x1"] {
        a.broker.change(change(Kind::Topic, name, Expect::Absent, true, Effect::None)).await.unwrap();
    }
    let names = |records: Vec<Record>| records.into_iter().map(|r| r.name).collect::<Vec<_>>();
    let list = async |prefix: &str, after: &str, limit| names(b.broker.list(Kind::Topic, prefix, after, limit).await.unwrap());
    let all = ["projects/a/topics/X3", "projects/a/topics/x1", "projects/a/topics/x2"];
    assert_eq!(list("projects/a/", "", 10).await, all);
    assert_eq!(list("projects/a/", "", 2).await, all[..2]);
    assert_eq!(list("projects/a/", all[0], 10).await, all[1..]);
    assert_eq!(list("", all[2], 1).await, ["projects/b/topics/x1"]);
    assert!(b.broker.list(Kind::Snapshot, "", "", 10).await.unwrap().is_empty());
}

/// Two sessions take a publish in small parts: whole runs of it, or the messages of a key among those of others.
async fn take_in_parts(rig: &Rig, queue: &QueueRef, filtered: Vec<u32>) {
    let made: Vec<(String, String)> = (0..60).map(|n| (format!("{n:02} {}", "x".repeat(n)), format!("key{}", n % 5))).collect();
    let messages: Vec<(&str, &str)> = made.iter().map(|(text, key)| (text.as_str(), key.as_str())).collect();
    let target = Target { queue: queue.clone(), filtered: filtered.clone() };
    let ids = rig.publish_filtered(&messages, vec![target]).await;
    let sealed = |n: usize| {
        let mut out = bytes::BytesMut::new();
        EncodedMessage::encode(made[n].0.as_bytes(), [], &made[n].1).seal(ids[n], rig.now_ms(), &mut out);
        out.freeze()
    };
    let sessions = [rig.session(queue), rig.session(queue)];
    let (mut seen, mut held) = (Vec::new(), [Vec::new(), Vec::new()]);
    for _ in 0..100 {
        for (session, held) in sessions.iter().zip(&mut held) {
            let earlier = std::mem::replace(held, rig.lease(queue, session, 7).await);
            rig.ack(queue, &earlier).await;
            seen.extend(held.iter().map(|leased| leased.message.clone()));
        }
    }
    assert_eq!(seen.len(), made.len() - filtered.len());
    for key in 0..5 {
        let of_key = |n: &usize| n % 5 == key && !filtered.contains(&(*n as u32));
        let expected: Vec<_> = (0..60).filter(of_key).map(sealed).collect();
        let got: Vec<_> = seen.iter().filter(|message| expected.contains(message)).cloned().collect();
        assert_eq!(got, expected, "the messages of key {key}");
    }
}

#[tokio::test]
async fn parts_of_a_publish_are_given_along_as_they_were_published() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |c| c.ordered = true).await;
    take_in_parts(&rig, &queue, Vec::new()).await;
    take_in_parts(&rig, &queue, vec![0, 7, 8, 30]).await;
}

/// A session whose keys all belong to another one puts what it meets into their lines, and does not do so with a whole backlog
/// in one call.
#[tokio::test]
async fn a_backlog_of_anothers_key_is_not_put_into_its_line_in_one_call() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |c| c.ordered = true).await;
    let (owner, other) = (rig.session(&queue), rig.session(&queue));
    for _ in 0..5 {
        rig.publish_keyed(&[("m", "key"); 700]).await;
    }
    rig.publish_keyed(&[("free", "other key")]).await;
    let first = rig.lease(&queue, &owner, 1).await;
    let mut calls = 0;
    let free = loop {
        calls += 1;
        let leased = rig.lease(&queue, &other, 10).await;
        if !leased.is_empty() {
            break leased;
        }
        let woken = tokio::time::timeout(Duration::from_secs(10), other.woken()).await;
        woken.expect("a session that has not seen all is woken at once");
    };
    assert_eq!((text(&free[0]).as_str(), free.len(), calls), ("free", 1, 3));
    rig.ack(&queue, &first).await;
    assert_eq!(rig.lease(&queue, &owner, 5000).await.len(), 3499);
}

/// While servers are replaced one by one, some have the library of the version before. Here one is called by its names; its
/// text is that of version 2, which is to be replaced when the version is raised.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nodes_with_the_library_of_the_version_before_and_with_this_one_break_no_promise() {
    let names = |version: u32| format!("landline{version}_");
    let text = include_str!("landline2.lua").replace("LANDLINE_VERSION", &library::own_version());
    for seed in ledger::seeds() {
        let server = Server::start(&[]);
        let _: String = server.command(0, &["FUNCTION", "LOAD", &text]);
        let proxy = Proxy::renaming(server.port, names(library::VERSION), names(library::VERSION - 1));
        let mut rig = Rig::on(&server.url(0), None).await;
        let earlier = second(&rig, &proxy.url()).await;
        ledger::run(&mut rig, std::slice::from_ref(&earlier.broker), Plan::of(seed, 4, 50), seed, |_| {}).await;
        assert!(proxy.renamed() > 50, "the earlier library was called {} times", proxy.renamed());

        // What one of them made is the other's too.
        let made = earlier.config(2).queue;
        let effect = Effect::OpenQueue(earlier.config(2));
        earlier.broker.change(change(Kind::Subscription, "s2", Expect::Absent, true, effect)).await.unwrap();
        rig.publish(&["new"]).await;
        earlier.publish(&["old"]).await;
        let mut texts = rig.texts(&made, 1).await;
        texts.extend(earlier.texts(&made, 1).await);
        texts.sort();
        assert_eq!(texts, ["new", "old"]);
        let libraries: Vec<Vec<redis::Value>> = server.command(0, &["FUNCTION", "LIST"]);
        assert_eq!(libraries.len(), 2, "each has its own");
    }
}

#[tokio::test]
async fn who_acts_on_an_older_record_is_refused() {
    let (mut a, b) = pair().await;
    let queue = a.queue(1, |_| {}).await;
    let session = b.session(&queue);
    a.publish(&["m"]).await;
    let request = |record_version| LeaseRequest { record_version, ..lease_request(&queue, &session, 5) };
    let (made, route) = (a.versions[&1], b.broker.route(&b.topic).await.unwrap().version);
    a.queue(1, |c| c.exactly_once = true).await;
    assert_eq!(b.broker.lease(request(made)).await.map(drop), Err(BrokerError::Stale));
    let changed = a.versions[&1];
    assert_eq!(b.broker.lease(request(changed)).await.map(|leased| leased.len()), Ok(1));
    let (topic, record) = (TopicConfig { topic: a.topic.clone(), retention_ms: None }, a.broker.get(Kind::Topic, "topic").await);
    let expect = Expect::Version(record.unwrap().unwrap().version);
    a.broker.change(change(Kind::Topic, "topic", expect, true, Effect::OpenTopic(topic))).await.unwrap();
    let targets = vec![Target { queue: queue.clone(), filtered: Vec::new() }];
    let messages = vec![EncodedMessage::encode(b"m", [], "")];
    let append = Append { topic: b.topic.clone(), messages, targets, route_version: route };
    assert_eq!(b.broker.append(append).await, Err(BrokerError::Stale));
    b.publish(&["again"]).await;
    let gone = change(Kind::Subscription, "s1", Expect::Version(changed), false, Effect::CloseQueue(queue.clone()));
    a.broker.change(gone).await.unwrap();
    assert_eq!(b.broker.lease(request(0)).await.map(drop), Err(BrokerError::Gone));
}
