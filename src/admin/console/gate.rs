//! Which requests the console takes: by the host they name, by who asks, and by what their forms carry.

use std::net::IpAddr;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};

use super::{
    exchange::{Answer, Ask, Failure, TEXT, answer, see_other},
    names::segment,
    operators::{Operator, Operators, Refusal},
};

/// The cookie of a session.
const COOKIE: &str = "landline_console";
/// Told by proxies that speak TLS to the browser.
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
/// The field of forms that must hold the session's token.
const CSRF_FIELD: &str = "csrf";

/// Whether the console answers for a host. Addresses and localhost always: a page of somebody else can have a name of its own
/// resolve to this server, but then the browser names that. Other names have to be set.
pub fn is_own_host(headers: &HeaderMap, names: &[String]) -> bool {
    let Some(host) = headers.get(header::HOST).and_then(|host| host.to_str().ok()) else { return false };
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    name == "localhost" || name.parse::<IpAddr>().is_ok() || names.contains(&name)
}

/// What a host that is not the console's gets.
pub fn other_host() -> Answer {
    let text = "The console answers to addresses, localhost and the names in CONNECTORS_GCP_ADMIN_HOSTS.\n";
    answer(StatusCode::MISDIRECTED_REQUEST, TEXT, text)
}

/// What the cookie of a session holds.
pub fn session(headers: &HeaderMap) -> Option<&str> {
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs = cookies.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(name, _)| *name == COOKIE).map(|(_, value)| value)
}

/// Sets the cookie of a session, or with an empty one takes it away.
pub fn set_session(to: &mut Answer, token: &str, headers: &HeaderMap) {
    let secure = if headers.get(FORWARDED_PROTO).is_some_and(|proto| proto == "https") { "; Secure" } else { "" };
    let age = if token.is_empty() { "; Max-Age=0" } else { "" };
    let cookie = format!("{COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict{secure}{age}");
    if let Ok(value) = HeaderValue::from_str(&cookie) {
        to.headers_mut().insert(header::SET_COOKIE, value);
    }
}

/// Who sends a request: by the password in its `Authorization: Bearer`, or by its session. `None` for nobody.
///
/// # Errors
/// A password that is not accepted.
pub fn identify(operators: &Operators, headers: &HeaderMap, peer: IpAddr) -> Result<Option<Operator>, Refusal> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).and_then(|v| v.strip_prefix("Bearer "));
    match bearer {
        Some(password) => {
            operators.check(password.trim(), peer)?;
            Ok(Some(Operator { name: "script".into(), csrf: None, notice: None }))
        }
        None => Ok(session(headers).and_then(|token| operators.of_session(token))),
    }
}

/// What a refused password gets.
pub fn refused(refusal: Refusal) -> Failure {
    match refusal {
        Refusal::Wrong => Failure::new(StatusCode::UNAUTHORIZED, "That is not the password."),
        Refusal::Wait(seconds) => {
            let text = format!("Too many wrong passwords came from this address. Try again in {seconds} seconds.");
            Failure::new(StatusCode::TOO_MANY_REQUESTS, text)
        }
    }
}

/// Somebody unknown: a browser goes to sign in, anything else is told how.
pub fn ask_to_sign_in(ask: &Ask) -> Answer {
    if ask.method != http::Method::POST && ask.header(header::ACCEPT).contains("text/html") {
        return see_other(&format!("/login?next={}", segment(&ask.uri)));
    }
    let mut refused =
        answer(StatusCode::UNAUTHORIZED, TEXT, "Send the console's password as Authorization: Bearer, or sign in.\n");
    refused.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    refused
}

/// Checks that a form is one that the console itself made for this operator.
///
/// # Errors
/// 403 with what is missing.
pub fn check_form(ask: &Ask, operator: &Operator) -> Result<(), Failure> {
    let Some(expected) = &operator.csrf else { return Ok(()) };
    check_origin(ask)?;
    let given = ask.field(CSRF_FIELD);
    if verify_slices_are_equal(given.as_bytes(), expected.as_bytes()).is_ok() {
        return Ok(());
    }
    let text = "The form does not belong to this session: load its page again and repeat.";
    Err(Failure::new(StatusCode::FORBIDDEN, text))
}

/// A browser says which page a form is on.
///
/// # Errors
/// 403 for a page of somebody else.
pub fn check_origin(ask: &Ask) -> Result<(), Failure> {
    let (origin, host) = (ask.header(header::ORIGIN), ask.header(header::HOST));
    if origin.is_empty() || origin.split_once("://").is_some_and(|(_, authority)| authority.eq_ignore_ascii_case(host)) {
        return Ok(());
    }
    Err(Failure::new(StatusCode::FORBIDDEN, "The form is on a page of another server."))
}

/// Where to go after signing in: a page of the console, whatever the address says.
pub fn next_page(next: &str) -> &str {
    let own = next.starts_with('/') && !next.starts_with("//") && !next.contains(['\\', '\r', '\n']);
    if own && !next.starts_with("/login") { next } else { "/" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: HeaderName, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_static(value))])
    }

    #[test]
    fn only_own_hosts_are_answered() {
        let names = vec!["console.example".to_owned()];
        for host in ["localhost", "localhost:9090", "127.0.0.1:9090", "[::1]:9090", "192.0.2.1", "Console.Example.:80"] {
            assert!(is_own_host(&headers(header::HOST, host), &names), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example:9090", "127.0.0.1.evil.example", "", "[evil]"] {
            assert!(!is_own_host(&headers(header::HOST, host), &names), "{host}");
        }
        assert!(!is_own_host(&HeaderMap::new(), &names));
    }

    #[test]
    fn a_session_is_found_among_other_cookies() {
        let found = headers(header::COOKIE, "a=b; landline_console=abc; landline_console2=x");
        assert_eq!(session(&found), Some("abc"));
        assert_eq!(session(&headers(header::COOKIE, "xlandline_console=abc")), None);
    }

    #[test]
    fn signing_in_leads_to_own_pages_only() {
        assert_eq!(next_page("/topics?project=a"), "/topics?project=a");
        for foreign in ["//evil.example", "https://evil.example", "/\\evil.example", "", "/login?next=/login"] {
            assert_eq!(next_page(foreign), "/", "{foreign}");
        }
    }
}
