//! Redis Cluster and Sentinel: slots that move, servers that are lost.

use std::collections::BTreeSet;

use super::{server::Server, *};
use crate::broker::redis::{queue::queue_key, slots::slot_of};

/// A cluster without shared fate: every server may be killed.
struct Cluster {
    servers: Vec<Server>,
}

impl Cluster {
    /// Three primaries, with a replica of the first as the fourth server when asked for.
    async fn start(replica: bool) -> Self {
        let servers: Vec<Server> = (0..if replica { 4 } else { 3 })
            .map(|_| {
                let bus = server::free_port().to_string();
                Server::start(&["--cluster-enabled", "yes", "--cluster-port", &bus, "--cluster-node-timeout", "1000"])
            })
            .collect();
        let cluster = Self { servers };
        for (number, (first, last)) in [("0", "5460"), ("5461", "10922"), ("10923", "16383")].iter().enumerate() {
            let server = &cluster.servers[number];
            let _: String = server.command(0, &["CLUSTER", "ADDSLOTSRANGE", first, last]);
            let _: String = server.command(0, &["CLUSTER", "SET-CONFIG-EPOCH", &(number + 1).to_string()]);
        }
        for from in &cluster.servers {
            for to in &cluster.servers {
                let bus = to.option("--cluster-port").unwrap();
                let _: String = from.command(0, &["CLUSTER", "MEET", "127.0.0.1", &to.port.to_string(), bus]);
            }
        }
        let known = format!("cluster_known_nodes:{}\r", cluster.servers.len());
        eventually("the servers know each other", async || {
            cluster.servers.iter().all(|s| s.command::<String>(0, &["CLUSTER", "INFO"]).contains(&known))
        })
        .await;
        if let Some(replica) = cluster.servers.get(3) {
            let primary = cluster.id(0);
            eventually("the replica", async || replica.try_command::<String>(0, &["CLUSTER", "REPLICATE", &primary]).is_ok())
                .await;
            eventually("the replica's link", async || replica.info("replication").contains("master_link_status:up")).await;
        }
        eventually("the cluster works", async || {
            cluster.servers.iter().all(|s| s.command::<String>(0, &["CLUSTER", "INFO"]).contains("cluster_state:ok"))
        })
        .await;
        cluster
    }

    fn id(&self, server: usize) -> String {
        self.servers[server].command(0, &["CLUSTER", "MYID"])
    }

    /// Seeds that are all but the first server, which may be lost.
    fn url(&self) -> String {
        let seeds: Vec<_> = self.servers.iter().skip(1).map(|s| format!("127.0.0.1:{}", s.port)).collect();
        format!("redis+cluster://{}", seeds.join(","))
    }

    /// The server of a slot as they were given at the start.
    fn home(slot: u16) -> usize {
        usize::from(slot > 5460) + usize::from(slot > 10922)
    }

    /// A queue whose slot the first server has.
    fn queue_on_first(rig: &Rig) -> u64 {
        (1..).find(|n| Self::home(slot_of(&queue_key(&rig.config(*n).queue))) == 0).unwrap()
    }

    /// Moves a slot key by key, slowly enough for calls to come between.
    fn move_slot(&self, slot: u16, from: usize, to: usize) {
        let (slot, source, target) = (slot.to_string(), &self.servers[from], &self.servers[to]);
        let (source_id, target_id, port) = (self.id(from), self.id(to), target.port.to_string());
        let _: String = target.command(0, &["CLUSTER", "SETSLOT", &slot, "IMPORTING", &source_id]);
        let _: String = source.command(0, &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &target_id]);
        loop {
            let keys: Vec<String> = source.command(0, &["CLUSTER", "GETKEYSINSLOT", &slot, "1"]);
            let Some(key) = keys.first() else { break };
            let _: String = source.command(0, &["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
            std::thread::sleep(Duration::from_millis(10));
        }
        for server in [target, source] {
            let _: String = server.command(0, &["CLUSTER", "SETSLOT", &slot, "NODE", &target_id]);
        }
    }
}

/// What was confirmed to a client, to be compared with what comes out in the end.
#[derive(Default)]
struct Confirmed {
    published: BTreeSet<String>,
    acked: BTreeSet<String>,
    /// Asked for, but the answer was lost.
    doubtful: BTreeSet<String>,
    failures: usize,
}

impl Confirmed {
    /// Publishes one message and acknowledges every other one that comes.
    async fn step(&mut self, rig: &Rig, queue: &QueueRef, number: usize) {
        let name = format!("m{number:04}");
        match rig.append(vec![EncodedMessage::encode(name.as_bytes(), [], "")], Vec::new()).await {
            Ok(_) => {
                self.published.insert(name);
            }
            Err(BrokerError::Unavailable(_)) => self.failed().await,
            Err(e) => panic!("{e}"),
        }
        if number.is_multiple_of(2) {
            return;
        }
        match rig.broker.lease(lease_request(queue, &Session::new(next_session_id()), 1)).await {
            Ok(leased) => self.acknowledge(rig, queue, &leased).await,
            Err(BrokerError::Unavailable(_)) => self.failed().await,
            Err(e) => panic!("{e}"),
        }
    }

