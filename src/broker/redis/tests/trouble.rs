//! Lost connections, lost data, and servers that are not fit.

use super::{proxy::Proxy, server::Server, *};

async fn start(url: &str) -> Result<Arc<Redis>, BrokerError> {
    Redis::start(url, Options::default()).await
}

#[tokio::test]
async fn a_server_that_is_away_is_told_soon_and_used_again_when_it_is_back() {
    let mut server = Server::start(&["--appendonly", "yes", "--appendfsync", "always"]);
    let mut rig = Rig::on(&server.url(0), None).await;
    let queue = rig.queue(1, |_| {}).await;
    rig.publish(&["a", "b"]).await;
    let session = rig.session(&queue);
    let leased = rig.lease(&queue, &session, 1).await;
    let mut events = rig.broker.events();
    server.kill();
    let begun = std::time::Instant::now();
    assert!(matches!(rig.broker.stats(&queue).await, Err(BrokerError::Unavailable(_))));
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    assert!(matches!(rig.broker.ready().await, Err(BrokerError::Unavailable(_))));
    server.start_again();
    eventually("recovery", async || rig.broker.ready().await.is_ok()).await;
    while events.recv().await.unwrap() != Event::Reset {}
    assert_eq!(session.outstanding_messages(), 1, "nothing was lost, so the lease is still good");
    assert_eq!(rig.ack(&queue, &leased).await, [Outcome::Done]);
    eventually("the credit", async || session.outstanding_messages() == 0).await;
    assert_eq!(rig.texts(&queue, 5).await, ["b"]);
}

#[tokio::test]
async fn leases_are_given_back_when_the_server_lost_data() {
    let mut server = Server::start(&[]);
    let mut rig = Rig::on(&server.url(0), None).await;
    let queue = rig.queue(1, |c| c.exactly_once = true).await;
    rig.publish(&["a", "b"]).await;
    let session = rig.session(&queue);
    let leased = rig.lease(&queue, &session, 1).await;
    let _: String = server.command(0, &["SAVE"]);
    let lost = rig.lease(&queue, &session, 1).await;
    assert_eq!(lost.len(), 1);
    server.kill();
    server.start_again();
    eventually("recovery", async || rig.broker.ready().await.is_ok()).await;
    let mut again = Vec::new();
    eventually("both messages", async || {
        again.extend(rig.broker.lease(lease_request(&queue, &Session::new(next_session_id()), 5)).await.unwrap_or_default());
        again.len() == 2
    })
    .await;
    assert_eq!(rig.ack(&queue, &leased).await, [Outcome::Invalid]);
    assert_eq!(rig.ack(&queue, &lost).await, [Outcome::Invalid]);
    assert!(again.iter().all(|l| l.token.lease > lost[0].token.lease));
    assert_eq!(rig.ack(&queue, &again).await, [Outcome::Done; 2]);
    eventually("the credit", async || session.outstanding_messages() == 0).await;
}

#[tokio::test]
async fn an_acknowledgement_counts_though_the_server_lost_the_lease() {
    for (ordered, retained) in [(false, false), (true, false), (false, true)] {
        let mut server = Server::start(&[]);
        let mut rig = Rig::on(&server.url(0), None).await;
        let config = |c: &mut QueueConfig| (c.ordered, c.retain_acked) = (ordered, retained);
        let queue = rig.queue(1, config).await;
        let published = rig.now_ms();
        rig.publish_keyed(&[("a", "k"), ("b", ""), ("c", "k"), ("d", "")]).await;
        rig.publish_keyed(&[("e", "k"), ("f", "l")]).await;
        let _: String = server.command(0, &["SAVE"]);
        let lost = rig.pull(&queue, 6).await;
        assert_eq!(lost.len(), 6);
        let by = |name: &str| lost.iter().find(|l| text(l) == name).unwrap().clone();
        server.kill();
        server.start_again();
        eventually("recovery", async || rig.broker.ready().await.is_ok()).await;
        // Given to nobody, as far as the server knows.
        assert_eq!(rig.ack(&queue, &[by("b"), by("f"), by("b")]).await, [Outcome::Done; 3]);
        assert_eq!(rig.broker.stats(&queue).await.unwrap().undelivered_messages, 4);
        // Given to another by now, and still there.
        let first = rig.pull(&queue, 1).await;
        assert_eq!(text(&first[0]), "a");
        assert_eq!(rig.ack(&queue, &[by("a"), by("c")]).await, [Outcome::Done; 2]);
        rig.modify(&queue, &first, 0).await;
        let mut rest = rig.texts(&queue, 10).await;
        rest.sort();
        assert_eq!(rest, ["d", "e"]);
        rig.ack(&queue, &[by("d"), by("e")]).await;
        rig.pass(20_000);
        assert!(rig.pull(&queue, 10).await.is_empty());
        assert_eq!(rig.broker.stats(&queue).await.unwrap().undelivered_messages, 0);
        rig.broker.seek(&queue, SeekTarget::Time(published)).await.unwrap();
        assert_eq!(rig.pull(&queue, 10).await.len(), if retained { 6 } else { 0 });
    }
}

