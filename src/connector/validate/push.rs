//! Checks of a push configuration.

use crate::{
    connector::Error,
    model::{
        PushConfig,
        limits::{MAX_ATTRIBUTE_KEY_BYTES, MAX_ATTRIBUTE_VALUE_BYTES, MAX_ATTRIBUTES},
    },
};

/// Bytes of an endpoint; the length of URL that servers commonly take.
const MAX_ENDPOINT_BYTES: usize = 8192;
/// Bytes of an email address or an audience; a bound against abuse.
const MAX_IDENTITY_BYTES: usize = 2048;

/// The push configuration: an absolute http or https URL, or no endpoint at all for a pull subscription.
pub fn push_config(given: &PushConfig) -> Result<PushConfig, Error> {
    if cfg!(not(feature = "push")) && !given.endpoint.is_empty() {
        return Err(Error::Unsupported("push_config.push_endpoint"));
    }
    if !given.endpoint.is_empty() && !is_http_url(&given.endpoint) {
        return Err(Error::argument("push_config.push_endpoint", "must be an absolute http or https URL"));
    }
    if given.attributes.len() > MAX_ATTRIBUTES {
        let why = format!("there are {}, but the maximum is {MAX_ATTRIBUTES}", given.attributes.len());
        return Err(Error::argument("push_config.attributes", why));
    }
    for (key, value) in &given.attributes {
        if key.is_empty() || key.len() > MAX_ATTRIBUTE_KEY_BYTES || value.len() > MAX_ATTRIBUTE_VALUE_BYTES {
            let why =
                format!("a key must have 1 to {MAX_ATTRIBUTE_KEY_BYTES} bytes, a value at most {MAX_ATTRIBUTE_VALUE_BYTES}");
            return Err(Error::argument("push_config.attributes", why));
        }
    }
    if let Some(token) = &given.oidc_token {
        if token.service_account_email.is_empty() {
            return Err(Error::argument("push_config.oidc_token.service_account_email", "must not be empty"));
        }
        if token.service_account_email.len() > MAX_IDENTITY_BYTES || token.audience.len() > MAX_IDENTITY_BYTES {
            let why = format!("the email and the audience must have at most {MAX_IDENTITY_BYTES} bytes");
            return Err(Error::argument("push_config.oidc_token", why));
        }
    }
    Ok(given.clone())
}

/// True for `http://` or `https://`, a host, perhaps a port, and anything without spaces or control characters after it.
/// Plain http is accepted: endpoints of a self-hosted server are often in the same network.
fn is_http_url(url: &str) -> bool {
    let Some((scheme, rest)) = url.split_once("://") else { return false };
    if !scheme.eq_ignore_ascii_case("http") && !scheme.eq_ignore_ascii_case("https") || url.len() > MAX_ENDPOINT_BYTES {
        return false;
    }
    if !url.bytes().all(|b| b.is_ascii_graphic()) {
        return false;
    }
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    is_host_and_port(authority.rsplit_once('@').map_or(authority, |(_, host)| host))
}

fn is_host_and_port(text: &str) -> bool {
    // Behind the host there is nothing, or a colon and perhaps a port.
    let (host_is_legal, rest) = match text.strip_prefix('[') {
        Some(rest) => {
            let Some((host, rest)) = rest.split_once(']') else { return false };
            (host.parse::<std::net::Ipv6Addr>().is_ok(), rest)
        }
        None => {
            let (host, rest) = text.split_at(text.find(':').unwrap_or(text.len()));
            (!host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._~%".contains(&b)), rest)
        }
    };
    let Some(port) = (if rest.is_empty() { Some("") } else { rest.strip_prefix(':') }) else { return false };
    host_is_legal && (port.is_empty() || port.parse::<u16>().is_ok_and(|port| port > 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::OidcToken;

    fn check(endpoint: &str) -> bool {
        push_config(&PushConfig { endpoint: endpoint.into(), ..PushConfig::default() }).is_ok()
    }

    #[test]
    fn absolute_http_urls_and_the_empty_endpoint_are_accepted() {
        for endpoint in [
            "",
            "https://example.com",
            "HTTPS://example.com/p",
            "http://host.docker.internal:9000/p?token=a%2Bb#x",
            "http://[::1]:9000/",
            "http://[::1]",
            "http://user:secret@10.0.0.1:80",
            "http://service_name:1/",
        ] {
            assert!(check(endpoint), "{endpoint}");
        }
    }

    #[test]
    fn anything_else_is_no_endpoint() {
        for endpoint in [
            "ftp://example.com",
            "example.com",
            "http://",
            "http:///path",
            "http://:80",
            "http://a b/",
            "http://a/\n",
            "http://a:99999/",
            "http://a:x/",
            "http://a:0/",
            "http://[::1/",
            "http://[zz]/",
            "http://[::1]9000/",
            "http://exämple.com/",
            "garbage",
        ] {
            assert!(!check(endpoint), "{endpoint}");
        }
        assert!(!check(&format!("http://a/{}", "x".repeat(9000))));
    }

    #[test]
    fn a_token_needs_an_identity() {
        let token = |email: &str| PushConfig {
            endpoint: "http://a/".into(),
            oidc_token: Some(OidcToken { service_account_email: email.into(), audience: String::new() }),
            ..PushConfig::default()
        };
        assert!(push_config(&token("a@b")).is_ok());
        let error = push_config(&token("")).unwrap_err().to_string();
        assert!(error.contains("push_config.oidc_token.service_account_email"), "{error}");
    }
}
