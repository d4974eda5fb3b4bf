//! Connections: one to each server that holds data, opened again by itself whenever it breaks, and the map from hash slots
//! to servers.
//!
//! Nothing waits long for a server that is away: a call on a broken connection waits a moment for the next attempt and is
//! then refused. What a lost answer means is left to the caller, because only it knows how to repeat its call.

use std::{
    collections::HashMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::{Mutex, RwLock};
use redis::{
    AsyncConnectionConfig, Client, Cmd, FromRedisValue, Pipeline, RedisError, Value, aio::MultiplexedConnection, cmd,
    from_redis_value_ref,
};
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;

mod sentinels;

use super::{
    address::{Address, Arrangement, Endpoint},
    durability::{self, Durability},
    library,
    replicas::{Attached, connected},
    slots::{SLOTS, read_slots},
};
use crate::{
    broker::{BrokerError, Measure, MeasureValue},
    model::meter::{Histogram, add},
};

/// How long a call waits for a broken connection to come back: a restart of a local server takes about this long.
const CONNECT_WAIT: Duration = Duration::from_millis(250);
/// Longest time for one attempt to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The same with TLS. Its handshake takes more round trips and some milliseconds of work on both sides, and a server that was
/// started again does it one after the other with all its clients; an attempt that is given up makes that work anew.
const TLS_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A server that has not answered for this long is given up. Longer than any function runs, and than a 10 MB publish takes.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// First and longest pause between attempts.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// Redirections followed at once: a slot moves at most once or twice while a call is under way.
const MAX_REDIRECTS: usize = 4;
/// How long a call waits for a slot that is moving, and for a cluster that is putting itself in order. Longer moves and
/// failovers are told to the caller.
const MOVING_WAIT: Duration = Duration::from_secs(2);
/// Pause between two tries meanwhile.
const MOVING_PAUSE: Duration = Duration::from_millis(50);
/// The mark that a wait for replicas writes is forgotten after this long.
const MARK_SECONDS: u64 = 60;

/// Why a call failed.
#[derive(Debug, Clone)]
pub enum Failure {
    /// It never reached a server.
    Unsent(String),
    /// It was sent and the answer never came: it was carried out or not.
    Lost(String),
    /// The server refused it: nothing was done. Code and text.
    Refused(String, String),
}

impl From<Failure> for BrokerError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Unsent(text) | Failure::Lost(text) => Self::Unavailable(text),
            Failure::Refused(code, text) => match code.as_str() {
                "LLGONE" => Self::Gone,
                "LLSTALE" => Self::Stale,
                "LLCONFLICT" => Self::Conflict(text.trim().parse().unwrap_or(0)),
                "LLFORMAT" => Self::Damaged(format!("{text}, this server knows 1")),
                "OOM" => Self::Full("Redis has reached its maxmemory".into()),
                _ if text.contains("OOM ") => Self::Full("Redis has reached its maxmemory".into()),
                _ => Self::Unavailable(format!("Redis: {code} {text}")),
            },
        }
    }
}

/// Commands that go to one server together.
pub enum Request {
    One(Cmd),
    /// One after the other; answers one value each.
    Many(Vec<Cmd>),
    /// All or nothing; answers one value each.
    Atomic(Vec<Cmd>),
}

/// Something happened to a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Happened {
    Lost,
    /// Another server is the master, though the old one may still answer.
    Moved,
    /// It is there again, perhaps to another server.
    Restored,
}

#[derive(Clone)]
struct Live {
    connection: MultiplexedConnection,
    generation: u64,
    /// Where it leads; with Sentinels that is not where the link says.
    server: Endpoint,
    /// Names the run of the server.
    run: Arc<str>,
}

/// What a connection is for. Waits for replicas hold up everything behind them, so they have their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Lane {
    Calls,
    Waits,
}

struct Link {
    endpoint: Endpoint,
    lane: Lane,
    live: watch::Sender<Option<Live>>,
    /// Why the last attempt failed.
    trouble: Mutex<Option<BrokerError>>,
    /// An attempt failed.
    failed: Notify,
}

/// Which connection writes went over. Another one may lead to a server that never saw them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    endpoint: Endpoint,
    generation: u64,
}

/// Waits for replicas on one server: those that come while one is under way share the next.
#[derive(Default)]
struct Waits {
    asked: AtomicU64,
    turn: tokio::sync::Mutex<WaitDone>,
}