#[tokio::test]
async fn a_publish_during_a_short_stop_is_stored_once() {
    let server = Server::start(&[]);
    let mut rig = Rig::on(&server.url(0), None).await;
    let queue = rig.queue(1, |_| {}).await;
    server.pause(true);
    let publishes = futures::future::join_all((0..20).map(|n| {
        let append = Append {
            topic: rig.topic.clone(),
            messages: vec![EncodedMessage::encode(format!("m{n:02}").as_bytes(), [], "")],
            targets: vec![Target { queue: queue.clone(), filtered: Vec::new() }],
            route_version: 2,
        };
        rig.broker.append(append)
    }));
    let resume = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        // Connections break while the server stands still: what was sent may have arrived.
        server.pause(false);
        let _: i64 = server.command(0, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    };
    let (results, ()) = tokio::join!(publishes, resume);
    let stored = results.iter().filter(|r| r.is_ok()).count();
    let mut texts = Vec::new();
    eventually("the messages", async || {
        texts.extend(
            rig.broker
                .lease(lease_request(&queue, &Session::new(next_session_id()), 50))
                .await
                .unwrap_or_default()
                .iter()
                .map(text),
        );
        texts.len() >= stored
    })
    .await;
    let count = texts.len();
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), count, "nothing is stored twice");
    assert!(count >= stored);
}

#[tokio::test]
async fn a_lease_that_nobody_received_comes_again_uncounted() {
    let server = Server::start(&[]);
    let mut rig = Rig::on(&server.url(0), None).await;
    let queue = rig.queue(1, |c| c.max_delivery_attempts = Some(5)).await;
    rig.publish(&["m"]).await;
    let session = rig.session(&queue);
    server.pause(true);
    let dropped = tokio::time::timeout(Duration::from_millis(50), rig.lease(&queue, &session, 1)).await;
    assert!(dropped.is_err());
    server.pause(false);
    let mut again = Vec::new();
    eventually("the message", async || {
        again = rig.pull(&queue, 1).await;
        !again.is_empty()
    })
    .await;
    assert_eq!((again[0].token.attempt, again[0].delivery_attempt), (1, 1));
    assert_eq!(session.outstanding_messages(), 0);
}

#[tokio::test]
async fn a_full_server_refuses_messages_and_still_settles() {
    let server = Server::start(&["--maxmemory", "8mb"]);
    let mut rig = Rig::on(&server.url(0), None).await;
    let queue = rig.queue(1, |_| {}).await;
    let big = EncodedMessage::encode(&vec![b'x'; 500_000], [], "");
    let mut refused = None;
    for _ in 0..40 {
        if let Err(e) = rig.append(vec![big.clone()], Vec::new()).await {
            refused = Some(e);
            break;
        }
    }
    assert!(matches!(refused, Some(BrokerError::Full(_))), "{refused:?}");
    let leased = rig.pull(&queue, 100).await;
    assert!(rig.ack(&queue, &leased).await.iter().all(|o| *o == Outcome::Done));
    rig.append(vec![big], Vec::new()).await.unwrap();
}

#[tokio::test]
async fn an_unfit_server_is_refused_at_the_start_with_the_reason() {
    let evicting = Server::start(&["--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"]);
    let refused = start(&evicting.url(0)).await.err().unwrap().to_string();
    assert!(refused.contains("must be noeviction"), "{refused}");
    let server = Server::start(&[]);
    let options = Options { durability: Durability::Fsync, ..Options::default() };
    let refused = Redis::start(&server.url(0), options).await.err().unwrap().to_string();
    assert!(refused.contains("needs appendonly yes and appendfsync always"), "{refused}");
    let options = Options { durability: Durability::Replicas(2), ..Options::default() };
    let refused = Redis::start(&server.url(0), options).await.err().unwrap().to_string();
    assert!(refused.contains("replicas:2 needs as many replicas, 0 are connected"), "{refused}");
    let nobody = format!("redis://127.0.0.1:{}", server::free_port());
    assert!(matches!(start(&nobody).await, Err(BrokerError::Unavailable(_))));
}

