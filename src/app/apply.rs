//! `landline apply`: brings an endpoint's resources to the state of a file.

use std::{io::Write, path::PathBuf};

use clap::Args;

use super::Error;
use crate::{
    client::Target,
    resources::{Action, Caller, Document, Plan},
};

/// Exit code of a dry run that found differences.
const DIFFERENCES: u8 = 2;

/// Arguments of `landline apply`.
#[derive(Debug, Clone, Args)]
pub struct Apply {
    /// YAML or JSON file of schemas, topics, subscriptions and policies, as PRELOAD_FILE takes it
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,

    #[command(flatten)]
    target: Target,

    /// Show what differs and change nothing; exits with 2 when something does
    #[arg(long)]
    dry_run: bool,

    /// Delete the subscriptions, topics and schemas of this project that the file does not have; may be repeated
    #[arg(long, value_name = "PROJECT")]
    prune: Vec<String>,
}

/// Prints what differs and then changes it; answers the exit code. When the file wants what can't be changed, nothing is.
///
/// # Errors
/// A mistake in the file, or what the API says against it.
pub fn run(apply: &Apply) -> Result<u8, Error> {
    let document = Document::read(&apply.file).map_err(|wrong| Error::Apply(wrong.join("\nlandline: apply: ")))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::System)?;
    runtime.block_on(async {
        let connection = apply.target.connections(1).map_err(Error::Apply)?.remove(0);
        let caller = Caller::remote(connection).map_err(|e| Error::Descriptors(e.to_string()))?;
        let plan = Plan::make(&document, &caller, &apply.prune).await;
        let plan = plan.map_err(|(at, failure)| Error::Apply(format!("{at}: {}: {}", failure.status, failure.message)))?;
        let mut out = std::io::stdout().lock();
        write!(out, "{plan}").and_then(|()| out.flush()).map_err(Error::Output)?;
        if apply.dry_run {
            return Ok(if plan.steps.is_empty() { 0 } else { DIFFERENCES });
        }
        if plan.count(Action::Impossible) > 0 {
            return Err(Error::Apply("nothing was changed, because the file wants what can't be (the lines with !)".into()));
        }
        plan.carry_out(&caller).await.map_err(|failures| {
            let lines = failures.iter().map(|(step, failure)| {
                format!("{}: {} {}: {}: {}", step.place, step.kind.noun(), step.name, failure.status, failure.message)
            });
            Error::Apply(lines.collect::<Vec<_>>().join("\nlandline: apply: "))
        })?;
        Ok(0)
    })
}