#[derive(Default)]
struct WaitDone {
    /// Everybody who asked before this is answered.
    asked: u64,
    by: Option<Mark>,
    result: Option<Result<(), BrokerError>>,
    /// The replicas of the marked server.
    attached: Attached,
}

/// What the connections of this node did so far.
#[derive(Default)]
struct Traffic {
    /// From a request to its answer.
    took: Histogram,
    /// Requests that were not sent, or whose answer was lost.
    failed: AtomicU64,
    connects: AtomicU64,
}

/// All connections of one broker.
pub struct Shards {
    traffic: Traffic,
    address: Address,
    durability: Durability,
    links: Mutex<HashMap<(Endpoint, Lane), Arc<Link>>>,
    waits: Mutex<HashMap<Endpoint, Arc<Waits>>>,
    slots: RwLock<Arc<Vec<Endpoint>>>,
    happened: mpsc::UnboundedSender<Happened>,
    stop: CancellationToken,
    this: Weak<Self>,
}

fn failure(error: &RedisError) -> Failure {
    if let Some(code) = error.code() {
        return Failure::Refused(code.to_owned(), error.detail().unwrap_or_default().to_owned());
    }
    if error.is_io_error() || error.is_connection_dropped() || error.is_timeout() || error.is_unrecoverable_error() {
        return Failure::Lost(error.to_string());
    }
    Failure::Refused("ERR".into(), error.to_string())
}

fn server_failure(error: &redis::ServerError) -> Failure {
    Failure::Refused(error.code().to_owned(), error.details().unwrap_or_default().to_owned())
}

/// The first error in an answer, at its top level.
fn check(values: Vec<Value>) -> Result<Vec<Value>, Failure> {
    match values.iter().find_map(|v| if let Value::ServerError(e) = v { Some(server_failure(e)) } else { None }) {
        Some(failure) => Err(failure),
        None => Ok(values),
    }
}

async fn send(connection: &mut MultiplexedConnection, request: &Request, asking: bool) -> Result<Vec<Value>, Failure> {
    let sent = match request {
        Request::One(one) if !asking => connection.send_packed_command(one).await.map(|v| vec![v]),
        Request::One(_) | Request::Many(_) | Request::Atomic(_) => {
            let commands = match request {
                Request::One(one) => std::slice::from_ref(one),
                Request::Many(many) | Request::Atomic(many) => many.as_slice(),
            };
            let mut pipe = Pipeline::with_capacity(commands.len() + 3);
            let atomic = matches!(request, Request::Atomic(_));
            // Holds for the next command, or the whole transaction; several commands are never asked for together.
            let skip = usize::from(asking);
            if asking {
                pipe.cmd("ASKING");
            }
            if atomic {
                pipe.cmd("MULTI");
            }
            for command in commands {
                pipe.add_command(command.clone());
            }
            if atomic {
                pipe.cmd("EXEC");
            }
            // Of a transaction every answer is read: what refused a command is told there, EXEC only says that one was.
            let count = commands.len() + if atomic { 2 } else { 0 };
            connection.send_packed_commands(&pipe, skip, count).await
        }
    };
    let values = check(sent.map_err(|e| failure(&e))?)?;
    match request {
        Request::Atomic(commands) => match values.into_iter().next_back() {
            Some(Value::Array(values)) if values.len() == commands.len() => check(values),
            _ => Err(Failure::Lost("a transaction was answered without its results".into())),
        },
        _ => Ok(values),
    }
}

impl Shards {
    /// Connects. The first connection is made before this answers, so that a wrong address or an unfit server is told at
    /// once.
    ///
    /// # Errors
    /// [`BrokerError::Unavailable`] when no server can be reached; [`BrokerError::Damaged`] when one holds newer data.
    pub async fn open(
        address: Address,
        durability: Durability,
        happened: mpsc::UnboundedSender<Happened>,
    ) -> Result<Arc<Self>, BrokerError> {
        let shards = Arc::new_cyclic(|this| Self {
            traffic: Traffic::default(),
            address,
            durability,
            links: Mutex::default(),
            waits: Mutex::default(),
            slots: RwLock::default(),
            happened,
            stop: CancellationToken::new(),
            this: this.clone(),
        });
        match shards.address.arrangement {
            Arrangement::Cluster => shards.refresh_slots().await?,
            _ => {
                let link = shards.link(&shards.address.endpoints[0], Lane::Calls);
                shards.first_connection(&link).await?;
            }
        }
        let endpoints = shards.masters();
        for endpoint in endpoints {
            let link = shards.link(&endpoint, Lane::Calls);
            shards.first_connection(&link).await?;
        }
        if let Arrangement::Sentinel(master) = &shards.address.arrangement {
            tokio::spawn(sentinels::follow(Arc::downgrade(&shards), master.clone(), shards.stop.clone()));
        }
        Ok(shards)
    }

