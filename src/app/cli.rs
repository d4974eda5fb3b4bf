//! The command line.

use std::{io::Write, path::PathBuf};

use clap::{Args, Parser, Subcommand};

use crate::{
    app::{Error, apply::Apply, import::Import, reset::Reset, wait::Wait},
    bench,
    broker::{BrokerError, redis},
    mirror,
    model::SubscriptionName,
    settings::{self, BrokerUrl, Loaded, Settings, Wrong},
};

/// A server for the Google Cloud Pub/Sub API that keeps messages on your own disk, Redis or Valkey.
///
/// Settings come from --set, the environment (CONNECTORS_GCP_...) and the file, in this order.
#[derive(Debug, Parser)]
#[command(name = "landline", version)]
pub struct Arguments {
    /// Settings file, YAML or TOML
    #[arg(long, global = true, value_name = "FILE", env = "LANDLINE_CONFIG")]
    config: Option<PathBuf>,

    /// One setting, stronger than file and environment; may be repeated
    #[arg(long, global = true, value_name = "KEY=VALUE")]
    set: Vec<String>,

    #[command(subcommand)]
    command: Option<Command>,
}

/// What the program is asked to do.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Run the server (the default)
    Serve,
    /// Check the settings and print those in force, without secrets
    CheckConfig,
    /// Ask a running server for its health; exits with 0 only when it serves
    Healthcheck(Healthcheck),
    /// Issue, list and take back service-account keys for clients
    #[command(subcommand)]
    Keys(KeysCommand),
    /// Show what Redis holds of a subscription: counts, keys, leases and the oldest message
    Inspect(Inspect),
    /// Bring the resources of a server, this or another, to the state of a file; shows first what differs
    Apply(Apply),
    /// Turn lists that gcloud printed as JSON into a file for apply and PRELOAD_FILE, and say what it can't carry
    Import(Import),
    /// Copy messages from subscriptions of one Pub/Sub endpoint to topics of another until it is stopped
    Mirror(mirror::Options),
    /// Wait until nothing of a subscription waits or is leased, by a server's admin address
    Wait(Wait),
    /// Delete everything that a project has, between two tests
    Reset(Reset),
    /// Put load on a server, this or another, and report what was measured as a line of JSON
    Bench(bench::Options),
    /// Answer as the server does and keep nothing, for `bench` to measure the rest of the server against
    #[command(hide = true)]
    Floor,
}

/// What `landline keys` does.
#[derive(Debug, Clone, Subcommand)]
pub enum KeysCommand {
    /// Make a key: its private half goes to a new file that Google's clients load, its public half to AUTH_KEYS_FILE
    Create(CreateKey),
    /// Print the ids and holders of all keys
    List,
    /// Take a key back; running servers notice within seconds
    Delete {
        /// The key's id
        id: String,
    },
}

/// Arguments of `landline keys create`.
#[derive(Debug, Clone, Args)]
pub struct CreateKey {
    /// The key file to write; it must not exist
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,

    /// Whose key it is; policies call its holder serviceAccount:EMAIL. Made up by default
    #[arg(long, value_name = "EMAIL", value_parser = email)]
    pub email: Option<String>,

    /// The project that clients take for theirs when they are told no other
    #[arg(long, value_name = "ID", default_value = "landline")]
    pub project: String,

    /// Where clients reach the server, HOST:PORT or a URL; ADVERTISED_ENDPOINT by default
    #[arg(long, value_name = "ADDRESS")]
    pub endpoint: Option<String>,
}

fn email(text: &str) -> Result<String, String> {
    let legal = text.split_once('@').is_some_and(|(name, domain)| !name.is_empty() && !domain.is_empty())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"@._-+".contains(&b));
    if legal { Ok(text.to_owned()) } else { Err("must look like orders@shop.example".into()) }
}

/// Arguments of `landline inspect`.
#[derive(Debug, Clone, Args)]
pub struct Inspect {
    /// The subscription, PROJECT/ID or its full name
    #[arg(value_name = "SUBSCRIPTION")]
    pub subscription: String,
}

/// Arguments of `landline healthcheck`.
#[derive(Debug, Clone, Args)]
pub struct Healthcheck {
    /// Address of the server; the settings' own by default
    #[arg(long, value_name = "HOST:PORT")]
    pub address: Option<String>,

    /// Speak TLS; the default where the settings have a certificate
    #[arg(long)]
    pub tls: bool,

    /// Roots of the server's certificate, PEM. By default the server must have the certificate of the settings or, without
    /// one, be trusted by the machine
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,

    /// Client certificate, PEM, for a server that requires one
    #[arg(long, value_name = "FILE", requires = "key_file")]
    pub cert_file: Option<PathBuf>,

    /// Private key of the client certificate, PEM
    #[arg(long, value_name = "FILE", requires = "cert_file")]
    pub key_file: Option<PathBuf>,

    /// Longest time to wait for the answer
    #[arg(long, value_name = "SECONDS", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout_seconds: u64,
}

impl Arguments {
    /// Reads the process's arguments; ends the process on `--help`, `--version` and mistakes.
    pub fn read() -> Self {
        Self::parse()
    }

    /// The command; serving is what the program is for, so it is the default.
    pub fn command(&self) -> Command {
        self.command.clone().unwrap_or(Command::Serve)
    }

    /// Reads the settings from every source.
    ///
    /// # Errors
    /// Everything that is wrong with them.
    pub fn load_settings(&self) -> Result<Loaded, Vec<Wrong>> {
        let environment = std::env::vars_os().map(|(name, value)| (lossy(name), lossy(value)));
        settings::load(self.config.as_deref(), environment, &self.set)
    }
}

fn lossy(text: std::ffi::OsString) -> String {
    text.to_string_lossy().into_owned()
}

/// Prints the settings in force to standard output.
///
/// # Errors
/// When standard output can't be written.
pub fn print(loaded: &Loaded) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    write!(out, "{loaded}").and_then(|()| out.flush()).map_err(Error::Output)
}

/// Prints what Redis holds of a subscription.
///
/// # Errors
/// When there is none of this name, the broker is not Redis, or Redis can't be read.
pub fn inspect(asked: &Inspect, settings: &Settings) -> Result<(), Error> {
    let wrong = |why: String| Error::Inspect(format!("{}: {why}", asked.subscription));
    let parsed = match asked.subscription.split_once('/') {
        Some((project, id)) if !asked.subscription.starts_with("projects/") => SubscriptionName::new(project, id),
        _ => SubscriptionName::parse(&asked.subscription),
    };
    let name = parsed.map_err(|e| wrong(e.to_string()))?.to_string();
    let BrokerUrl::Redis(url) = &settings.broker else {
        return Err(wrong(format!("only Redis can be inspected, and the broker is {}", settings.broker)));
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::System)?;
    let text = runtime.block_on(redis::inspect(url, &name)).map_err(|e| match e {
        BrokerError::Gone => wrong("there is no such subscription".to_owned()),
        other => other.into(),
    })?;
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Error::Output)
}

/// Runs a load and prints its report.
///
/// # Errors
/// When the load could not be carried out.
pub fn run_bench(options: &bench::Options) -> Result<(), Error> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(Error::System)?;
    let report = runtime.block_on(bench::run(options)).map_err(Error::Bench)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::json!(report)).and_then(|()| out.flush()).map_err(Error::Output)
}
