//! Sentinels: who is the master, and that another one is.

use std::sync::Weak;

use futures::StreamExt;

use super::*;

/// Pause before the next Sentinel is followed.
const REFOLLOW: Duration = Duration::from_secs(1);
/// How often a Sentinel is asked although it says nothing, because a link that is cut in silence looks the same.
const ASK_AGAIN: Duration = Duration::from_secs(10);

impl Shards {
    /// The master by the first Sentinel that answers.
    ///
    /// # Errors
    /// [`BrokerError::Unavailable`].
    pub(super) async fn ask_sentinels(&self, master: &str) -> Result<Endpoint, BrokerError> {
        let mut trouble = String::from("no sentinel answers");
        for sentinel in &self.address.endpoints {
            let asked = async {
                let mut question = cmd("SENTINEL");
                question.arg("GET-MASTER-ADDR-BY-NAME").arg(master);
                let found: Option<(String, u16)> = self.ask(self.address.sentinel(sentinel)?, sentinel, &question).await?;
                found
                    .map(|(host, port)| Endpoint { host, port })
                    .ok_or_else(|| BrokerError::Unavailable(format!("{sentinel} knows no master '{master}'")))
            };
            match asked.await {
                Ok(endpoint) => return Ok(endpoint),
                Err(e) => trouble = e.to_string(),
            }
        }
        Err(BrokerError::Unavailable(trouble))
    }

    /// Gives up connections to a server that is not the master any more. It may live on and answer for seconds until it is told,
    /// and whatever is written there is lost.
    async fn leave_deposed(&self, master: &str) -> Result<(), BrokerError> {
        let named = self.ask_sentinels(master).await?;
        let links: Vec<Arc<Link>> = self.links.lock().values().cloned().collect();
        let mut left = false;
        for link in links {
            let live = link.live.borrow().as_ref().filter(|live| live.server != named).map(|live| live.generation);
            if let Some(generation) = live {
                left = true;
                self.broken(&link, generation);
            }
        }
        if left {
            tracing::info!(master, server = %named, "another server is the master now");
            let _ = self.happened.send(Happened::Moved);
        }
        Ok(())
    }
}

/// Follows one Sentinel after the other until the end.
pub async fn follow(shards: Weak<Shards>, master: String, stop: CancellationToken) {
    let mut turn = 0;
    loop {
        let Some(this) = shards.upgrade() else { return };
        let sentinel = this.address.endpoints[turn % this.address.endpoints.len()].clone();
        drop(this);
        tokio::select! {
            ended = follow_one(&shards, &sentinel, &master) => if let Err(error) = ended {
                tracing::debug!(%sentinel, %error, "a sentinel can't be followed");
            },
            () = stop.cancelled() => return,
        }
        tokio::select! {
            () = tokio::time::sleep(REFOLLOW) => turn += 1,
            () = stop.cancelled() => return,
        }
    }
}

async fn follow_one(shards: &Weak<Shards>, sentinel: &Endpoint, master: &str) -> Result<(), BrokerError> {
    let unavailable = |e: RedisError| BrokerError::Unavailable(format!("{sentinel}: {e}"));
    let gone = || BrokerError::Unavailable("closed".into());
    let (client, patience) = {
        let shards = shards.upgrade().ok_or_else(gone)?;
        (shards.address.sentinel(sentinel)?, shards.connect_timeout())
    };
    let late = |_| BrokerError::Unavailable(format!("{sentinel} does not answer"));
    let mut channel = tokio::time::timeout(patience, client.get_async_pubsub()).await.map_err(late)?.map_err(unavailable)?;
    channel.subscribe("+switch-master").await.map_err(unavailable)?;
    let mut messages = channel.on_message();
    loop {
        shards.upgrade().ok_or_else(gone)?.leave_deposed(master).await?;
        if let Ok(None) = tokio::time::timeout(ASK_AGAIN, messages.next()).await {
            return Err(BrokerError::Unavailable(format!("{sentinel} closed the connection")));
        }
    }
}
