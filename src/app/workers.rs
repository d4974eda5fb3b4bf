//! The threads that serve connections.
//!
//! Each has a scheduler of its own and keeps a connection for its whole life. Small calls cost less than half of what
//! they cost on one scheduler over all threads, which wakes the connection for every single answer.

use std::{
    io,
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::connection::Server;

/// Time a worker's last tasks get to end once it must stop; they are cancelled, not waited for.
const END_PATIENCE: Duration = Duration::from_millis(100);

/// All workers of the server.
pub struct Workers {
    workers: Mutex<Vec<Worker>>,
    /// Connections of all workers.
    connections: Arc<AtomicUsize>,
    /// Ends connections that did not end by themselves.
    abort: CancellationToken,
    /// Held by each running worker.
    running: watch::Receiver<()>,
}

struct Worker {
    inbox: mpsc::UnboundedSender<(TcpStream, Load)>,
    load: Arc<AtomicUsize>,
}

/// Counts a connection while it lives.
struct Load([Arc<AtomicUsize>; 2]);

impl Load {
    fn count(counters: [&Arc<AtomicUsize>; 2]) -> Self {
        counters.iter().for_each(|counter| _ = counter.fetch_add(1, Ordering::Relaxed));
        Self(counters.map(Arc::clone))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.0.iter().for_each(|counter| _ = counter.fetch_sub(1, Ordering::Relaxed));
    }
}

impl Workers {
    /// Starts `count` threads, one a core when it is 0.
    ///
    /// # Errors
    /// When the system gives no thread or no event queue.
    pub fn start(count: usize, server: &Server) -> io::Result<Self> {
        let count = match count {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            count => count,
        };
        let abort = CancellationToken::new();
        let (alive, running) = watch::channel(());
        let alive = Arc::new(alive);
        let mut workers = Vec::with_capacity(count);
        for number in 0..count {
            let (inbox, connections) = mpsc::unbounded_channel();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let (server, abort, alive) = (server.clone(), abort.clone(), alive.clone());
            std::thread::Builder::new().name(format!("worker-{number}")).spawn(move || {
                runtime.block_on(work(connections, server, abort));
                runtime.shutdown_timeout(END_PATIENCE);
                drop(alive);
            })?;
            workers.push(Worker { inbox, load: Arc::default() });
        }
        Ok(Self { workers: Mutex::new(workers), connections: Arc::default(), abort, running })
    }

    /// The counter of connections being served.
    pub fn counter(&self) -> Arc<AtomicUsize> {
        self.connections.clone()
    }

    /// Connections being served.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Gives a connection to the worker that has the fewest.
    pub fn take(&self, stream: TcpStream) {
        let workers = self.workers.lock();
        // After `close` there is no worker, and the connection closes here.
        if let Some(worker) = workers.iter().min_by_key(|worker| worker.load.load(Ordering::Relaxed)) {
            let load = Load::count([&self.connections, &worker.load]);
            let _ = worker.inbox.send((stream, load));
        }
    }

    /// Takes no more connections; the workers end with their last one. The connections must have been told to end.
    pub fn close(&self) {
        self.workers.lock().clear();
    }

    /// Resolves when every worker has ended.
    pub async fn ended(&self) {
        let mut running = self.running.clone();
        while running.changed().await.is_ok() {}
    }

    /// Ends what is left at once.
    pub fn abort(&self) {
        self.abort.cancel();
    }
}

async fn work(mut inbox: mpsc::UnboundedReceiver<(TcpStream, Load)>, server: Server, abort: CancellationToken) {
    let connections = TaskTracker::new();
    let serving = async {
        while let Some((stream, load)) = inbox.recv().await {
            let server = server.clone();
            connections.spawn(async move {
                server.serve(stream).await;
                drop(load);
            });
        }
        connections.close();
        connections.wait().await;
    };
    tokio::select! {
        () = serving => {}
        () = abort.cancelled() => {}
    }
}
