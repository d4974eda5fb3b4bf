//! What is done to servers and stores while clients work.

use std::time::Duration;

use crate::fixture::{Backend, Fixture};

/// What was done. It is over when [`strike`](Self::strike) returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A server was killed and started again.
    ServerKilled,
    /// A server was asked to stop, and started again.
    ServerStopped,
    /// Every server was killed at the same time.
    AllServersKilled,
    /// Redis, or one of the cluster, was killed and started again on its data.
    RedisKilled,
    /// Redis kept its connections and did nothing for a while.
    RedisFrozen,
    /// The master was killed, its replica took over, and it came back as the replica.
    FailedOver,
}

impl Fault {
    /// Whether leases may have been lost and given out anew: only what waits for replicas survives a failover.
    pub fn forgets_leases(self) -> bool {
        self == Self::FailedOver
    }

    /// One of those that the store may suffer.
    pub fn choose(fixture: &Fixture) -> Self {
        use Fault::{AllServersKilled, FailedOver, RedisFrozen, RedisKilled, ServerKilled, ServerStopped};
        let faults: &[Fault] = match fixture.backend {
            Backend::Embedded => &[ServerKilled, ServerKilled, ServerKilled, ServerStopped],
            Backend::Redis => &[ServerKilled, ServerKilled, ServerStopped, RedisKilled, RedisFrozen],
            Backend::TwoNodes => &[ServerKilled, ServerKilled, ServerKilled, ServerStopped, AllServersKilled, RedisKilled],
            Backend::RedisCluster => &[ServerKilled, RedisKilled, RedisKilled],
            Backend::Sentinel => &[FailedOver, FailedOver, ServerKilled],
        };
        faults[rand::random_range(0..faults.len())]
    }

    /// Does something bad and mends it again.
    pub async fn strike(self, fixture: &mut Fixture) {
        let number = rand::random_range(0..fixture.nodes.len());
        let moment = || tokio::time::sleep(Duration::from_millis(rand::random_range(0..1000)));
        match self {
            Fault::ServerKilled => {
                fixture.nodes[number].kill();
                // Another server goes on alone meanwhile.
                if fixture.nodes.len() > 1 {
                    moment().await;
                }
                fixture.nodes[number].restart();
            }
            Fault::ServerStopped => {
                fixture.nodes[number].terminate();
                let ended = fixture.nodes[number].wait(Duration::from_secs(30));
                assert!(ended.is_some_and(|status| status.success()), "a server that was asked to stop ended with {ended:?}");
                fixture.nodes[number].restart();
            }
            Fault::AllServersKilled => fixture.crash_and_restart(),
            Fault::RedisKilled => {
                let redis = match &mut fixture.cluster {
                    Some(cluster) => {
                        let count = cluster.nodes.len();
                        &mut cluster.nodes[rand::random_range(0..count)]
                    }
                    None => fixture.redis.as_mut().expect("a Redis"),
                };
                redis.kill();
                moment().await;
                redis.restart();
            }
            Fault::RedisFrozen => {
                let redis = fixture.redis.as_ref().expect("a Redis");
                redis.pause();
                moment().await;
                moment().await;
                redis.resume();
            }
            Fault::FailedOver => fixture.sentinel.as_mut().expect("a sentinel").fail_over(),
        }
    }
}
