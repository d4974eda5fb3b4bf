//! Settling: tokens are grouped by chunk and lease, so that the library handles whole ranges at once.

use std::{collections::HashMap, sync::Arc};

use redis::{Cmd, Value};

use super::{
    codec::{Group, Place, Reader, Set, group},
    engine::{Engine, bytes},
    queue::QueueView,
};
use crate::broker::{BrokerError, DeadlineChange, LeaseToken, Outcome, QueueRef};

/// Groups one call carries: bounds the time it holds the server up, to about a millisecond.
const GROUPS_PER_CALL: usize = 200;

/// For each group, the part that was too late; nothing where all is done.
type Late = Vec<Option<Set>>;

fn read_late(answers: &[Value], late: &mut Late) -> Result<(), BrokerError> {
    for answer in answers {
        let text = bytes(answer)?;
        late.push(match text.split_first() {
            Some((b'P', set)) => Some(Set::read(&mut Reader(set))?),
            Some((b'I', _)) => Some(Set::everything()),
            _ => None,
        });
    }
    Ok(())
}

fn outcomes<'a>(places: &'a [Place], late: &'a Late, missing: Outcome) -> impl Iterator<Item = Outcome> + 'a {
    places.iter().map(move |place| match place {
        None => missing,
        Some((at, index)) => match &late[*at] {
            Some(set) if set.contains(*index) => Outcome::Invalid,
            _ => Outcome::Done,
        },
    })
}

impl Engine {
    async fn settle(&self, queue: &QueueView, name: &str, options: &[u8], groups: &[Group]) -> Result<Late, BrokerError> {
        let mut late = Vec::with_capacity(groups.len());
        for part in groups.chunks(GROUPS_PER_CALL) {
            let call = |call: &mut Cmd, repeated: bool| {
                if name == "landline_nack" {
                    call.arg(&[options[0], if repeated { b'1' } else { b'0' }][..]);
                } else {
                    call.arg(options);
                }
                for group in part {
                    call.arg(group.encode());
                }
            };
            let answer = self.on_queue(queue, name, call).await?;
            read_late(&answer[3..], &mut late)?;
        }
        Ok(late)
    }

    /// Removes messages.
    ///
    /// # Errors
    /// What the port says.
    pub async fn acknowledge(&self, queue: &QueueRef, tokens: &[LeaseToken]) -> Result<Vec<Outcome>, BrokerError> {
        let queue = self.queue(queue);
        let (groups, places) = group(tokens.iter().copied());
        let mark = self.mark(queue.slot).await?;
        let late = self.settle(&queue, "landline_acknowledge", b"", &groups).await?;
        self.barrier(queue.slot, &queue.key, mark).await?;
        Ok(outcomes(&places, &late, Outcome::Invalid).collect())
    }

    /// Moves deadlines: nacks and extensions, in runs of the same kind, in the order of the changes.
    ///
    /// # Errors
    /// What the port says.
    pub async fn modify_deadlines(&self, queue: &QueueRef, changes: &[DeadlineChange]) -> Result<Vec<Outcome>, BrokerError> {
        let queue = self.queue(queue);
        let mut kinds: Vec<((u64, bool, u64), Vec<usize>)> = Vec::new();
        let mut index_of: HashMap<(u64, bool, u64), usize> = HashMap::new();
        let mut seen = std::collections::HashSet::new();
        let mut repeats = false;
        for change in changes {
            repeats |= !seen.insert(change.token);
        }
        for (at, change) in changes.iter().enumerate() {
            let kind = (change.deadline_ms, change.bypass_backoff, change.max_life_ms);
            // Several changes of one token keep their order; otherwise all of a kind go together.
            let index = if repeats {
                match kinds.last() {
                    Some((last, _)) if *last == kind => kinds.len() - 1,
                    _ => kinds.len(),
                }
            } else {
                *index_of.entry(kind).or_insert(kinds.len())
            };
            if index == kinds.len() {
                kinds.push((kind, Vec::new()));
            }
            kinds[index].1.push(at);
        }
        let mark = self.mark(queue.slot).await?;
        let mut all = vec![Outcome::Done; changes.len()];
        for ((deadline_ms, bypass, life_ms), list) in kinds {
            let (groups, places) = group(list.iter().map(|at| changes[*at].token));
            let late = if deadline_ms == 0 {
                self.settle(&queue, "landline_nack", if bypass { b"1" } else { b"0" }, &groups).await?
            } else {
                let mut options = deadline_ms.to_le_bytes().to_vec();
                options.extend_from_slice(&life_ms.to_le_bytes());
                self.settle(&queue, "landline_extend", &options, &groups).await?
            };
            for (at, outcome) in list.iter().zip(outcomes(&places, &late, Outcome::Invalid)) {
                all[*at] = outcome;
            }
            if deadline_ms > 0 {
                queue.extended(&groups, &late, self.now_ms() + deadline_ms);
            }
        }
        self.barrier(queue.slot, &queue.key, mark).await?;
        Ok(all)
    }

