//! The table of keys.

use super::{
    Settings,
    value::{self, flag, integer, text},
};
use crate::connector::Scope;

/// Prefix of a key's name in the environment.
pub const ENVIRONMENT_PREFIX: &str = "CONNECTORS_GCP_";

/// One thing that can be set.
pub struct Key {
    /// Name without the environment's prefix; in a file it may be written in lower case.
    pub name: &'static str,
    /// The values it takes, as a text that follows "must be".
    pub range: &'static str,
    /// What it does, for the README.
    pub about: &'static str,
    /// Checks and stores a value; false when it is out of range.
    pub(super) set: fn(&mut Settings, &str) -> bool,
    /// The value in force, secrets masked.
    pub(super) get: fn(&Settings) -> String,
}

/// Longest time any setting in seconds can say; far beyond use, and safe to add to a clock.
const MOST_SECONDS: u64 = u32::MAX as u64;
/// Largest count any setting can say, for the same reason.
const MOST: u64 = u32::MAX as u64;
/// Most bytes a limit can say: a tebibyte, which is still exact as a floating-point rate.
const MOST_BYTES: u64 = 1 << 40;
/// gRPC's length prefix and protobuf itself end here.
const MOST_MESSAGE_BYTES: u64 = i32::MAX as u64;

/// Stores a parsed value, if there is one.
fn store<T>(place: &mut T, value: Option<T>) -> bool {
    value.map(|value| *place = value).is_some()
}

