//! Starts real servers on every kind of broker and speaks to them over gRPC and REST.

pub mod api;
pub mod call;
pub mod certificates;
pub mod collector;
pub mod failure;
pub mod message;
pub mod node;
pub mod ports;
pub mod redis;
pub mod rest;
pub mod sink;
pub mod stream;
pub mod wait;

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, SystemTime},
};

use tempfile::TempDir;

pub use self::{
    api::{Api, Transport},
    failure::{Failure, code},
    message::{Received, message},
    stream::Stream,
    wait::{eventually, within},
};
use self::{
    node::{Node, NodeSpec},
    redis::{Redis, RedisCluster, Sentinel},
};

/// As the value of `ADMIN_ADDRESS`: each server gets an address of its own.
pub const OWN_ADDRESS: &str = "own";

/// Where the messages of a test are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// The embedded broker on disk.
    Embedded,
    /// One Redis.
    Redis,
    /// A Redis Cluster of three primaries.
    RedisCluster,
    /// Two servers on one Redis; calls go to them in turn.
    TwoNodes,
    /// Two servers on a Redis with a replica and a sentinel that lets it take over.
    Sentinel,
}

impl Backend {
    /// The settings with which a fault of this store loses nothing that was confirmed.
    pub fn durability(self) -> &'static [(&'static str, &'static str)] {
        if self == Self::Sentinel { &[("DURABILITY", "replicas:1")] } else { &[] }
    }
}

/// Makes one test a broker out of each `async fn name(backend: Backend)` of the module.
#[macro_export]
macro_rules! for_every_backend {
    ($($name:ident),+ $(,)?) => {
        $crate::tests_on! { [embedded Embedded, redis Redis, redis_cluster RedisCluster, two_nodes TwoNodes] $($name)+ }
    };
}

/// The same for tests that restart the server and need their messages back.
#[macro_export]
macro_rules! for_durable_backends {
    ($($name:ident),+ $(,)?) => {
        $crate::tests_on! { [embedded Embedded, redis Redis] $($name)+ }
    };
}

/// The same for tests that don't depend on where messages are kept.
#[macro_export]
macro_rules! for_one_backend {
    ($($name:ident),+ $(,)?) => {
        $crate::tests_on! { [embedded Embedded] $($name)+ }
    };
}

/// The same for tests of several servers on one store.
#[macro_export]
macro_rules! for_two_nodes {
    ($($name:ident),+ $(,)?) => {
        $crate::tests_on! { [two_nodes TwoNodes] $($name)+ }
    };
}

