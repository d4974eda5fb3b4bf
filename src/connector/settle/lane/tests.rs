use std::sync::atomic::{AtomicUsize, Ordering};

use futures::FutureExt;

use super::*;
use crate::{
    broker::{LeaseRequest, Session},
    connector::rig::Rig,
};

/// Acknowledges one message after the other at the embedded broker, and counts the calls.
struct Counted;

static CALLS: AtomicUsize = AtomicUsize::new(0);

impl Operation for Counted {
    type Item = LeaseToken;

    fn run<'a>(
        broker: &'a dyn Broker,
        queue: &'a QueueRef,
        items: &'a [LeaseToken],
    ) -> Pin<Box<dyn Future<Output = Answer> + Send + 'a>> {
        Box::pin(async move {
            CALLS.fetch_add(1, Ordering::Relaxed);
            tokio::task::yield_now().await;
            broker.acknowledge(queue, items).await
        })
    }
}

async fn leased(rig: &Rig, count: usize) -> (QueueRef, Vec<LeaseToken>) {
    let sub = rig.subscription("sub", |s| s.enable_exactly_once_delivery = true).await;
    rig.publish(&vec!["x"; count]).await;
    let queue = rig.connector.subscription(&sub).await.unwrap().queue.clone();
    let request = LeaseRequest {
        queue: queue.clone(),
        session: Session::new(1),
        max_messages: count,
        max_bytes: u64::MAX,
        deadline_ms: 10_000,
        max_inflight: 1000,
        record_version: 0,
    };
    let tokens = rig.broker.lease(request).await.unwrap().iter().map(|l| l.token).collect();
    (queue, tokens)
}

#[tokio::test]
async fn requests_that_arrive_during_a_call_go_together_and_get_their_own_outcomes() {
    let rig = Rig::new().await;
    let (queue, tokens) = leased(&rig, 100).await;
    let lane = Lane::<Counted>::new(rig.broker.clone(), queue, TaskTracker::new());
    CALLS.store(0, Ordering::Relaxed);
    let unknown = LeaseToken { lease: u64::MAX, ..tokens[7] };
    let mut requests: Vec<Vec<LeaseToken>> = tokens.iter().map(|token| vec![*token]).collect();
    requests[7] = vec![unknown, tokens[7]];
    let answers = futures::future::join_all(requests.into_iter().map(|items| lane.run(items))).await;
    for (index, answer) in answers.into_iter().enumerate() {
        let expected: &[Outcome] = if index == 7 { &[Outcome::Invalid, Outcome::Done] } else { &[Outcome::Done] };
        assert_eq!(answer.unwrap(), expected, "request {index}");
    }
    assert_eq!(CALLS.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn a_caller_that_goes_away_leaves_the_lane_working() {
    let rig = Rig::new().await;
    let (queue, tokens) = leased(&rig, 3).await;
    let lane = Lane::<Acks>::new(rig.broker.clone(), queue, TaskTracker::new());
    let mut first = Box::pin(lane.run(vec![tokens[0]]));
    let _ = futures::poll!(first.as_mut());
    let mut second = Box::pin(lane.run(vec![tokens[1]]));
    let _ = futures::poll!(second.as_mut());
    drop(first);
    drop(second);
    assert_eq!(lane.run(vec![tokens[2]]).await, Ok(vec![Outcome::Done]));
    // The second had joined the queue of work, and is done although nobody waits for it.
    assert_eq!(lane.run(vec![tokens[1]]).await, Ok(vec![Outcome::Done]));
}

#[tokio::test]
async fn a_fault_of_the_broker_reaches_everyone() {
    let rig = Rig::new().await;
    let (queue, tokens) = leased(&rig, 2).await;
    let lane = Lane::<Counted>::new(rig.broker.clone(), queue, TaskTracker::new());
    rig.broker.close().await;
    let answers = futures::future::join(lane.run(vec![tokens[0]]), lane.run(vec![tokens[1]])).await;
    assert!(matches!(answers, (Err(BrokerError::Unavailable(_)), Err(BrokerError::Unavailable(_)))));
}

#[tokio::test]
async fn nothing_to_do_is_done_at_once() {
    let rig = Rig::new().await;
    let (queue, _) = leased(&rig, 1).await;
    let lane = Lane::<Acks>::new(rig.broker.clone(), queue, TaskTracker::new());
    assert_eq!(lane.run(Vec::new()).now_or_never(), Some(Ok(Vec::new())));
}
