//! What forms change. Every change is a line of the log: who, what, and how it ended.

use http::StatusCode;

use super::{
    Visit, audit,
    exchange::{Answer, Failure, TEXT, answer, see_other},
    gate, names,
};
use crate::{
    connector::{
        Error, SeekTo,
        draft::{SnapshotDraft, Span},
        replay::{MAX_REPLAY, Replayed},
    },
    model::{EncodedMessage, SnapshotName, SubscriptionName, TopicName},
};

/// Carries a change out, notes it, and shows the page it was made on.
async fn change(
    visit: &Visit<'_>,
    action: &str,
    name: &str,
    back: String,
    work: impl Future<Output = Result<String, Failure>> + Send,
) -> Result<Answer, Failure> {
    let outcome = work.await;
    match &outcome {
        Ok(text) => audit(visit, action, name, text),
        Err(failure) => audit(visit, action, name, &format!("refused: {}", failure.text)),
    }
    let text = outcome?;
    let session = gate::session(&visit.ask.headers).filter(|_| visit.operator.as_ref().is_some_and(|o| o.csrf.is_some()));
    match (session, &visit.console.operators) {
        (Some(session), Some(operators)) => {
            operators.notify(session, &text);
            Ok(see_other(&back))
        }
        _ => Ok(answer(StatusCode::OK, TEXT, text + "\n")),
    }
}

/// What can't be undone is asked for twice.
fn check_sure(visit: &Visit<'_>) -> Result<(), Failure> {
    if visit.ask.field("sure") == "yes" { Ok(()) } else { Err(Failure::bad("Tick the box to say that you are sure.")) }
}

/// A full name, or an id in the project.
fn full(text: &str, project: &str, collection: &str) -> String {
    if text.contains('/') { text.to_owned() } else { format!("projects/{project}/{collection}/{text}") }
}

/// Publishes one message.
pub async fn publish(visit: &Visit<'_>, project: &str, id: &str) -> Result<Answer, Failure> {
    let name = TopicName::new(project, id)?;
    let back = names::path_of("topics", name.as_str());
    change(visit, "publish", name.as_str(), back, async {
        let ask = visit.ask;
        let attributes = attributes(ask.field("attributes"))?;
        let pairs = attributes.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        let message = EncodedMessage::encode(ask.field("data").as_bytes(), pairs, ask.field("ordering_key"));
        let ids = visit.connector.publish(&name, vec![message.wire().clone()]).await?;
        Ok(format!("Published message {}.", ids.first().copied().unwrap_or_default()))
    })
    .await
}

/// One `key=value` a line.
fn attributes(text: &str) -> Result<Vec<(String, String)>, Failure> {
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let pair = |line: &str| match line.split_once('=') {
        Some((key, value)) => Ok((key.trim().to_owned(), value.to_owned())),
        None => Err(Failure::bad(format!("The attribute {line:?} must be key=value."))),
    };
    lines.map(pair).collect()
}

/// Moves dead letters back.
pub async fn replay(visit: &Visit<'_>, project: &str, id: &str) -> Result<Answer, Failure> {
    let name = SubscriptionName::new(project, id)?;
    let back = names::path_of("subscriptions", name.as_str());
    change(visit, "replay", name.as_str(), back, async {
        let to = match visit.ask.field("topic").trim() {
            "" => None,
            topic => Some(TopicName::parse(&full(topic, project, "topics"))?),
        };
        let max = match visit.ask.field("max") {
            "" => MAX_REPLAY,
            text => {
                text.trim().parse().map_err(|_| Failure::bad(format!("{text:?} must be a number from 1 to {MAX_REPLAY}.")))?
            }
        };
        let done = visit.connector.replay(&name, to, max).await?;
        let left = match visit.connector.subscription(&name).await {
            Ok(entry) => visit.connector.broker().stats(&entry.queue).await.map(|stats| stats.undelivered_messages).ok(),
            Err(_) => None,
        };
        Ok(told(&done, left))
    })
    .await
}

fn told(done: &Replayed, left: Option<u64>) -> String {
    let mut text = format!("Moved {}.", counted(done.moved));
    if done.stayed > 0 {
        let reasons: Vec<_> = done.reasons.iter().map(|(why, count)| format!("{why} ({count})")).collect();
        text += &format!(" {} stayed: {}.", counted(done.stayed), reasons.join("; "));
    }
    text + &left.map(|left| format!(" {left} are left in the subscription.")).unwrap_or_default()
}

