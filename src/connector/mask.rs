//! Update masks: which fields an update names, and whether it may.
//!
//! An update copies the named fields from the request onto the stored resource and then checks exactly those; the others are
//! neither applied nor looked at.

use super::Error;
use crate::model::text::clipped;

/// A field path that an update may name.
pub struct Path<D: 'static, F> {
    pub path: &'static str,
    /// Sub-fields that may be named and mean the whole, because this server does not honour their parent.
    pub nested: &'static [&'static str],
    /// The field of the resource to check and set again.
    pub field: F,
    /// Copies this path alone from the second draft to the first.
    pub copy: fn(&mut D, &D),
}

/// The paths of one kind of resource.
pub struct Paths<D: 'static, F: 'static> {
    /// As it appears in texts, for example `Topic`.
    pub resource: &'static str,
    pub mutable: &'static [Path<D, F>],
    pub immutable: &'static [&'static str],
}

impl<D, F: Copy + PartialEq> Paths<D, F> {
    /// Looks up every path of a mask.
    ///
    /// # Errors
    /// An empty mask, a path that does not exist, or one that can't be changed.
    pub fn resolve(&self, mask: &[String]) -> Result<Vec<&'static Path<D, F>>, Error> {
        if mask.is_empty() {
            return Err(Error::EmptyMask(self.resource));
        }
        mask.iter().map(|path| self.find(path)).collect()
    }

    fn find(&self, path: &str) -> Result<&'static Path<D, F>, Error> {
        let nested = |known: &Path<D, F>| {
            let rest = path.strip_prefix(known.path).and_then(|rest| rest.strip_prefix('.'));
            rest.is_some_and(|rest| known.nested.contains(&rest))
        };
        if let Some(known) = self.mutable.iter().find(|known| known.path == path || nested(known)) {
            return Ok(known);
        }
        let resource = self.resource;
        if self.immutable.contains(&path) {
            Err(Error::ImmutablePath { resource, path: path.to_owned() })
        } else {
            Err(Error::UnknownPath { resource, path: clipped(path).into_owned() })
        }
    }
}

/// Carries out the paths on the draft of the stored resource and answers the fields they touch, each once.
pub fn merge<D, F: Copy + PartialEq>(paths: &[&Path<D, F>], onto: &mut D, from: &D) -> Vec<F> {
    let mut touched = Vec::new();
    for path in paths {
        (path.copy)(onto, from);
        if !touched.contains(&path.field) {
            touched.push(path.field);
        }
    }
    touched
}

/// A path without nested ones that mean the same.
pub const fn path<D, F: Copy>(path: &'static str, field: F, copy: fn(&mut D, &D)) -> Path<D, F> {
    Path { path, nested: &[], field, copy }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Draft {
        labels: u8,
        export: u8,
    }

    const PATHS: Paths<Draft, u8> = Paths {
        resource: "Topic",
        mutable: &[
            path("labels", 1, |to, from| to.labels = from.labels),
            Path { path: "export", nested: &["table"], field: 2, copy: |to, from| to.export = from.export },
        ],
        immutable: &["name"],
    };

    fn text(mask: &[&str]) -> String {
        let mask: Vec<_> = mask.iter().map(|p| p.to_string()).collect();
        PATHS.resolve(&mask).map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn an_update_must_name_known_fields_that_can_change() {
        assert_eq!(text(&[]), "The update_mask in the UpdateTopicRequest must be set, and must contain a non-empty paths list.");
        assert_eq!(
            text(&["labels", "pushConfig"]),
            "Invalid update_mask provided in the UpdateTopicRequest: 'pushConfig' is not a known Topic field. Note that field paths must be of the form 'push_config' rather than 'pushConfig'."
        );
        assert_eq!(
            text(&["name"]),
            "Invalid update_mask provided in the UpdateTopicRequest: the 'name' field in the Topic is not mutable."
        );
        for unknown in ["", "labels.a", "export.", "export.other", "exporttable", "*"] {
            assert!(text(&[unknown]).contains("is not a known Topic field"), "{unknown}");
        }
    }

    #[test]
    fn named_fields_alone_are_copied_and_reported_once() {
        let mask = ["export.table".to_owned(), "export".to_owned()];
        let paths = PATHS.resolve(&mask).unwrap();
        let mut onto = Draft { labels: 1, export: 1 };
        assert_eq!(merge(&paths, &mut onto, &Draft { labels: 2, export: 2 }), [2]);
        assert_eq!((onto.labels, onto.export), (1, 2));
    }
}
