//! A link to a server that can be cut, or swallow the answers.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::Mutex;

#[derive(Default)]
struct State {
    over: AtomicBool,
    swallows: AtomicBool,
    sockets: Mutex<Vec<TcpStream>>,
}

/// Passes everything on between its own port and a server's.
pub struct Proxy {
    pub port: u16,
    state: Arc<State>,
}

impl Proxy {
    pub fn start(to: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, state) = (listener.local_addr().unwrap().port(), Arc::new(State::default()));
        let shared = state.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if shared.over.load(Ordering::Acquire) {
                    return;
                }
                if let Ok(server) = TcpStream::connect(("127.0.0.1", to)) {
                    shared.pass(&client, &server, false);
                    shared.pass(&server, &client, true);
                }
            }
        });
        Self { port, state }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// From now on what the server answers gets lost.
    pub fn swallow_answers(&self, swallows: bool) {
        self.state.swallows.store(swallows, Ordering::Release);
    }

    /// Ends all connections; new ones are let through.
    pub fn cut(&self) {
        for socket in self.state.sockets.lock().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl State {
    fn pass(self: &Arc<Self>, from: &TcpStream, to: &TcpStream, answers: bool) {
        let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
        self.sockets.lock().push(from.try_clone().unwrap());
        let state = self.clone();
        std::thread::spawn(move || {
            let mut buffer = vec![0; 64 * 1024];
            while let Ok(count @ 1..) = from.read(&mut buffer) {
                let swallowed = answers && state.swallows.load(Ordering::Acquire);
                if !swallowed && to.write_all(&buffer[..count]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Both);
        });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.over.store(true, Ordering::Release);
        self.cut();
        // Wakes the listener, so that it sees that it is over.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}
