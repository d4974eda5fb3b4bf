//! A link to a server that can be cut, lose the answers, or lose the notices.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;
use rand::{Rng, SeedableRng, rngs::StdRng};

#[derive(Default)]
struct State {
    over: AtomicBool,
    swallows: AtomicBool,
    loses_notices: AtomicBool,
    lost: AtomicUsize,
    /// Decides where the link breaks by itself, and how often of a thousand times.
    breaks: Mutex<Option<(StdRng, u32)>>,
    sockets: Mutex<Vec<TcpStream>>,
    renames: Option<Renaming>,
}

/// A word of what is asked that another of the same length takes the place of.
struct Renaming {
    from: String,
    to: String,
    renamed: AtomicUsize,
}

impl Renaming {
    /// Replaces the word in `bytes`, and answers how many of them may be passed on: the rest may be the beginning of the word.
    fn apply(&self, bytes: &mut [u8]) -> usize {
        let word = self.from.as_bytes();
        let mut at = 0;
        while let Some(found) = bytes[at..].windows(word.len()).position(|w| w == word) {
            bytes[at + found..at + found + word.len()].copy_from_slice(self.to.as_bytes());
            self.renamed.fetch_add(1, Ordering::AcqRel);
            at += found + word.len();
        }
        let rest = (1..word.len()).rev().find(|count| bytes[at..].ends_with(&word[..*count])).unwrap_or(0);
        bytes.len() - rest
    }
}

/// Passes everything on between its own port and a server's.
pub struct Proxy {
    pub port: u16,
    state: Arc<State>,
}

impl Proxy {
    pub fn start(to: u16) -> Self {
        Self::with(to, State::default())
    }

    /// One that calls the functions of one library by the names of another's.
    pub fn renaming(to: u16, word: String, by: String) -> Self {
        assert_eq!(word.len(), by.len());
        let renames = Some(Renaming { from: word, to: by, renamed: AtomicUsize::new(0) });
        Self::with(to, State { renames, ..State::default() })
    }

    /// How many names were replaced.
    pub fn renamed(&self) -> usize {
        self.state.renames.as_ref().map_or(0, |renames| renames.renamed.load(Ordering::Acquire))
    }

    fn with(to: u16, state: State) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, state) = (listener.local_addr().unwrap().port(), Arc::new(state));
        let shared = state.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if shared.over.load(Ordering::Acquire) {
                    return;
                }
                if let Ok(server) = TcpStream::connect(("127.0.0.1", to)) {
                    let _ = (client.set_nodelay(true), server.set_nodelay(true));
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

    /// From now on notices to nodes get lost.
    pub fn lose_notices(&self, loses: bool) {
        self.state.loses_notices.store(loses, Ordering::Release);
    }

    /// How many notices got lost.
    pub fn lost(&self) -> usize {
        self.state.lost.load(Ordering::Acquire)
    }

    /// From now on connections break by themselves, before a call is passed on or before its answer is, so often of a thousand
    /// times; 0 ends it.
    pub fn break_at_random(&self, seed: u64, of_thousand: u32) {
        *self.state.breaks.lock() = (of_thousand > 0).then(|| (StdRng::seed_from_u64(seed), of_thousand));
    }

    /// Ends all connections; new ones are let through.
    pub fn cut(&self) {
        for socket in self.state.sockets.lock().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl State {
    fn breaks_now(&self) -> bool {
        self.breaks.lock().as_mut().is_some_and(|(random, of_thousand)| random.random_range(0..1000) < *of_thousand)
    }

    fn pass(self: &Arc<Self>, from: &TcpStream, to: &TcpStream, answers: bool) {
        let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
        self.sockets.lock().push(from.try_clone().unwrap());
        let state = self.clone();
        std::thread::spawn(move || {
            let mut buffer = vec![0; 64 * 1024];
            let mut kept = Vec::new();
            while let Ok(count @ 1..) = from.read(&mut buffer) {
                let mut bytes = &buffer[..count];
                let whole;
                if let Some(renames) = state.renames.as_ref().filter(|_| !answers) {
                    kept.extend_from_slice(bytes);
                    let passed = renames.apply(&mut kept);
                    whole = kept.drain(..passed).collect::<Vec<_>>();
                    bytes = &whole;
                }
                if state.breaks_now() {
                    break;
                }
                if answers && state.loses_notices.load(Ordering::Acquire) && bytes.windows(9).any(|w| w == b"gcp.node:") {
                    state.lost.fetch_add(1, Ordering::AcqRel);
                    continue;
                }
                let swallowed = answers && state.swallows.load(Ordering::Acquire);
                if !swallowed && to.write_all(bytes).is_err() {
                    break;
                }
            }
            let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
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