fn counted(messages: usize) -> String {
    if messages == 1 { "1 message".into() } else { format!("{messages} messages") }
}

/// Moves the subscription to a time or a snapshot.
pub async fn seek(visit: &Visit<'_>, project: &str, id: &str) -> Result<Answer, Failure> {
    let name = SubscriptionName::new(project, id)?;
    let back = names::path_of("subscriptions", name.as_str());
    change(visit, "seek", name.as_str(), back, async {
        check_sure(visit)?;
        let (time, snapshot) = (visit.ask.field("time").trim(), visit.ask.field("snapshot").trim());
        let target = match (time, snapshot) {
            ("", "") => None,
            ("", snapshot) => Some(SeekTo::Snapshot(full(snapshot, project, "snapshots"))),
            (time, "") => Some(SeekTo::Time(point(time)?)),
            _ => return Err(Failure::bad("Give a time or a snapshot, not both.")),
        };
        visit.connector.seek(&name, target).await?;
        let to = if time.is_empty() { format!("the snapshot {snapshot}") } else { time.to_owned() };
        Ok(format!("The subscription was moved to {to}."))
    })
    .await
}

fn point(text: &str) -> Result<Span, Failure> {
    let wrong = || Failure::bad(format!("{text:?} must be a time such as 2026-01-31T12:00:00Z."));
    let time: prost_types::Timestamp = text.parse().map_err(|_| wrong())?;
    Ok(Span { seconds: time.seconds, nanos: time.nanos })
}

/// Acknowledges everything published until now.
pub async fn purge(visit: &Visit<'_>, project: &str, id: &str) -> Result<Answer, Failure> {
    let name = SubscriptionName::new(project, id)?;
    let back = names::path_of("subscriptions", name.as_str());
    change(visit, "purge", name.as_str(), back, async {
        check_sure(visit)?;
        let now = Span::from_ms(visit.connector.broker().now_ms());
        visit.connector.seek(&name, Some(SeekTo::Time(now))).await?;
        Ok("Everything published before now counts as acknowledged.".into())
    })
    .await
}

/// Takes a snapshot of the subscription.
pub async fn snapshot(visit: &Visit<'_>, project: &str, id: &str) -> Result<Answer, Failure> {
    let name = SubscriptionName::new(project, id)?;
    let back = names::path_of("subscriptions", name.as_str());
    change(visit, "create snapshot", name.as_str(), back, async {
        let given = visit.ask.field("snapshot").trim();
        let full = if given.is_empty() { String::new() } else { full(given, project, "snapshots") };
        let view = visit.connector.create_snapshot(SnapshotDraft { name: full, ..SnapshotDraft::default() }, &name).await?;
        Ok(format!("The snapshot {} was created.", view.snapshot.name))
    })
    .await
}

/// Deletes a snapshot.
pub async fn delete_snapshot(visit: &Visit<'_>, project: &str, id: &str) -> Result<Answer, Failure> {
    let name = SnapshotName::new(project, id)?;
    change(visit, "delete snapshot", name.as_str(), "/snapshots".into(), async {
        check_sure(visit)?;
        visit.connector.delete_snapshot(&name).await.map_err(|error| match error {
            Error::NotFound(_) => Failure::new(StatusCode::NOT_FOUND, format!("There is no snapshot {name}.")),
            error => error.into(),
        })?;
        Ok(format!("The snapshot {name} was deleted."))
    })
    .await
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_read_a_line_each() {
        assert_eq!(attributes("a=1\r\n\n b = x=y\n").unwrap(), [("a".into(), "1".into()), ("b".into(), " x=y".into())]);
        assert!(attributes("nothing").unwrap_err().text.contains("\"nothing\""));
    }

    #[test]
    fn a_replay_is_told_with_its_reasons() {
        let reasons = [("no topic".to_owned(), 2)].into();
        let done = Replayed { moved: 1, stayed: 2, reasons };
        assert_eq!(told(&done, Some(2)), "Moved 1 message. 2 messages stayed: no topic (2). 2 are left in the subscription.");
        assert_eq!(told(&Replayed::default(), None), "Moved 0 messages.");
    }

    #[test]
    fn an_id_is_one_of_the_project() {
        assert_eq!(full("orders", "p1", "topics"), "projects/p1/topics/orders");
        assert_eq!(full("projects/p2/topics/orders", "p1", "topics"), "projects/p2/topics/orders");
    }
}