#[tokio::test]
async fn data_of_a_newer_format_is_refused() {
    let server = Server::start(&[]);
    let mut rig = Rig::on(&server.url(0), None).await;
    let queue = rig.queue(1, |_| {}).await;
    let _: i64 = server.command(0, &["HSET", "gcp.sub.{p/s1}:1", "v", "2"]);
    assert!(matches!(rig.broker.stats(&queue).await, Err(BrokerError::Damaged(_))));
    let _: i64 = server.command(0, &["HSET", "gcp.catalog.{landline}", "v", "2"]);
    let refused = start(&server.url(0)).await.err().unwrap();
    assert!(matches!(&refused, BrokerError::Damaged(text) if text.contains("format 2")), "{refused}");
}

#[tokio::test]
async fn a_removed_function_library_is_loaded_again() {
    let server = Server::start(&[]);
    let mut rig = Rig::on(&server.url(0), None).await;
    let queue = rig.queue(1, |_| {}).await;
    let _: String = server.command(0, &["FUNCTION", "FLUSH"]);
    rig.publish(&["m"]).await;
    let _: String = server.command(0, &["FUNCTION", "FLUSH"]);
    let leased = rig.pull(&queue, 5).await;
    let _: String = server.command(0, &["FUNCTION", "FLUSH"]);
    assert_eq!(rig.ack(&queue, &leased).await, [Outcome::Done]);
}

#[tokio::test]
async fn a_library_of_another_build_is_replaced_at_the_start() {
    let server = Server::start(&[]);
    let mut rig = Rig::on(&server.url(0), None).await;
    let queue = rig.queue(1, |_| {}).await;
    let broken = library::text_of(library::VERSION)
        .replace(&format!("return '{}.", library::VERSION), "return '0.")
        .replace("_publish', publish)", "_publish', function() return redis.error_reply('ERR another build') end)");
    let _: String = server.command(0, &["FUNCTION", "LOAD", "REPLACE", &broken]);
    assert!(rig.append(vec![EncodedMessage::encode(b"lost", [], "")], Vec::new()).await.is_err());
    start(&server.url(0)).await.unwrap();
    rig.publish(&["m"]).await;
    assert_eq!(rig.texts(&queue, 5).await, ["m"]);
}

#[tokio::test]
async fn a_slow_server_is_waited_for() {
    let server = Server::start(&[]);
    let mut rig = Rig::on(&server.url(0), None).await;
    let queue = rig.queue(1, |_| {}).await;
    rig.publish(&["first"]).await;
    let leased = rig.pull(&queue, 1).await;
    server.pause(true);
    let publishes = futures::future::join_all((0..10).map(|n| {
        let message = EncodedMessage::encode(format!("m{n}").as_bytes(), [], "");
        let targets = vec![Target { queue: queue.clone(), filtered: Vec::new() }];
        rig.broker.append(Append { topic: rig.topic.clone(), messages: vec![message], targets, route_version: 2 })
    }));
    let tokens = [leased[0].token];
    let acknowledged = rig.broker.acknowledge(&queue, &tokens);
    let resumed = async {
        // Less than the time after which a server is given up.
        tokio::time::sleep(Duration::from_millis(1500)).await;
        server.pause(false);
    };
    let (published, acknowledged, ()) = tokio::join!(publishes, acknowledged, resumed);
    assert!(published.iter().all(Result::is_ok), "{published:?}");
    assert_eq!(acknowledged, Ok(vec![Outcome::Done]));
    assert_eq!(rig.broker.stats(&queue).await.unwrap().undelivered_messages, 10);
}

/// A function of Lua may have 200 local names at a time, and the library is one function.
#[tokio::test]
async fn the_library_has_room_for_more_names() {
    let server = Server::start(&[]);
    let load = |spare: u32| {
        let names: String = (0..spare).map(|n| format!("local spare{n}\n")).collect();
        let text = library::text_of(library::VERSION) + &names;
        server.try_command::<String>(0, &["FUNCTION", "LOAD", "REPLACE", &text]).map_err(|e| e.to_string())
    };
    assert!(load(40).is_ok(), "make parts of the library blocks: {:?}", load(40));
    assert!(load(200).is_err_and(|error| error.contains("200 local variables")));
}

/// Calls of functions that a server has carried out.
fn calls(server: &Server) -> u64 {
    let info = server.info("commandstats");
    let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_fcall:calls="));
    line.and_then(|line| line.split(',').next()?.parse().ok()).unwrap_or(0)
}

/// Lets a call be carried out, cuts the link before the answer comes, and answers what the call says in the end.
async fn cut_off<T>(server: &Server, proxy: &Proxy, call: impl Future<Output = T>) -> T {
    let before = calls(server);
    proxy.swallow_answers(true);
    let cut = async {
        eventually("the call", async || calls(server) > before).await;
        proxy.cut();
        proxy.swallow_answers(false);
    };
    tokio::join!(call, cut).0
}

