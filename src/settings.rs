//! Settings from the command line, the environment, and a YAML or TOML file, in this order of precedence.
//!
//! Every key is described once, in [`keys::KEYS`]: that table drives reading, `landline check-config` and the table of
//! the README. A wrong or unknown key is an error; all of them are reported together.

pub mod keys;
mod preload;
mod source;
mod value;

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
    path::PathBuf,
};

pub use self::{
    preload::Preload,
    source::Given,
    value::{Bind, BrokerUrl, Durability, LogFormat, PreloadExisting, masked},
};
use crate::{auth, connector, telemetry, tls};

/// Where metrics are served unless something else is said. On this address alone the server does without when it is taken,
/// so that two servers run side by side on one machine.
pub const DEFAULT_ADMIN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9090);

/// Everything that can be set, checked.
#[derive(Debug, Clone)]
pub struct Settings {
    /// 0 takes any free port.
    pub port: u16,
    pub bind: Bind,
    /// Where metrics are served; none where they are not.
    pub admin: Option<SocketAddr>,
    /// File of the password of the console's operators, empty for a console that only shows things.
    pub admin_password_file: PathBuf,
    /// Names the console is reached by, lower case.
    pub admin_hosts: Vec<String>,
    pub broker: BrokerUrl,
    pub durability: Durability,
    /// The durability was set, and is not just the default.
    pub durability_given: bool,
    pub tls: tls::ServerFiles,
    pub auth: auth::Options,
    /// What the use cases obey. Its node id is empty until the start gives it one.
    pub connector: connector::Options,
    /// Open HTTP/2 streams of one connection.
    pub max_concurrent_streams: u32,
    /// Open connections of the process.
    pub max_connections: usize,
    /// Threads that serve connections; 0 takes one a core.
    pub workers: usize,
    pub enable_reflection: bool,
    /// Origins whose pages browsers may let call REST, `*` alone for all, empty for none.
    pub cors_origins: Vec<String>,
    /// `host:port` that clients are told, empty for none.
    pub advertised_endpoint: String,
    /// Whether pushes may go to this machine and to private networks.
    pub push_internal_networks: bool,
    /// Certificates that push trusts beside the system's, empty for none.
    pub push_ca_file: PathBuf,
    /// URL of the issuer of push tokens, empty for one made from the address.
    pub push_issuer: String,
    /// Where metrics and spans are sent by OTLP.
    pub telemetry: telemetry::Options,
    /// Time a stop leaves balancers to look elsewhere, before it ends anything.
    pub drain_delay_seconds: u64,
    /// Longest time a stop waits for calls under way.
    pub drain_seconds: u64,
    /// Filter of log lines: a level, or `target=level` items.
    pub log: String,
    pub log_format: LogFormat,
    /// Topics and subscriptions that exist before the port answers.
    pub preload: Preload,
    /// File of further resources to create, empty for none.
    pub preload_file: PathBuf,
    /// What becomes of those that exist and differ.
    pub preload_existing: PreloadExisting,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            port: 8085,
            bind: Bind::localhost(),
            admin: Some(DEFAULT_ADMIN),
            admin_password_file: PathBuf::new(),
            admin_hosts: Vec::new(),
            broker: BrokerUrl::Embedded("./data".into()),
            durability: Durability::Fsync,
            durability_given: false,
            tls: tls::ServerFiles::default(),
            auth: auth::Options::default(),
            connector: connector::Options::default(),
            max_concurrent_streams: 65_536,
            max_connections: 16_384,
            workers: 0,
            enable_reflection: true,
            cors_origins: Vec::new(),
            advertised_endpoint: String::new(),
            push_internal_networks: true,
            push_ca_file: PathBuf::new(),
            push_issuer: String::new(),
            telemetry: telemetry::Options::default(),
            drain_delay_seconds: 0,
            drain_seconds: 25,
            log: "info".into(),
            log_format: LogFormat::Text,
            preload: Preload::default(),
            preload_file: PathBuf::new(),
            preload_existing: PreloadExisting::Keep,
        }
    }
}

/// One thing wrong with the settings, as one line that names the key, the value and the range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Wrong(String);

/// The settings, and where each key's value came from.
#[derive(Debug, Clone)]
pub struct Loaded {
    pub settings: Settings,
    /// One origin a key, in the order of [`keys::KEYS`].
    origins: Vec<Origin>,
}

/// Where a value came from; a later one wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Origin {
    Default,
    File,
    Environment,
    CommandLine,
}

/// Reads the settings: `overrides` are `KEY=VALUE` texts of the command line.
///
/// # Errors
/// Everything that is wrong, one item each.
pub fn load(
    file: Option<&Path>,
    environment: impl IntoIterator<Item = (String, String)>,
    overrides: &[String],
) -> Result<Loaded, Vec<Wrong>> {
    let mut given = Vec::new();
    let mut wrong = Vec::new();
    if let Some(path) = file {
        source::file(path, &mut given, &mut wrong);
    }
    source::environment(environment, &mut given);
    source::command_line(overrides, &mut given, &mut wrong);

    let mut loaded = Loaded { settings: Settings::default(), origins: vec![Origin::Default; keys::KEYS.len()] };
    for item in &given {
        match loaded.take(item) {
            Ok(()) => {}
            Err(error) => wrong.push(error),
        }
    }
    wrong.extend(loaded.settings.contradictions());
    if wrong.is_empty() { Ok(loaded) } else { Err(wrong) }
}

