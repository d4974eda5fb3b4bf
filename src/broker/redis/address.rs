//! Where Redis is: the broker URL taken apart.
//!
//! `redis://user:password@host:port/database`, `rediss://…` for TLS, `redis+cluster://h1:p1,h2:p2`,
//! `redis+sentinel://h1:p1,h2:p2/master?db=0&sentinel_password=…`. The last two take `rediss+…` for TLS. With TLS,
//! `tls_ca=FILE` names the certificates to trust in place of the system's, `tls_cert=FILE&tls_key=FILE` the client's own.

use std::{fmt, path::PathBuf};

use redis::{Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo, TlsCertificates};

use crate::broker::BrokerError;

const DEFAULT_PORT: u16 = 6379;
const DEFAULT_SENTINEL_PORT: u16 = 26379;

/// A server's address.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Endpoint {
    pub host: String,
    pub port: u16,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// How the servers are arranged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arrangement {
    Single,
    Cluster,
    /// Sentinels that know the current master of this name.
    Sentinel(String),
}

/// A parsed broker URL.
#[derive(Clone)]
pub struct Address {
    pub arrangement: Arrangement,
    pub endpoints: Vec<Endpoint>,
    pub database: i64,
    pub tls: bool,
    username: Option<String>,
    password: Option<String>,
    sentinel_password: Option<String>,
    files: Files,
}

/// PEM files for TLS, read at each connection.
#[derive(Clone, Default)]
struct Files {
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
}

impl Files {
    fn read(&self) -> Result<TlsCertificates, String> {
        let read = |path: &PathBuf| std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()));
        let client_tls = match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => Some(ClientTlsConfig { client_cert: read(cert)?, client_key: read(key)? }),
            _ => None,
        };
        Ok(TlsCertificates { client_tls, root_cert: self.ca.as_ref().map(read).transpose()? })
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the password: this is printed.
        write!(f, "{:?} {:?} database {}", self.arrangement, self.endpoints, self.database)
    }
}

fn refuse(what: impl fmt::Display) -> BrokerError {
    BrokerError::Unavailable(what.to_string())
}

fn decode(text: &str) -> Result<String, String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let digits = [bytes.next(), bytes.next()].map(|d| d.and_then(|d| char::from(d).to_digit(16)));
        let [Some(high), Some(low)] = digits else { return Err("an incomplete percent encoding in user or password".to_owned()) };
        out.push((high * 16 + low) as u8);
    }
    String::from_utf8(out).map_err(|_| "user or password is not UTF-8".to_owned())
}

fn endpoint(text: &str, default_port: u16) -> Result<Endpoint, String> {
    let wrong = || format!("'{text}' is not a host and port");
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or_else(wrong)?;
            (host, rest.strip_prefix(':'))
        }
        None => text.rsplit_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    let port = port.map_or(Ok(default_port), |p| p.parse().map_err(|_| wrong()))?;
    if host.is_empty() { Err(wrong()) } else { Ok(Endpoint { host: host.to_owned(), port }) }
}

impl Address {
    /// Takes a broker URL apart.
    ///
    /// # Errors
    /// What is wrong with it; the password is never repeated.
    pub fn parse(url: &str) -> Result<Self, String> {
        let (scheme, rest) = url.split_once("://").ok_or_else(|| "no scheme".to_owned())?;
        let (base, kind) = scheme.split_once('+').unwrap_or((scheme, ""));
        let tls = match base {
            "redis" | "valkey" => false,
            "rediss" | "valkeys" => true,
            _ => return Err(format!("unknown scheme '{scheme}'")),
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, hosts) = authority.rsplit_once('@').map_or((None, authority), |(login, hosts)| (Some(login), hosts));
        let (mut username, mut password) = (None, None);
        if let Some(login) = login {
            let (user, secret) = login.split_once(':').unwrap_or((login, ""));
            username = Some(decode(user)?).filter(|u| !u.is_empty());
            password = Some(decode(secret)?).filter(|p| !p.is_empty());
        }
        let (mut database, mut sentinel_password, mut files) = (0, None, Files::default());
        for (name, value) in query.split('&').filter(|p| !p.is_empty()).map(|p| p.split_once('=').unwrap_or((p, ""))) {
            match name {
                "db" => database = value.parse().map_err(|_| format!("db '{value}' is not a number"))?,
                "sentinel_password" => sentinel_password = Some(decode(value)?),
                "tls_ca" | "tls_cert" | "tls_key" if !tls => return Err(format!("{name} needs a scheme with TLS, rediss")),
                "tls_ca" => files.ca = Some(decode(value)?.into()),
                "tls_cert" => files.cert = Some(decode(value)?.into()),
                "tls_key" => files.key = Some(decode(value)?.into()),
                _ => return Err(format!("unknown parameter '{name}'")),
            }
        }
        if files.cert.is_some() != files.key.is_some() {
            return Err("tls_cert and tls_key go together".to_owned());
        }
        let arrangement = match kind {
            "" => Arrangement::Single,
            "cluster" => Arrangement::Cluster,
            "sentinel" if path.is_empty() => return Err("the path must name the master the sentinels watch".to_owned()),
            "sentinel" => Arrangement::Sentinel(path.to_owned()),
            _ => return Err(format!("unknown scheme '{scheme}'")),
        };
        if !path.is_empty() && !matches!(arrangement, Arrangement::Sentinel(_)) {
            database = path.parse().map_err(|_| format!("database '{path}' is not a number"))?;
        }
        if arrangement == Arrangement::Cluster && database != 0 {
            return Err("a cluster has only database 0".to_owned());
        }
        let default_port = if matches!(arrangement, Arrangement::Sentinel(_)) { DEFAULT_SENTINEL_PORT } else { DEFAULT_PORT };
        let endpoints = hosts.split(',').map(|h| endpoint(h, default_port)).collect::<Result<Vec<_>, _>>()?;
        if arrangement == Arrangement::Single && endpoints.len() > 1 {
            return Err("several hosts need redis+cluster:// or redis+sentinel://".to_owned());
        }
        Ok(Self { arrangement, endpoints, database, tls, username, password, sentinel_password, files })
    }

