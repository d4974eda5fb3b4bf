//! The types of values and their parsers. A parser answers `None` for what is out of range.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
    path::PathBuf,
};

use http::{HeaderName, HeaderValue};
use tracing_subscriber::filter::Targets;

use crate::{
    auth::{self, IssuerSpec, Mode},
    connector::Scope,
    telemetry::Protocol,
    tls::ClientAuth,
};

/// A decimal number within a range.
pub(super) fn integer<T: TryFrom<u64>>(text: &str, range: RangeInclusive<u64>) -> Option<T> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let number = digits.then(|| text.parse().ok()).flatten()?;
    range.contains(&number).then(|| T::try_from(number).ok()).flatten()
}

/// `true` or `false`, in any case.
pub(super) fn flag(text: &str) -> Option<bool> {
    text.to_ascii_lowercase().parse().ok()
}

/// Text without control characters.
pub(super) fn text(text: &str) -> Option<String> {
    (!text.contains(char::is_control)).then(|| text.to_owned())
}

pub(super) fn scope(text: &str) -> Option<Scope> {
    match text {
        "cluster" => Some(Scope::Cluster),
        "node" => Some(Scope::Node),
        _ => None,
    }
}

pub(super) fn client_auth(text: &str) -> Option<ClientAuth> {
    [ClientAuth::Off, ClientAuth::Optional, ClientAuth::Required].into_iter().find(|auth| client_auth_name(*auth) == text)
}

/// A mode of authentication; empty leaves it to the addresses.
pub(super) fn auth_mode(text: &str) -> Option<Option<Mode>> {
    if text.is_empty() {
        return Some(None);
    }
    [Mode::Off, Mode::Audit, Mode::Enforce].into_iter().find(|mode| auth_mode_name(*mode) == text).map(Some)
}

/// The word for it in the settings.
pub(super) fn auth_mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Off => "off",
        Mode::Audit => "audit",
        Mode::Enforce => "enforce",
    }
}

/// Texts separated by commas, or by semicolons as lists of files are joined.
pub(super) fn texts(given: &str) -> Option<Vec<String>> {
    let items = text(given)?;
    Some(items.split([',', ';']).map(str::trim).filter(|item| !item.is_empty()).map(str::to_owned).collect())
}

/// Members of policies.
pub(super) fn members(given: &str) -> Option<Vec<String>> {
    texts(given).filter(|members| members.iter().all(|member| auth::is_member(member)))
}

/// Identity providers.
pub(super) fn issuers(given: &str) -> Option<Vec<IssuerSpec>> {
    texts(given)?.iter().map(|item| IssuerSpec::parse(item)).collect()
}

/// The word for it in the settings.
pub(super) fn client_auth_name(auth: ClientAuth) -> &'static str {
    match auth {
        ClientAuth::Off => "off",
        ClientAuth::Optional => "optional",
        ClientAuth::Required => "required",
    }
}

/// Node ids stay short, because every ack id carries one.
const NODE_ID_MAX_BYTES: usize = 64;

/// A node's name; empty asks for a random one.
pub(super) fn node_id(text: &str) -> Option<String> {
    let legal = text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
    (legal && text.len() <= NODE_ID_MAX_BYTES).then(|| text.to_owned())
}

/// `allow` or `deny`.
pub(super) fn allowed(text: &str) -> Option<bool> {
    match text {
        "allow" => Some(true),
        "deny" => Some(false),
        _ => None,
    }
}

/// An http or https URL that paths can be put behind; empty for none.
pub(super) fn issuer(text: &str) -> Option<String> {
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let legal = |rest: &str| {
        let graphic = rest.bytes().all(|b| b.is_ascii_graphic() && !b"?#\"\\".contains(&b));
        graphic && !rest.is_empty() && !rest.starts_with('/') && !rest.ends_with('/')
    };
    (text.is_empty() || rest.is_some_and(legal)).then(|| text.to_owned())
}