    pub fn is_cluster(&self) -> bool {
        self.address.arrangement == Arrangement::Cluster
    }

    pub fn database(&self) -> i64 {
        self.address.database
    }

    pub fn stopped(&self) -> &CancellationToken {
        &self.stop
    }

    /// Every server that holds slots; the only one where there is no cluster.
    pub fn masters(&self) -> Vec<Endpoint> {
        if !self.is_cluster() {
            return vec![self.address.endpoints[0].clone()];
        }
        let mut list: Vec<Endpoint> = self.slots.read().iter().cloned().collect();
        list.sort_by_key(ToString::to_string);
        list.dedup();
        list
    }

    /// Sends to the server that has the slot.
    ///
    /// # Errors
    /// [`Failure`]; see there for what may have happened.
    pub async fn call(&self, slot: u16, request: &Request) -> Result<Vec<Value>, Failure> {
        if !self.is_cluster() {
            return self.call_at(&self.address.endpoints[0], request, false).await;
        }
        let until = tokio::time::Instant::now() + MOVING_WAIT;
        let (mut target, mut asking, mut redirects) = (self.owner(slot)?, false, 0);
        loop {
            let answer = self.call_at(&target, request, asking).await;
            let Err(Failure::Refused(code, text)) = &answer else {
                if let Err(Failure::Unsent(_) | Failure::Lost(_)) = &answer {
                    self.refresh_soon();
                }
                return answer;
            };
            let again = tokio::time::Instant::now() < until;
            match code.as_str() {
                "MOVED" | "ASK" if matches!(request, Request::Many(list) if list.len() > 1) => {
                    let Request::Many(list) = request else { return answer };
                    return self.call_each(slot, list).await;
                }
                "MOVED" | "ASK" if redirects < MAX_REDIRECTS => {
                    redirects += 1;
                    asking = code == "ASK";
                    let to = redirected(text, &target);
                    target = to.ok_or_else(|| Failure::Unsent(format!("{target} redirects to '{text}'")))?;
                    if !asking {
                        self.refresh_soon();
                    }
                }
                "MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN" | "READONLY" if again => {
                    tokio::time::sleep(MOVING_PAUSE).await;
                    self.refresh_soon();
                    (target, asking, redirects) = (self.owner(slot)?, false, 0);
                }
                _ => return answer,
            }
        }
    }

    /// Of several commands some may find their keys here and some there while a slot moves.
    async fn call_each(&self, slot: u16, commands: &[Cmd]) -> Result<Vec<Value>, Failure> {
        let mut values = Vec::with_capacity(commands.len());
        for command in commands {
            values.extend(Box::pin(self.call(slot, &Request::One(command.clone()))).await?);
        }
        Ok(values)
    }

    /// The server that has a slot.
    fn owner(&self, slot: u16) -> Result<Endpoint, Failure> {
        if !self.is_cluster() {
            return Ok(self.address.endpoints[0].clone());
        }
        let owner = self.slots.read().get(usize::from(slot)).cloned();
        owner.ok_or_else(|| Failure::Unsent("the cluster's slots are not known".into()))
    }

    /// Sends to one server.
    ///
    /// # Errors
    /// [`Failure`].
    pub async fn call_at(&self, endpoint: &Endpoint, request: &Request, asking: bool) -> Result<Vec<Value>, Failure> {
        let began = tokio::time::Instant::now();
        let answer = self.exchange(endpoint, request, asking).await;
        match &answer {
            Err(Failure::Unsent(_) | Failure::Lost(_)) => add(&self.traffic.failed, 1),
            _ => self.traffic.took.observe(began.elapsed()),
        }
        answer
    }