    /// Gives messages back uncounted.
    ///
    /// # Errors
    /// What the port says.
    pub async fn release(&self, queue: &QueueRef, tokens: &[LeaseToken]) -> Result<(), BrokerError> {
        let queue = self.queue(queue);
        let (groups, _) = group(tokens.iter().copied());
        self.settle(&queue, "landline_release", b"", &groups).await.map(drop)
    }

    /// The same in the background, for leases that nobody received.
    pub fn release_later(self: &Arc<Self>, queue: QueueRef, tokens: Vec<LeaseToken>) {
        let engine = self.clone();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if let Err(e) = engine.release(&queue, &tokens).await {
                    tracing::debug!(queue = %queue.channel, error = %e, "leases could not be given back; they run out");
                }
            });
        }
    }

    /// Compares leases that should be over with what the server has.
    ///
    /// # Errors
    /// What the port says.
    pub async fn check_overdue(&self, queue: &QueueView, before_ms: u64) -> Result<(), BrokerError> {
        let groups = queue.overdue(before_ms);
        for part in groups.chunks(GROUPS_PER_CALL) {
            let call = |call: &mut Cmd, _| {
                call.arg("");
                for group in part {
                    call.arg(group.encode());
                }
            };
            let answers = match self.on_queue(queue, "landline_check", call).await {
                Ok(answers) => answers,
                Err(BrokerError::Gone) => Vec::new(),
                Err(e) => return Err(e),
            };
            for (at, group) in part.iter().enumerate() {
                let text = answers.get(at + 3).map(bytes).transpose()?.unwrap_or_default();
                let live = if text.is_empty() {
                    None
                } else {
                    let mut from = Reader(text);
                    Some((from.u64()?, Set::read(&mut from)?))
                };
                queue.correct(group, live);
            }
        }
        Ok(())
    }

    /// Settles dead letters.
    ///
    /// # Errors
    /// What the port says.
    pub async fn settle_dead_letters(&self, queue: &QueueRef, tokens: &[LeaseToken], forwarded: bool) -> Result<(), BrokerError> {
        let queue = self.queue(queue);
        let mark = self.mark(queue.slot).await?;
        for part in tokens.chunks(GROUPS_PER_CALL) {
            let call = |call: &mut Cmd, _| {
                call.arg(if forwarded { "1" } else { "0" });
                for token in part {
                    let mut text = token.transaction.to_le_bytes().to_vec();
                    text.extend_from_slice(&token.lease.to_le_bytes());
                    text.extend_from_slice(&(token.sequence.saturating_sub(token.transaction) as u16).to_le_bytes());
                    call.arg(text);
                }
            };
            self.on_queue(&queue, "landline_settle_dead", call).await?;
        }
        self.barrier(queue.slot, &queue.key, mark).await
    }
}
