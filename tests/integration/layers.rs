//! Imports run inwards only: reads the `crate::` and `super::` paths of every source file and holds them against the layers.

use std::{fs, path::Path};

/// The layers and what each may name, beside itself.
const LAYERS: &[(&str, &[&str])] = &[
    ("main", &["app", "settings"]),
    (
        "app",
        &[
            "settings",
            "tls",
            "api",
            "push",
            "admin",
            "auth",
            "bench",
            "client",
            "mirror",
            "resources",
            "connector",
            "rules",
            "broker",
            "telemetry",
            "embedded",
            "redis",
            "model",
        ],
    ),
    // The load generator is a client: it knows the protocol and what a message is.
    ("bench", &["client", "api", "model"]),
    // So is what copies messages, and what compares resources with a file.
    ("mirror", &["client", "api", "model"]),
    ("resources", &["client", "api"]),
    ("client", &["tls", "auth"]),
    ("settings", &["tls", "auth", "connector", "telemetry", "model"]),
    ("api", &["auth", "connector", "rules", "broker", "model"]),
    ("push", &["auth", "connector", "rules", "broker", "telemetry", "model"]),
    ("admin", &["auth", "connector", "rules", "broker", "telemetry", "model"]),
    ("auth", &["connector", "rules", "broker", "model"]),
    ("connector", &["rules", "broker", "telemetry", "model"]),
    ("rules", &["model"]),
    ("embedded", &["broker", "model"]),
    ("redis", &["broker", "model"]),
    ("broker", &["model"]),
    ("model", &[]),
    // Spans and metrics on their way out: what they are of is said by others.
    ("telemetry", &["model"]),
    // The edge of the process: certificates, and nothing of Pub/Sub.
    ("tls", &[]),
];

/// The crate's root names everything; the others are compiled for tests only, which stand on a real engine.
const SKIPPED: &[&str] = &["lib.rs", "tests.rs", "rig.rs"];

/// Where the tests within a file begin; they end the file.
const TESTS: &str = "#[cfg(test)]\nmod tests {";

#[test]
fn imports_run_inwards_only() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    collect(&root, &mut files);
    assert!(files.len() > 20, "the sources are at {}", root.display());
    let wrong: Vec<_> = files.iter().flat_map(|file| violations(file, &fs::read_to_string(root.join(file)).unwrap())).collect();
    assert!(wrong.is_empty(), "imports that run outwards:\n{}", wrong.join("\n"));
}

#[test]
fn an_import_that_runs_outwards_is_found_however_it_is_written() {
    for (file, text) in [
        ("model/names.rs", "use crate::rules::filter::Filter;"),
        ("broker.rs", "use crate::{model::Name, connector::Connector};"),
        ("broker.rs", "use self::embedded::Embedded;"),
        ("rules/filter.rs", "fn f() -> crate::broker::Record { todo() }"),
        ("broker/embedded/queue.rs", "use super::super::redis::Client;"),
        ("broker/embedded.rs", "use crate::{\n    broker::{self, redis::{Client}},\n};"),
        ("connector/pull.rs", "use super::{super::api::status, topics};"),
        ("connector.rs", "use crate::broker::{Broker, embedded::Embedded};"),
        ("api/rest.rs", "use super::super::super::app;"),
        ("model.rs", "use super::rules;"),
        ("main.rs", "use landline::connector::Connector;"),
    ] {
        assert_eq!(violations(file, text).len(), 1, "{file}: {text}");
    }
}

#[test]
fn imports_that_run_inwards_pass() {
    for (file, text) in [
        ("app/start.rs", "use crate::{broker::embedded::{self, Embedded}, settings::Settings};"),
        ("app.rs", "use self::{connection::Server}; use crate::api::grpc;"),
        ("broker/embedded.rs", "use super::{Append, Broker}; use self::queue::Queue;"),
        ("broker/embedded/queue/due.rs", "use super::super::super::Session; use crate::model::Name;"),
        ("connector.rs", "// use crate::api::status;\nuse crate::broker::{Broker, BrokerError};"),
        ("settings/tests.rs", "use super::*;"),
    ] {
        assert_eq!(violations(file, text), Vec::<String>::new(), "{file}: {text}");
    }
}