    async fn acknowledge(&mut self, rig: &Rig, queue: &QueueRef, leased: &[Leased]) {
        for leased in leased {
            let name = text(leased);
            assert!(!self.acked.contains(&name), "{name} came after its confirmed acknowledgement");
            match rig.broker.acknowledge(queue, &[leased.token]).await {
                Ok(outcomes) if outcomes == [Outcome::Done] => {
                    self.acked.insert(name);
                }
                Ok(_) => {}
                Err(BrokerError::Unavailable(_)) => {
                    self.doubtful.insert(name);
                    self.failed().await;
                }
                Err(e) => panic!("{e}"),
            }
        }
    }

    async fn failed(&mut self) {
        self.failures += 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    /// Takes everything that is left and compares.
    async fn settle(mut self, rig: &Rig, queue: &QueueRef) {
        eventually("the broker works again", async || rig.broker.stats(queue).await.is_ok()).await;
        rig.pass(20_000);
        let mut idle = 0;
        while idle < 3 {
            let leased = rig.broker.lease(lease_request(queue, &Session::new(next_session_id()), 100)).await.unwrap_or_default();
            idle = if leased.is_empty() { idle + 1 } else { 0 };
            if leased.is_empty() {
                rig.pass(11_000);
            }
            self.acknowledge(rig, queue, &leased).await;
        }
        let lost: Vec<_> =
            self.published.iter().filter(|name| !self.acked.contains(*name) && !self.doubtful.contains(*name)).collect();
        assert!(lost.is_empty(), "confirmed and never delivered: {lost:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_moves_loses_nothing_and_repeats_nothing() {
    let cluster = Cluster::start(false).await;
    let mut rig = Rig::on(&cluster.url(), None).await;
    let number = Cluster::queue_on_first(&rig);
    let queue = rig.queue(number, |c| c.exactly_once = true).await;
    let mut confirmed = Confirmed::default();
    for n in 0..40 {
        confirmed.step(&rig, &queue, n).await;
    }
    assert_eq!(confirmed.failures, 0);
    let slot = slot_of(&queue_key(&queue));
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| cluster.move_slot(slot, 0, 1));
        let steps = async {
            let mut n = 40;
            while !moving.is_finished() || n < 60 {
                confirmed.step(&rig, &queue, n).await;
                n += 1;
            }
        };
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(steps));
    });
    let keys: i64 = cluster.servers[0].command(0, &["CLUSTER", "COUNTKEYSINSLOT", &slot.to_string()]);
    assert_eq!(keys, 0, "everything moved, and nothing was written to the old place");
    confirmed.settle(&rig, &queue).await;
}

/// Waits until a replica has what its master has, by its own word.
async fn has_everything(replica: &Server, master: &Server) {
    let offset = |server: &Server, field: &str| -> u64 {
        server.info("replication").lines().find_map(|l| l.strip_prefix(field)).unwrap().trim().parse().unwrap()
    };
    eventually("the replica has everything", async || {
        offset(replica, "slave_repl_offset:") >= offset(master, "master_repl_offset:")
    })
    .await;
}

#[tokio::test]
async fn a_lost_primary_is_replaced_by_its_replica() {
    let mut cluster = Cluster::start(true).await;
    let mut rig = Rig::on(&cluster.url(), None).await;
    let number = Cluster::queue_on_first(&rig);
    let queue = rig.queue(number, |c| c.exactly_once = true).await;
    let session = rig.session(&queue);
    rig.publish(&["a", "b", "c"]).await;
    let leased = rig.lease(&queue, &session, 2).await;
    assert_eq!(rig.ack(&queue, &leased[..1]).await, [Outcome::Done]);
    has_everything(&cluster.servers[3], &cluster.servers[0]).await;
    cluster.servers[0].kill();
    assert!(matches!(rig.broker.stats(&queue).await, Err(BrokerError::Unavailable(_))));
    eventually("the replica takes over", async || rig.broker.stats(&queue).await.is_ok()).await;
    // Nothing was lost: leases are what they were, and what was acknowledged stays away.
    assert_eq!(rig.ack(&queue, &leased).await, [Outcome::Done, Outcome::Done]);
    rig.publish(&["d"]).await;
    rig.pass(11_000);
    let mut rest = rig.texts(&queue, 10).await;
    rest.sort();
    assert_eq!(rest, ["c", "d"]);
    eventually("the credit", async || session.outstanding_messages() == 0).await;
}