    async fn exchange(&self, endpoint: &Endpoint, request: &Request, asking: bool) -> Result<Vec<Value>, Failure> {
        let link = self.link(endpoint, Lane::Calls);
        let mut live = self.live(&link).await?;
        let mut answer = send(&mut live.connection, request, asking).await;
        if answer_lacks_function(&answer) {
            // Somebody removed the library, or this server has never had it. Nothing was done.
            tracing::warn!(server = %endpoint, "the function library is missing and is loaded again");
            if library::ensure(&mut live.connection).await.is_ok() {
                answer = send(&mut live.connection, request, asking).await;
            }
        }
        match &answer {
            Err(Failure::Lost(_)) => self.broken(&link, live.generation),
            Err(Failure::Refused(code, _)) => match code.as_str() {
                // This server is no master any more: another one is.
                "READONLY" | "MASTERDOWN" | "LOADING" => self.broken(&link, live.generation),
                _ => {}
            },
            _ => {}
        }
        answer
    }

    async fn live(&self, link: &Link) -> Result<Live, Failure> {
        if let Some(live) = link.live.borrow().clone() {
            return Ok(live);
        }
        if self.stop.is_cancelled() {
            return Err(Failure::Unsent("the broker is closed".into()));
        }
        let mut changes = link.live.subscribe();
        let arrived = tokio::time::timeout(CONNECT_WAIT, changes.wait_for(Option::is_some)).await;
        match arrived {
            Ok(Ok(live)) => live.clone().ok_or_else(|| Failure::Unsent("no connection".into())),
            _ => {
                let trouble = link.trouble.lock().as_ref().map_or_else(|| "not connected yet".to_owned(), ToString::to_string);
                Err(Failure::Unsent(format!("{}: {trouble}", link.endpoint)))
            }
        }
    }

    fn broken(&self, link: &Link, generation: u64) {
        let lost = link.live.send_if_modified(|live| {
            let same = live.as_ref().is_some_and(|l| l.generation == generation);
            if same {
                *live = None;
            }
            same
        });
        if lost && link.lane == Lane::Calls {
            let _ = self.happened.send(Happened::Lost);
        }
    }

    fn link(&self, endpoint: &Endpoint, lane: Lane) -> Arc<Link> {
        let mut links = self.links.lock();
        let name = (endpoint.clone(), lane);
        if let Some(link) = links.get(&name) {
            return link.clone();
        }
        let (live, trouble, failed) = (watch::Sender::new(None), Mutex::new(None), Notify::new());
        let link = Arc::new(Link { endpoint: endpoint.clone(), lane, live, trouble, failed });
        links.insert(name, link.clone());
        tokio::spawn(keep(self.this.clone(), link.clone(), self.stop.clone()));
        link
    }

    fn connect_timeout(&self) -> Duration {
        if self.address.tls { TLS_CONNECT_TIMEOUT } else { CONNECT_TIMEOUT }
    }

    /// Waits for the first attempt, and tells what is wrong.
    async fn first_connection(&self, link: &Link) -> Result<(), BrokerError> {
        let mut changes = link.live.subscribe();
        let failed = link.failed.notified();
        tokio::pin!(failed);
        failed.as_mut().enable();
        if link.trouble.lock().is_none() {
            tokio::select! {
                biased;
                arrived = changes.wait_for(Option::is_some) => if arrived.is_ok() { return Ok(()) },
                () = failed => {}
                () = tokio::time::sleep(self.connect_timeout() * 3) => {}
            }
        }
        self.stop.cancel();
        let trouble = link.trouble.lock().take();
        Err(trouble.unwrap_or_else(|| BrokerError::Unavailable(format!("{} does not answer", link.endpoint))))
    }

