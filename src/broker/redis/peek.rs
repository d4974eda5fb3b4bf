//! Looking at a queue's messages without touching them: a function that writes nothing finds them, then their payloads are
//! read.

use std::sync::Arc;

use redis::Value;

use super::{
    codec::{Reader, Set, Stored},
    connection::Request,
    engine::{Engine, array, bytes},
    lease::Given,
    library::function,
};
use crate::broker::{BrokerError, Peek, PeekRequest, Peeked, Standing};

/// A chunk's messages as the library found them.
struct Found {
    stored: Stored,
    set: Set,
    /// Of each message, in order: its standing and the deliveries that failed.
    details: Vec<(u16, Standing, u32)>,
}

impl Found {
    fn read(answer: &[u8]) -> Result<Self, BrokerError> {
        let mut from = Reader(answer);
        let stored = Stored::read(&mut from)?;
        let count = from.u16()?;
        let set = Set::read(&mut from)?;
        let mut details = Vec::with_capacity(usize::from(count));
        for _ in 0..count {
            let (index, place, time, failures) = (from.u16()?, from.u8()?, from.u64()?, from.u16()?);
            let standing = match place {
                b'L' => Standing::Leased { deadline_at_ms: time },
                b'D' => Standing::Delayed { until_ms: time },
                b'N' => Standing::InLine,
                b'X' => Standing::Dead,
                _ => Standing::Waiting,
            };
            details.push((index, standing, u32::from(failures)));
        }
        Ok(Self { stored, set, details })
    }
}

impl Engine {
    /// Looks at messages.
    ///
    /// # Errors
    /// What the port says.
    pub async fn peek(self: &Arc<Self>, request: PeekRequest) -> Result<Peek, BrokerError> {
        let queue = self.queue(&request.queue);
        let mut call = function("landline_peek", &[&queue.key]);
        call.arg(self.header(queue.seen()))
            .arg(request.from.min(super::engine::NEVER))
            .arg(request.max_messages)
            .arg(request.max_bytes.min(super::engine::NEVER));
        let answer = array(self.shards.call(queue.slot, &Request::One(call)).await?)?;
        let next = match answer.first() {
            Some(Value::Int(next)) => u64::try_from(*next).ok().filter(|next| *next > 0),
            _ => return Err(BrokerError::Damaged("a look at messages was answered in an unknown form".into())),
        };
        let found = answer.iter().skip(1).map(|value| Found::read(bytes(value)?)).collect::<Result<Vec<_>, _>>()?;
        let read = self.read(&queue, found.iter().map(|found| (&found.stored, &found.set)), Given::default()).await?;
        let mut messages = Vec::new();
        for (found, read) in found.iter().zip(read) {
            // Acknowledged between the two steps.
            let Some(read) = read else { continue };
            messages.extend(found.details.iter().zip(read).map(|((index, standing, failures), message)| Peeked {
                sequence: found.stored.chunk + u64::from(*index),
                standing: *standing,
                failures: *failures,
                message,
            }));
        }
        Ok(Peek { messages, next })
    }
}
