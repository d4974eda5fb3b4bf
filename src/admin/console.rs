//! The console: pages for operators, made here and plain enough to work without scripts.
//!
//! Without a password it shows what metrics tell as well, and changes nothing. With one, everything but metrics and probes
//! needs it, messages can be looked at, and forms change things; every change is a line of the log.

mod changes;
mod exchange;
mod format;
mod gate;
mod login;
mod messages;
mod names;
mod operators;
mod overview;
mod rates;
mod schemas;
mod snapshots;
mod subscriptions;
mod topics;

use std::{net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Method, StatusCode, header, request::Parts};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;

pub use self::exchange::{Answer, TEXT, answer};
use self::{
    exchange::{Ask, Failure, Frame},
    operators::{Operator, Operators},
    overview::Totals,
    rates::Rates,
};
use super::Admin;
use crate::connector::Connector;

/// Bytes of a form: a test message of some size.
const MAX_FORM_BYTES: usize = 1024 * 1024;
/// Time for a form to arrive.
const FORM_TIMEOUT: Duration = Duration::from_secs(30);

const SCRIPT: &str = include_str!("console/assets/htmx.min.js");
const STYLE: &str = include_str!("console/assets/style.css");
const ICON: &str = include_str!("console/assets/icon.svg");

/// What the console obeys.
#[derive(Debug, Clone, Default)]
pub struct ConsoleOptions {
    /// File of the operators' password; empty leaves the console read-only.
    pub password_file: PathBuf,
    /// Names the console is reached by, beside addresses and localhost; lower case.
    pub hosts: Vec<String>,
}

/// The console's state. One per process.
pub struct Console {
    operators: Option<Operators>,
    hosts: Vec<String>,
    rates: Rates,
    totals: Arc<Totals>,
}

impl Console {
    /// Reads the password.
    ///
    /// # Errors
    /// What is wrong with its file.
    pub fn open(options: &ConsoleOptions) -> Result<Self, String> {
        let has_password = !options.password_file.as_os_str().is_empty();
        let operators = has_password.then(|| Operators::open(&options.password_file)).transpose()?;
        Ok(Self { operators, hosts: options.hosts.clone(), rates: Rates::default(), totals: Arc::default() })
    }

    /// Reads the password again, to be called when its file changed.
    ///
    /// # Errors
    /// What is wrong with the file; the former password stays in use then.
    pub fn reread(&self) -> Result<(), String> {
        self.operators.as_ref().map_or(Ok(()), Operators::reread)
    }

    fn frame(&self, section: &'static str, title: impl Into<String>, operator: Option<Operator>) -> Frame {
        Frame { title: title.into(), section, operator, has_password: self.operators.is_some() }
    }
}

/// A request that was let in, and what it is about.
struct Visit<'a> {
    admin: &'a Admin,
    console: &'a Console,
    connector: &'a Arc<Connector>,
    ask: &'a Ask,
    operator: Option<Operator>,
}

impl Visit<'_> {
    fn frame(&self, section: &'static str, title: impl Into<String>) -> Frame {
        self.console.frame(section, title, self.operator.clone())
    }
}

impl Admin {
    /// Answers everything that is not for probes or scrapers.
    pub(super) async fn visit(&self, parts: Parts, body: Incoming, peer: IpAddr) -> Answer {
        let console = &self.console;
        if !gate::is_own_host(&parts.headers, &console.hosts) {
            return gate::other_host();
        }
        if let Some(asset) = asset(parts.uri.path()) {
            return asset;
        }
        let form = match form(&parts, body).await {
            Ok(form) => form,
            Err(failure) => return answer(failure.status, TEXT, failure.text + "\n"),
        };
        let Some(ask) = Ask::new(&parts, &form, peer.to_canonical()) else {
            return answer(StatusCode::BAD_REQUEST, TEXT, "The path is not UTF-8.\n");
        };
        if ask.path[0] == "login" {
            return login::answer(console, &ask);
        }
        let operator = match &console.operators {
            None => None,
            Some(operators) => match gate::identify(operators, &ask.headers, ask.peer) {
                Ok(Some(operator)) => Some(operator),
                Ok(None) => return gate::ask_to_sign_in(&ask),
                Err(refusal) => return plain(&gate::refused(refusal)),
            },
        };
        self.visited(&ask, operator).await
    }

