//! Random operations against the account, and of several callers at once against the ledger.

use account::{Account, Kinds, Step, kinds, step};
use ledger::Plan;
use proptest::prelude::*;

use super::{proxy::Proxy, server::Server, *};

/// How often a connection breaks, of a thousand times that something passes over it: every caller loses several answers.
const BREAKS_OF_THOUSAND: u32 = 15;

async fn run(steps: Vec<Step>, kinds: Kinds) {
    let mut rig = Rig::new().await;
    let mut account = Account::open(&mut rig, kinds, "x".into()).await;
    for step in steps {
        account.take(&rig, step).await;
        account.check(&rig).await;
    }
    account.drain(&rig).await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn random_operations_keep_the_promises(steps in prop::collection::vec(step(), 1..120), kinds in kinds()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run(steps, kinds));
    }
}

async fn another_node(rig: &Rig, url: &str) -> Arc<Redis> {
    Redis::start(url, Options { set_clock: Some(rig.clock.clone()), ..Options::default() }).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn callers_of_two_nodes_at_once_break_no_promise() {
    for seed in ledger::seeds() {
        let url = server::empty_database();
        let mut rig = Rig::on(&url, None).await;
        let other = another_node(&rig, &url).await;
        ledger::run(&mut rig, &[other], Plan::of(seed, 4, 50), seed, |_| {}).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn calls_that_lose_their_answers_break_no_promise() {
    for seed in ledger::seeds() {
        let server = Server::start(&[]);
        let (here, there) = (Proxy::start(server.port), Proxy::start(server.port));
        let mut rig = Rig::on(&here.url(), None).await;
        let other = another_node(&rig, &there.url()).await;
        let disturb = |begins: bool| {
            for (link, proxy) in (0..).zip([&here, &there]) {
                proxy.break_at_random(seed + link, if begins { BREAKS_OF_THOUSAND } else { 0 });
            }
        };
        ledger::run(&mut rig, &[other], Plan::of(seed, 4, 50), seed, disturb).await;
    }
}
