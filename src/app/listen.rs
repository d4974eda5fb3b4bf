//! Opens the listening sockets and takes connections from them.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use super::{Error, workers::Workers};
use crate::settings::{Bind, DEFAULT_ADMIN, Settings};

/// Connections the kernel completes while the server is busy; Linux caps it at its own `somaxconn`, 4096 by default.
const BACKLOG: i32 = 4096;
/// Ports to try when any port will do and the one the first address got is taken on the second.
const PORT_TRIES: usize = 32;
/// Pause after an error that only time mends, such as too few file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Least time between two log lines about connections that could not be taken.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(10);
/// The kernel gives a connection up when sent bytes stay unacknowledged, or the peer's window shut, for this long.
/// Longer than HTTP/2's own keep-alive takes, so it decides only where there is none.
const UNACKNOWLEDGED_BYTES_TIMEOUT: Duration = Duration::from_secs(120);

/// Opens a socket for each address, all on one port.
///
/// # Errors
/// [`Error::Listen`] names the address.
pub fn open(settings: &Settings) -> Result<Vec<TcpListener>, Error> {
    let mut tries = 0;
    loop {
        tries += 1;
        match open_all(&settings.bind, settings.port) {
            Err(Error::Listen(address, error))
                if settings.port == 0
                    && address.port() != 0
                    && error.kind() == io::ErrorKind::AddrInUse
                    && tries < PORT_TRIES => {}
            opened => return opened,
        }
    }
}

fn open_all(bind: &Bind, mut port: u16) -> Result<Vec<TcpListener>, Error> {
    let has_ipv4 = bind.addresses.iter().any(IpAddr::is_ipv4);
    let mut listeners: Vec<TcpListener> = Vec::new();
    for &ip in &bind.addresses {
        let address = SocketAddr::new(ip, port);
        match open_one(address, has_ipv4) {
            Ok(listener) => {
                port = listener.local_addr().map_err(|e| Error::Listen(address, e))?.port();
                listeners.push(listener);
            }
            // Containers are often without IPv6; localhost then is 127.0.0.1 alone.
            Err(error) if bind.is_localhost && !listeners.is_empty() && error.kind() != io::ErrorKind::AddrInUse => {
                tracing::debug!(%address, %error, "not listening there");
            }
            Err(error) => return Err(Error::Listen(address, error)),
        }
    }
    Ok(listeners)
}

fn open_one(address: SocketAddr, has_ipv4: bool) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        // `::` takes IPv4 clients as well, unless an address of its own is meant for them.
        socket.set_only_v6(has_ipv4)?;
    }
    // A restart must not wait for the old connections' TIME_WAIT.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

/// Opens the admin address, if there is one.
///
/// # Errors
/// [`Error::Listen`], but for [the default address](DEFAULT_ADMIN): there the server does without.
pub fn open_admin(settings: &Settings) -> Result<Option<TcpListener>, Error> {
    let Some(address) = settings.admin else { return Ok(None) };
    match open_one(address, false) {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if address == DEFAULT_ADMIN => {
            tracing::warn!(%address, %error, "no metrics: set CONNECTORS_GCP_ADMIN_ADDRESS to another address");
            Ok(None)
        }
        Err(error) => Err(Error::Listen(address, error)),
    }
}

/// Hands connections to the workers until `stop`. Nothing that happens to a connection ends it.
pub async fn accept(listener: TcpListener, workers: Arc<Workers>, max_connections: usize, stop: CancellationToken) {
    let complaint = Complaint::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        match accepted {
            Ok((stream, _)) if workers.connections() < max_connections => {
                if let Err(error) = hand_over(stream, &workers) {
                    tracing::debug!(%error, "connection lost before it began");
                }
            }
            // Closing it tells the client at once, where leaving it in the backlog would let it hang.
            Ok(_) => complaint.say("CONNECTORS_GCP_MAX_CONNECTIONS is reached, new connections are closed"),
            Err(error) if is_about_one_connection(&error) => {}
            Err(error) => {
                complaint.say(&format!("can't take connections: {error}"));
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

fn hand_over(stream: TcpStream, workers: &Workers) -> io::Result<()> {
    stream.set_nodelay(true)?;
    #[cfg(target_os = "linux")]
    SockRef::from(&stream).set_tcp_user_timeout(Some(UNACKNOWLEDGED_BYTES_TIMEOUT))?;
    workers.take(stream.into_std()?);
    Ok(())
}

/// The peer went before the connection was taken; others are not concerned.
fn is_about_one_connection(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused)
}

/// A log line that is not repeated too often.
#[derive(Default)]
struct Complaint {
    last: Mutex<Option<Instant>>,
}

impl Complaint {
    fn say(&self, text: &str) {
        let mut last = self.last.lock();
        if last.is_none_or(|at| at.elapsed() >= COMPLAINT_INTERVAL) {
            *last = Some(Instant::now());
            tracing::warn!("{text}");
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn addresses(bind: &str, port: u16) -> Result<Vec<SocketAddr>, Error> {
        let settings = crate::settings::load(None, [], &[format!("BIND={bind}"), format!("PORT={port}"), "AUTH=off".into()])
            .unwrap()
            .settings;
        Ok(open(&settings)?.iter().map(|l| l.local_addr().unwrap()).collect())
    }

    #[tokio::test]
    async fn localhost_listens_on_both_loopbacks_on_one_port() {
        let found = addresses("localhost", 0).unwrap();
        assert_eq!(found[0].ip().to_string(), "127.0.0.1");
        assert_ne!(found[0].port(), 0);
        // Where the machine has no IPv6 the first is all there is.
        if let Some(second) = found.get(1) {
            assert_eq!(*second, SocketAddr::new("::1".parse().unwrap(), found[0].port()));
        }
    }

    #[tokio::test]
    async fn the_ipv6_wildcard_takes_ipv4_clients() {
        let settings =
            crate::settings::load(None, [], &["BIND=[::]".into(), "PORT=0".into(), "AUTH=off".into()]).unwrap().settings;
        let Ok(listeners) = open(&settings) else {
            assert!(Socket::new(Domain::IPV6, Type::STREAM, None).is_err(), "the machine has IPv6");
            return;
        };
        let port = listeners[0].local_addr().unwrap().port();
        let (client, accepted) = tokio::join!(TcpStream::connect(("127.0.0.1", port)), listeners[0].accept());
        client.unwrap();
        accepted.unwrap();
    }

    #[tokio::test]
    async fn a_busy_port_is_an_error_that_names_the_address() {
        let busy = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = busy.local_addr().unwrap().port();
        let error = addresses("127.0.0.1", port).unwrap_err().to_string();
        assert!(error.contains(&format!("127.0.0.1:{port}")), "{error}");
    }
}
