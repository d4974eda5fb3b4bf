//! The messages of a subscription, looked at without leasing them.

use askama::Template;
use http::StatusCode;

use super::{
    Visit,
    exchange::{Answer, Failure, Frame, render},
    format, names,
};
use crate::{broker::Standing, connector::peek::PeekedMessage, model::SubscriptionName};

/// Messages of one page.
const PAGE: usize = 20;
/// Bytes of data that are shown of a message in the list, and of one that is looked at alone.
const FEW_BYTES: usize = 4096;
const MANY_BYTES: usize = 256 * 1024;

/// How data is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Text,
    Json,
    Hex,
}

struct Shown {
    place: u64,
    id: String,
    published: String,
    age: String,
    standing: String,
    attempt: u32,
    ordering_key: String,
    attributes: Vec<(String, String)>,
    size: String,
    form: &'static str,
    data: String,
    is_cut: bool,
    /// Alone, with more of its data.
    alone: String,
}

#[derive(Template)]
#[template(path = "messages.html")]
struct Messages {
    frame: Frame,
    name: String,
    path: String,
    messages: Vec<Shown>,
    forms: Vec<(&'static str, String)>,
    is_first: bool,
    next: Option<String>,
}

/// The page. Only for operators: what messages say is nobody else's.
pub async fn page(visit: &Visit<'_>, project: &str, id: &str) -> Result<Answer, Failure> {
    if visit.operator.is_none() {
        let text = "Messages are shown to operators only: CONNECTORS_GCP_ADMIN_PASSWORD_FILE lets them sign in.";
        return Err(Failure::new(StatusCode::FORBIDDEN, text));
    }
    let name = SubscriptionName::new(project, id)?;
    let wanted = match visit.ask.query.get("as").map(String::as_str) {
        Some("text") => Some(Form::Text),
        Some("json") => Some(Form::Json),
        Some("hex") => Some(Form::Hex),
        _ => None,
    };
    let from = visit.ask.number("from", 0, u64::MAX);
    let is_alone = visit.ask.query.contains_key("alone");
    let count = if is_alone { 1 } else { PAGE };
    let (found, next) = visit.connector.peek(&name, from, count).await?;
    super::audit(visit, "look at messages", name.as_str(), &format!("{} from {from}", found.len()));
    let path = names::path_of("subscriptions", name.as_str());
    let form = match wanted {
        None => "",
        Some(Form::Text) => "&as=text",
        Some(Form::Json) => "&as=json",
        Some(Form::Hex) => "&as=hex",
    };
    let now_ms = visit.connector.broker().now_ms();
    let most = if is_alone { MANY_BYTES } else { FEW_BYTES };
    let at = |from: u64| format!("{path}/messages?from={from}{}", if is_alone { "&alone" } else { "" });
    let forms = [("as it looks", ""), ("text", "&as=text"), ("JSON", "&as=json"), ("hex", "&as=hex")];
    let page = Messages {
        frame: visit.frame("subscriptions", format!("Messages of {}", name.id())),
        name: name.to_string(),
        messages: found.iter().map(|peeked| show(peeked, wanted, most, now_ms, &path)).collect(),
        forms: forms.into_iter().map(|(label, query)| (label, at(from) + query)).collect(),
        is_first: from == 0,
        next: next.map(|next| at(next) + form),
        path,
    };
    Ok(render(StatusCode::OK, &page))
}

fn show(peeked: &PeekedMessage, wanted: Option<Form>, most: usize, now_ms: u64, path: &str) -> Shown {
    let message = &peeked.message;
    let (form, data, is_cut) = data(message.data(), wanted, most);
    Shown {
        place: peeked.place,
        id: peeked.message_id.clone(),
        published: format::time(peeked.publish_time_ms),
        age: format::duration(now_ms.saturating_sub(peeked.publish_time_ms) as f64 / 1000.0),
        standing: standing(peeked.standing, now_ms),
        attempt: peeked.failures + 1,
        ordering_key: message.ordering_key().to_owned(),
        attributes: message.attribute_map().into_iter().collect(),
        size: format::size(message.data().len() as u64),
        form,
        data,
        is_cut,
        alone: format!("{path}/messages?from={}&alone", peeked.place),
    }
}

fn standing(standing: Standing, now_ms: u64) -> String {
    let until = |at_ms: u64| format::duration(at_ms.saturating_sub(now_ms) as f64 / 1000.0);
    match standing {
        Standing::Waiting => "waiting".into(),
        Standing::InLine => "waiting for its ordering key".into(),
        Standing::Delayed { until_ms } => format!("waiting for its backoff, {}", until(until_ms)),
        Standing::Leased { deadline_at_ms } => format!("leased for {}", until(deadline_at_ms)),
        Standing::Dead => "on its way to the dead-letter topic".into(),
    }
}

/// Data as a person reads it: its form, what is shown, and whether that is not all.
fn data(data: &[u8], wanted: Option<Form>, most: usize) -> (&'static str, String, bool) {
    let text = std::str::from_utf8(data).ok();
    let is_plain = text.is_some_and(|text| !text.contains(|c: char| c.is_control() && !matches!(c, '\n' | '\r' | '\t')));
    // Parsing is bounded like showing; what is longer is text.
    let json = || {
        let parsed = text.filter(|text| text.len() <= MANY_BYTES && text.starts_with(['{', '[']));
        parsed.and_then(|text| serde_json::from_str::<serde_json::Value>(text).ok())
    };
    let cut = |text: &str| {
        let end = (0..=text.len().min(most)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        (text[..end].to_owned(), end < text.len())
    };
    let as_json = if matches!(wanted, None | Some(Form::Json)) { json() } else { None };
    if let Some(pretty) = as_json.and_then(|value| serde_json::to_string_pretty(&value).ok()) {
        let (shown, is_cut) = cut(&pretty);
        return ("json", shown, is_cut);
    }
    if (is_plain && wanted != Some(Form::Hex)) || wanted == Some(Form::Text) {
        let (shown, is_cut) = cut(&String::from_utf8_lossy(&data[..data.len().min(most + 4)]));
        return ("text", shown, is_cut || data.len() > most);
    }
    // A row of 16 bytes takes about five times as many characters.
    let most = most / 4;
    ("hex", format::hex(&data[..data.len().min(most)]), data.len() > most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_shown_as_it_looks_unless_another_form_is_asked_for() {
        assert_eq!(data(b"plain <b>", None, 100), ("text", "plain <b>".into(), false));
        assert_eq!(data(br#"{"a":1}"#, None, 100), ("json", "{\n  \"a\": 1\n}".into(), false));
        assert_eq!(data(br#"{"a":1}"#, Some(Form::Text), 100), ("text", r#"{"a":1}"#.into(), false));
        assert_eq!(data(b"{not json", Some(Form::Json), 100).0, "text");
        assert_eq!(data(&[0, 159, 146, 150], None, 100).0, "hex");
        assert_eq!(data(&[0xff], Some(Form::Text), 100), ("text", "\u{fffd}".into(), false));
        assert_eq!(data(b"abc", Some(Form::Hex), 100).0, "hex");
        assert_eq!(data(b"", None, 100), ("text", String::new(), false));
    }

    #[test]
    fn long_data_is_cut_between_characters() {
        let text = "é".repeat(100);
        let (form, shown, is_cut) = data(text.as_bytes(), None, 51);
        assert_eq!((form, shown.as_str(), is_cut), ("text", "é".repeat(25).as_str(), true));
        let (form, shown, is_cut) = data(&[0; 1000], None, 64);
        assert_eq!((form, shown.lines().count(), is_cut), ("hex", 1, true));
    }
}
