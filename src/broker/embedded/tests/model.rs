//! Random operations against the account, what only this engine has: restarts, checkpoints and a log to tidy, and operations
//! of several callers at once against the ledger.

use std::path::Path;

use account::{Account, Kinds, kinds};
use ledger::Plan;
use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Step {
    Call(account::Step),
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
        account::WEIGHT => account::step().prop_map(Step::Call),
        1 => Just(Step::Gather),
        1 => Just(Step::Reclaim),
        2 => any::<bool>().prop_map(|checkpoint| Step::Restart { checkpoint }),
    ];
    prop::collection::vec(step, 1..120)
}

async fn run(steps: Vec<Step>, kinds: Kinds, directory: Option<&Path>) {
    let mut rig = match directory {
        Some(directory) => Rig::on_disk(directory).await,
        None => Rig::new().await,
    };
    // Large enough that a case fills several segments of the log.
    let mut account = Account::open(&mut rig, kinds, "x".repeat(3000)).await;
    for step in steps {
        match step {
            Step::Call(step) => account.take(&rig, step).await,
            Step::Restart { checkpoint } => {
                if let Some(directory) = directory {
                    if checkpoint {
                        checkpoint::write(&rig.broker.shared, Some(directory)).unwrap();
                    }
                    rig = rig.restart(directory);
                    account.attach(&rig);
                }
            }
            Step::Gather => rig.gather(u64::from(SEGMENT_BYTES), directory),
            Step::Reclaim => {
                let now_ms = rig.now_ms();
                rig.broker.shared.state.lock().reclaim(now_ms);
            }
        }
        account.check(&rig).await;
    }
    account.drain(&rig).await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn random_operations_keep_the_promises(steps in steps(), kinds in kinds()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(run(steps, kinds, None));
    }
}

proptest! {
    // Each restart opens a log on disk anew, so fewer cases take as long.
    #![proptest_config(ProptestConfig { cases: 25, ..ProptestConfig::default() })]

    #[test]
    fn random_operations_and_restarts_keep_the_promises(steps in steps(), kinds in kinds()) {
        let directory = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(run(steps, kinds, Some(directory.path())));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn callers_at_once_break_no_promise() {
    for seed in ledger::seeds() {
        let folder = tempfile::tempdir().unwrap();
        let mut rig = Rig::on_disk(folder.path()).await;
        ledger::run(&mut rig, &[], Plan::of(seed, 4, 200), seed, |_| {}).await;
    }
}