/// Origins of pages that browsers may let call: `*`, or `scheme://host[:port]` as browsers write them, separated by commas.
pub(super) fn origins(given: &str) -> Option<Vec<String>> {
    let origin = |item: &str| {
        let host = item.strip_prefix("https://").or_else(|| item.strip_prefix("http://"))?;
        let legal = !host.is_empty() && host.bytes().all(|b| b.is_ascii_graphic() && !b"/?#@\"\\*".contains(&b));
        // Browsers write schemes and hosts in lower case, and origins are compared byte by byte.
        legal.then(|| item.to_ascii_lowercase())
    };
    let items = texts(given)?;
    if items == ["*"] {
        return Some(items);
    }
    items.iter().map(|item| origin(item)).collect()
}

/// `host:port` with a port from 1; empty for none.
pub(super) fn endpoint(text: &str) -> Option<String> {
    if text.is_empty() {
        return Some(String::new());
    }
    let (host, port) = text.rsplit_once(':')?;
    let _: u16 = integer(port, 1..=65_535)?;
    let bracketed = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
    let legal = match bracketed {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)),
    };
    legal.then(|| text.to_owned())
}

/// An IP address and a port; empty for none.
pub(super) fn admin(text: &str) -> Option<Option<SocketAddr>> {
    if text.is_empty() { Some(None) } else { text.parse().ok().map(Some) }
}

/// How OTLP travels.
pub(super) fn otlp_protocol(text: &str) -> Option<Protocol> {
    [Protocol::Grpc, Protocol::Http].into_iter().find(|protocol| otlp_protocol_name(*protocol) == text)
}

/// The word for it in the settings.
pub(super) fn otlp_protocol_name(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Grpc => "grpc",
        Protocol::Http => "http",
    }
}

/// `off`, or a part of all.
pub(super) fn traces(text: &str) -> Option<Option<f64>> {
    if text == "off" {
        return Some(None);
    }
    text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio)).map(Some)
}

/// Names with values; a value may hold an equals sign.
pub(super) fn pairs(given: &str) -> Option<Vec<(String, String)>> {
    let pair = |item: &String| {
        let (name, value) = item.split_once('=')?;
        let name = name.trim();
        (!name.is_empty()).then(|| (name.to_owned(), value.trim().to_owned()))
    };
    texts(given)?.iter().map(pair).collect()
}

/// Pairs that HTTP takes for headers.
pub(super) fn headers(given: &str) -> Option<Vec<(String, String)>> {
    let legal = |(name, value): &(String, String)| {
        HeaderName::try_from(name.as_str()).is_ok() && HeaderValue::try_from(value.as_str()).is_ok()
    };
    pairs(given).filter(|pairs| pairs.iter().all(legal))
}

/// A level or a list of `target=level`.
pub(super) fn log_filter(text: &str) -> Option<String> {
    let levels = ["off", "error", "warn", "info", "debug", "trace"];
    // A bare word that is no level would be read as the name of a target, and a misspelt level silence the log.
    let words_are_levels = text.split(',').all(|item| {
        let level = item.rsplit_once('=').map_or(item, |(_, level)| level);
        levels.contains(&level.trim().to_ascii_lowercase().as_str())
    });
    (words_are_levels && text.parse::<Targets>().is_ok()).then(|| text.to_owned())
}

/// The addresses to listen on, at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bind {
    /// In the order given.
    pub addresses: Vec<IpAddr>,
    /// The second address is a convenience that may be missing on a machine without IPv6.
    pub is_localhost: bool,
}

impl Bind {
    /// Both loopback addresses: a client that resolves `localhost` may take either.
    pub fn localhost() -> Self {
        Self { addresses: vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()], is_localhost: true }
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        if text.eq_ignore_ascii_case("localhost") {
            return Some(Self::localhost());
        }
        let mut addresses: Vec<IpAddr> = Vec::new();
        for item in text.split([',', ';']).map(str::trim) {
            let bare = item.strip_prefix('[').and_then(|i| i.strip_suffix(']'));
            let address = match bare {
                Some(bare) => bare.parse::<Ipv6Addr>().ok()?.into(),
                None => item.parse().ok()?,
            };
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        Some(Self { addresses, is_localhost: false })
    }
}

impl fmt::Display for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_localhost {
            return f.write_str("localhost");
        }
        let texts: Vec<_> = self.addresses.iter().map(ToString::to_string).collect();
        f.write_str(&texts.join(","))
    }
}

