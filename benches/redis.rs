//! What the engine on Redis costs the Redis server, against a stream with a consumer group in the same run.
//!
//! `cargo bench --bench redis` starts a `redis-server` on a free loopback port and prints a table. CPU is the time of the
//! server process, so it holds however busy the machine is; messages a second of one Redis core are its inverse.

use std::{
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use landline::{
    broker::{
        Append, Broker, Change, Effect, Expect, Kind, LeaseRequest, QueueConfig, QueueRef, Session, Target, TopicConfig,
        TopicRef, next_session_id,
        redis::{Options, Redis},
    },
    model::EncodedMessage,
};

type Failure = Box<dyn std::error::Error>;

/// Messages of one measurement: long enough for the clock ticks the kernel counts CPU time in (10 ms).
const MESSAGES: usize = 200_000;
const DATA_BYTES: usize = 100;

struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start() -> Result<Self, Failure> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let arguments = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--port", &port.to_string()];
        let child = Command::new("redis-server").args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        let server = Self { child, port };
        let until = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            if Instant::now() > until {
                return Err("redis-server does not answer".into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(server)
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// CPU time of the process so far.
    fn cpu(&self) -> Result<Duration, Failure> {
        let stat = std::fs::read_to_string(format!("/proc/{}/schedstat", self.child.id()))?;
        Ok(Duration::from_nanos(stat.split_whitespace().next().unwrap_or("0").parse()?))
    }

    fn memory(&self) -> Result<u64, Failure> {
        let mut connection = redis::Client::open(self.url())?.get_connection()?;
        let info: String = redis::cmd("INFO").arg("memory").query(&mut connection)?;
        let line = info.lines().find_map(|l| l.strip_prefix("used_memory:")).ok_or("no used_memory")?;
        Ok(line.trim().parse()?)
    }
}

impl Server {
    fn commands(&self) -> Result<u64, Failure> {
        let mut connection = redis::Client::open(self.url())?.get_connection()?;
        let info: String = redis::cmd("INFO").arg("stats").query(&mut connection)?;
        let line = info.lines().find_map(|l| l.strip_prefix("total_commands_processed:")).ok_or("no count of commands")?;
        Ok(line.trim().parse()?)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Rig {
    broker: Arc<dyn Broker>,
    topic: TopicRef,
    queue: QueueRef,
    route_version: u64,
    ordered: bool,
}

impl Rig {
    async fn new(server: &Server, number: u64, ordered: bool) -> Result<Self, Failure> {
        let broker = Redis::open(&server.url(), Options::default()).await?;
        let topic = TopicRef { channel: format!("bench/topic{number}").into(), incarnation: number };
        let change = |kind, name: String, effect| Change { kind, name, expect: Expect::Absent, body: Some("{}".into()), effect };
        let config = TopicConfig { topic: topic.clone(), retention_ms: None };
        broker.change(change(Kind::Topic, format!("topic{number}"), Effect::OpenTopic(config))).await?;
        let queue = QueueRef { channel: format!("bench/sub{number}").into(), incarnation: number };
        let mut rig = Self { broker, topic, queue, route_version: 0, ordered };
        rig.queue = rig.subscribe(number).await?;
        rig.route_version = rig.broker.route(&rig.topic).await?.version;
        Ok(rig)
    }

    async fn subscribe(&self, number: u64) -> Result<QueueRef, Failure> {
        let queue = QueueRef { channel: format!("bench/sub{number}").into(), incarnation: number };
        let config = QueueConfig {
            queue: queue.clone(),
            topic: self.topic.clone(),
            ordered: self.ordered,
            exactly_once: false,
            retry: None,
            max_delivery_attempts: None,
            retention_ms: 7 * 86_400_000,
            retain_acked: false,
        };
        let (kind, effect) = (Kind::Subscription, Effect::OpenQueue(config));
        let name = format!("sub{number}");
        self.broker.change(Change { kind, name, expect: Expect::Absent, body: Some("{}".into()), effect }).await?;
        Ok(queue)
    }

    async fn append(&self, batch: usize, keys: usize) -> Result<(), Failure> {
        let data = [b'x'; DATA_BYTES];
        let key = |n: usize| if keys == 0 { String::new() } else { format!("key{}", n % keys) };
        let append = Append {
            topic: self.topic.clone(),
            messages: (0..batch).map(|n| EncodedMessage::encode(&data, [], &key(n))).collect(),
            targets: vec![Target { queue: self.queue.clone(), filtered: Vec::new() }],
            route_version: self.route_version,
        };
        self.broker.append(append).await?;
        Ok(())
    }

    /// Publishes, leases and acknowledges. Several batches wait at a time, as under load.
    async fn cycle(&self, batch: usize, keys: usize) -> Result<(), Failure> {
        let session = Session::new(next_session_id());
        let (rounds, at_once) = (MESSAGES / batch, (1000 / batch).clamp(4, 100));
        for _ in 0..rounds / at_once {
            futures::future::try_join_all((0..at_once).map(|_| self.append(batch, keys))).await?;
            let mut left = batch * at_once;
            while left > 0 {
                let request = LeaseRequest {
                    queue: self.queue.clone(),
                    session: session.clone(),
                    max_messages: batch.max(100),
                    max_bytes: u64::MAX,
                    deadline_ms: 60_000,
                    max_inflight: 1_000_000,
                };
                let leased = self.broker.lease(request).await?;
                left -= leased.len();
                let tokens: Vec<_> = leased.iter().map(|l| l.token).collect();
                self.broker.acknowledge(&self.queue, &tokens).await?;
            }
        }
        Ok(())
    }
}

/// What XREADGROUP answers: stream, then id and fields of each message.
type Rows = Vec<(String, Vec<(String, Vec<Vec<u8>>)>)>;

/// The same with a stream and a consumer group, pipelined by batch.
async fn stream_cycle(server: &Server, batch: usize) -> Result<(), Failure> {
    let mut connection = redis::Client::open(server.url())?.get_multiplexed_async_connection().await?;
    let _: redis::Value =
        redis::cmd("XGROUP").arg("CREATE").arg("s").arg("g").arg("$").arg("MKSTREAM").query_async(&mut connection).await?;
    let data = [b'x'; DATA_BYTES + 2];
    for _ in 0..MESSAGES / batch {
        let mut pipe = redis::pipe();
        for _ in 0..batch {
            pipe.cmd("XADD").arg("s").arg("*").arg("m").arg(&data[..]).ignore();
        }
        pipe.exec_async(&mut connection).await?;
        let mut read = redis::cmd("XREADGROUP");
        read.arg("GROUP").arg("g").arg("c").arg("COUNT").arg(batch).arg("STREAMS").arg("s").arg(">");
        let rows: Rows = read.query_async(&mut connection).await?;
        let ids: Vec<String> = rows.into_iter().flat_map(|(_, rows)| rows).map(|(id, _)| id).collect();
        let mut pipe = redis::pipe();
        pipe.cmd("XACK").arg("s").arg("g").arg(&ids).ignore().cmd("XDEL").arg("s").arg(&ids).ignore();
        pipe.exec_async(&mut connection).await?;
    }
    Ok(())
}

/// Measures the CPU time of Redis for `MESSAGES` messages, microseconds a message.
async fn measure(server: &Server, name: &str, work: impl Future<Output = Result<(), Failure>>) -> Result<f64, Failure> {
    let before = server.cpu()?;
    work.await?;
    let micros = (server.cpu()? - before).as_nanos() as f64 / 1000.0 / MESSAGES as f64;
    println!("| {name} | {micros:.2} us | {:.0} |", 1e6 / micros);
    Ok(micros)
}

/// Redis's memory for a backlog, bytes a message, overhead included.
async fn weigh(server: &Server, name: &str, work: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    let before = server.memory()?;
    work.await?;
    let bytes = (server.memory()? as f64 - before as f64) / MESSAGES as f64;
    println!("| {name} | {bytes:.0} B | |");
    Ok(())
}

async fn stream_backlog(server: &Server, batch: usize) -> Result<(), Failure> {
    let mut connection = redis::Client::open(server.url())?.get_multiplexed_async_connection().await?;
    let data = [b'x'; DATA_BYTES + 2];
    for _ in 0..MESSAGES / batch {
        let mut pipe = redis::pipe();
        for _ in 0..batch {
            pipe.cmd("XADD").arg("backlog").arg("*").arg("m").arg(&data[..]).ignore();
        }
        pipe.exec_async(&mut connection).await?;
    }
    Ok(())
}

/// Subscriptions whose consumers wait for messages that don't come.
async fn idle(server: &Server, count: u64) -> Result<(), Failure> {
    let rig = Rig::new(server, 1000, false).await?;
    let mut sessions = Vec::new();
    for number in 2000..2000 + count {
        let queue = rig.subscribe(number).await?;
        let session = Session::new(next_session_id());
        rig.broker.attach(&queue, &session);
        let request = LeaseRequest {
            queue: queue.clone(),
            session: session.clone(),
            max_messages: 100,
            max_bytes: u64::MAX,
            deadline_ms: 60_000,
            max_inflight: 1_000_000,
        };
        rig.broker.lease(request).await?;
        sessions.push(session);
    }
    // Two of the slow rounds in which a node looks at all queues.
    let (commands, cpu, since) = (server.commands()?, server.cpu()?, Instant::now());
    tokio::time::sleep(Duration::from_secs(30)).await;
    let seconds = since.elapsed().as_secs_f64();
    let busy = (server.cpu()? - cpu).as_secs_f64() / seconds * 100.0;
    println!(
        "| {count} idle subscriptions with a stream each, one node | {busy:.2} % of a core | {:.0} commands/s |",
        (server.commands()? - commands) as f64 / seconds
    );
    Ok(())
}

async fn run() -> Result<(), Failure> {
    let server = Server::start()?;
    println!(
        "| publish, lease and acknowledge messages of {DATA_BYTES} B | CPU of Redis a message | messages/s of one Redis core |"
    );
    println!("|---|---|---|");
    let control = measure(&server, "stream with a consumer group, batch 100", stream_cycle(&server, 100)).await?;
    let plain = Rig::new(&server, 1, false).await?;
    let batch = measure(&server, "Landline, batch 100", plain.cycle(100, 0)).await?;
    measure(&server, "Landline, batch 10", plain.cycle(10, 0)).await?;
    measure(&server, "Landline, batch 1", plain.cycle(1, 0)).await?;
    let ordered = Rig::new(&server, 2, true).await?;
    measure(&server, "Landline, ordered, batch 100, 100 keys", ordered.cycle(100, 100)).await?;
    measure(&server, "Landline, ordered, batch 100, 1 key", ordered.cycle(100, 1)).await?;
    weigh(&server, "memory of a backlog: stream", stream_backlog(&server, 100)).await?;
    let fill = async {
        for _ in 0..MESSAGES / 100 {
            plain.append(100, 0).await?;
        }
        Ok(())
    };
    weigh(&server, "memory of a backlog: Landline, batch 100", fill).await?;
    // Each of them is a node with its own rounds.
    drop((plain, ordered));
    idle(&server, 1000).await?;
    println!("\nAt batch 100, a message costs {:.1} times less than in a stream with a consumer group.", control / batch);
    Ok(())
}

fn main() -> Result<(), Failure> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(run())
}
