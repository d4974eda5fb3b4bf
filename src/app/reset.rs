//! `landline reset`: deletes everything that a project has, between two tests.

use std::io::Write;

use clap::Args;
use http::Method;

use super::Error;
use crate::{
    client::Target,
    resources::{Caller, Document, Failure, Plan},
};

/// Exit code when nothing was deleted because nobody said that it should be.
const NOT_SAID: u8 = 2;

/// Arguments of `landline reset`.
#[derive(Debug, Clone, Args)]
pub struct Reset {
    /// The project's id
    #[arg(value_name = "PROJECT")]
    project: String,

    #[command(flatten)]
    target: Target,

    /// Really delete; without it the command shows what it would delete, and exits with 2
    #[arg(long)]
    yes: bool,
}

/// Deletes subscriptions, snapshots, topics and schemas; answers the exit code.
///
/// # Errors
/// What the API says against it.
pub fn run(reset: &Reset) -> Result<u8, Error> {
    let wrong = |failure: Failure| Error::Reset(format!("projects/{}: {}: {}", reset.project, failure.status, failure.message));
    if reset.project.is_empty() || reset.project.contains(['/', '?', '#', ' ']) {
        return Err(Error::Reset(format!("{:?} is no id of a project", reset.project)));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::System)?;
    runtime.block_on(async {
        let connection = reset.target.connections(1).map_err(Error::Reset)?.remove(0);
        let caller = Caller::remote(connection).map_err(|e| Error::Descriptors(e.to_string()))?;
        let snapshots = caller.list(&format!("projects/{}/snapshots", reset.project), "snapshots").await.map_err(wrong)?;
        let snapshots: Vec<_> = snapshots.iter().filter_map(|item| item["name"].as_str()).collect();
        let plan = Plan::make(&Document::default(), &caller, std::slice::from_ref(&reset.project)).await;
        let plan = plan.map_err(|(_, failure)| wrong(failure))?;
        let names = snapshots.iter().copied().chain(plan.steps.iter().map(|step| step.name.as_str()));
        let text: String = names.map(|name| format!("- {name}\n")).collect();
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Error::Output)?;
        if !reset.yes && !text.is_empty() {
            eprintln!("landline: reset: nothing was deleted; --yes deletes all of this");
            return Ok(NOT_SAID);
        }
        for name in snapshots {
            match caller.call(&Method::DELETE, name, None).await {
                Err(failure) if !failure.is_not_found() => return Err(wrong(failure)),
                _ => {}
            }
        }
        plan.carry_out(&caller).await.map_err(|mut failures| wrong(failures.remove(0).1))?;
        Ok(0)
    })
}
