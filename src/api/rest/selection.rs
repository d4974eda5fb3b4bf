//! Partial answers, the parameter `fields`: `nextPageToken,topics(name,labels/color)`.
//!
//! Source: the section on partial responses in the documentation of Google's REST APIs. Names of fields that an answer does
//! not have are no error: they select nothing.

use std::collections::BTreeMap;

use serde_json::Value as Json;

/// Parts inside of parts; answers have far fewer.
const MAX_DEPTH: usize = 16;

/// Which parts of a value are wanted, by name; an empty one wants everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection(BTreeMap<String, Selection>);

impl Selection {
    /// Reads a selection; the empty text selects everything.
    ///
    /// # Errors
    /// The rest of the text that is not understood.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut rest = text.trim();
        if rest.is_empty() {
            return Ok(Self::default());
        }
        let selection = list(&mut rest, 0).map_err(|at| at.to_owned())?;
        if rest.is_empty() { Ok(selection) } else { Err(rest.to_owned()) }
    }

    /// Whether nothing is left out.
    pub fn is_everything(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes away what is not selected. Lists are looked through item by item.
    pub fn keep(&self, value: &mut Json) {
        if self.is_everything() {
            return;
        }
        match value {
            Json::Array(items) => items.iter_mut().for_each(|item| self.keep(item)),
            Json::Object(fields) => fields.retain(|name, value| match self.of(name) {
                Some(part) => {
                    part.keep(value);
                    true
                }
                None => false,
            }),
            _ => {}
        }
    }

    /// Fields have two spellings; keys of maps stand for themselves.
    fn of(&self, name: &str) -> Option<&Self> {
        let spelt = || self.0.iter().find(|(wanted, _)| camel_case(wanted) == name).map(|(_, part)| part);
        self.0.get(name).or_else(spelt).or_else(|| self.0.get("*"))
    }

    fn add(&mut self, name: &str, part: Self) {
        match self.0.get_mut(name) {
            // Everything and a part of it is everything.
            Some(known) if known.is_everything() || part.is_everything() => known.0.clear(),
            Some(known) => part.0.into_iter().for_each(|(name, part)| known.add(&name, part)),
            None => _ = self.0.insert(name.to_owned(), part),
        }
    }
}

/// `item,item`, up to what can't belong to it.
fn list<'t>(rest: &mut &'t str, depth: usize) -> Result<Selection, &'t str> {
    let mut selection = Selection::default();
    loop {
        let (name, part) = item(rest, depth)?;
        selection.add(name, part);
        match rest.strip_prefix(',') {
            Some(more) => *rest = more,
            None => return Ok(selection),
        }
    }
}

/// `name`, `name/item` or `name(list)`.
fn item<'t>(rest: &mut &'t str, depth: usize) -> Result<(&'t str, Selection), &'t str> {
    let text = rest.trim_start();
    let end = text.find([',', '/', '(', ')']).unwrap_or(text.len());
    let name = text[..end].trim_end();
    if name.is_empty() || depth > MAX_DEPTH {
        return Err(text);
    }
    *rest = &text[end..];
    let mut part = Selection::default();
    if let Some(inner) = rest.strip_prefix('/') {
        *rest = inner;
        let (name, inner) = item(rest, depth + 1)?;
        part.add(name, inner);
    } else if let Some(inner) = rest.strip_prefix('(') {
        *rest = inner;
        part = list(rest, depth + 1)?;
        *rest = rest.strip_prefix(')').ok_or(*rest)?.trim_start();
    }
    Ok((name, part))
}

/// Fields are in answers as `nextPageToken`.
fn camel_case(name: &str) -> String {
    let mut camel = String::with_capacity(name.len());
    let mut after_underscore = false;
    for letter in name.chars() {
        match letter {
            '_' => after_underscore = true,
            _ if after_underscore => {
                camel.push(letter.to_ascii_uppercase());
                after_underscore = false;
            }
            _ => camel.push(letter),
        }
    }
    camel
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn kept(selection: &str) -> Json {
        let mut value = json!({
            "topics": [{"name": "a", "labels": {"x": "1", "y_z": "2"}, "state": "ACTIVE"}, {"name": "b"}],
            "nextPageToken": "t",
        });
        Selection::parse(selection).unwrap().keep(&mut value);
        value
    }

    #[test]
    fn only_what_is_selected_stays() {
        assert_eq!(kept("nextPageToken"), json!({"nextPageToken": "t"}));
        assert_eq!(kept("next_page_token"), json!({"nextPageToken": "t"}));
        assert_eq!(kept("topics/name"), json!({"topics": [{"name": "a"}, {"name": "b"}]}));
        assert_eq!(kept("topics(name, labels/x)"), json!({"topics": [{"name": "a", "labels": {"x": "1"}}, {"name": "b"}]}));
        assert_eq!(
            kept("topics/labels/y_z,nextPageToken"),
            json!({"topics": [{"labels": {"y_z": "2"}}, {}], "nextPageToken": "t"})
        );
        assert_eq!(kept("topics/name,topics/labels(x)"), kept("topics(name,labels/x)"));
        assert_eq!(kept("topics/name,topics,nextPageToken"), kept(""));
        assert_eq!(kept("*"), kept(""));
        assert_eq!(kept("*/name"), json!({"topics": [{"name": "a"}, {"name": "b"}], "nextPageToken": "t"}));
        assert_eq!(kept("nothing/of(this)"), json!({}));
    }

    #[test]
    fn what_is_no_selection_is_refused_from_where_it_ends() {
        for (text, at) in [("a,", ""), (",a", ",a"), ("a(b", ""), ("a)b", ")b"), ("a/(b)", "(b)"), ("a()", ")"), ("a(b)c", "c")] {
            assert_eq!(Selection::parse(text), Err(at.to_owned()), "{text}");
        }
        assert!(Selection::parse(&"a/".repeat(100_000)).is_err());
        assert!(Selection::parse(&"a(".repeat(100_000)).is_err());
    }
}
