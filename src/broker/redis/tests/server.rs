//! Real servers on loopback, each with its own folder, ended with the test that started them.

use std::{
    cell::RefCell,
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

const START_DEADLINE: Duration = Duration::from_secs(20);

/// A port that nothing listens on.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A server process.
pub struct Server {
    child: Child,
    arguments: Vec<String>,
    _folder: tempfile::TempDir,
    pub port: u16,
}

impl Server {
    /// Starts a server that keeps its data in memory only, unless the options say otherwise.
    pub fn start(options: &[&str]) -> Self {
        let (port, folder) = (free_port(), tempfile::tempdir().unwrap());
        let mut arguments: Vec<String> = ["--bind", "127.0.0.1", "--save", "", "--port"].map(String::from).into();
        arguments.extend([port.to_string(), "--dir".into(), folder.path().display().to_string()]);
        arguments.extend(["--repl-diskless-sync-delay", "0"].map(String::from));
        arguments.extend(options.iter().map(ToString::to_string));
        Self::spawned(arguments, folder, port)
    }

    /// Starts a sentinel that decides alone about the master on a port, which it calls `main`.
    pub fn sentinel(master: u16) -> Self {
        let (port, folder) = (free_port(), tempfile::tempdir().unwrap());
        let file = folder.path().join("sentinel.conf");
        let text = format!(
            "port {port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {master} 1\n\
             sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 3000\n"
        );
        std::fs::write(&file, text).unwrap();
        Self::spawned(vec![file.display().to_string(), "--sentinel".into()], folder, port)
    }

    fn spawned(arguments: Vec<String>, folder: tempfile::TempDir, port: u16) -> Self {
        let child = spawn(&arguments);
        let server = Self { child, arguments, _folder: folder, port };
        server.await_ready();
        server
    }

    pub fn url(&self, database: u32) -> String {
        format!("redis://127.0.0.1:{}/{database}", self.port)
    }

    /// A section of `INFO`.
    pub fn info(&self, section: &str) -> String {
        self.command(0, &["INFO", section])
    }

    /// Ends the process at once.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Starts it again on the same port and files.
    pub fn start_again(&mut self) {
        self.child = spawn(&self.arguments);
        self.await_ready();
    }

    /// Stops it where it is: connections stay and nothing is answered.
    pub fn pause(&self, paused: bool) {
        let signal = if paused { Signal::STOP } else { Signal::CONT };
        kill_process(Pid::from_raw(self.child.id() as i32).unwrap(), signal).unwrap();
    }

    /// Sends a command outside the engine.
    pub fn command<T: redis::FromRedisValue>(&self, database: u32, parts: &[&str]) -> T {
        self.try_command(database, parts).unwrap_or_else(|e| panic!("{parts:?}: {e}"))
    }

    /// The same, for a command that may fail.
    pub fn try_command<T: redis::FromRedisValue>(&self, database: u32, parts: &[&str]) -> redis::RedisResult<T> {
        let mut connection = redis::Client::open(self.url(database))?.get_connection()?;
        let mut command = redis::cmd(parts[0]);
        for part in &parts[1..] {
            command.arg(*part);
        }
        command.query(&mut connection)
    }

    /// An option it was started with.
    pub fn option(&self, name: &str) -> Option<&str> {
        self.arguments.iter().skip_while(|a| *a != name).nth(1).map(String::as_str)
    }

    fn await_ready(&self) {
        let until = Instant::now() + START_DEADLINE;
        let ready = || {
            TcpStream::connect(("127.0.0.1", self.port)).is_ok()
                && redis::Client::open(self.url(0))
                    .and_then(|c| c.get_connection())
                    .and_then(|mut c| redis::cmd("PING").query::<String>(&mut c))
                    .is_ok()
        };
        while !ready() {
            assert!(Instant::now() < until, "Redis on port {} does not answer", self.port);
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(arguments: &[String]) -> Child {
    let program = std::env::var("LANDLINE_TEST_REDIS").unwrap_or_else(|_| "redis-server".into());
    Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("redis-server")
}

thread_local! {
    static SHARED: RefCell<Option<(Server, u32)>> = const { RefCell::new(None) };
}

/// The address of an empty database on a server that all of this thread's tests share; it ends with the thread.
pub fn empty_database() -> String {
    SHARED.with_borrow_mut(|shared| {
        let (server, used) = shared.get_or_insert_with(|| (Server::start(&["--databases", "4000"]), 0));
        *used += 1;
        server.url(*used)
    })
}
