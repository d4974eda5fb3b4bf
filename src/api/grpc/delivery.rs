//! Pull, StreamingPull, Acknowledge and ModifyAckDeadline: from the wire to the connector and back.

mod settling;
mod streaming;
mod tracked;

use std::{sync::Arc, time::Duration};

use tonic::{Request, Response, Status, metadata::MetadataMap};

use self::tracked::Tracking;
pub use self::{
    settling::{acknowledge, modify_ack_deadline},
    streaming::{StreamingPullStream, streaming_pull},
    tracked::track,
};
use crate::{
    api::{
        proto::pubsub::{PullRequest, PullResponse, ReceivedMessage},
        status::to_status,
    },
    connector::{Connector, Error, pull::Delivered},
    model::SubscriptionName,
};

/// Longest wait of a Pull. The official clients give a Pull 60 s, gcloud 20 s, and proxies in between often 30 s.
const LONGEST_WAIT: Duration = Duration::from_secs(15);

/// An answer must be on its way this part of the caller's time before the end of it.
const MARGIN_PART: u32 = 10;
const LEAST_MARGIN: Duration = Duration::from_millis(50);

/// The header with the caller's time in seconds that gcloud sends over REST.
const SERVER_TIMEOUT: &str = "x-server-timeout";

/// Leases messages. The response is empty when none came in time.
pub async fn pull(connector: &Arc<Connector>, request: Request<PullRequest>) -> Result<Response<PullResponse>, Status> {
    let wait = longest_wait(request.metadata());
    let request = request.into_inner();
    #[allow(deprecated)]
    let wait = if request.return_immediately { Duration::ZERO } else { wait };
    let name = SubscriptionName::parse(&request.subscription).map_err(Error::from).map_err(to_status)?;
    let pulled = connector.pull(&name, request.max_messages, wait).await.map_err(to_status)?;
    let received_messages = pulled.messages.into_iter().map(received).collect();
    let mut response = Response::new(PullResponse { received_messages });
    response.extensions_mut().insert(Tracking::unary(pulled.receipt));
    Ok(response)
}

/// One message for the wire.
fn received(delivered: Delivered) -> ReceivedMessage {
    ReceivedMessage {
        ack_id: delivered.ack_id,
        message: delivered.message,
        delivery_attempt: delivered.delivery_attempt.min(i32::MAX as u32) as i32,
    }
}

/// How long a Pull may wait for its caller to be still there when the answer comes.
fn longest_wait(metadata: &MetadataMap) -> Duration {
    let text = |key: &str| metadata.get(key).and_then(|value| value.to_str().ok());
    let grpc = text("grpc-timeout").and_then(grpc_timeout);
    let rest = text(SERVER_TIMEOUT).and_then(|text| Duration::try_from_secs_f64(text.trim().parse().ok()?).ok());
    grpc.into_iter().chain(rest).map(before_the_end).fold(LONGEST_WAIT, Duration::min)
}

fn before_the_end(time: Duration) -> Duration {
    time.saturating_sub(LEAST_MARGIN.max(time / MARGIN_PART))
}

/// Parses a `grpc-timeout`: up to eight digits and a unit.
fn grpc_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let value = digits.parse::<u32>().ok().filter(|_| digits.len() <= 8)?;
    Some(match unit {
        "H" => Duration::from_secs(u64::from(value) * 3600),
        "M" => Duration::from_secs(u64::from(value) * 60),
        "S" => Duration::from_secs(u64::from(value)),
        "m" => Duration::from_millis(u64::from(value)),
        "u" => Duration::from_micros(u64::from(value)),
        "n" => Duration::from_nanos(u64::from(value)),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(headers: &[(&'static str, &str)]) -> Duration {
        let mut metadata = MetadataMap::new();
        for (key, value) in headers {
            metadata.insert(*key, value.parse().unwrap());
        }
        longest_wait(&metadata)
    }

    #[test]
    fn a_pull_waits_fifteen_seconds_unless_its_caller_has_less_time() {
        assert_eq!(wait(&[]), LONGEST_WAIT);
        assert_eq!(wait(&[("grpc-timeout", "60S")]), LONGEST_WAIT);
        assert_eq!(wait(&[("grpc-timeout", "5S")]), Duration::from_millis(4500));
        assert_eq!(wait(&[("grpc-timeout", "5000000u"), ("x-server-timeout", "2")]), Duration::from_millis(1800));
        assert_eq!(wait(&[("x-server-timeout", "20.0")]), LONGEST_WAIT);
        assert_eq!(wait(&[("grpc-timeout", "40m")]), Duration::ZERO);
    }

    #[test]
    fn a_timeout_that_is_not_one_is_ignored() {
        for text in ["", "S", "5", "5X", "-5S", "123456789S", "1.5S"] {
            assert_eq!(wait(&[("grpc-timeout", text), ("x-server-timeout", text)][..1]), LONGEST_WAIT, "{text}");
        }
        for text in ["", "x", "-1", "NaN", "1e300"] {
            assert_eq!(wait(&[("x-server-timeout", text)]), LONGEST_WAIT, "{text}");
        }
    }
}
