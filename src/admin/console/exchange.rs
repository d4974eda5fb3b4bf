//! Requests to the console and answers of it.

use std::{collections::HashMap, net::IpAddr};

use askama::Template;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};
use http_body_util::Full;

use super::{names, operators::Operator};
use crate::connector::Error;

/// What the console answers.
pub type Answer = Response<Full<Bytes>>;

pub const HTML: &str = "text/html; charset=utf-8";
pub const TEXT: &str = "text/plain; charset=utf-8";

/// Scripts and styles are the server's own files; nothing comes from elsewhere, goes elsewhere, or is shown in a frame.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
     connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'";

/// A request, taken apart.
pub struct Ask {
    pub method: Method,
    /// The path as it came, for the way back.
    pub uri: String,
    pub path: Vec<String>,
    pub query: HashMap<String, String>,
    /// The fields of a form; empty for a request without one.
    pub form: HashMap<String, String>,
    pub headers: HeaderMap,
    pub peer: IpAddr,
}

impl Ask {
    /// Takes a request apart. `None` when its path is not UTF-8.
    pub fn new(parts: &http::request::Parts, body: &[u8], peer: IpAddr) -> Option<Self> {
        let pairs = |bytes: &[u8]| form_urlencoded::parse(bytes).into_owned().collect();
        Some(Self {
            method: parts.method.clone(),
            uri: parts.uri.path_and_query().map_or("/", |uri| uri.as_str()).to_owned(),
            path: names::segments(parts.uri.path())?,
            query: pairs(parts.uri.query().unwrap_or_default().as_bytes()),
            form: pairs(body),
            headers: parts.headers.clone(),
            peer,
        })
    }

    /// A header's text; empty when it is not there.
    pub fn header(&self, name: header::HeaderName) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// A field of the form; empty when it is not there.
    pub fn field(&self, name: &str) -> &str {
        self.form.get(name).map_or("", String::as_str)
    }

    /// A number in the query within bounds; the default when it is not there or none.
    pub fn number(&self, name: &str, default: u64, most: u64) -> u64 {
        self.query.get(name).and_then(|text| text.parse().ok()).unwrap_or(default).min(most)
    }
}

/// What every page shows around its content.
pub struct Frame {
    pub title: String,
    /// The part of the console that is shown as the current one.
    pub section: &'static str,
    pub operator: Option<Operator>,
    /// Whether there is a password to sign in with.
    pub has_password: bool,
}

impl Frame {
    /// Whether forms that change something are shown.
    pub fn may_write(&self) -> bool {
        self.operator.is_some()
    }

    /// What forms carry.
    pub fn csrf(&self) -> &str {
        self.operator.as_ref().and_then(|operator| operator.csrf.as_deref()).unwrap_or_default()
    }

    /// Part of the address of the pages' files.
    pub fn version(&self) -> &'static str {
        env!("CARGO_PKG_VERSION")
    }

    pub fn notice(&self) -> Option<&str> {
        self.operator.as_ref()?.notice.as_deref()
    }

    pub fn name(&self) -> &str {
        self.operator.as_ref().map_or("", |operator| operator.name.as_str())
    }
}

#[derive(Template)]
#[template(path = "problem.html")]
struct Problem<'a> {
    frame: Frame,
    what: &'a str,
}

/// Why there is no page.
#[derive(Debug)]
pub struct Failure {
    pub status: StatusCode,
    pub text: String,
}

impl Failure {
    pub fn new(status: StatusCode, text: impl Into<String>) -> Self {
        Self { status, text: text.into() }
    }

    pub fn bad(text: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, text)
    }

    pub fn nothing() -> Self {
        Self::new(StatusCode::NOT_FOUND, "There is nothing here.")
    }

    /// As a page.
    pub fn page(&self, mut frame: Frame) -> Answer {
        frame.title = self.status.canonical_reason().unwrap_or("Problem").to_owned();
        render(self.status, &Problem { frame, what: &self.text })
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = match &error {
            Error::NotFound(_) => StatusCode::NOT_FOUND,
            Error::Exists(_) => StatusCode::CONFLICT,
            Error::Unavailable(_) | Error::Full(_) | Error::Contended | Error::Closing => StatusCode::SERVICE_UNAVAILABLE,
            Error::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
            _ => StatusCode::BAD_REQUEST,
        };
        if let Some(internal) = error.internal() {
            tracing::warn!(error = internal, "the console could not carry out a request");
        }
        Self::new(status, error.to_string())
    }
}

/// A name that is not one names nothing.
impl From<crate::model::NameError> for Failure {
    fn from(error: crate::model::NameError) -> Self {
        Self::bad(error.to_string())
    }
}

/// An answer with headers that keep browsers from guessing and from remembering.
pub fn answer(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}

/// A page.
pub fn render(status: StatusCode, page: &impl Template) -> Answer {
    let html = match page.render() {
        Ok(html) => html,
        Err(error) => {
            tracing::error!(%error, "a page of the console can't be made");
            return answer(StatusCode::INTERNAL_SERVER_ERROR, TEXT, "This page can't be made.\n");
        }
    };
    let mut answer = answer(status, HTML, html);
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(CONTENT_SECURITY_POLICY));
    headers.insert(header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("same-origin"));
    answer
}

/// Sends the browser to another page of the console.
pub fn see_other(path: &str) -> Answer {
    let mut answer = answer(StatusCode::SEE_OTHER, TEXT, format!("See {path}\n"));
    let location = HeaderValue::from_str(path).unwrap_or_else(|_| HeaderValue::from_static("/"));
    answer.headers_mut().insert(header::LOCATION, location);
    answer
}
