//! Who may use the console: one password for all operators, and the sessions it opened.
//!
//! The password is in a file and is kept as a digest. Sessions live in memory: they end with the process, with the password,
//! after an hour without use and after half a day. An address that guesses wrong waits longer each time.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv6Addr},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use aws_lc_rs::{constant_time::verify_slices_are_equal, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use parking_lot::{Mutex, RwLock};

/// Shortest password: a shorter one can be found by trying, even when tries are slowed down.
const MIN_PASSWORD_BYTES: usize = 12;
/// Longest password; more is surely another file.
const MAX_PASSWORD_BYTES: usize = 1024;
/// A session ends after this long without a request, and after this long altogether: a working day.
const SESSION_IDLE: Duration = Duration::from_secs(3600);
const SESSION_LIFE: Duration = Duration::from_secs(12 * 3600);
/// Sessions at a time; the one that was not used for longest makes way.
const MAX_SESSIONS: usize = 100;
/// Wrong passwords of one address before it has to wait; a person mistypes.
const FREE_FAILURES: u32 = 5;
/// The longest wait, and how long failures are remembered after the last.
const MAX_WAIT: Duration = Duration::from_secs(300);
const FAILURES_LIFE: Duration = Duration::from_secs(900);
/// Addresses whose failures are remembered.
const MAX_ADDRESSES: usize = 1024;
/// Longest name an operator may give.
const MAX_NAME_CHARS: usize = 64;

type Digest = [u8; digest::SHA256_OUTPUT_LEN];

fn digest_of(text: &[u8]) -> Digest {
    let mut out = Digest::default();
    out.copy_from_slice(digest::digest(&digest::SHA256, text).as_ref());
    out
}

/// Someone who gave the password.
#[derive(Debug, Clone)]
pub struct Operator {
    /// As they called themselves; a note, not a proof.
    pub name: String,
    /// What their forms must carry; none for a request that carries the password itself, which no browser adds by itself.
    pub csrf: Option<String>,
    /// A word from the last change, to be shown once.
    pub notice: Option<String>,
}

/// Why a password was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    Wrong,
    /// Too many wrong ones came from the address. Seconds until the next is looked at.
    Wait(u64),
}

struct Session {
    name: String,
    csrf: String,
    opened: Instant,
    used: Instant,
    notice: Option<String>,
}

impl Session {
    fn is_over(&self, now: Instant) -> bool {
        now.duration_since(self.used) > SESSION_IDLE || now.duration_since(self.opened) > SESSION_LIFE
    }
}

#[derive(Clone, Copy)]
struct Failures {
    count: u32,
    last: Instant,
}

impl Failures {
    fn wait(self, now: Instant) -> Option<Duration> {
        let beyond = self.count.checked_sub(FREE_FAILURES)?;
        let wait = Duration::from_secs(1 << beyond.min(16)).min(MAX_WAIT);
        (self.last + wait).checked_duration_since(now).filter(|left| !left.is_zero())
    }
}

/// The operators of the console.
pub struct Operators {
    file: PathBuf,
    password: RwLock<Digest>,
    /// By the digest of what the cookie holds.
    sessions: Mutex<HashMap<Digest, Session>>,
    failures: Mutex<HashMap<IpAddr, Failures>>,
}

impl Operators {
    /// Reads the password.
    ///
    /// # Errors
    /// What is wrong with the file, without its content.
    pub fn open(file: &Path) -> Result<Self, String> {
        let password = RwLock::new(read(file)?);
        Ok(Self { file: file.to_owned(), password, sessions: Mutex::default(), failures: Mutex::default() })
    }

    /// Reads the password again. With another one every session ends.
    ///
    /// # Errors
    /// As [`open`](Self::open); the former password stays then.
    pub fn reread(&self) -> Result<(), String> {
        let password = read(&self.file)?;
        if std::mem::replace(&mut *self.password.write(), password) != password {
            self.sessions.lock().clear();
        }
        Ok(())
    }

    /// Compares a password, and remembers where wrong ones come from.
    ///
    /// # Errors
    /// Why it is not accepted.
    pub fn check(&self, password: &str, peer: IpAddr) -> Result<(), Refusal> {
        self.check_at(password, peer, Instant::now())
    }

    fn check_at(&self, password: &str, peer: IpAddr, now: Instant) -> Result<(), Refusal> {
        let peer = network(peer);
        let mut failures = self.failures.lock();
        if let Some(left) = failures.get(&peer).and_then(|failed| failed.wait(now)) {
            return Err(Refusal::Wait(left.as_secs() + 1));
        }
        // Of digests, so that neither the time nor the length of the answer depends on the password.
        if verify_slices_are_equal(&digest_of(password.as_bytes()), &*self.password.read()).is_ok() {
            failures.remove(&peer);
            return Ok(());
        }
        failures.retain(|_, failed| now.duration_since(failed.last) < FAILURES_LIFE);
        if failures.len() >= MAX_ADDRESSES
            && let Some(oldest) = failures.iter().min_by_key(|(_, failed)| failed.last).map(|(peer, _)| *peer)
        {
            failures.remove(&oldest);
        }
        let failed = failures.entry(peer).or_insert(Failures { count: 0, last: now });
        *failed = Failures { count: failed.count.saturating_add(1), last: now };
        Err(Refusal::Wrong)
    }

    /// Opens a session for someone whose password was right; answers what the cookie holds.
    pub fn sign_in(&self, name: &str) -> String {
        let now = Instant::now();
        let (token, csrf) = (random(), random());
        let session = Session { name: clean(name), csrf, opened: now, used: now, notice: None };
        let mut sessions = self.sessions.lock();
        sessions.retain(|_, session| !session.is_over(now));
        if sessions.len() >= MAX_SESSIONS
            && let Some(oldest) = sessions.iter().min_by_key(|(_, session)| session.used).map(|(key, _)| *key)
        {
            sessions.remove(&oldest);
        }
        sessions.insert(digest_of(token.as_bytes()), session);
        token
    }