fn collect(folder: &Path, files: &mut Vec<String>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|e| e == "rs")
            && path.file_name().is_none_or(|name| !SKIPPED.iter().any(|s| name == *s))
        {
            files.push(path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned());
        }
    }
}

/// What a file names that its layer must not.
fn violations(file: &str, text: &str) -> Vec<String> {
    let text = text.split(TESTS).next().unwrap_or_default();
    let module: Vec<_> = file.trim_end_matches(".rs").split('/').collect();
    let own = layer(&module);
    let Some((_, allowed)) = LAYERS.iter().find(|(name, _)| *name == own) else {
        return vec![format!("{file}: the layer {own} is not in the table")];
    };
    let mut named = Vec::new();
    for path in paths(&module, text) {
        let path: Vec<_> = path.iter().map(String::as_str).collect();
        let layer = layer(&path);
        // Other names at the root come from modules within a file, whose `super` is the file.
        let known = LAYERS.iter().any(|(name, _)| *name == layer);
        if known && layer != own && !allowed.contains(&layer) {
            named.push(format!("{file}: {}", path.join("::")));
        }
    }
    named
}

/// The layer of a module: its first part, but each engine is one of its own.
fn layer<'p>(module: &[&'p str]) -> &'p str {
    match module {
        ["broker", engine @ ("embedded" | "redis"), ..] => engine,
        [first, ..] => first,
        [] => "",
    }
}

/// Every path that begins at the crate's root or climbs towards it, from the root on.
fn paths(module: &[&str], text: &str) -> Vec<Vec<String>> {
    let tokens = tokens(text);
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let starts_path = at == 0 || tokens[at - 1] != "::";
        if starts_path
            && matches!(tokens[at].as_str(), "crate" | "landline" | "self" | "super")
            && tokens.get(at + 1).is_some_and(|t| t == "::")
        {
            at = tree(&tokens, at, &module.iter().map(ToString::to_string).collect::<Vec<_>>(), &mut found);
        } else {
            at += 1;
        }
    }
    found
}

/// Reads one path or tree of paths below `base`; answers where it ends.
fn tree(tokens: &[String], mut at: usize, base: &[String], found: &mut Vec<Vec<String>>) -> usize {
    let mut path = base.to_vec();
    loop {
        match tokens.get(at).map(String::as_str) {
            Some("crate" | "landline") => path.clear(),
            Some("self") => {}
            Some("super") => _ = path.pop(),
            Some("{") => {
                at += 1;
                while tokens.get(at).is_some_and(|t| t != "}") {
                    if tokens[at] == "," {
                        at += 1;
                    } else {
                        at = tree(tokens, at, &path, found);
                    }
                }
                return at + 1;
            }
            Some(word) if word.starts_with(|c: char| c.is_alphanumeric() || "_*".contains(c)) => path.push(word.to_owned()),
            _ => return at + 1,
        }
        at += 1;
        if tokens.get(at).is_none_or(|t| t != "::") {
            // An alias is not part of the path.
            if tokens.get(at).is_some_and(|t| t == "as") {
                at += 2;
            }
            found.push(path);
            return at;
        }
        at += 1;
    }
}

/// Words, `::`, and single signs; comments are left out.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    for line in text.lines() {
        let mut rest = line.split("//").next().unwrap_or_default();
        while let Some(first) = rest.chars().next() {
            let length = if first.is_alphanumeric() || first == '_' {
                rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len())
            } else if rest.starts_with("::") {
                2
            } else {
                first.len_utf8()
            };
            if !first.is_whitespace() {
                tokens.push(rest[..length].to_owned());
            }
            rest = &rest[length..];
        }
    }
    tokens
}
