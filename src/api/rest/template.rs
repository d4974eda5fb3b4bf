//! Path templates of HTTP bindings: `/v1/{name=projects/*/topics/*}:publish`.
//!
//! A path is split into segments before it is decoded, and each segment is percent-decoded exactly once. Resource ids may
//! hold `%`, `+` and `~`; a `+` is not a space, and an escape that is none stays as it is.

use percent_encoding::percent_decode_str;

/// One segment of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Segment {
    Literal(String),
    /// `*`: any one segment that is not empty.
    One,
    /// `**`: the rest of the path, also none. Only at the end.
    Rest,
}

/// A part of the path that is the value of a request field.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Variable {
    /// Path of the field, `topic.name`.
    field: String,
    /// Its segments: the first, and the one after the last.
    start: usize,
    end: usize,
}

/// A parsed template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    segments: Vec<Segment>,
    variables: Vec<Variable>,
    verb: Option<String>,
}

/// Why a template can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("path template {0:?} is not understood")]
pub struct TemplateError(String);

/// Why a path can't be used although a template matches it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the path is not UTF-8")]
pub struct NotUtf8;

impl Template {
    /// Parses a template. Variables may not be nested, and `**` must come last.
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        let error = || TemplateError(text.to_owned());
        let (path, verb) = split_template_verb(text);
        let mut template = Self { segments: Vec::new(), variables: Vec::new(), verb: verb.map(str::to_owned) };
        let mut rest = path.strip_prefix('/').ok_or_else(error)?;
        while !rest.is_empty() {
            let part_end = match rest.strip_prefix('{') {
                Some(inner) => inner.find('}').map(|at| at + 2).ok_or_else(error)?,
                None => rest.find('/').unwrap_or(rest.len()),
            };
            template.push_part(&rest[..part_end]).ok_or_else(error)?;
            rest = match rest[part_end..].strip_prefix('/') {
                Some(more) if !more.is_empty() => more,
                None if rest.len() == part_end => "",
                _ => return Err(error()),
            };
        }
        let rest_at = template.segments.iter().position(|segment| *segment == Segment::Rest);
        if template.segments.is_empty() || rest_at.is_some_and(|at| at + 1 != template.segments.len()) {
            return Err(error());
        }
        Ok(template)
    }

    /// Adds `literal`, `*`, `**`, `{field}` or `{field=segments}`.
    fn push_part(&mut self, part: &str) -> Option<()> {
        let Some(variable) = part.strip_prefix('{').and_then(|inner| inner.strip_suffix('}')) else {
            self.segments.push(segment(part)?);
            return Some(());
        };
        let (field, pattern) = variable.split_once('=').unwrap_or((variable, "*"));
        if field.is_empty() || field.split('.').any(str::is_empty) {
            return None;
        }
        let start = self.segments.len();
        for part in pattern.split('/') {
            self.segments.push(segment(part)?);
        }
        self.variables.push(Variable { field: field.to_owned(), start, end: self.segments.len() });
        Some(())
    }

    /// The fields that the path gives, in order.
    pub fn fields(&self) -> impl Iterator<Item = &str> {
        self.variables.iter().map(|variable| variable.field.as_str())
    }

    /// The values of the fields, in the order of [`Template::fields`], or `None` if the path does not match.
    pub fn matches(&self, path: &Path) -> Option<Result<Vec<String>, NotUtf8>> {
        let segments = self.raw_segments(path)?;
        let mut decoded = Vec::with_capacity(segments.len());
        for segment in &segments {
            match percent_decode_str(segment).decode_utf8() {
                Ok(text) => decoded.push(text),
                Err(_) => return Some(Err(NotUtf8)),
            }
        }
        let fits = self.segments.iter().enumerate().all(|(at, segment)| match segment {
            Segment::Literal(literal) => decoded[at] == literal.as_str(),
            Segment::One => !decoded[at].is_empty(),
            Segment::Rest => true,
        });
        let value = |variable: &Variable| {
            let rest = self.segments.get(variable.end - 1) == Some(&Segment::Rest);
            decoded[variable.start..if rest { decoded.len() } else { variable.end }].join("/")
        };
        fits.then(|| Ok(self.variables.iter().map(value).collect()))
    }

    /// The path's segments without the verb, if their number and the verb fit.
    fn raw_segments<'p>(&self, path: &Path<'p>) -> Option<Vec<&'p str>> {
        let (last, others) = path.segments.split_last()?;
        let last = match (&self.verb, split_verb(last)) {
            (Some(verb), Some((id, found))) if verb == found => id,
            // An escaped colon does not begin a verb that nobody knows: it is left to the check of the name.
            (None, Some(_)) if !last.contains(':') => last,
            (None, None) => last,
            _ => return None,
        };
        let mut segments = others.to_vec();
        segments.push(last);
        let fits = match self.segments.last() {
            Some(Segment::Rest) => segments.len() + 1 >= self.segments.len(),
            _ => segments.len() == self.segments.len(),
        };
        fits.then_some(segments)
    }
}

