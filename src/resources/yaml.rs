//! YAML, and JSON as part of it, with the place of everything.

use std::{collections::HashMap, fmt};

use serde_json::{Map, Value};
use yaml_rust2::{
    Yaml,
    parser::{Event, MarkedEventReceiver, Parser},
    scanner::{Marker, TScalarStyle},
};

/// A place in a text; both count from 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Place {
    pub line: usize,
    pub column: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

/// A value and where it begins.
#[derive(Debug, Clone)]
pub struct Node {
    pub place: Place,
    pub content: Content,
}

#[derive(Debug, Clone)]
pub enum Content {
    Scalar(Value),
    List(Vec<Node>),
    /// In the order of the text; each key with its place.
    Map(Vec<(String, Place, Node)>),
}

impl Node {
    /// Reads a text that holds one document; an empty one is an empty map.
    ///
    /// # Errors
    /// Where the text is wrong, and why.
    pub fn read(text: &str) -> Result<Self, (Place, String)> {
        let mut reader = Reader::default();
        let text = with_whole_characters(text);
        Parser::new_from_str(&text).load(&mut reader, true).map_err(|e| (place(*e.marker()), e.info().to_owned()))?;
        if let Some(wrong) = reader.wrong {
            return Err(wrong);
        }
        Ok(reader.root.unwrap_or(Self { place: Place { line: 1, column: 1 }, content: Content::Map(Vec::new()) }))
    }

    /// The same without places.
    pub fn value(&self) -> Value {
        match &self.content {
            Content::Scalar(value) => value.clone(),
            Content::List(items) => items.iter().map(Self::value).collect(),
            Content::Map(entries) => {
                Value::Object(entries.iter().map(|(key, _, node)| (key.clone(), node.value())).collect::<Map<_, _>>())
            }
        }
    }

    /// The entries of a map.
    pub fn entries(&self) -> Option<&[(String, Place, Node)]> {
        match &self.content {
            Content::Map(entries) => Some(entries),
            _ => None,
        }
    }

    /// The items of a list.
    pub fn items(&self) -> Option<&[Node]> {
        match &self.content {
            Content::List(items) => Some(items),
            _ => None,
        }
    }

    /// A map's entry.
    pub fn get(&self, key: &str) -> Option<&Node> {
        self.entries()?.iter().find(|(known, ..)| known == key).map(|(.., node)| node)
    }

    /// The place of what a path such as `push_config.attributes[x]` or `list[0]` leads to, or of the last part that is
    /// there. Names are compared whether written in camelCase or with underscores.
    pub fn find(&self, path: &str) -> Place {
        let mut node = self;
        for part in path.split(['.', '[']).map(|part| part.trim_end_matches(']').trim_matches('"')) {
            let next = match &node.content {
                Content::Map(entries) => entries.iter().find(|(key, ..)| plain(key) == plain(part)).map(|(.., node)| node),
                Content::List(items) => part.parse::<usize>().ok().and_then(|at| items.get(at)),
                Content::Scalar(_) => None,
            };
            let Some(next) = next else { break };
            node = next;
        }
        node.place
    }

    /// The place of a key anywhere below.
    pub fn find_key(&self, key: &str) -> Option<Place> {
        match &self.content {
            Content::Scalar(_) => None,
            Content::List(items) => items.iter().find_map(|item| item.find_key(key)),
            Content::Map(entries) => {
                let here = entries.iter().find(|(known, ..)| known == key).map(|(_, place, _)| *place);
                here.or_else(|| entries.iter().find_map(|(.., node)| node.find_key(key)))
            }
        }
    }
}

fn plain(name: &str) -> String {
    name.replace('_', "").to_lowercase()
}

fn place(marker: Marker) -> Place {
    Place { line: marker.line(), column: marker.col() + 1 }
}

/// JSON writes characters beyond the first plane as two escapes, which YAML does not know.
fn with_whole_characters(text: &str) -> String {
    let mut whole = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("\\u") {
        let escape = |from: usize| {
            let digits = rest.get(from..from + 6)?.strip_prefix("\\u")?;
            u16::from_str_radix(digits, 16).ok()
        };
        let pair = [escape(at), escape(at + 6)].into_iter().flatten().collect::<Vec<_>>();
        match String::from_utf16(&pair) {
            Ok(character) if pair.len() == 2 && character.chars().count() == 1 => {
                whole.push_str(&rest[..at]);
                whole.push_str(&character);
                rest = &rest[at + 12..];
            }
            _ => {
                whole.push_str(&rest[..at + 2]);
                rest = &rest[at + 2..];
            }
        }
    }
    whole + rest
}

/// A list or a map whose end was not seen yet.
struct Open {
    node: Node,
    anchor: usize,
    /// The key that a map has read and whose value comes next.
    key: Option<(String, Place)>,
}

/// Puts the tree together.
#[derive(Default)]
struct Reader {
    root: Option<Node>,
    open: Vec<Open>,
    anchors: HashMap<usize, Node>,
    wrong: Option<(Place, String)>,
}