    /// A connection that is fit for its use.
    async fn connect(&self, endpoint: &Endpoint, lane: Lane, generation: u64) -> Result<Live, BrokerError> {
        let server = match &self.address.arrangement {
            Arrangement::Sentinel(master) => self.ask_sentinels(master).await?,
            _ => endpoint.clone(),
        };
        let unavailable = |e: RedisError| BrokerError::Unavailable(format!("{server}: {e}"));
        let client = self.address.client(&server)?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connect_timeout()))
            .set_response_timeout(Some(RESPONSE_TIMEOUT));
        let mut connection = client.get_multiplexed_async_connection_with_config(&config).await.map_err(unavailable)?;
        if lane == Lane::Calls {
            durability::check(&mut connection, &server.to_string(), self.durability).await?;
            library::ensure(&mut connection).await?;
        }
        let run = durability::run_id(&mut connection).await.map_err(unavailable)?;
        Ok(Live { connection, generation, server, run: run.into() })
    }

    /// One question over a connection of its own, which is not waited for long.
    async fn ask<T: FromRedisValue>(&self, client: Client, server: &Endpoint, question: &Cmd) -> Result<T, BrokerError> {
        let unavailable = |e: RedisError| BrokerError::Unavailable(format!("{server}: {e}"));
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connect_timeout()))
            .set_response_timeout(Some(self.connect_timeout()));
        let mut connection = client.get_multiplexed_async_connection_with_config(&config).await.map_err(unavailable)?;
        question.query_async(&mut connection).await.map_err(unavailable)
    }

    /// A client for a connection of one's own, to whichever server can be reached.
    ///
    /// # Errors
    /// [`BrokerError::Unavailable`].
    pub async fn client(&self) -> Result<Client, BrokerError> {
        let endpoint = match &self.address.arrangement {
            Arrangement::Single => self.address.endpoints[0].clone(),
            Arrangement::Sentinel(master) => self.ask_sentinels(master).await?,
            Arrangement::Cluster => {
                let links = self.links.lock();
                let live = links.values().find(|l| l.live.borrow().is_some()).map(|l| l.endpoint.clone());
                live.unwrap_or_else(|| self.address.endpoints[0].clone())
            }
        };
        self.address.client(&endpoint)
    }

    /// The connection that calls for a slot go over now.
    ///
    /// # Errors
    /// [`BrokerError::Unavailable`] when there is none.
    pub async fn mark(&self, slot: u16) -> Result<Mark, BrokerError> {
        let endpoint = self.owner(slot)?;
        let link = self.link(&endpoint, Lane::Calls);
        let generation = self.live(&link).await?.generation;
        Ok(Mark { endpoint, generation })
    }

    /// Waits until the replicas of the slot's server have everything that was written since the mark was taken.
    ///
    /// # Errors
    /// [`BrokerError::Unavailable`] when too few have it in time, or when the connection is another one than the marked one:
    /// after a failover the new server may never have had the writes.
    pub async fn wait_for_replicas(&self, slot: u16, key: &str, mark: &Mark, count: u32) -> Result<(), BrokerError> {
        let waits = self.waits.lock().entry(mark.endpoint.clone()).or_default().clone();
        let asked = waits.asked.fetch_add(1, Ordering::AcqRel);
        let mut done = waits.turn.lock().await;
        if asked < done.asked
            && done.by.as_ref() == Some(mark)
            && let Some(result) = &done.result
        {
            return result.clone();
        }
        let until = waits.asked.load(Ordering::Acquire);
        if done.by.as_ref() != Some(mark) {
            done.attached = Attached::default();
        }
        let result = self.wait_now(slot, key, mark, count, &mut done.attached).await;
        (done.asked, done.by, done.result) = (until, Some(mark.clone()), Some(result.clone()));
        result
    }

    async fn wait_now(&self, slot: u16, key: &str, mark: &Mark, count: u32, attached: &mut Attached) -> Result<(), BrokerError> {
        let moved = || BrokerError::Unavailable(format!("{} went away before the write was safe", mark.endpoint));
        let link = self.link(&mark.endpoint, Lane::Waits);
        let mut live = self.live(&link).await?;
        let same_run = || {
            let calls = self.link(&mark.endpoint, Lane::Calls);
            let calls = calls.live.borrow();
            calls.as_ref().is_some_and(|c| c.generation == mark.generation && c.run == live.run)
        };
        if !same_run() {
            // This connection may be the older one: the next wait finds a new one.
            self.broken(&link, live.generation);
            return Err(moved());
        }
        loop {
            let asked = count.max(attached.now());
            let mut touch = cmd("SET");
            touch.arg(format!("{key}:wait")).arg(1).arg("EX").arg(MARK_SECONDS);
            let mut wait = cmd("WAIT");
            wait.arg(asked).arg(durability::REPLICA_TIMEOUT.as_millis() as u64);
            let mut info = cmd("INFO");
            info.arg("replication");
            let answer = send(&mut live.connection, &Request::Many(vec![touch, wait, info]), false).await;
            if let Err(Failure::Lost(_)) = &answer {
                self.broken(&link, live.generation);
            }
            let (have, connected) = match answer?.as_slice() {
                [_, Value::Int(have), info] => {
                    (*have as u32, connected(&from_redis_value_ref::<String>(info).unwrap_or_default()))
                }
                _ => (0, 0),
            };
            let wanted = count.max(attached.note(connected, Instant::now()));
            if have >= wanted {
                break;
            }
            // More may have come since they were last counted.
            if have < asked || connected <= asked {
                return Err(BrokerError::Unavailable(format!("{have} of {wanted} replicas have the write")));
            }
        }
        let owned = self.owner(slot).is_ok_and(|owner| owner == mark.endpoint);
        if owned && self.mark(slot).await? == *mark { Ok(()) } else { Err(moved()) }
    }

    // ---- cluster

    fn refresh_soon(&self) {
        let Some(this) = self.this.upgrade() else { return };
        tokio::spawn(async move {
            let _ = this.refresh_slots().await;
        });
    }

    /// Asks any reachable server who has which slots.
    async fn refresh_slots(&self) -> Result<(), BrokerError> {
        let mut known: Vec<Endpoint> =
            self.links.lock().values().filter(|l| l.live.borrow().is_some()).map(|l| l.endpoint.clone()).collect();
        known.extend(self.address.endpoints.iter().cloned());
        let mut trouble = BrokerError::Unavailable("no server of the cluster answers".into());
        for endpoint in known {
            let asked = async {
                let mut question = cmd("CLUSTER");
                question.arg("SLOTS");
                let answer: Value = self.ask(self.address.client(&endpoint)?, &endpoint, &question).await?;
                read_slots(&answer, &endpoint)
            };
            match asked.await {
                Ok(slots) if slots.len() == usize::from(SLOTS) => {
                    *self.slots.write() = Arc::new(slots);
                    return Ok(());
                }
                Ok(_) => trouble = BrokerError::Unavailable(format!("{endpoint}: some slots have no server")),
                Err(e) => trouble = e,
            }
        }
        Err(trouble)
    }

    /// What the connections of this node are and did, for operators.
    pub fn measures(&self) -> Vec<Measure> {
        let open = self.links.lock().values().filter(|link| link.live.borrow().is_some()).count();
        let counter = |counter: &AtomicU64| MeasureValue::Counter(counter.load(Ordering::Relaxed));
        let (took, failed) = (MeasureValue::Histogram(self.traffic.took.view()), counter(&self.traffic.failed));
        [
            ("connections", "Open connections to Redis", MeasureValue::Gauge(open as f64)),
            ("connects_total", "Connections to Redis that were opened, the first ones included", counter(&self.traffic.connects)),
            ("request_failures_total", "Requests to Redis that were not sent, or whose answer was lost", failed),
            ("request_duration_seconds", "Time from a request to Redis to its answer", took),
        ]
        .map(|(name, about, value)| Measure { name, about, value })
        .into()
    }

    pub fn close(&self) {
        self.stop.cancel();
        for link in self.links.lock().values() {
            link.live.send_replace(None);
        }
    }
}