impl Loaded {
    /// Applies one given value.
    fn take(&mut self, given: &Given) -> Result<(), Wrong> {
        let Some(index) = keys::KEYS.iter().position(|key| key.name == given.key) else {
            return Err(Wrong(source::unknown(given)));
        };
        let key = &keys::KEYS[index];
        if given.origin == Origin::File && self.origins[index] == Origin::File {
            return Err(Wrong(format!("{}: given twice", given.place)));
        }
        if !(key.set)(&mut self.settings, &given.value) {
            return Err(Wrong(format!("{}={:?}: must be {}", given.place, shown(&given.key, &given.value), key.range)));
        }
        self.origins[index] = given.origin;
        Ok(())
    }
}

/// A value as errors show it: without its secrets.
fn shown(key: &str, value: &str) -> String {
    // The path of a file with a secret is none.
    let secret = !key.ends_with("_FILE")
        && ["PASSWORD", "SECRET", "TOKEN", "CREDENTIAL", "PRIVATE", "OTLP_HEADERS"].iter().any(|word| key.contains(word));
    if secret { "***".into() } else { masked(value) }
}

impl Settings {
    /// Values that are right each for itself but not together.
    fn contradictions(&self) -> Vec<Wrong> {
        let mut wrong = Vec::new();
        if matches!((&self.broker, self.durability), (BrokerUrl::Embedded(_) | BrokerUrl::Memory, Durability::Replicas(_))) {
            wrong.push(Wrong(format!(
                "DURABILITY={:?}: must be none or fsync with BROKER_URL={:?}; replicas needs a redis broker",
                self.durability.to_string(),
                self.broker.to_string()
            )));
        }
        let tls = &self.tls;
        if tls.is_set() == tls.key.as_os_str().is_empty() {
            wrong.push(Wrong("TLS_CERT_FILE and TLS_KEY_FILE: must be given together".into()));
        }
        let asks = tls.client_auth != tls::ClientAuth::Off;
        if asks == tls.client_roots.as_os_str().is_empty() || asks && !tls.is_set() {
            wrong.push(Wrong(format!(
                "TLS_CLIENT_AUTH={}: must be optional or required where TLS_CLIENT_CA_FILE is given, and only there; both need TLS_CERT_FILE",
                value::client_auth_name(tls.client_auth)
            )));
        }
        if self.telemetry.traces.is_some() && self.telemetry.endpoint.is_empty() {
            wrong.push(Wrong("OTLP_TRACES: needs OTLP_ENDPOINT, the collector that takes them".into()));
        }
        self.contradictions_of_auth(&mut wrong);
        wrong
    }

    fn contradictions_of_auth(&self, wrong: &mut Vec<Wrong>) {
        let public = self.bind.addresses.iter().find(|address| !address.to_canonical().is_loopback());
        if let (Some(address), None) = (public, self.auth.mode) {
            wrong.push(Wrong(format!(
                "BIND={:?}: {address} is open to others, so AUTH must be given: enforce, audit, or off if everyone who reaches the port may do everything",
                self.bind.to_string()
            )));
        }
        let nobody = self.auth.admins.is_empty() && self.auth.policy_file.as_os_str().is_empty();
        if self.auth.mode == Some(auth::Mode::Enforce) && nobody {
            wrong.push(Wrong("AUTH=enforce: needs AUTH_ADMINS or AUTH_POLICY_FILE, or nobody may do anything".into()));
        }
        if !self.auth.issuers.is_empty() && self.auth.audiences.is_empty() {
            wrong.push(Wrong("AUTH_OIDC_ISSUERS: needs AUTH_AUDIENCES, whom the providers' tokens must be for".into()));
        }
        if let Some(own) = self.auth.issuers.iter().find(|issuer| self.is_own_issuer(&issuer.issuer)) {
            let text = "must not be this server, which signs push tokens for any email a subscription asks for";
            wrong.push(Wrong(format!("AUTH_OIDC_ISSUERS={:?}: {text}", own.to_string())));
        }
    }

    /// True for the URL that this server signs push tokens by.
    fn is_own_issuer(&self, url: &str) -> bool {
        let address = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://")).unwrap_or(url);
        let own = [self.push_issuer.as_str(), self.advertised_endpoint.as_str(), &format!("localhost:{}", self.port)];
        own.iter().any(|own| !own.is_empty() && (*own == url || *own == address))
    }

    /// Where the public halves of Landline-issued keys are; empty for nowhere. By default beside the embedded broker's data.
    pub fn keys_file(&self) -> PathBuf {
        match &self.broker {
            BrokerUrl::Embedded(folder) if self.auth.keys_file.as_os_str().is_empty() => folder.join("keys.json"),
            _ => self.auth.keys_file.clone(),
        }
    }
}

/// Renders the settings in force as a YAML file, secrets masked, each with its origin.
impl fmt::Display for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (key, origin) in keys::KEYS.iter().zip(&self.origins) {
            let line = format!("{}: {}", key.name.to_lowercase(), value::yaml(&(key.get)(&self.settings)));
            let origin = match origin {
                Origin::Default => "default",
                Origin::File => "file",
                Origin::Environment => "environment",
                Origin::CommandLine => "command line",
            };
            writeln!(f, "{line:<52} # {origin}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