impl Reader {
    fn begin(&mut self, marker: Marker, content: Content, anchor: usize) {
        self.open.push(Open { node: Node { place: place(marker), content }, anchor, key: None });
    }

    fn end(&mut self) {
        if let Some(Open { mut node, anchor, .. }) = self.open.pop() {
            // The parser says where a map's first value is; it begins with the key.
            if let Content::Map(entries) = &node.content
                && let Some((_, first, _)) = entries.first()
                && (first.line, first.column) < (node.place.line, node.place.column)
            {
                node.place = *first;
            }
            self.add(node, anchor);
        }
    }

    fn refuse(&mut self, place: Place, why: impl Into<String>) {
        self.wrong.get_or_insert((place, why.into()));
    }

    fn add(&mut self, node: Node, anchor: usize) {
        if anchor > 0 {
            self.anchors.insert(anchor, node.clone());
        }
        let Some(Open { node: parent, key, .. }) = self.open.last_mut() else {
            if self.root.is_some() {
                self.refuse(node.place, "a second document begins here; there must be one");
            }
            self.root.get_or_insert(node);
            return;
        };
        match &mut parent.content {
            Content::Scalar(_) => {}
            Content::List(items) => items.push(node),
            Content::Map(entries) => match key.take() {
                Some((key, place)) => entries.push((key, place, node)),
                None => {
                    let text = match &node.content {
                        Content::Scalar(Value::String(text)) => text.clone(),
                        Content::Scalar(other) => other.to_string(),
                        _ => return self.refuse(node.place, "a list or a map can't be a key"),
                    };
                    if entries.iter().any(|(known, ..)| *known == text) {
                        return self.refuse(node.place, format!("{text} is here for the second time"));
                    }
                    *key = Some((text, node.place));
                }
            },
        }
    }
}

impl MarkedEventReceiver for Reader {
    fn on_event(&mut self, event: Event, marker: Marker) {
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                // A tag such as !!str, or quotes, make text of anything.
                let plain = style == TScalarStyle::Plain && tag.is_none();
                let content = Content::Scalar(if plain { scalar(&text) } else { Value::String(text) });
                self.add(Node { place: place(marker), content }, anchor);
            }
            Event::SequenceStart(anchor, _) => self.begin(marker, Content::List(Vec::new()), anchor),
            Event::MappingStart(anchor, _) => self.begin(marker, Content::Map(Vec::new()), anchor),
            Event::SequenceEnd | Event::MappingEnd => self.end(),
            Event::Alias(anchor) => match self.anchors.get(&anchor).cloned() {
                Some(node) => self.add(Node { place: place(marker), ..node }, 0),
                None => self.refuse(place(marker), "the alias is of nothing that came before"),
            },
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentStart | Event::DocumentEnd => {}
        }
    }
}

fn scalar(text: &str) -> Value {
    match Yaml::from_str(text) {
        Yaml::Null => Value::Null,
        Yaml::Boolean(value) => Value::Bool(value),
        Yaml::Integer(value) => Value::from(value),
        Yaml::Real(number) => {
            number.parse::<f64>().ok().and_then(serde_json::Number::from_f64).map_or(text.into(), Value::Number)
        }
        _ => Value::String(text.to_owned()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn yaml_and_json_read_alike_with_places() {
        let yaml = "topics:\n  - name: a\n    labels: {x: '1', y: no}\n    n: 10\n    f: \"s:\\\"\"\n";
        let expected = json!({"topics": [{"name": "a", "labels": {"x": "1", "y": "no"}, "n": 10, "f": "s:\""}]});
        assert_eq!(Node::read(yaml).unwrap().value(), expected);
        let text = serde_json::to_string_pretty(&expected).unwrap();
        let node = Node::read(&text).unwrap();
        assert_eq!(node.value(), expected);
        assert_eq!(Node::read(&expected.to_string()).unwrap().value(), expected);
        assert_eq!(text.lines().nth(node.find("topics[0].n").line - 1).unwrap().trim_end_matches(',').trim(), "\"n\": 10");
        assert_eq!(node.find("topics[0].labels.nothing"), node.find("topics[0].labels"));
        assert_eq!(Node::read("a:\n  deadLetter: {z: 1}").unwrap().find("a.dead_letter.z"), Place { line: 2, column: 19 });
        assert_eq!(Node::read(r#"{"s": "\ud83d\ude00 \u00e9 \\u0041"}"#).unwrap().value(), json!({"s": "😀 é \\u0041"}));
        assert_eq!(Node::read("").unwrap().value(), json!({}));
        assert_eq!(Node::read("a: &x {b: 1}\nc: *x").unwrap().value(), json!({"a": {"b": 1}, "c": {"b": 1}}));
    }

    #[test]
    fn what_is_wrong_is_placed() {
        for (text, line, why) in [
            ("a: 1\nb: [", 2, ""),
            ("a: 1\nb: 2\na: 3", 3, "second time"),
            ("a: 1\n---\nb: 1", 3, "second document"),
            ("? [x]\n: 1", 1, "can't be a key"),
        ] {
            let (place, text) = Node::read(text).unwrap_err();
            assert!(place.line >= line && text.contains(why), "{place} {text}");
        }
    }
}
