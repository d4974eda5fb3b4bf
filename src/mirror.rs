//! `landline mirror`: copies messages from subscriptions of one Pub/Sub endpoint to topics of another, Google's and ours,
//! in either direction, until it is told to stop.
//!
//! A message is acknowledged at the source only after the destination has confirmed it: each arrives at least once, with
//! its data, attributes and ordering key. Messages of a key are published one request after the other, in order.
//!
//! Copies bear the attribute `landline-mirror`, whose value is the topic they were copied into. A mirror that reads
//! from a subscription of that very topic leaves them alone, so that two mirrors can run in opposite directions.

mod copy;
mod lanes;
mod progress;
mod publish;
mod route;
mod source;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use clap::Args;
use config::{File, FileFormat, Source};
use serde::Deserialize;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use self::progress::Progress;
use crate::client::Target;

/// Connections to the source, and to the destination, of all routes.
const CONNECTIONS: usize = 2;

/// Arguments of `landline mirror`.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Where messages come from: a URL or HOST:PORT
    #[arg(long, value_name = "URL")]
    from: String,

    /// Where they go
    #[arg(long, value_name = "URL")]
    to: String,

    /// Roots of the source's certificate, PEM
    #[arg(long, value_name = "FILE")]
    from_ca_file: Option<PathBuf>,

    /// Key file of the service account that reads, of Google or as `landline keys create` makes it
    #[arg(long, value_name = "FILE")]
    from_key_file: Option<PathBuf>,

    /// Roots of the destination's certificate, PEM
    #[arg(long, value_name = "FILE")]
    to_ca_file: Option<PathBuf>,

    /// Key file of the service account that publishes
    #[arg(long, value_name = "FILE")]
    to_key_file: Option<PathBuf>,

    /// A subscription to copy from, with --topic; may be repeated
    #[arg(long, value_name = "NAME")]
    subscription: Vec<String>,

    /// The topic to copy the subscription's messages to, in the same order as --subscription
    #[arg(long, value_name = "NAME")]
    topic: Vec<String>,

    /// YAML or JSON file of further pairs: `routes: [{subscription: ..., topic: ...}]`
    #[arg(long, value_name = "FILE")]
    routes: Option<PathBuf>,

    /// StreamingPull streams a subscription
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    streams: u64,

    /// Publish requests of a pair under way at once
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=1000))]
    publishers: u64,

    /// Messages of a pair that were received and are not yet confirmed by the destination
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    outstanding: u64,

    /// Their bytes
    #[arg(long, default_value_t = 100 << 20, value_parser = clap::value_parser!(u64).range(1..=1 << 34))]
    outstanding_bytes: u64,

    /// Ack deadline of received messages; it is extended while they wait, and says how soon they come again after a crash
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(10..=600))]
    ack_deadline_seconds: u64,

    /// Seconds between two lines of progress on standard error
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    report_seconds: u64,

    /// Longest time that a stop waits for publishes under way
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(0..=3600))]
    drain_seconds: u64,
}

/// One subscription and where its messages go.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Route {
    subscription: String,
    topic: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Routes {
    routes: Vec<Route>,
}

impl Options {
    /// Every pair.
    fn pairs(&self) -> Result<Vec<Route>, String> {
        let (subscriptions, topics) = (self.subscription.len(), self.topic.len());
        if subscriptions != topics {
            return Err(format!("each --subscription goes with one --topic; there are {subscriptions} and {topics}"));
        }
        let pairs = self.subscription.iter().zip(&self.topic);
        let mut routes: Vec<_> = pairs.map(|(s, t)| Route { subscription: s.clone(), topic: t.clone() }).collect();
        if let Some(path) = &self.routes {
            routes.extend(read(path).map_err(|why| format!("{}: {why}", path.display()))?);
        }
        if routes.is_empty() {
            return Err("there is nothing to copy: --subscription and --topic, or --routes, must be given".into());
        }
        for (at, Route { subscription, topic }) in routes.iter().enumerate() {
            if !is_name(subscription, "subscriptions") {
                return Err(format!("{subscription:?} is no name like projects/PROJECT/subscriptions/ID"));
            }
            if !is_name(topic, "topics") {
                return Err(format!("{topic:?} is no name like projects/PROJECT/topics/ID"));
            }
            if routes[..at].iter().any(|route| route.subscription == *subscription) {
                return Err(format!("{subscription} is there twice: its messages can go to one topic only"));
            }
        }
        Ok(routes)
    }