    /// Makes ready to connect to one of the data servers.
    ///
    /// # Errors
    /// [`BrokerError::Unavailable`] when the files for TLS can't be used.
    pub fn client(&self, endpoint: &Endpoint) -> Result<Client, BrokerError> {
        self.client_of(endpoint, self.connection_info(endpoint)?)
    }

    /// Makes ready to connect to one of the sentinels; their password is their own, given as the parameter
    /// `sentinel_password`.
    ///
    /// # Errors
    /// As [`client`](Self::client).
    pub fn sentinel(&self, endpoint: &Endpoint) -> Result<Client, BrokerError> {
        self.client_of(endpoint, self.sentinel_info(endpoint)?)
    }

    fn client_of(&self, endpoint: &Endpoint, info: ConnectionInfo) -> Result<Client, BrokerError> {
        let files = self.files.read().map_err(refuse)?;
        let client = if self.tls { Client::build_with_tls(info, files) } else { Client::open(info) };
        client.map_err(|e| refuse(format!("{endpoint}: {e}")))
    }

    fn connection_info(&self, endpoint: &Endpoint) -> Result<ConnectionInfo, BrokerError> {
        let mut settings = RedisConnectionInfo::default().set_db(self.database).set_skip_set_lib_name();
        if let Some(username) = &self.username {
            settings = settings.set_username(username);
        }
        if let Some(password) = &self.password {
            settings = settings.set_password(password);
        }
        self.to(endpoint, settings)
    }

    fn sentinel_info(&self, endpoint: &Endpoint) -> Result<ConnectionInfo, BrokerError> {
        let mut settings = RedisConnectionInfo::default().set_skip_set_lib_name();
        if let Some(password) = &self.sentinel_password {
            settings = settings.set_password(password);
        }
        self.to(endpoint, settings)
    }

    fn to(&self, endpoint: &Endpoint, settings: RedisConnectionInfo) -> Result<ConnectionInfo, BrokerError> {
        let (host, port) = (endpoint.host.clone(), endpoint.port);
        let addr = if self.tls {
            ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None }
        } else {
            ConnectionAddr::Tcp(host, port)
        };
        if !addr.is_supported() {
            return Err(refuse("TLS to Redis is not built in"));
        }
        let info = addr.into_connection_info().map_err(refuse)?;
        let tcp = redis::io::tcp::TcpSettings::default().set_nodelay(true);
        Ok(info.set_redis_settings(settings).set_tcp_settings(tcp))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_url_is_understood() {
        let plain = Address::parse("redis://u%40x:p%3A1@[::1]:7000/3").unwrap();
        assert_eq!(plain.endpoints, [Endpoint { host: "::1".into(), port: 7000 }]);
        assert_eq!((plain.database, plain.tls), (3, false));
        assert_eq!((plain.username.as_deref(), plain.password.as_deref()), (Some("u@x"), Some("p:1")));
        let cluster = Address::parse("rediss+cluster://a,b:1").unwrap();
        assert_eq!(cluster.endpoints.iter().map(|e| e.port).collect::<Vec<_>>(), [6379, 1]);
        assert!(cluster.tls && cluster.arrangement == Arrangement::Cluster);
        let sentinel = Address::parse("redis+sentinel://a,b/main?db=2").unwrap();
        assert_eq!(sentinel.arrangement, Arrangement::Sentinel("main".into()));
        assert_eq!((sentinel.endpoints[0].port, sentinel.database), (26379, 2));
    }

    #[test]
    fn a_wrong_url_is_refused_with_its_fault_and_without_the_password() {
        for (url, fault) in [
            ("redis://:secret@h:x", "'h:x' is not a host and port"),
            ("http://h", "unknown scheme 'http'"),
            ("redis://h/one", "database 'one' is not a number"),
            ("redis+sentinel://h", "must name the master"),
            ("redis://a,b", "several hosts need"),
            ("redis+cluster://a/1", "only database 0"),
            ("redis://h?x=1", "unknown parameter 'x'"),
            ("redis://h?tls_ca=/x", "tls_ca needs a scheme with TLS"),
            ("rediss://h?tls_cert=/x", "tls_cert and tls_key go together"),
        ] {
            let text = Address::parse(url).unwrap_err();
            assert!(text.contains(fault) && !text.contains("secret"), "{text}");
        }
    }
}
