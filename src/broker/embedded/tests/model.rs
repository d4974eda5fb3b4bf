//! Random operations against a naive account of what the port promises.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use proptest::prelude::*;

use super::*;

/// An expiry is noticed this much late at most.
const NOTICE_MS: u64 = 50;

#[derive(Debug, Clone)]
enum Step {
    Publish(Vec<u8>),
    Pull {
        session: usize,
        max: usize,
    },
    Ack(usize),
    Nack(usize),
    Extend(usize),
    Release(usize),
    Pass(u64),
    SeekBack,
    Snapshot,
    SeekSnapshot,
    /// Sparse segments of the log are emptied.
    Gather,
    /// A checkpoint that did not come to its end.
    Reclaim,
    Restart {
        checkpoint: bool,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => prop::collection::vec(0u8..4, 1..40).prop_map(Step::Publish),
        5 => (0usize..3, 1usize..30).prop_map(|(session, max)| Step::Pull { session, max }),
        5 => (0usize..1000).prop_map(Step::Ack),
        2 => (0usize..1000).prop_map(Step::Nack),
        1 => (0usize..1000).prop_map(Step::Extend),
        1 => (0usize..1000).prop_map(Step::Release),
        2 => (1u64..15_000).prop_map(Step::Pass),
        1 => Just(Step::SeekBack),
        1 => Just(Step::Snapshot),
        1 => Just(Step::SeekSnapshot),
        1 => Just(Step::Gather),
        1 => Just(Step::Reclaim),
        2 => any::<bool>().prop_map(|checkpoint| Step::Restart { checkpoint }),
    ];
    prop::collection::vec(step, 1..120)
}

#[derive(Debug, Clone, Copy)]
struct Kinds {
    ordered: bool,
    exactly_once: bool,
    backoff: bool,
    retain: bool,
}

/// What a careful user writes down.
#[derive(Default)]
struct Account {
    published: Vec<u64>,
    key: BTreeMap<u64, u8>,
    unacked: BTreeSet<u64>,
    /// Message to the time until which nobody else may get it.
    leased_until: BTreeMap<u64, u64>,
    snapshot: Option<(BTreeSet<u64>, usize)>,
    held: Vec<(u64, Leased)>,
}

async fn run(steps: Vec<Step>, kinds: Kinds, directory: Option<&Path>) {
    let mut rig = match directory {
        Some(directory) => Rig::on_disk(directory).await,
        None => Rig::new().await,
    };
    let config = |c: &mut QueueConfig| {
        c.ordered = kinds.ordered;
        c.exactly_once = kinds.exactly_once;
        c.retain_acked = kinds.retain;
        c.retry = kinds.backoff.then(|| retry(500, 4000).unwrap());
    };
    let queue = rig.queue(1, config).await;
    let mut sessions = [rig.session(&queue), rig.session(&queue), rig.session(&queue)];
    let mut account = Account::default();
    for step in steps {
        match step {
            Step::Publish(keys) => publish(&rig, &mut account, &keys).await,
            Step::Pull { session, max } => {
                let leased = rig.lease(&queue, &sessions[session], max).await;
                receive(&rig, &mut account, leased, kinds);
            }
            Step::Ack(n) => ack(&rig, &queue, &mut account, n, kinds).await,
            Step::Nack(n) => give_back(&rig, &queue, &mut account, n, true).await,
            Step::Release(n) => give_back(&rig, &queue, &mut account, n, false).await,
            Step::Extend(n) => {
                if let Some((id, leased)) = pick(&account, n) {
                    let newest = account.held.iter().rfind(|(m, _)| *m == id).is_some_and(|(_, l)| l.token == leased.token);
                    let done = rig.modify(&queue, &[leased], 12_000).await;
                    if newest
                        && done == [Outcome::Done]
                        && account.leased_until.get(&id).is_some_and(|until| *until > rig.now_ms())
                    {
                        account.leased_until.insert(id, rig.now_ms() + 12_000);
                    }
                }
            }
            Step::Pass(ms) => rig.pass(ms),
            Step::SeekBack if kinds.retain => {
                rig.broker.seek(&queue, SeekTarget::Time(0)).await.unwrap();
                account.unacked = account.published.iter().copied().collect();
                account.leased_until.clear();
            }
            Step::SeekBack => {}
            Step::Snapshot if account.snapshot.is_none() => {
                rig.snapshot(9, &queue).await;
                account.snapshot = Some((account.unacked.clone(), account.published.len()));
            }
            Step::Snapshot => {}
            Step::Restart { checkpoint } => {
                if let Some(directory) = directory {
                    if checkpoint {
                        checkpoint::write(&rig.broker.shared, Some(directory)).unwrap();
                    }
                    rig = rig.restart(directory);
                    sessions = [rig.session(&queue), rig.session(&queue), rig.session(&queue)];
                }
            }
            Step::Gather => rig.gather(u64::from(SEGMENT_BYTES), directory),
            Step::Reclaim => {
                let now_ms = rig.now_ms();
                rig.broker.shared.state.lock().reclaim(now_ms);
            }
            Step::SeekSnapshot => {
                if let Some((unacked, count)) = &account.snapshot {
                    rig.broker.seek(&queue, SeekTarget::Snapshot(9)).await.unwrap();
                    account.unacked = unacked.iter().chain(&account.published[*count..]).copied().collect();
                    account.leased_until.clear();
                }
            }
        }
        let stats = rig.broker.stats(&queue).await.unwrap();
        assert_eq!(stats.undelivered_messages, account.unacked.len() as u64);
    }
    drain(&rig, &queue, account, kinds).await;
    assert!(sessions.iter().all(|s| s.outstanding_messages() == 0));
}

