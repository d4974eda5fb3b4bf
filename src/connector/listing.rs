//! Lists in pages. A page token is opaque to the caller: it carries the last name given and a MAC over that name, the list
//! and its parent, so a token that was made up or belongs to another list is refused. It names a place between items, not a
//! count, so items that come and go between two pages neither hide nor repeat others.

use std::hash::Hasher;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use siphasher::sip128::{Hasher128, SipHasher24};

use super::{Connector, Error, Secret};
use crate::{
    broker::{Kind, Record},
    model::{NameError, limits::MAX_PAGE_SIZE, names::is_project_id},
};

/// Stored bytes of the resources of one page. Answers stay well under the 4 MiB that clients take by default.
const MAX_PAGE_BYTES: usize = 1024 * 1024;
const MAC_BYTES: usize = 16;

/// Records read at a time. A schema's may have 6 MB, others are small.
fn batch(kind: Kind) -> usize {
    if kind == Kind::Schema { 8 } else { usize::MAX }
}

/// The page a caller asks for.
#[derive(Debug, Clone, Default)]
pub struct PageRequest {
    pub size: i32,
    pub token: String,
}

/// A page of a list.
#[derive(Debug, Clone, PartialEq)]
pub struct Page<T> {
    pub items: Vec<T>,
    /// Empty on the last page.
    pub next_token: String,
}

/// One list, for example the topics of one project.
pub(super) struct Listing<'a> {
    pub list: &'static str,
    /// Full name of what the list belongs to.
    pub parent: &'a str,
}

/// Where a page begins and how long it may be.
pub(super) struct Window {
    pub size: usize,
    /// Items with names up to this one come before the page.
    pub after: String,
}

impl Listing<'_> {
    pub fn open(&self, secret: &Secret, request: &PageRequest) -> Result<Window, Error> {
        let size = match usize::try_from(request.size) {
            Ok(0) => MAX_PAGE_SIZE,
            Ok(size) => size.min(MAX_PAGE_SIZE),
            Err(_) => {
                return Err(Error::TooSmall { field: "page_size", passed: request.size.to_string(), minimum: "0".into() });
            }
        };
        let after = if request.token.is_empty() {
            String::new()
        } else {
            self.read_token(secret, &request.token).ok_or_else(|| Error::Argument("page_token".into()))?
        };
        Ok(Window { size, after })
    }

    pub fn token(&self, secret: &Secret, last: &str) -> String {
        URL_SAFE_NO_PAD.encode([&self.mac(secret, last), last.as_bytes()].concat())
    }

    fn read_token(&self, secret: &Secret, token: &str) -> Option<String> {
        let bytes = URL_SAFE_NO_PAD.decode(token).ok()?;
        let (mac, last) = bytes.split_at_checked(MAC_BYTES)?;
        let last = std::str::from_utf8(last).ok()?;
        (mac == self.mac(secret, last)).then(|| last.to_owned())
    }

    fn mac(&self, secret: &Secret, last: &str) -> [u8; MAC_BYTES] {
        let mut hasher = SipHasher24::new_with_key(&secret.key("page token"));
        for part in [self.list, self.parent, last] {
            hasher.write_u64(part.len() as u64);
            hasher.write(part.as_bytes());
        }
        hasher.finish128().as_bytes()
    }
}

/// Checks the name of a project, `projects/{id}`.
pub(super) fn check_project(name: &str) -> Result<(), Error> {
    let legal = name.strip_prefix("projects/").is_some_and(is_project_id);
    if legal { Ok(()) } else { Err(NameError::new(name).into()) }
}

impl Connector {
    /// Reads one page of the records whose names start with `prefix`, in byte order of their names. `read` turns a record
    /// into an item, or leaves it out.
    pub(super) async fn list<T>(
        &self,
        listing: &Listing<'_>,
        request: &PageRequest,
        kind: Kind,
        prefix: &str,
        read: impl Fn(&Record) -> Result<Option<T>, Error>,
    ) -> Result<Page<T>, Error> {
        let Window { size, mut after } = listing.open(self.secret(), request)?;
        let (mut items, mut last, mut bytes) = (Vec::new(), String::new(), 0);
        loop {
            // One more than is wanted shows whether there is another page.
            let limit = (size - items.len() + 1).min(batch(kind));
            let records = self.broker().list(kind, prefix, &after, limit).await?;
            for record in &records {
                let Some(item) = read(record)? else { continue };
                if items.len() == size || bytes > MAX_PAGE_BYTES {
                    return Ok(Page { items, next_token: listing.token(self.secret(), &last) });
                }
                items.push(item);
                bytes += record.body.len();
                last.clone_from(&record.name);
            }
            match records.last() {
                Some(record) if records.len() >= limit => after.clone_from(&record.name),
                _ => return Ok(Page { items, next_token: String::new() }),
            }
        }
    }
}