    fn source(&self) -> Target {
        let (ca_file, key_file) = (self.from_ca_file.clone(), self.from_key_file.clone());
        Target { ca_file, key_file, ..Target::plain(&self.from) }
    }

    fn destination(&self) -> Target {
        let (ca_file, key_file) = (self.to_ca_file.clone(), self.to_key_file.clone());
        Target { ca_file, key_file, ..Target::plain(&self.to) }
    }
}

fn is_name(text: &str, collection: &str) -> bool {
    let parts: Vec<_> = text.split('/').collect();
    parts.len() == 4 && parts[0] == "projects" && parts[2] == collection && parts.iter().all(|part| !part.is_empty())
}

fn read(path: &Path) -> Result<Vec<Route>, String> {
    let text = std::fs::read_to_string(path).map_err(|e| e.to_string())?;
    let table = File::from_str(&text, FileFormat::Yaml).collect().map_err(|e| e.to_string())?;
    let routes: Routes = config::Value::from(table).try_deserialize().map_err(|e| e.to_string())?;
    Ok(routes.routes)
}

/// Copies until `stop`, then settles what the destination has confirmed and gives the rest back.
///
/// # Errors
/// What waiting does not mend: an option, a file, a subscription or a topic that does not exist.
pub async fn run(options: &Options, stop: CancellationToken) -> Result<(), String> {
    let routes = options.pairs()?;
    let from = options.source().connections(CONNECTIONS)?;
    let to = options.destination().connections(CONNECTIONS)?;
    let mut tasks = JoinSet::new();
    let mut all = Vec::new();
    for route in routes {
        let progress = Arc::new(Progress::new(format!("{} -> {}", route.subscription, route.topic)));
        all.push(progress.clone());
        tasks.spawn(route::run(route, options.clone(), from.clone(), to.clone(), stop.clone(), progress));
    }
    let every = Duration::from_secs(options.report_seconds);
    let reporting = async {
        loop {
            tokio::time::sleep(every).await;
            all.iter().for_each(|progress| progress.report());
        }
    };
    let copying = async {
        while let Some(done) = tasks.join_next().await {
            if let Err(why) = done.map_err(|e| e.to_string())? {
                // The others settle what they hold.
                stop.cancel();
                while tasks.join_next().await.is_some() {}
                return Err(why);
            }
        }
        Ok(())
    };
    let done = tokio::select! {
        done = copying => done,
        () = reporting => Ok(()),
    };
    all.iter().for_each(|progress| progress.report());
    done
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn pairs(arguments: &[&str]) -> Result<Vec<Route>, String> {
        Line::parse_from(["mirror", "--from", "a:1", "--to", "b:1"].iter().chain(arguments)).options.pairs()
    }

    #[test]
    fn pairs_come_from_the_command_line_and_from_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("routes.yaml");
        std::fs::write(&file, "routes:\n  - {subscription: projects/a/subscriptions/t, topic: projects/b/topics/t}\n").unwrap();
        let line = ["--subscription", "projects/a/subscriptions/s", "--topic", "projects/b/topics/s"];
        let both = pairs(&[&line[..], &["--routes", file.to_str().unwrap()]].concat()).unwrap();
        let names: Vec<_> = both.iter().map(|route| (route.subscription.as_str(), route.topic.as_str())).collect();
        let expected =
            [("projects/a/subscriptions/s", "projects/b/topics/s"), ("projects/a/subscriptions/t", "projects/b/topics/t")];
        assert_eq!(names, expected);
    }

    #[test]
    fn what_makes_no_pairs_is_refused() {
        let (subscription, topic) = ("projects/a/subscriptions/s", "projects/b/topics/s");
        for (line, why) in [
            (&[][..], "nothing to copy"),
            (&["--subscription", subscription][..], "there are 1 and 0"),
            (&["--subscription", "s", "--topic", topic][..], "\"s\" is no name like projects/PROJECT/subscriptions/ID"),
            (&["--subscription", subscription, "--topic", subscription][..], "is no name like projects/PROJECT/topics/ID"),
            (&["--subscription", subscription, "--topic", topic, "--subscription", subscription, "--topic", topic][..], "twice"),
            (&["--routes", "/nowhere"][..], "/nowhere: "),
        ] {
            let error = pairs(line).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