    async fn visited(&self, ask: &Ask, operator: Option<Operator>) -> Answer {
        let console = &self.console;
        let frame = console.frame("", "", operator.clone());
        let Some(connector) = self.connector.get() else {
            return Failure::new(StatusCode::SERVICE_UNAVAILABLE, "The broker is not ready yet.").page(frame);
        };
        let is_script = operator.as_ref().is_some_and(|operator| operator.csrf.is_none());
        let visit = Visit { admin: self, console, connector, ask, operator };
        let done = if ask.method == Method::POST { post(&visit).await } else { get(&visit).await };
        done.unwrap_or_else(|failure| if is_script { plain(&failure) } else { failure.page(frame) })
    }
}

async fn get(visit: &Visit<'_>) -> Result<Answer, Failure> {
    let path: Vec<&str> = visit.ask.path.iter().map(String::as_str).collect();
    match path[..] {
        [""] => overview::page(visit).await,
        ["topics"] => topics::list(visit).await,
        ["topics", project, id] => topics::page(visit, project, id).await,
        ["subscriptions"] => subscriptions::list(visit).await,
        ["subscriptions", project, id] => subscriptions::page(visit, project, id).await,
        ["subscriptions", project, id, "messages"] => messages::page(visit, project, id).await,
        ["snapshots"] => snapshots::list(visit).await,
        ["schemas"] => schemas::list(visit).await,
        ["schemas", project, id] => schemas::page(visit, project, id).await,
        _ => Err(Failure::nothing()),
    }
}

async fn post(visit: &Visit<'_>) -> Result<Answer, Failure> {
    let Some(operator) = &visit.operator else {
        let text = "The console only shows things: CONNECTORS_GCP_ADMIN_PASSWORD_FILE lets it change them.";
        return Err(Failure::new(StatusCode::FORBIDDEN, text));
    };
    gate::check_form(visit.ask, operator)?;
    let path: Vec<&str> = visit.ask.path.iter().map(String::as_str).collect();
    match path[..] {
        ["logout"] => Ok(login::leave(visit)),
        ["topics", project, id, "publish"] => changes::publish(visit, project, id).await,
        ["subscriptions", project, id, "replay"] => changes::replay(visit, project, id).await,
        ["subscriptions", project, id, "seek"] => changes::seek(visit, project, id).await,
        ["subscriptions", project, id, "purge"] => changes::purge(visit, project, id).await,
        ["subscriptions", project, id, "snapshot"] => changes::snapshot(visit, project, id).await,
        ["snapshots", project, id, "delete"] => changes::delete_snapshot(visit, project, id).await,
        _ => Err(Failure::nothing()),
    }
}

/// Notes in the log what an operator did, and to what.
fn audit(visit: &Visit<'_>, action: &str, name: &str, outcome: &str) {
    let operator = visit.operator.as_ref().map_or("", |operator| operator.name.as_str());
    tracing::info!(operator, peer = %visit.ask.peer, action, resource = name, outcome, "console");
}

/// A failure for something that is not a browser.
fn plain(failure: &Failure) -> Answer {
    answer(failure.status, TEXT, format!("{}\n", failure.text))
}

/// The files that pages refer to. They may be kept: their addresses change with the version.
fn asset(path: &str) -> Option<Answer> {
    let (content_type, content) =
        match path.strip_prefix("/assets/")?.strip_prefix(env!("CARGO_PKG_VERSION"))?.strip_prefix('/')? {
            "htmx.js" => ("text/javascript; charset=utf-8", SCRIPT),
            "style.css" => ("text/css; charset=utf-8", STYLE),
            "icon.svg" => ("image/svg+xml", ICON),
            _ => return None,
        };
    let mut asset = answer(StatusCode::OK, content_type, content);
    asset.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("private, max-age=86400"));
    Some(asset)
}

/// The form a request carries; nothing for one that only asks.
async fn form(parts: &Parts, body: Incoming) -> Result<Bytes, Failure> {
    if parts.method != Method::POST {
        return Ok(Bytes::new());
    }
    match tokio::time::timeout(FORM_TIMEOUT, Limited::new(body, MAX_FORM_BYTES).collect()).await {
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(_)) => {
            let text = format!("A form may have {MAX_FORM_BYTES} bytes.");
            Err(Failure::new(StatusCode::PAYLOAD_TOO_LARGE, text))
        }
        Err(_) => Err(Failure::new(StatusCode::REQUEST_TIMEOUT, "The form took too long to arrive.")),
    }
}