/// Every key, in the order of the README.
pub static KEYS: &[Key] = &[
    Key {
        name: "PORT",
        range: "0..65535 (0 takes any free port and prints it)",
        about: "Port of gRPC and REST.",
        set: |s, v| store(&mut s.port, integer(v, 0..=65_535)),
        get: |s| s.port.to_string(),
    },
    Key {
        name: "BIND",
        range: "IP addresses separated by commas, or localhost",
        about: "Addresses to listen on. `localhost` is 127.0.0.1 and ::1; `0.0.0.0` or `[::]` opens it to the network.",
        set: |s, v| store(&mut s.bind, value::Bind::parse(v)),
        get: |s| s.bind.to_string(),
    },
    Key {
        name: "ADMIN_ADDRESS",
        range: "an IP address with a port, such as 127.0.0.1:9090 or [::]:9090, or empty",
        about: "Where the console, metrics, `/readyz` and `/livez` are served; empty for nowhere. It speaks plain HTTP.",
        set: |s, v| store(&mut s.admin, value::admin(v)),
        get: |s| s.admin.map(|address| address.to_string()).unwrap_or_default(),
    },
    Key {
        name: "ADMIN_PASSWORD_FILE",
        range: "the path of a file, or empty",
        about: "Password of the console's operators, 12 bytes or more. Without it the console only shows things, and no messages. Read again when it changes.",
        set: |s, v| store(&mut s.admin_password_file, text(v).map(Into::into)),
        get: |s| s.admin_password_file.display().to_string(),
    },
    Key {
        name: "ADMIN_HOSTS",
        range: "host names separated by commas, or empty",
        about: "Names by which browsers reach the console, beside addresses and localhost.",
        set: |s, v| {
            store(&mut s.admin_hosts, value::texts(v).map(|names| names.iter().map(|n| n.to_ascii_lowercase()).collect()))
        },
        get: |s| s.admin_hosts.join(","),
    },
    Key {
        name: "OTLP_ENDPOINT",
        range: "an http or https URL without a slash at its end, such as http://localhost:4317, or empty",
        about: "OpenTelemetry collector that metrics and spans are sent to; empty for none.",
        set: |s, v| store(&mut s.telemetry.endpoint, value::issuer(v)),
        get: |s| s.telemetry.endpoint.clone(),
    },
    Key {
        name: "OTLP_PROTOCOL",
        range: "grpc or http",
        about: "How the collector is spoken to: gRPC (usually port 4317), or protocol buffers over HTTP (4318).",
        set: |s, v| store(&mut s.telemetry.protocol, value::otlp_protocol(v)),
        get: |s| value::otlp_protocol_name(s.telemetry.protocol).into(),
    },
    Key {
        name: "OTLP_HEADERS",
        range: "name=value pairs separated by commas, or empty",
        about: "Headers sent to the collector, such as credentials. Not shown by check-config.",
        set: |s, v| store(&mut s.telemetry.headers, value::headers(v)),
        get: |s| s.telemetry.headers.iter().map(|(name, _)| format!("{name}=***")).collect::<Vec<_>>().join(","),
    },
    Key {
        name: "OTLP_CA_FILE",
        range: "the path of a PEM file, or empty",
        about: "Root certificates of the collector, PEM, beside those of the machine.",
        set: |s, v| store(&mut s.telemetry.ca_file, text(v).map(Into::into)),
        get: |s| s.telemetry.ca_file.display().to_string(),
    },
    Key {
        name: "OTLP_METRICS_SECONDS",
        range: "0..86400 (0 sends no metrics)",
        about: "Time between two reports of the metrics to the collector.",
        set: |s, v| store(&mut s.telemetry.metrics_seconds, integer(v, 0..=86_400)),
        get: |s| s.telemetry.metrics_seconds.to_string(),
    },
    Key {
        name: "OTLP_TRACES",
        range: "off, or a number from 0 to 1",
        about: "Which traces are recorded: those that a client records, and this part of those that no client began.",
        set: |s, v| store(&mut s.telemetry.traces, value::traces(v)),
        get: |s| s.telemetry.traces.map_or_else(|| "off".into(), |ratio| ratio.to_string()),
    },
    Key {
        name: "OTLP_RESOURCE_ATTRIBUTES",
        range: "name=value pairs separated by commas, or empty",
        about: "Attributes of the resource, beside `service.name` (landline), `service.instance.id` (the node id) and `service.version`, or in their place.",
        set: |s, v| store(&mut s.telemetry.attributes, value::pairs(v)),
        get: |s| s.telemetry.attributes.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(","),
    },
    Key {
        name: "BROKER_URL",
        range: "embedded:PATH, memory:, redis://, rediss://, redis+cluster://, rediss+cluster://, redis+sentinel:// or rediss+sentinel://",
        about: "Where messages and resources are kept.",
        set: |s, v| store(&mut s.broker, value::BrokerUrl::parse(v)),
        get: |s| s.broker.to_string(),
    },
    Key {
        name: "DURABILITY",
        range: "none, fsync or replicas:N (N from 1 to 16)",
        about: "What must hold a message before its publish is confirmed: memory, the disk, or N replicas as well (Redis only).",
        set: |s, v| {
            s.durability_given = true;
            store(&mut s.durability, value::Durability::parse(v))
        },
        get: |s| s.durability.to_string(),
    },
    Key {
        name: "TLS_CERT_FILE",
        range: "the path of a PEM file, or empty",
        about: "Certificate of the server and those between it and its root, PEM. With it the port speaks TLS and nothing else. The TLS files are read again when they change.",
        set: |s, v| store(&mut s.tls.certificate, text(v).map(Into::into)),
        get: |s| s.tls.certificate.display().to_string(),
    },
    Key {
        name: "TLS_KEY_FILE",
        range: "the path of a PEM file, or empty",
        about: "Private key of that certificate, PEM.",
        set: |s, v| store(&mut s.tls.key, text(v).map(Into::into)),
        get: |s| s.tls.key.display().to_string(),
    },
    Key {
        name: "TLS_CLIENT_CA_FILE",
        range: "the path of a PEM file, or empty",
        about: "Root certificates of the clients' certificates, PEM.",
        set: |s, v| store(&mut s.tls.client_roots, text(v).map(Into::into)),
        get: |s| s.tls.client_roots.display().to_string(),
    },
    Key {
        name: "TLS_CLIENT_AUTH",
        range: "off, optional or required",
        about: "Whether clients are asked for certificates.",
        set: |s, v| store(&mut s.tls.client_auth, value::client_auth(v)),
        get: |s| value::client_auth_name(s.tls.client_auth).into(),
    },
    Key {
        name: "AUTH",
        range: "off, audit, enforce, or empty (off, where all addresses are loopback)",
        about: "Whether callers must say who they are and be allowed what they do. `audit` logs what `enforce` would refuse.",
        set: |s, v| store(&mut s.auth.mode, value::auth_mode(v)),
        get: |s| s.auth.mode.map_or("", value::auth_mode_name).into(),
    },
    Key {
        name: "AUTH_ADMINS",
        range: "members separated by commas, such as serviceAccount:EMAIL or user:EMAIL, or empty",
        about: "Who may do everything in every project.",
        set: |s, v| store(&mut s.auth.admins, value::members(v)),
        get: |s| s.auth.admins.join(","),
    },
    Key {
        name: "AUTH_POLICY_FILE",
        range: "the path of a .yaml, .yml, .toml or .json file, or empty",
        about: "Who has which roles in which projects. Read again when it changes.",
        set: |s, v| store(&mut s.auth.policy_file, text(v).map(Into::into)),
        get: |s| s.auth.policy_file.display().to_string(),
    },
    Key {
        name: "AUTH_KEYS_FILE",
        range: "the path of a file, or empty (keys.json in the folder of the embedded broker)",
        about: "Public halves of the keys that `landline keys create` issued; the same file for every node. Read again when it changes.",
        set: |s, v| store(&mut s.auth.keys_file, text(v).map(Into::into)),
        get: |s| s.auth.keys_file.display().to_string(),
    },
    Key {
        name: "AUTH_OIDC_ISSUERS",
        range: "https:// addresses separated by commas, each perhaps followed by = and a URL or file of its keys, or empty",
        about: "Identity providers (OpenID Connect) whose tokens are accepted.",
        set: |s, v| store(&mut s.auth.issuers, value::issuers(v)),
        get: |s| s.auth.issuers.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
    },
    Key {
        name: "AUTH_AUDIENCES",
        range: "texts separated by commas, or empty",
        about: "Whom those tokens must be for (their `aud`); any one of them.",
        set: |s, v| store(&mut s.auth.audiences, value::texts(v)),
        get: |s| s.auth.audiences.join(","),
    },
    Key {
        name: "AUTH_OIDC_CA_FILE",
        range: "the path of a PEM file, or empty",
        about: "Root certificates of the identity providers, PEM, beside those of the machine.",
        set: |s, v| store(&mut s.auth.issuer_roots, text(v).map(Into::into)),
        get: |s| s.auth.issuer_roots.display().to_string(),
    },
    Key {
        name: "LIMIT_REQUESTS_PER_SECOND",
        range: "0..4294967295 (0 sets no limit)",
        about: "Calls a second of one project, on each node. A stream counts once.",
        set: |s, v| store(&mut s.auth.limits.requests_per_second, integer(v, 0..=MOST)),
        get: |s| s.auth.limits.requests_per_second.to_string(),
    },
    Key {
        name: "LIMIT_PUBLISH_BYTES_PER_SECOND",
        range: "0..1099511627776 (0 sets no limit)",
        about: "Bytes a second of one project's Publish requests, on each node.",
        set: |s, v| store(&mut s.auth.limits.publish_bytes_per_second, integer(v, 0..=MOST_BYTES)),
        get: |s| s.auth.limits.publish_bytes_per_second.to_string(),
    },
    Key {
        name: "LIMIT_TOPICS",
        range: "0..1000000 (0 sets no limit)",
        about: "Topics of one project.",
        set: |s, v| store(&mut s.auth.limits.topics, integer(v, 0..=1_000_000)),
        get: |s| s.auth.limits.topics.to_string(),
    },
    Key {
        name: "LIMIT_SUBSCRIPTIONS",
        range: "0..1000000 (0 sets no limit)",
        about: "Subscriptions of one project.",
        set: |s, v| store(&mut s.auth.limits.subscriptions, integer(v, 0..=1_000_000)),
        get: |s| s.auth.limits.subscriptions.to_string(),
    },
    Key {
        name: "LIMIT_BACKLOG_BYTES",
        range: "0..1099511627776 (0 sets no limit)",
        about: "Bytes of all backlogs of one project, give or take two seconds' worth; beyond it nothing is published to its topics.",
        set: |s, v| store(&mut s.auth.limits.backlog_bytes, integer(v, 0..=MOST_BYTES)),
        get: |s| s.auth.limits.backlog_bytes.to_string(),
    },
    Key {
        name: "DEFAULT_ACK_DEADLINE_SECONDS",
        range: "10..600",
        about: "Ack deadline of a subscription that is created without one.",
        set: |s, v| store(&mut s.connector.default_ack_deadline_seconds, integer(v, 10..=600)),
        get: |s| s.connector.default_ack_deadline_seconds.to_string(),
    },
    Key {
        name: "MAX_OUTSTANDING_MESSAGES",
        range: "1..4294967295",
        about: "Outstanding messages of one stream that sets no limit of its own.",
        set: |s, v| store(&mut s.connector.max_outstanding_messages, integer(v, 1..=MOST)),
        get: |s| s.connector.max_outstanding_messages.to_string(),
    },
    Key {
        name: "MAX_INFLIGHT_PER_SUBSCRIPTION",
        range: "1..4294967295",
        about: "Leased messages of one subscription, over all its streams and all nodes.",
        set: |s, v| store(&mut s.connector.max_inflight_per_subscription, integer(v, 1..=MOST)),
        get: |s| s.connector.max_inflight_per_subscription.to_string(),
    },
    Key {
        name: "STREAM_CLOSE_SECONDS",
        range: "1..4294967295",
        about: "Age at which a StreamingPull stream is closed with UNAVAILABLE, give or take a tenth; clients open a new one.",
        set: |s, v| store(&mut s.connector.stream_close_seconds, integer(v, 1..=MOST_SECONDS)),
        get: |s| s.connector.stream_close_seconds.to_string(),
    },
    Key {
        name: "MAX_MESSAGE_BYTES",
        range: "1..2147483647",
        about: "Bytes of the data of one message.",
        set: |s, v| store(&mut s.connector.max_message_bytes, integer(v, 1..=MOST_MESSAGE_BYTES)),
        get: |s| s.connector.max_message_bytes.to_string(),
    },
    Key {
        name: "MAX_CONCURRENT_STREAMS",
        range: "1..2147483647",
        about: "Open HTTP/2 streams of one connection.",
        set: |s, v| store(&mut s.max_concurrent_streams, integer(v, 1..=i32::MAX as u64)),
        get: |s| s.max_concurrent_streams.to_string(),
    },
    Key {
        name: "MAX_CONNECTIONS",
        range: "1..1048576",
        about: "Open connections of the server; further ones are closed at once.",
        set: |s, v| store(&mut s.max_connections, integer(v, 1..=1_048_576)),
        get: |s| s.max_connections.to_string(),
    },
    Key {
        name: "MAX_ACK_EXTENSION_SECONDS",
        range: "0..3600 (0 sets no bound)",
        about: "Longest total life of one lease, however often its deadline is extended.",
        set: |s, v| store(&mut s.connector.max_ack_extension_seconds, integer(v, 0..=3600)),
        get: |s| s.connector.max_ack_extension_seconds.to_string(),
    },
    Key {
        name: "MIN_ACK_EXTENSION_SECONDS",
        range: "0..10",
        about: "Shortest ModifyAckDeadline, apart from 0, that is not refused.",
        set: |s, v| store(&mut s.connector.min_ack_extension_seconds, integer(v, 0..=10)),
        get: |s| s.connector.min_ack_extension_seconds.to_string(),
    },
    Key {
        name: "NACK_BYPASSES_BACKOFF",
        range: "true or false",
        about: "A nacked message is redelivered at once even under a retry policy.",
        set: |s, v| store(&mut s.connector.nack_bypasses_backoff, flag(v)),
        get: |s| s.connector.nack_bypasses_backoff.to_string(),
    },
    Key {
        name: "EXACTLY_ONCE_SCOPE",
        range: "cluster or node",
        about: "Which nodes settle a lease of an exactly-once subscription: any, or only the one that delivered the message.",
        set: |s, v| store(&mut s.connector.exactly_once_scope, value::scope(v)),
        get: |s| match s.connector.exactly_once_scope {
            Scope::Cluster => "cluster".into(),
            Scope::Node => "node".into(),
        },
    },
    Key {
        name: "NODE_ID",
        range: "up to 64 of A-Z a-z 0-9 . _ - (empty: random, kept in the folder of the embedded broker)",
        about: "Name of this node in ack ids.",
        set: |s, v| store(&mut s.connector.node_id, value::node_id(v)),
        get: |s| s.connector.node_id.clone(),
    },
    Key {
        name: "ENABLE_REFLECTION",
        range: "true or false",
        about: "Serve gRPC reflection, for grpcurl and the like.",
        set: |s, v| store(&mut s.enable_reflection, flag(v)),
        get: |s| s.enable_reflection.to_string(),
    },
    Key {
        name: "CORS_ORIGINS",
        range: "origins separated by commas, such as https://app.example.com, or *, or empty (none)",
        about: "Origins whose pages browsers let call the REST API. Give `*` with `AUTH=enforce` only.",
        set: |s, v| store(&mut s.cors_origins, value::origins(v)),
        get: |s| s.cors_origins.join(","),
    },
    Key {
        name: "ADVERTISED_ENDPOINT",
        range: "host:port, or empty",
        about: "Address that clients reach the server by, shown in the start line of the log.",
        set: |s, v| store(&mut s.advertised_endpoint, value::endpoint(v)),
        get: |s| s.advertised_endpoint.clone(),
    },
    Key {
        name: "PUSH_INTERNAL_NETWORKS",
        range: "allow or deny",
        about: "Whether push endpoints may be on this machine or in private networks. Link-local addresses never are.",
        set: |s, v| store(&mut s.push_internal_networks, value::allowed(v)),
        get: |s| if s.push_internal_networks { "allow".into() } else { "deny".into() },
    },
    Key {
        name: "PUSH_CA_FILE",
        range: "the path of a PEM file, or empty",
        about: "Certificates that push endpoints are trusted by, beside those of the system.",
        set: |s, v| store(&mut s.push_ca_file, text(v).map(Into::into)),
        get: |s| s.push_ca_file.display().to_string(),
    },
    Key {
        name: "PUSH_ISSUER",
        range: "an http or https URL without a slash at its end, or empty",
        about: "Issuer of the tokens that pushes carry, and the URL that its keys are found below. Empty: made from ADVERTISED_ENDPOINT, or else localhost and the port.",
        set: |s, v| store(&mut s.push_issuer, value::issuer(v)),
        get: |s| s.push_issuer.clone(),
    },
    Key {
        name: "WORKERS",
        range: "0..256 (0 takes one a core)",
        about: "Threads that serve connections.",
        set: |s, v| store(&mut s.workers, integer(v, 0..=256)),
        get: |s| s.workers.to_string(),
    },
    Key {
        name: "DRAIN_DELAY_SECONDS",
        range: "0..600",
        about: "After a stop is asked for, health is NOT_SERVING for this long while everything is still served, so that \
                balancers notice.",
        set: |s, v| store(&mut s.drain_delay_seconds, integer(v, 0..=600)),
        get: |s| s.drain_delay_seconds.to_string(),
    },
    Key {
        name: "DRAIN_SECONDS",
        range: "0..3600",
        about: "Longest time a stop (SIGTERM, SIGINT) waits for calls under way. A second signal ends at once.",
        set: |s, v| store(&mut s.drain_seconds, integer(v, 0..=3600)),
        get: |s| s.drain_seconds.to_string(),
    },
    Key {
        name: "LOG",
        range: "off, error, warn, info, debug, trace, or target=level items separated by commas",
        about: "Which log lines are written, to standard error.",
        set: |s, v| store(&mut s.log, value::log_filter(v)),
        get: |s| s.log.clone(),
    },
    Key {
        name: "LOG_FORMAT",
        range: "text or json",
        about: "Form of the log lines.",
        set: |s, v| store(&mut s.log_format, value::LogFormat::parse(v)),
        get: |s| s.log_format.to_string(),
    },
    Key {
        name: "PRELOAD",
        range: "project,topic:subscription:...,topic... with legal ids; several projects are separated by semicolons",
        about: "Topics and subscriptions that exist before the port answers.",
        set: |s, v| store(&mut s.preload, super::Preload::parse(v)),
        get: |s| s.preload.to_string(),
    },
    Key {
        name: "PRELOAD_FILE",
        range: "the path of a YAML or JSON file, or empty",
        about: "YAML or JSON file of schemas, topics, subscriptions and policies with all their fields, created before the port \
                answers. `landline apply` takes the same file.",
        set: |s, v| store(&mut s.preload_file, text(v).map(Into::into)),
        get: |s| s.preload_file.display().to_string(),
    },
    Key {
        name: "PRELOAD_EXISTING",
        range: "keep or update",
        about: "What becomes of a resource that exists and differs from the file: it is left as it is, or changed where it can \
                be. Nothing is deleted.",
        set: |s, v| store(&mut s.preload_existing, value::PreloadExisting::parse(v)),
        get: |s| s.preload_existing.to_string(),
    },
];

/// The keys that hold the path of a file which the server reads, with that path; those that are empty are left out.
pub fn files(settings: &Settings) -> impl Iterator<Item = (&'static Key, String)> {
    let files = KEYS.iter().filter(|key| key.name.ends_with("_FILE")).map(|key| (key, (key.get)(settings)));
    files.filter(|(_, path)| !path.is_empty())
}

/// The README's table of settings.
pub fn markdown() -> String {
    let defaults = Settings::default();
    let mut table = String::from("| CONNECTORS_GCP_… | default | range | what it does |\n|---|---|---|---|\n");
    for key in KEYS {
        let default = (key.get)(&defaults);
        let default = if default.is_empty() { String::new() } else { format!("`{default}`") };
        table += &format!("| {} | {default} | {} | {} |\n", key.name, key.range, key.about);
    }
    table
}
