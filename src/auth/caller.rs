//! Who calls.

use std::{fmt, sync::Arc};

/// A caller: what it is called, and the members of policies that it is.
#[derive(Debug, PartialEq, Eq)]
pub struct Caller {
    members: Vec<String>,
    /// When its credentials end, seconds since the epoch; none for those that end with the connection.
    pub expires: Option<u64>,
    /// The id of the Landline-issued key that its credentials come from.
    pub key_id: Option<String>,
}

/// The caller as requests carry it, in their extensions.
#[derive(Debug, Clone)]
pub struct CallerRef(pub Arc<Caller>);

/// Members every caller with valid credentials is.
const EVERYONE: [&str; 2] = ["allAuthenticatedUsers", "allUsers"];

impl Caller {
    fn new(first: String, more: Vec<String>) -> Self {
        let everyone = EVERYONE.map(str::to_owned);
        let members = std::iter::once(first).chain(more).chain(everyone).collect();
        Self { members, expires: None, key_id: None }
    }

    /// Nobody in particular: what audit mode lets pass, and every caller where nobody is asked for credentials.
    pub fn anonymous() -> Self {
        Self { members: vec!["anonymous".into()], expires: None, key_id: None }
    }

    /// The holder of a key that Landline issued.
    pub fn service_account(email: &str, key_id: &str, expires: u64) -> Self {
        let caller = Self::new(format!("serviceAccount:{email}"), Vec::new());
        Self { expires: Some(expires), key_id: Some(key_id.to_owned()), ..caller }
    }

    /// The subject of an identity provider. The e-mail address must have been verified there.
    pub fn subject(issuer: &str, subject: &str, email: Option<&str>, groups: &[String], expires: u64) -> Self {
        let issuer = issuer.trim_start_matches("https://").trim_start_matches("http://").trim_end_matches('/');
        let mut more: Vec<_> = groups.iter().map(|group| format!("group:{group}")).collect();
        if let Some(email) = email {
            more.push(format!("user:{email}"));
            if let Some((_, domain)) = email.rsplit_once('@') {
                more.push(format!("domain:{domain}"));
            }
        }
        let caller = Self::new(format!("principal://{issuer}/subject/{subject}"), more);
        Self { expires: Some(expires), ..caller }
    }

    /// The holder of a client certificate.
    pub fn certificate(name: &str) -> Self {
        Self::new(format!("principal://tls/{name}"), Vec::new())
    }

    /// The members of policies that this caller is; the first says who it is.
    pub fn members(&self) -> &[String] {
        &self.members
    }

    /// True for a caller without credentials.
    pub fn is_anonymous(&self) -> bool {
        self.members.len() == 1
    }

    /// True once its credentials have ended.
    pub fn has_expired(&self, now: u64) -> bool {
        self.expires.is_some_and(|end| end.saturating_add(super::jwt::SKEW_SECONDS) <= now)
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.members.first().map_or("anonymous", String::as_str))
    }
}
