//! Random operations against the account.

use account::{Account, Kinds, Step, kinds, step};
use proptest::prelude::*;

use super::*;

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