/// The path of a request, split once for all templates.
#[derive(Debug, Clone)]
pub struct Path<'p> {
    segments: Vec<&'p str>,
}

impl<'p> Path<'p> {
    /// Splits an encoded path. Leading slashes are one: base addresses with a slash at their end are common.
    pub fn new(encoded: &'p str) -> Self {
        Self { segments: encoded.trim_start_matches('/').split('/').collect() }
    }
}

fn segment(text: &str) -> Option<Segment> {
    match text {
        "*" => Some(Segment::One),
        "**" => Some(Segment::Rest),
        "" => None,
        _ if text.contains(['{', '}', '*', '=']) => None,
        _ => Some(Segment::Literal(text.to_owned())),
    }
}

/// Splits `:verb` from a template. A colon within a variable is not one.
fn split_template_verb(text: &str) -> (&str, Option<&str>) {
    match text.rfind(':') {
        Some(at) if !text[at..].contains(['/', '}']) => (&text[..at], Some(&text[at + 1..])),
        _ => (text, None),
    }
}

/// Splits the verb from the last segment of an encoded path. Some clients escape the colon; ids can't hold one.
fn split_verb(segment: &str) -> Option<(&str, &str)> {
    if let Some(split) = segment.rsplit_once(':') {
        return Some(split);
    }
    let at = segment.rfind("%3A").max(segment.rfind("%3a"))?;
    Some((&segment[..at], &segment[at + 3..]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn values(template: &str, path: &str) -> Option<Vec<String>> {
        Template::parse(template).unwrap().matches(&Path::new(path)).map(Result::unwrap)
    }

    const TOPIC: &str = "/v1/{name=projects/*/topics/*}";

    #[test]
    fn a_variable_takes_its_segments() {
        assert_eq!(values(TOPIC, "/v1/projects/p/topics/t"), Some(vec!["projects/p/topics/t".into()]));
        assert_eq!(values("/v1/{project=projects/*}/topics", "/v1/projects/p/topics"), Some(vec!["projects/p".into()]));
        assert_eq!(values("/v1/{a}/x/{b.c}", "/v1/1/x/2"), Some(vec!["1".into(), "2".into()]));
    }

    #[test]
    fn segments_are_decoded_once() {
        assert_eq!(values(TOPIC, "/v1/projects/p/topics/a%25b").unwrap(), ["projects/p/topics/a%b"]);
        assert_eq!(values(TOPIC, "/v1/projects/p/topics/a%2525").unwrap(), ["projects/p/topics/a%25"]);
        assert_eq!(values(TOPIC, "/v1/projects/p/topics/x+y~z.w").unwrap(), ["projects/p/topics/x+y~z.w"]);
        assert_eq!(values(TOPIC, "/v1/projects/p/topics/x%2By%7Ez").unwrap(), ["projects/p/topics/x+y~z"]);
        assert_eq!(values(TOPIC, "/v1/projects/p/topics/100%").unwrap(), ["projects/p/topics/100%"]);
    }

    #[test]
    fn an_escaped_slash_does_not_split_a_segment() {
        assert_eq!(values(TOPIC, "/v1/projects/p/topics/a%2Fb").unwrap(), ["projects/p/topics/a/b"]);
        assert_eq!(values(TOPIC, "/v1/projects%2Fp/topics/a"), None);
    }

    #[test]
    fn a_path_of_another_shape_does_not_match() {
        for path in ["/", "", "/v1", "/v2/projects/p/topics/t", "/v1/projects/p/topics/", "/v1/projects//topics/t"] {
            assert_eq!(values(TOPIC, path), None, "{path}");
        }
        assert_eq!(values(TOPIC, "/v1/projects/p/topics/t/"), None);
        assert_eq!(values(TOPIC, "/v1/projects/p/topics/t/subscriptions"), None);
    }

    #[test]
    fn verbs_must_agree() {
        let publish = "/v1/{topic=projects/*/topics/*}:publish";
        assert_eq!(values(publish, "/v1/projects/p/topics/t:publish").unwrap(), ["projects/p/topics/t"]);
        assert_eq!(values(publish, "/v1/projects/p/topics/t%3Apublish").unwrap(), ["projects/p/topics/t"]);
        assert_eq!(values(publish, "/v1/projects/p/topics/t:pull"), None);
        assert_eq!(values(publish, "/v1/projects/p/topics/t"), None);
        assert_eq!(values(publish, "/v1/projects/p/topics/:publish"), None);
        assert_eq!(values(TOPIC, "/v1/projects/p/topics/t:publish"), None);
        assert_eq!(values(TOPIC, "/v1/projects/p/topics/t%3Ax").unwrap(), ["projects/p/topics/t:x"]);
    }

    #[test]
    fn a_project_may_hold_a_colon() {
        let lists = "/v1/{project=projects/*}/topics";
        assert_eq!(values(lists, "/v1/projects/example.com:p/topics").unwrap(), ["projects/example.com:p"]);
        let test = "/v1/{project=projects/*}:testMessageTransforms";
        assert_eq!(values(test, "/v1/projects/example.com:p:testMessageTransforms").unwrap(), ["projects/example.com:p"]);
    }

    #[test]
    fn leading_slashes_are_one() {
        assert!(values(TOPIC, "//v1/projects/p/topics/t").is_some());
    }

    #[test]
    fn the_rest_takes_what_remains() {
        let any = "/v1/{resource=**}:getIamPolicy";
        assert_eq!(values(any, "/v1/projects/p/topics/t:getIamPolicy").unwrap(), ["projects/p/topics/t"]);
    }

    #[test]
    fn bytes_that_are_not_utf8_are_reported() {
        let template = Template::parse(TOPIC).unwrap();
        assert_eq!(template.matches(&Path::new("/v1/projects/p/topics/%FF")), Some(Err(NotUtf8)));
    }

    #[test]
    fn a_malformed_template_is_refused() {
        for text in
            ["", "v1", "/", "/v1/", "/{a", "/{=*}", "/{a=}", "/**/x", "/{a=**}/x", "/{a.=*}", "/a*", "/{a=b/{c}}", "/{a}b"]
        {
            assert!(Template::parse(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn parsing_a_template_never_panics(text in "[/{}=*:.a-zé]{0,24}") {
            let _ = Template::parse(&text);
        }

        #[test]
        fn matching_a_path_never_panics(path in "(/|/v1/projects/|topics|:publish|%3A|%25|%|[a-z%:/é]){0,12}") {
            for template in ["/v1/{name=projects/*/topics/*}", "/v1/{t=projects/*/topics/*}:publish", "/v1/{r=**}:x", "/{a}/{b}"] {
                let _ = Template::parse(template).unwrap().matches(&Path::new(&path));
            }
        }

        #[test]
        fn an_encoded_id_comes_back_as_it_was(id in "[A-Za-z][A-Za-z0-9_.~+%-]{2,40}") {
            let encoded = percent_encoding::utf8_percent_encode(&id, percent_encoding::NON_ALPHANUMERIC);
            let name = values(TOPIC, &format!("/v1/projects/p/topics/{encoded}"));
            prop_assert_eq!(name, Some(vec![format!("projects/p/topics/{id}")]));
        }
    }
}