async fn publish(rig: &Rig, account: &mut Account, keys: &[u8]) {
    let names: Vec<String> = keys.iter().map(|k| if *k == 0 { String::new() } else { k.to_string() }).collect();
    // Large enough that a case fills several segments of the log.
    let text = "x".repeat(3000);
    let messages: Vec<_> = names.iter().map(|name| (text.as_str(), name.as_str())).collect();
    for (id, key) in rig.publish_keyed(&messages).await.into_iter().zip(keys) {
        account.published.push(id);
        account.key.insert(id, *key);
        account.unacked.insert(id);
    }
}

fn id(leased: &Leased) -> u64 {
    // Field 3, a string: the last but one field of the stored encoding.
    let wire = &leased.message;
    let at = wire.windows(2).rposition(|w| w == [0x1a, 16]).unwrap();
    std::str::from_utf8(&wire[at + 2..at + 18]).unwrap().parse().unwrap()
}

/// An expiry on an ordered queue takes the key's later messages back.
fn expire_keys(account: &mut Account, now_ms: u64) {
    let expired: Vec<u64> = account.leased_until.iter().filter(|(_, until)| **until <= now_ms).map(|(id, _)| *id).collect();
    for id in expired {
        let key = account.key[&id];
        account.leased_until.retain(|m, until| key == 0 || account.key[m] != key || *m < id || *until <= now_ms);
    }
}

fn receive(rig: &Rig, account: &mut Account, leased: Vec<Leased>, kinds: Kinds) {
    if kinds.ordered {
        expire_keys(account, rig.now_ms());
    }
    for leased in leased {
        let id = id(&leased);
        assert!(account.unacked.contains(&id), "{id} was delivered after its acknowledgement");
        let until = account.leased_until.get(&id).copied().unwrap_or(0);
        assert!(until <= rig.now_ms(), "{id} was delivered while leased until {until}");
        let key = account.key[&id];
        if kinds.ordered && key != 0 {
            let earlier = account.unacked.range(..id).filter(|m| account.key[m] == key);
            let skipped: Vec<_> =
                earlier.filter(|m| account.leased_until.get(m).is_none_or(|u| *u + NOTICE_MS <= rig.now_ms())).collect();
            assert!(skipped.is_empty(), "{id} of key {key} overtook {skipped:?}");
        }
        account.leased_until.insert(id, rig.now_ms() + 10_000);
        account.held.push((id, leased));
    }
}

fn pick(account: &Account, n: usize) -> Option<(u64, Leased)> {
    let at = n.checked_rem(account.held.len())?;
    Some(account.held[at].clone())
}

async fn ack(rig: &Rig, queue: &QueueRef, account: &mut Account, n: usize, kinds: Kinds) {
    let Some((id, leased)) = pick(account, n) else { return };
    let before = rig.broker.stats(queue).await.unwrap().undelivered_messages;
    let outcome = rig.ack(queue, &[leased]).await[0];
    let removed = before - rig.broker.stats(queue).await.unwrap().undelivered_messages;
    if removed == 1 {
        assert_eq!(outcome, Outcome::Done);
        assert!(account.unacked.remove(&id));
        account.leased_until.remove(&id);
    } else if kinds.exactly_once && outcome == Outcome::Done {
        assert!(!account.unacked.contains(&id), "{id} was confirmed and is still there");
    }
}

async fn give_back(rig: &Rig, queue: &QueueRef, account: &mut Account, n: usize, failed: bool) {
    let Some((id, leased)) = pick(account, n) else { return };
    let before = rig.broker.stats(queue).await.unwrap().outstanding_messages;
    if failed {
        rig.modify(queue, &[leased], 0).await;
    } else {
        rig.broker.release(queue, &[leased.token]).await.unwrap();
    }
    if rig.broker.stats(queue).await.unwrap().outstanding_messages < before {
        // An ordered queue takes the key's later messages back too.
        let key = account.key[&id];
        account.leased_until.retain(|m, _| *m < id || (*m > id && (key == 0 || account.key[m] != key)));
    }
}

/// Everything unacknowledged comes out, in order by key, and nothing else.
async fn drain(rig: &Rig, queue: &QueueRef, mut account: Account, kinds: Kinds) {
    rig.pass(20_000);
    let mut idle = 0;
    while idle < 3 {
        let leased = rig.pull(queue, 50).await;
        idle = if leased.is_empty() { idle + 1 } else { 0 };
        if leased.is_empty() {
            rig.pass(5_000);
        }
        receive(rig, &mut account, leased.clone(), kinds);
        for leased in &leased {
            account.unacked.remove(&id(leased));
        }
        rig.ack(queue, &leased).await;
    }
    assert!(account.unacked.is_empty(), "lost: {:?}", account.unacked);
    assert_eq!(rig.broker.stats(queue).await.unwrap().undelivered_messages, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn random_operations_keep_the_promises(
        steps in steps(),
        (ordered, exactly_once, backoff, retain) in any::<(bool, bool, bool, bool)>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(run(steps, Kinds { ordered, exactly_once, backoff, retain }, None));
    }

}

proptest! {
    // Each restart opens a log on disk anew, so fewer cases take as long.
    #![proptest_config(ProptestConfig { cases: 25, ..ProptestConfig::default() })]

    #[test]
    fn random_operations_and_restarts_keep_the_promises(
        steps in steps(),
        (ordered, exactly_once, backoff, retain) in any::<(bool, bool, bool, bool)>(),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(run(steps, Kinds { ordered, exactly_once, backoff, retain }, Some(directory.path())));
    }
}
