//! The embedded engine without a transport: a batch of messages through append, lease and acknowledge, in memory.
//!
//! `cargo bench --bench engine`

use std::{hint::black_box, sync::Arc};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use landline::{
    broker::{
        Append, Broker, Change, Effect, Expect, Kind, LeaseRequest, QueueConfig, QueueRef, Session, TopicConfig, TopicRef,
        embedded::Embedded, next_session_id,
    },
    model::EncodedMessage,
};
use tokio::runtime::{Builder, Runtime};

const PAYLOAD: &[u8] = &[b'x'; 100];

struct Bench {
    broker: Arc<Embedded>,
    topic: TopicRef,
    queue: QueueRef,
    session: Arc<Session>,
    route_version: u64,
}

impl Bench {
    async fn new(ordered: bool) -> Self {
        let broker = Embedded::memory();
        let topic = TopicRef { channel: "p/topic".into(), incarnation: 1 };
        let queue = QueueRef { channel: "p/queue".into(), incarnation: 2 };
        let open = Effect::OpenTopic(TopicConfig { topic: topic.clone(), retention_ms: None });
        change(&broker, Kind::Topic, open).await;
        let config = QueueConfig {
            queue: queue.clone(),
            topic: topic.clone(),
            ordered,
            exactly_once: false,
            retry: None,
            max_delivery_attempts: None,
            retention_ms: 600_000,
            retain_acked: false,
        };
        change(&broker, Kind::Subscription, Effect::OpenQueue(config)).await;
        let session = Session::new(next_session_id());
        broker.attach(&queue, &session);
        let route_version = broker.route(&topic).await.expect("the topic is open").version;
        Self { broker, topic, queue, session, route_version }
    }

    async fn cycle(&self, messages: &[EncodedMessage]) {
        let append = Append {
            topic: self.topic.clone(),
            messages: messages.to_vec(),
            targets: Vec::new(),
            route_version: self.route_version,
        };
        self.broker.append(append).await.expect("memory takes it");
        let request = LeaseRequest {
            queue: self.queue.clone(),
            session: self.session.clone(),
            max_messages: messages.len(),
            max_bytes: u64::MAX,
            deadline_ms: 10_000,
            max_inflight: u64::MAX,
            record_version: 0,
        };
        let leased = self.broker.lease(request).await.expect("the queue is open");
        assert_eq!(leased.len(), messages.len());
        let tokens: Vec<_> = leased.iter().map(|l| l.token).collect();
        black_box(self.broker.acknowledge(&self.queue, &tokens).await.expect("the queue is open"));
    }
}

async fn change(broker: &Embedded, kind: Kind, effect: Effect) {
    let body = Some(bytes::Bytes::from_static(b"{}"));
    let change = Change { kind, name: format!("{kind:?}"), expect: Expect::Absent, body, effect };
    broker.change(change).await.expect("a new record");
}

fn cycles(c: &mut Criterion) {
    let runtime: Runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut group = c.benchmark_group("cycle");
    for (ordered, keys) in [(false, 0), (true, 1), (true, 100_000)] {
        let bench = runtime.block_on(Bench::new(ordered));
        for batch in [1u64, 100, 1000] {
            let mut next = 0u64;
            group.throughput(Throughput::Elements(batch));
            let name = if ordered { format!("{keys} keys, batch {batch}") } else { format!("unordered, batch {batch}") };
            group.bench_function(name, |b| {
                b.iter(|| {
                    let messages: Vec<_> = (0..batch)
                        .map(|_| {
                            next += 1;
                            let key = if ordered { (next % keys).to_string() } else { String::new() };
                            EncodedMessage::encode(PAYLOAD, [], &key)
                        })
                        .collect();
                    runtime.block_on(bench.cycle(&messages));
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, cycles);
criterion_main!(benches);