    /// Whose session a cookie names. Takes the notice with it.
    pub fn of_session(&self, token: &str) -> Option<Operator> {
        let now = Instant::now();
        let mut sessions = self.sessions.lock();
        let session = sessions.get_mut(&digest_of(token.as_bytes())).filter(|session| !session.is_over(now))?;
        session.used = now;
        Some(Operator { name: session.name.clone(), csrf: Some(session.csrf.clone()), notice: session.notice.take() })
    }

    /// Has the next page of the session say something.
    pub fn notify(&self, token: &str, notice: &str) {
        if let Some(session) = self.sessions.lock().get_mut(&digest_of(token.as_bytes())) {
            session.notice = Some(notice.to_owned());
        }
    }

    /// Ends a session.
    pub fn sign_out(&self, token: &str) {
        self.sessions.lock().remove(&digest_of(token.as_bytes()));
    }
}

fn read(file: &Path) -> Result<Digest, String> {
    let wrong = |what: &str| format!("{}: {what}", file.display());
    let content = std::fs::read(file).map_err(|error: io::Error| wrong(&error.to_string()))?;
    let line_end = content.iter().rposition(|byte| !b"\r\n".contains(byte)).map_or(0, |last| last + 1);
    let password = &content[..line_end];
    if !(MIN_PASSWORD_BYTES..=MAX_PASSWORD_BYTES).contains(&password.len()) {
        return Err(wrong(&format!("a password must have {MIN_PASSWORD_BYTES} to {MAX_PASSWORD_BYTES} bytes")));
    }
    Ok(digest_of(password))
}

fn random() -> String {
    URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>())
}

/// A name without what would break a line of the log.
fn clean(name: &str) -> String {
    let name: String = name.trim().chars().filter(|c| !c.is_control()).take(MAX_NAME_CHARS).collect();
    if name.is_empty() { "operator".into() } else { name }
}

/// One network of IPv6 is one caller: it has as many addresses as it wants.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => {
            let [a, b, c, d, ..] = v6.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        v4 => v4,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn operators() -> (tempfile::TempDir, Operators) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("password");
        std::fs::write(&file, "correct horse battery\n").unwrap();
        let operators = Operators::open(&file).unwrap();
        (folder, operators)
    }

    #[test]
    fn a_password_is_taken_without_the_end_of_its_line() {
        let (_folder, operators) = operators();
        assert_eq!(operators.check("correct horse battery", PEER), Ok(()));
        assert_eq!(operators.check("correct horse battery\n", PEER), Err(Refusal::Wrong));
        assert_eq!(operators.check("", PEER), Err(Refusal::Wrong));
    }

    #[test]
    fn a_short_password_is_refused_without_being_shown() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("password");
        std::fs::write(&file, "hunter2\n").unwrap();
        let error = Operators::open(&file).err().unwrap();
        assert!(error.contains("12 to 1024 bytes") && !error.contains("hunter2"), "{error}");
        assert!(Operators::open(&folder.path().join("none")).is_err());
    }

    #[test]
    fn wrong_passwords_make_their_address_wait_and_no_other() {
        let (_folder, operators) = operators();
        let start = Instant::now();
        for _ in 0..FREE_FAILURES {
            assert_eq!(operators.check_at("wrong", PEER, start), Err(Refusal::Wrong));
        }
        assert!(matches!(operators.check_at("correct horse battery", PEER, start), Err(Refusal::Wait(1..=2))));
        let other = "192.0.2.1".parse().unwrap();
        assert_eq!(operators.check_at("correct horse battery", other, start), Ok(()));
        let later = start + Duration::from_secs(2);
        assert_eq!(operators.check_at("wrong", PEER, later), Err(Refusal::Wrong));
        assert!(matches!(operators.check_at("correct horse battery", PEER, later), Err(Refusal::Wait(2..=3))));
        assert_eq!(operators.check_at("correct horse battery", PEER, later + Duration::from_secs(3)), Ok(()));
    }

    #[test]
    fn another_password_ends_every_session_and_the_same_one_none() {
        let (folder, operators) = operators();
        let token = operators.sign_in("anna\n");
        operators.notify(&token, "done");
        let first = operators.of_session(&token).unwrap();
        assert_eq!((first.name.as_str(), first.notice.as_deref()), ("anna", Some("done")));
        operators.reread().unwrap();
        assert_eq!(operators.of_session(&token).unwrap().notice, None);
        std::fs::write(folder.path().join("password"), "short").unwrap();
        assert!(operators.reread().is_err() && operators.of_session(&token).is_some());
        std::fs::write(folder.path().join("password"), "another password").unwrap();
        operators.reread().unwrap();
        assert!(operators.of_session(&token).is_none());
    }

    #[test]
    fn sessions_end_by_time_and_are_bounded_in_number() {
        let (_folder, operators) = operators();
        let token = operators.sign_in("");
        operators.sessions.lock().values_mut().for_each(|s| s.used = s.used.checked_sub(SESSION_IDLE * 2).unwrap_or(s.used));
        assert!(operators.of_session(&token).is_none());
        let first = operators.sign_in("first");
        (0..MAX_SESSIONS).for_each(|_| drop(operators.sign_in("other")));
        assert!(operators.sessions.lock().len() <= MAX_SESSIONS && operators.of_session(&first).is_none());
        assert!(operators.of_session("made up").is_none());
    }
}