#[tokio::test]
async fn a_failover_by_sentinel_loses_nothing_that_replicas_confirmed() {
    let mut master = Server::start(&[]);
    let port = master.port.to_string();
    let replicas: Vec<Server> = (0..2).map(|_| Server::start(&["--replicaof", "127.0.0.1", &port])).collect();
    eventually("the replicas", async || master.info("replication").matches("state=online").count() == 2).await;
    let sentinel = Server::sentinel(master.port);
    eventually("the sentinel knows them", async || sentinel.info("sentinel").contains("slaves=2")).await;
    let url = format!("redis+sentinel://127.0.0.1:{}/main", sentinel.port);
    let mut rig = Rig::with(&url, None, Durability::Replicas(1)).await;
    let queue = rig.queue(1, |c| c.exactly_once = true).await;
    let mut confirmed = Confirmed::default();
    for n in 0..40 {
        confirmed.step(&rig, &queue, n).await;
    }
    assert_eq!(confirmed.failures, 0);
    master.kill();
    let (until, mut n) = (tokio::time::Instant::now() + Duration::from_secs(30), 40);
    let before = confirmed.published.len();
    while confirmed.published.len() < before + 20 {
        assert!(tokio::time::Instant::now() < until, "nothing is confirmed after the failover");
        confirmed.step(&rig, &queue, n).await;
        n += 1;
    }
    assert!(confirmed.failures > 0, "the master was away for a while");
    assert!(replicas.iter().any(|replica| replica.info("replication").contains("role:master")));
    confirmed.settle(&rig, &queue).await;
}

#[tokio::test]
async fn a_deposed_master_is_left_though_it_still_answers() {
    let old = Server::start(&[]);
    let new = Server::start(&["--replicaof", "127.0.0.1", &old.port.to_string()]);
    let sentinel = Server::sentinel(old.port);
    eventually("the replica", async || old.info("replication").contains("state=online")).await;
    eventually("the sentinel knows the replica", async || sentinel.info("sentinel").contains("slaves=1")).await;
    let mut rig = Rig::on(&format!("redis+sentinel://127.0.0.1:{}/main", sentinel.port), None).await;
    let queue = rig.queue(1, |_| {}).await;
    let session = rig.session(&queue);
    rig.publish(&["before"]).await;
    has_everything(&new, &old).await;
    eventually("the sentinel changes the master", async || {
        sentinel.try_command::<String>(0, &["SENTINEL", "FAILOVER", "main"]).is_ok()
    })
    .await;
    // A server that is promoted closes its connections.
    let calls = |server: &Server| -> u64 {
        let info: String = server.try_command(0, &["INFO", "commandstats"]).unwrap_or_default();
        let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_fcall:calls="));
        line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
    };
    let mut sent = 0;
    eventually("publishes go to the new master", async || {
        let (there, name) = (calls(&new), format!("m{sent}"));
        let done = rig.append(vec![EncodedMessage::encode(name.as_bytes(), [], "")], Vec::new()).await.is_ok();
        sent += usize::from(done);
        done && there > 0 && calls(&new) > there
    })
    .await;
    // The sentinel tells it ten seconds later only.
    assert!(old.info("replication").contains("role:master"));
    // Consumers are told by the new one.
    while !rig.lease(&queue, &session, 100).await.is_empty() {}
    rig.publish(&["after"]).await;
    tokio::time::timeout(std::time::Duration::from_secs(5), session.woken()).await.expect("a notice of the new master");
    let leased = rig.lease(&queue, &session, 10).await;
    assert_eq!(leased.iter().map(text).collect::<Vec<_>>(), ["after"]);
}

#[tokio::test]
async fn a_write_is_confirmed_when_every_connected_replica_has_it() {
    let master = Server::start(&[]);
    let port = master.port.to_string();
    let mut replicas: Vec<Server> = (0..2).map(|_| Server::start(&["--replicaof", "127.0.0.1", &port])).collect();
    eventually("the replicas", async || master.info("replication").matches("state=online").count() == 2).await;
    let mut rig = Rig::with(&master.url(0), None, Durability::Replicas(1)).await;
    let queue = rig.queue(1, |_| {}).await;
    rig.publish(&["a"]).await;
    // This one may be promoted as well as the other, and would not have the message.
    replicas[1].pause(true);
    let publish = async |text: &str| rig.append(vec![EncodedMessage::encode(text.as_bytes(), [], "")], Vec::new()).await;
    let refused = publish("b").await.unwrap_err();
    assert!(matches!(&refused, BrokerError::Unavailable(text) if text.contains("of 2 replicas have")), "{refused}");
    replicas[1].pause(false);
    eventually("the replica has caught up", async || publish("c").await.is_ok()).await;
    // One that has left is done without, after a while.
    replicas[1].kill();
    eventually("the replica is missed no more", async || publish("d").await.is_ok()).await;
    let texts = rig.texts(&queue, 100).await;
    assert!(["a", "c", "d"].iter().all(|sent| texts.iter().any(|text| text == sent)), "{texts:?}");
}