/// Which broker, and where. Displays without passwords.
#[derive(Clone, PartialEq, Eq)]
pub enum BrokerUrl {
    /// On disk, in this folder.
    Embedded(PathBuf),
    /// In memory, gone with the process.
    Memory,
    /// A Redis or Valkey URL as given, password included.
    Redis(String),
}

/// Schemes of Redis URLs: plain or TLS; one server, a cluster, or found through Sentinel.
const REDIS_SCHEMES: [&str; 6] = ["redis", "rediss", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel"];

impl BrokerUrl {
    pub(super) fn parse(given: &str) -> Option<Self> {
        let given = text(given)?;
        if given == "memory:" {
            return Some(Self::Memory);
        }
        if let Some(path) = given.strip_prefix("embedded:") {
            return (!path.is_empty()).then(|| Self::Embedded(path.into()));
        }
        let (scheme, rest) = given.split_once("://")?;
        let host = rest.split(['/', '?']).next().unwrap_or_default();
        (REDIS_SCHEMES.contains(&scheme) && !host.is_empty() && !rest.contains(' ')).then_some(Self::Redis(given))
    }
}

impl fmt::Display for BrokerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedded(path) => write!(f, "embedded:{}", path.display()),
            Self::Memory => f.write_str("memory:"),
            Self::Redis(url) => f.write_str(&masked(url)),
        }
    }
}

impl fmt::Debug for BrokerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// A text with the passwords of its URL replaced: what stands between `:` and `@`, and query values whose names speak of
/// secrets.
pub fn masked(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else { return text.to_owned() };
    let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
    // The last `@`: a password that holds one unescaped is masked whole.
    let rest = match rest.rsplit_once('@') {
        Some((user, host)) => match user.split_once(':') {
            Some((name, _)) => format!("{name}:***@{host}"),
            // A lone user name may well be a token.
            None => format!("***@{host}"),
        },
        None => rest.to_owned(),
    };
    let query = query.map(|query| query.split('&').map(masked_pair).collect::<Vec<_>>().join("&"));
    query.map_or_else(|| format!("{scheme}://{rest}"), |query| format!("{scheme}://{rest}?{query}"))
}

fn masked_pair(pair: &str) -> String {
    let Some((name, _)) = pair.split_once('=') else { return pair.to_owned() };
    let lower = name.to_ascii_lowercase();
    let secret = ["pass", "secret", "token", "key", "auth"].iter().any(|word| lower.contains(word));
    if secret { format!("{name}=***") } else { pair.to_owned() }
}

/// What must hold a message before its publish is confirmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// The broker's memory.
    None,
    /// The broker's disk.
    Fsync,
    /// The broker's disk and this many of its replicas.
    Replicas(u8),
}

impl Durability {
    pub(super) fn parse(text: &str) -> Option<Self> {
        match text {
            "none" => Some(Self::None),
            "fsync" => Some(Self::Fsync),
            _ => Some(Self::Replicas(integer(text.strip_prefix("replicas:")?, 1..=16)?)),
        }
    }
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Fsync => f.write_str("fsync"),
            Self::Replicas(count) => write!(f, "replicas:{count}"),
        }
    }
}

/// Form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    /// One JSON object a line.
    Json,
}

impl LogFormat {
    pub(super) fn parse(text: &str) -> Option<Self> {
        match text {
            "text" => Some(Self::Text),
            "json" => Some(Self::Json),
            _ => None,
        }
    }
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Json => "json",
        })
    }
}

/// What the start does to a resource that exists and differs from what the settings ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreloadExisting {
    Keep,
    Update,
}

impl PreloadExisting {
    pub(super) fn parse(text: &str) -> Option<Self> {
        match text {
            "keep" => Some(Self::Keep),
            "update" => Some(Self::Update),
            _ => None,
        }
    }
}

impl fmt::Display for PreloadExisting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Keep => "keep",
            Self::Update => "update",
        })
    }
}

/// A value as YAML writes it: bare when it is a number, a flag or a plain word, quoted otherwise.
pub(super) fn yaml(value: &str) -> String {
    let plain = !value.is_empty() && value.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b));
    if plain { value.to_owned() } else { format!("{value:?}") }
}