#[tokio::test]
async fn calls_cut_off_before_their_answer_are_carried_out_once() {
    let server = Server::start(&[]);
    let proxy = Proxy::start(server.port);
    let mut rig = Rig::on(&proxy.url(), None).await;
    let config = |c: &mut QueueConfig| {
        c.exactly_once = true;
        c.max_delivery_attempts = Some(5);
    };
    let queue = rig.queue(1, config).await;
    let session = rig.session(&queue);
    let append = Append {
        topic: rig.topic.clone(),
        messages: ["a", "b"].map(|text| EncodedMessage::encode(text.as_bytes(), [], "")).into(),
        targets: vec![Target { queue: queue.clone(), filtered: Vec::new() }],
        route_version: rig.broker.route(&rig.topic).await.unwrap().version,
    };
    let ids = cut_off(&server, &proxy, rig.broker.append(append)).await.unwrap().message_ids;
    assert_eq!(ids.len(), 2);
    assert_eq!(rig.broker.stats(&queue).await.unwrap().undelivered_messages, 2);

    // Nobody has what was leased: it comes again, uncounted.
    let lost = cut_off(&server, &proxy, rig.broker.lease(lease_request(&queue, &session, 2))).await;
    assert!(matches!(lost, Err(BrokerError::Unavailable(_))), "{lost:?}");
    let mut leased = Vec::new();
    eventually("the lease", async || {
        leased.extend(rig.broker.lease(lease_request(&queue, &session, 2)).await.unwrap_or_default());
        leased.len() == 2
    })
    .await;
    assert!(leased.iter().all(|l| l.token.attempt == 1), "{leased:?}");

    let nack = DeadlineChange { token: leased[0].token, deadline_ms: 0, bypass_backoff: true, max_life_ms: 0 };
    assert_eq!(cut_off(&server, &proxy, rig.broker.modify_deadlines(&queue, &[nack])).await, Ok(vec![Outcome::Done]));
    let acked = cut_off(&server, &proxy, rig.broker.acknowledge(&queue, &[leased[1].token])).await;
    assert_eq!(acked, Ok(vec![Outcome::Done]));
    let again = rig.lease(&queue, &session, 5).await;
    assert_eq!(again.iter().map(|l| l.token.attempt).collect::<Vec<_>>(), [2]);
    assert_eq!(rig.ack(&queue, &again).await, [Outcome::Done]);
    assert_eq!(rig.broker.stats(&queue).await.unwrap().undelivered_messages, 0);
    eventually("the credit", async || session.outstanding_messages() == 0).await;
}

#[tokio::test]
async fn an_expiry_is_noticed_within_a_quarter_second_without_any_call() {
    let server = Server::start(&[]);
    let broker = start(&server.url(0)).await.unwrap();
    let clock = Arc::new(AtomicU64::new(0));
    let mut rig = Rig::with_topic(broker, clock, None).await;
    let queue = rig.queue(1, |_| {}).await;
    rig.publish(&["m"]).await;
    let (first, second) = (rig.session(&queue), rig.session(&queue));
    let request = LeaseRequest { deadline_ms: 400, ..lease_request(&queue, &first, 1) };
    let leased = rig.broker.lease(request).await.unwrap();
    second.woken().await;
    assert!(rig.lease(&queue, &second, 1).await.is_empty());
    tokio::time::timeout(Duration::from_secs(5), second.woken()).await.unwrap();
    let late = rig.broker.now_ms() as i64 - leased[0].deadline_at_ms as i64;
    assert!((-20..=250).contains(&late), "noticed {late} ms after the deadline");
    assert_eq!(first.outstanding_messages(), 0);
    assert_eq!(rig.lease(&queue, &second, 1).await[0].token.attempt, 2);
}

#[tokio::test]
async fn a_change_that_a_dead_node_left_behind_is_completed() {
    let server = Server::start(&[]);
    let rig = Rig::on(&server.url(0), None).await;
    // What a node leaves that dies right after it noted the change.
    let engine = &rig.broker.engine;
    let config = rig.config(1);
    engine.leave_behind(Kind::Subscription, "s1", &Effect::OpenQueue(config.clone())).await;
    assert_eq!(rig.broker.get(Kind::Subscription, "s1").await.unwrap(), None);
    let late = change(Kind::Subscription, "s1", Expect::Absent, true, Effect::OpenQueue(config.clone()));
    assert!(matches!(rig.broker.change(late).await, Err(BrokerError::Conflict(_))));
    assert!(rig.broker.get(Kind::Subscription, "s1").await.unwrap().is_some());
    rig.publish(&["m"]).await;
    assert_eq!(rig.texts(&config.queue, 5).await, ["m"]);
}
