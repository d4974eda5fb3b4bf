//! What the engine on Redis costs the Redis server, against a stream with a consumer group in the same run.
//!
//! `cargo bench --bench redis` starts a `redis-server` on a free loopback port, prints a table, and writes it to
//! `benches/redis.md`. CPU is what the server says it used (`used_cpu_user` and `used_cpu_sys`), so that it counts however
//! busy the machine is; messages a second of one Redis core are its inverse. The cases take turns in rounds, and the table
//! has the median of the rounds, so that what else runs on the machine hits all of them alike.

use std::{
    cell::Cell,
    fmt::Write,
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
use rustix::time::{ClockId, clock_gettime};

type Failure = Box<dyn std::error::Error>;

/// Messages of one measurement, a multiple of all batches: far longer than the resolution of the CPU time.
const MESSAGES: usize = 20_000;
const ROUNDS: usize = 15;
const BACKLOG: usize = 200_000;
const DATA_BYTES: usize = 100;
/// Messages a streaming client of Google's libraries may hold unless it is set up otherwise.
const STREAM_MESSAGES: usize = 1000;
/// Consumers of the cases with several: so many calls of one node are under way when a Redis core is busy.
const CONSUMERS: usize = 10;
const IDLE_SUBSCRIPTIONS: u64 = 1000;
/// How long idle subscriptions are watched: several rounds in which a node looks after them.
const IDLE: Duration = Duration::from_secs(60);
/// Longer than one such round.
const SETTLE: Duration = Duration::from_secs(15);

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

    fn info(&self, section: &str, names: &[&str]) -> Result<f64, Failure> {
        let mut connection = redis::Client::open(self.url())?.get_connection()?;
        let info: String = redis::cmd("INFO").arg(section).query(&mut connection)?;
        let mut sum = 0.0;
        for name in names {
            let line = info.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
            sum += line.ok_or_else(|| format!("INFO has no {name}"))?.trim().parse::<f64>()?;
        }
        Ok(sum)
    }

    /// CPU time of the server so far, microseconds.
    fn cpu(&self) -> Result<f64, Failure> {
        Ok(self.info("cpu", &["used_cpu_user", "used_cpu_sys"])? * 1e6)
    }

    fn memory(&self) -> Result<f64, Failure> {
        self.info("memory", &["used_memory"])
    }

    fn commands(&self) -> Result<f64, Failure> {
        self.info("stats", &["total_commands_processed"])
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

    /// Publishes, leases and acknowledges. Several publishes are under way at a time, as under load.
    async fn cycle(&self, sessions: &[Arc<Session>], case: &Case) -> Result<(), Failure> {
        let at_once = if case.alone { 1 } else { (1000 / case.batch).min(100) };
        for _ in 0..MESSAGES / case.batch / at_once / case.consumers {
            // Several consumers work on a backlog: the last messages of one are shared out in small parts.
            for _ in 0..case.consumers {
                futures::future::try_join_all((0..at_once).map(|_| self.append(case.batch, case.keys))).await?;
            }
            let left = Cell::new(case.batch * at_once * case.consumers);
            futures::future::try_join_all(sessions.iter().map(|session| self.consume(session, case.leased, &left))).await?;
        }
        Ok(())
    }

    /// Leases and acknowledges until nothing is left.
    async fn consume(&self, session: &Arc<Session>, most: usize, left: &Cell<usize>) -> Result<(), Failure> {
        while left.get() > 0 {
            let request = LeaseRequest {
                queue: self.queue.clone(),
                session: session.clone(),
                max_messages: most,
                max_bytes: u64::MAX,
                deadline_ms: 60_000,
                max_inflight: 1_000_000,
                record_version: 0,
            };
            let leased = self.broker.lease(request).await?;
            left.set(left.get() - leased.len());
            let tokens: Vec<_> = leased.iter().map(|l| l.token).collect();
            if !tokens.is_empty() {
                self.broker.acknowledge(&self.queue, &tokens).await?;
            }
        }
        Ok(())
    }
}

/// One way to pass messages on.
struct Case {
    name: &'static str,
    /// Messages of one publish.
    batch: usize,
    /// Messages leased and acknowledged together at most.
    leased: usize,
    /// Ordering keys; 0 for a subscription without ordering.
    keys: usize,
    /// One publish is under way at a time, so that none is stored together with others.
    alone: bool,
    /// How many lease and acknowledge at the same time, over one connection.
    consumers: usize,
    stream: bool,
}

const fn case(name: &'static str, batch: usize, leased: usize, keys: usize) -> Case {
    Case { name, batch, leased, keys, alone: false, consumers: 1, stream: false }
}

const fn stream(name: &'static str, leased: usize) -> Case {
    Case { name, batch: 100, leased, keys: 0, alone: true, consumers: 1, stream: true }
}

const CASES: [Case; 14] = [
    stream("stream, 100 and 100", 100),
    stream("stream, 100 and 1,000", STREAM_MESSAGES),
    Case { consumers: CONSUMERS, ..stream("stream, 100 and 100, 10 consumers at once", 100) },
    Case { alone: true, ..case("Landline, 100 and 100, one publish at a time", 100, 100, 0) },
    case("Landline, 100 and 100", 100, 100, 0),
    Case { consumers: CONSUMERS, ..case("Landline, 100 and 100, 10 consumers at once", 100, 100, 0) },
    case("Landline, 100 and 1,000", 100, STREAM_MESSAGES, 0),
    case("Landline, 1,000 and 1,000", 1000, STREAM_MESSAGES, 0),
    case("Landline, 10 and 1,000", 10, STREAM_MESSAGES, 0),
    case("Landline, 1 and 1,000", 1, STREAM_MESSAGES, 0),
    case("Landline, 100 and 1,000, over 100 ordering keys", 100, STREAM_MESSAGES, 100),
    case("Landline, 100 and 100, over 100 ordering keys", 100, 100, 100),
    Case { consumers: CONSUMERS, ..case("Landline, 100 and 100, over 100 ordering keys, 10 consumers at once", 100, 100, 100) },
    case("Landline, 100 and 1,000, all of one ordering key", 100, STREAM_MESSAGES, 1),
];

/// What XREADGROUP answers: stream, then id and fields of each message.
type Rows = Vec<(String, Vec<(String, Vec<Vec<u8>>)>)>;

/// The same with a stream and a consumer group, pipelined by batch.
async fn stream_cycle(connection: &redis::aio::MultiplexedConnection, case: &Case) -> Result<(), Failure> {
    let chain = async |mut connection: redis::aio::MultiplexedConnection| {
        for _ in 0..MESSAGES / case.leased / case.consumers {
            for _ in 0..case.leased / case.batch {
                add(&mut connection, "s", case.batch).await?;
            }
            let mut read = redis::cmd("XREADGROUP");
            read.arg("GROUP").arg("g").arg("c").arg("COUNT").arg(case.leased).arg("STREAMS").arg("s").arg(">");
            let rows: Rows = read.query_async(&mut connection).await?;
            let ids: Vec<String> = rows.into_iter().flat_map(|(_, rows)| rows).map(|(id, _)| id).collect();
            let mut pipe = redis::pipe();
            pipe.cmd("XACK").arg("s").arg("g").arg(&ids).ignore().cmd("XDEL").arg("s").arg(&ids).ignore();
            pipe.exec_async(&mut connection).await?;
        }
        Ok::<_, Failure>(())
    };
    futures::future::try_join_all((0..case.consumers).map(|_| chain(connection.clone()))).await?;
    Ok(())
}

async fn add(connection: &mut redis::aio::MultiplexedConnection, stream: &str, count: usize) -> Result<(), Failure> {
    let data = [b'x'; DATA_BYTES + 2];
    let mut pipe = redis::pipe();
    for _ in 0..count {
        pipe.cmd("XADD").arg(stream).arg("*").arg("m").arg(&data[..]).ignore();
    }
    pipe.exec_async(connection).await?;
    Ok(())
}

/// CPU time of this process so far, microseconds.
fn own_cpu() -> f64 {
    let used = clock_gettime(ClockId::ProcessCPUTime);
    used.tv_sec as f64 * 1e6 + used.tv_nsec as f64 / 1e3
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// What each case costs, microseconds a message: of Redis, and of this process.
async fn measure(server: &Server) -> Result<Vec<(f64, f64)>, Failure> {
    let mut connection = redis::Client::open(server.url())?.get_multiplexed_async_connection().await?;
    let mut create = redis::cmd("XGROUP");
    create.arg("CREATE").arg("s").arg("g").arg("$").arg("MKSTREAM");
    let _: redis::Value = create.query_async(&mut connection).await?;
    let mut rigs = Vec::new();
    for (number, case) in (1..).zip(&CASES) {
        let rig = Rig::new(server, number, case.keys > 0).await?;
        let sessions: Vec<_> = (0..case.consumers).map(|_| Session::new(next_session_id())).collect();
        if case.consumers > 1 {
            sessions.iter().for_each(|session| rig.broker.attach(&rig.queue, session));
        }
        rigs.push((rig, sessions));
    }
    let mut taken = vec![(Vec::new(), Vec::new()); CASES.len()];
    for _ in 0..ROUNDS {
        for ((case, (rig, sessions)), taken) in CASES.iter().zip(&rigs).zip(&mut taken) {
            let (redis, own) = (server.cpu()?, own_cpu());
            match case.stream {
                true => stream_cycle(&connection, case).await?,
                false => rig.cycle(sessions, case).await?,
            }
            taken.0.push((server.cpu()? - redis) / MESSAGES as f64);
            taken.1.push((own_cpu() - own) / MESSAGES as f64);
        }
    }
    Ok(taken.into_iter().map(|(redis, own)| (median(redis), median(own))).collect())
}

/// Redis's memory for a backlog, bytes a message, overhead included: of a stream, and of a subscription.
async fn weigh(server: &Server) -> Result<(f64, f64), Failure> {
    let mut connection = redis::Client::open(server.url())?.get_multiplexed_async_connection().await?;
    let empty = server.memory()?;
    for _ in 0..BACKLOG / 100 {
        add(&mut connection, "backlog", 100).await?;
    }
    let stream = server.memory()?;
    let rig = Rig::new(server, 100, false).await?;
    for _ in 0..BACKLOG / 100 {
        rig.append(100, 0).await?;
    }
    let both = server.memory()?;
    Ok(((stream - empty) / BACKLOG as f64, (both - stream) / BACKLOG as f64))
}

/// Subscriptions whose consumers wait for messages that don't come, on each of so many nodes: commands a second, those of
/// functions included, and percent of a core.
async fn idle(server: &Server, number: u64, nodes: usize) -> Result<(f64, f64), Failure> {
    let rig = Rig::new(server, number, false).await?;
    let mut brokers = vec![rig.broker.clone()];
    while brokers.len() < nodes {
        brokers.push(Redis::open(&server.url(), Options::default()).await?);
    }
    let mut sessions = Vec::new();
    for number in number + 1..=number + IDLE_SUBSCRIPTIONS {
        let queue = rig.subscribe(number).await?;
        for broker in &brokers {
            let session = Session::new(next_session_id());
            broker.attach(&queue, &session);
            let request = LeaseRequest {
                queue: queue.clone(),
                session: session.clone(),
                max_messages: 100,
                max_bytes: u64::MAX,
                deadline_ms: 60_000,
                max_inflight: 1_000_000,
                record_version: 0,
            };
            broker.lease(request).await?;
            sessions.push(session);
        }
    }
    // Nodes that came after the first one has looked at all queues.
    tokio::time::sleep(SETTLE).await;
    let (commands, cpu, since) = (server.commands()?, server.cpu()?, Instant::now());
    tokio::time::sleep(IDLE).await;
    let seconds = since.elapsed().as_secs_f64();
    let idle = ((server.commands()? - commands) / seconds, (server.cpu()? - cpu) / 1e4 / seconds);
    for broker in brokers {
        broker.close().await;
    }
    Ok(idle)
}

async fn run() -> Result<(), Failure> {
    let server = Server::start()?;
    let costs = measure(&server).await?;
    let (stream, landline) = weigh(&server).await?;
    // Servers of their own, because the brokers of the measurements before are idle too.
    let one = idle(&Server::start()?, 1000, 1).await?;
    let two = idle(&Server::start()?, 1000, 2).await?;
    let version = Command::new("redis-server").arg("--version").output()?.stdout;
    let version = String::from_utf8_lossy(&version).split_whitespace().find_map(|w| w.strip_prefix("v=").map(String::from));
    let mut text = format!(
        "# What the Redis broker costs\n\n\
         Written by `cargo bench --bench redis`. Messages of {DATA_BYTES} B are published, leased and acknowledged through one\n\
         `redis-server` {} on loopback; the first number is how many a publish brings, the second how many are leased and\n\
         acknowledged together at most. Publishes that are under way at the same time are stored together, up to 1,000 messages,\n\
         except where the table says otherwise. Consumers that are at work at once share a connection, and a backlog of\n\
         {CONSUMERS},000. The stream is read through a consumer group, and its messages are deleted once they are acknowledged. CPU\n\
         is the median of {ROUNDS} rounds in which the cases take turns; the client's, of an optimized build, holds making and\n\
         reading the messages. Times drift with the machine and with what else it does, ratios hardly.\n\n\
         | | CPU of Redis a message | messages/s of one Redis core | against the stream | CPU of the client a message |\n\
         |---|---|---|---|---|\n",
        version.unwrap_or_default()
    );
    let control = costs[0].0;
    for (case, (redis, own)) in CASES.iter().zip(&costs) {
        let own = if cfg!(debug_assertions) { "-".to_owned() } else { format!("{own:.2} us") };
        let line = format!("| {} | {redis:.2} us | {:.0} | {:.1} x | {own} |", case.name, 1e6 / redis, control / redis);
        writeln!(text, "{line}")?;
    }
    writeln!(
        text,
        "\nMemory of a backlog, a message of {DATA_BYTES} B published 100 at a time, overhead included: {landline:.0} B; in a stream\n\
         {stream:.0} B.\n\n\
         {IDLE_SUBSCRIPTIONS} idle subscriptions, each with a waiting consumer on every node: {:.1} commands/s, those of functions\n\
         included, and {:.2} % of a core with one node; {:.1} commands/s and {:.2} % with two.",
        one.0, one.1, two.0, two.1,
    )?;
    print!("{text}");
    std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/redis.md"), text)?;
    Ok(())
}

fn main() -> Result<(), Failure> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(run())
}