/// The same for tests that do something to Redis.
#[macro_export]
macro_rules! for_redis {
    ($($name:ident),+ $(,)?) => {
        $crate::tests_on! { [redis Redis] $($name)+ }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! tests_on {
    ($backends:tt $($name:ident)+) => { $($crate::tests_on! { @one $name $backends })+ };
    (@one $name:ident [$($label:ident $backend:ident),+]) => {
        mod $name {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $label() {
                    super::$name($crate::fixture::Backend::$backend).await;
                }
            )+
        }
    };
}

/// One or two servers on a fresh store. Everything ends with it.
pub struct Fixture {
    /// First, so that the servers end before what they stand on.
    pub nodes: Vec<Node>,
    pub redis: Option<Redis>,
    pub cluster: Option<RedisCluster>,
    pub sentinel: Option<Sentinel>,
    pub backend: Backend,
    pub folder: TempDir,
    /// The admin address of each server, where the settings ask for [`OWN_ADDRESS`].
    pub admins: Vec<String>,
    apis: AtomicU64,
}

impl Fixture {
    /// Starts servers with default settings.
    pub async fn start(backend: Backend) -> Self {
        Self::start_with(backend, &[]).await
    }

    /// Starts servers with further settings, named without the prefix `CONNECTORS_GCP_`.
    pub async fn start_with(backend: Backend, settings: &[(&str, &str)]) -> Self {
        Self::try_start(backend, settings).unwrap_or_else(|e| panic!("start: {e}"))
    }

    /// The same, for tests that expect the start to fail.
    ///
    /// # Errors
    /// The server's log.
    pub fn try_start(backend: Backend, settings: &[(&str, &str)]) -> Result<Self, String> {
        Self::try_start_in(backend, settings, |_| Vec::new())
    }

    /// The same with a program around each server, made from the fixture's folder.
    ///
    /// # Errors
    /// The server's log.
    pub fn try_start_in(
        backend: Backend,
        settings: &[(&str, &str)],
        wrapper: impl Fn(&Path) -> Vec<String>,
    ) -> Result<Self, String> {
        let folder = tempfile::Builder::new().prefix("landline-test-").tempdir().map_err(|e| e.to_string())?;
        let mut fixture = Self {
            nodes: Vec::new(),
            redis: None,
            cluster: None,
            sentinel: None,
            backend,
            folder,
            admins: Vec::new(),
            apis: AtomicU64::new(0),
        };
        let path = fixture.folder.path().to_owned();
        let url = match backend {
            Backend::Embedded => format!("embedded:{}", path.join("data").display()),
            Backend::Redis | Backend::TwoNodes => fixture.redis.insert(Redis::start(&path)).url(),
            Backend::RedisCluster => fixture.cluster.insert(RedisCluster::start(&path)).url(),
            Backend::Sentinel => fixture.sentinel.insert(Sentinel::start(&path)).url(),
        };
        for number in 0..if matches!(backend, Backend::TwoNodes | Backend::Sentinel) { 2 } else { 1 } {
            let mut env = vec![
                ("CONNECTORS_GCP_BROKER_URL".to_owned(), url.clone()),
                ("CONNECTORS_GCP_PORT".to_owned(), ports::reserve().to_string()),
                ("CONNECTORS_GCP_ADMIN_ADDRESS".to_owned(), String::new()),
            ];
            for (key, value) in settings {
                let mut value = (*value).to_owned();
                if (*key, value.as_str()) == ("ADMIN_ADDRESS", OWN_ADDRESS) {
                    value = format!("127.0.0.1:{}", ports::reserve());
                    fixture.admins.push(value.clone());
                }
                env.push((format!("CONNECTORS_GCP_{key}"), value));
            }
            let log = path.join(format!("node-{number}.log"));
            fixture.nodes.push(Node::start(NodeSpec { wrapper: wrapper(&path), env, log })?);
        }
        Ok(fixture)
    }

    /// The folder of the embedded broker.
    pub fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// A client in a project of its own, over gRPC.
    pub async fn api(&self) -> Api {
        self.api_over(Transport::Grpc).await
    }

    /// A client in a project of its own.
    pub async fn api_over(&self, transport: Transport) -> Api {
        let number = self.apis.fetch_add(1, Ordering::Relaxed);
        let addresses: Vec<_> = self.nodes.iter().map(|n| n.address).collect();
        Api::connect(&addresses, format!("test-project-{number}"), transport).await
    }

    /// One client a transport, each in a project of its own: a case runs once with each.
    pub async fn apis(&self) -> [Api; 2] {
        [self.api_over(Transport::Grpc).await, self.api_over(Transport::Rest).await]
    }

    /// A client of one node only, in the project of another client.
    pub async fn api_of_node(&self, node: usize, like: &Api) -> Api {
        Api::connect(&[self.nodes[node].address], like.project.clone(), Transport::Grpc).await
    }

    /// Kills every server (SIGKILL) and starts it again on its port and data.
    pub fn crash_and_restart(&mut self) {
        self.nodes.iter_mut().for_each(Node::kill);
        self.nodes.iter_mut().for_each(Node::restart);
    }
}

/// Wall-clock time as a protobuf timestamp, moved by `offset_seconds`.
pub fn timestamp(offset_seconds: i64) -> prost_types::Timestamp {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    prost_types::Timestamp { seconds: now.as_secs() as i64 + offset_seconds, nanos: now.subsec_nanos() as i32 }
}

/// A protobuf duration.
pub fn seconds(seconds: i64) -> prost_types::Duration {
    prost_types::Duration { seconds, nanos: 0 }
}

/// An update mask.
pub fn mask(paths: &[&str]) -> prost_types::FieldMask {
    prost_types::FieldMask { paths: paths.iter().map(|p| p.to_string()).collect() }
}