fn answer_lacks_function(answer: &Result<Vec<Value>, Failure>) -> bool {
    matches!(answer, Err(Failure::Refused(_, text)) if text.contains("Function not found"))
}

/// Where MOVED and ASK point: `3999 host:port`; an empty host means the server that answered.
fn redirected(text: &str, from: &Endpoint) -> Option<Endpoint> {
    let (host, port) = text.split_whitespace().nth(1)?.rsplit_once(':')?;
    let host = if host.is_empty() { from.host.clone() } else { host.trim_matches(['[', ']']).to_owned() };
    Some(Endpoint { host, port: port.parse().ok()? })
}

/// Opens a link's connection whenever there is none.
async fn keep(shards: Weak<Shards>, link: Arc<Link>, stop: CancellationToken) {
    let mut generation = 0;
    let mut changes = link.live.subscribe();
    loop {
        let mut pause = BACKOFF.0;
        loop {
            let Some(shards) = shards.upgrade() else { return };
            let attempt = tokio::select! {
                attempt = shards.connect(&link.endpoint, link.lane, generation + 1) => attempt,
                () = stop.cancelled() => return,
            };
            match attempt {
                Ok(live) => {
                    generation += 1;
                    add(&shards.traffic.connects, 1);
                    *link.trouble.lock() = None;
                    link.live.send_replace(Some(live));
                    if link.lane == Lane::Calls {
                        let _ = shards.happened.send(Happened::Restored);
                    }
                    break;
                }
                Err(e) => {
                    tracing::debug!(server = %link.endpoint, error = %e, "no connection to Redis");
                    *link.trouble.lock() = Some(e);
                    link.failed.notify_waiters();
                }
            }
            drop(shards);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stop.cancelled() => return,
            }
            pause = (pause * 2).min(BACKOFF.1);
        }
        tokio::select! {
            lost = changes.wait_for(Option::is_none) => if lost.is_err() { return },
            () = stop.cancelled() => return,
        }
    }
}
