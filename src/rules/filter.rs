//! Subscription filters: which messages of its topic a subscription takes, judged by their attributes.
//!
//! ```text
//! filter  := unary ( ("AND" unary)+ | ("OR" unary)+ )?      AND and OR never mix without parentheses
//! unary   := ("NOT" | "-")? primary
//! primary := "(" filter ")"
//!          | "attributes" ":" key
//!          | "attributes" "." key ("=" | "!=") string
//!          | "hasPrefix" "(" "attributes" "." key "," string ")"
//! key     := [A-Za-z0-9_-]+ | string
//! ```
//! Source: the filter page of the public Pub/Sub documentation. Operators are upper case, everything is case-sensitive.

mod error;
mod parser;
mod string;

#[cfg(test)]
mod properties;

pub use error::{Expected, FilterError, Found};

use crate::model::EncodedMessage;

/// A parsed filter. Judging a message takes one pass over its attributes, no allocation and no recursion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    tests: Vec<Test>,
    /// The expression in postfix order; its operands are the tests' results.
    steps: Vec<Step>,
}

/// One condition on one attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Test {
    key: String,
    condition: Condition,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Condition {
    Present,
    Equals(String),
    Differs(String),
    HasPrefix(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Pushes the result of the test at this index.
    Test(u8),
    Not,
    And,
    Or,
}

/// Results are bits of one word. The shortest test, `attributes:k`, takes 12 of the filter's 256 bytes, so that no filter
/// has more than 21 of them.
type Bits = u32;

const _: () = assert!(crate::model::limits::MAX_FILTER_BYTES / "attributes:k".len() <= Bits::BITS as usize);

impl Filter {
    /// Parses a filter expression. The empty text is refused: a subscription without a filter has none to parse.
    ///
    /// # Errors
    /// [`FilterError`]: the text is longer than 256 bytes, or the first byte at which it leaves the grammar.
    pub fn parse(text: &str) -> Result<Self, FilterError> {
        parser::parse(text)
    }

    /// True when the subscription takes the message. Of a repeated attribute key the last value counts.
    pub fn matches(&self, message: &EncodedMessage) -> bool {
        self.matches_attributes(message.attributes())
    }

    fn matches_attributes<'a>(&self, attributes: impl Iterator<Item = (&'a str, &'a str)>) -> bool {
        let mut results = self.without_attributes();
        for (key, value) in attributes {
            for (index, test) in self.tests.iter().enumerate().filter(|(_, test)| test.key == key) {
                results = results & !(1 << index) | Bits::from(test.condition.holds(value)) << index;
            }
        }
        self.evaluate(results)
    }

    /// What the tests say of a message that has none of their keys.
    fn without_attributes(&self) -> Bits {
        let differs = |test: &Test| matches!(test.condition, Condition::Differs(_));
        self.tests.iter().enumerate().map(|(index, test)| Bits::from(differs(test)) << index).sum()
    }

    /// Works the postfix expression off on a stack of bits, the top at the lowest place.
    fn evaluate(&self, results: Bits) -> bool {
        let mut stack: Bits = 0;
        for step in &self.steps {
            stack = match step {
                Step::Test(index) => stack << 1 | results >> index & 1,
                Step::Not => stack ^ 1,
                Step::And => stack >> 1 & (stack | !1),
                Step::Or => stack >> 1 | stack & 1,
            };
        }
        stack & 1 == 1
    }
}

impl Condition {
    fn holds(&self, value: &str) -> bool {
        match self {
            Self::Present => true,
            Self::Equals(wanted) => value == wanted,
            Self::Differs(unwanted) => value != unwanted,
            Self::HasPrefix(prefix) => value.starts_with(prefix.as_str()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(filter: &str, attributes: &[(&str, &str)]) -> bool {
        let message = EncodedMessage::encode(b"x", attributes.iter().copied(), "");
        Filter::parse(filter).unwrap_or_else(|e| panic!("{filter}: {e}")).matches(&message)
    }

    const COM: &[(&str, &str)] = &[("n", "com")];
    const ORG: &[(&str, &str)] = &[("n", "org")];
    const NONE: &[(&str, &str)] = &[("other", "com")];

    #[test]
    fn conditions_follow_the_truth_table_for_equal_other_and_missing_values() {
        let table = [
            ("attributes:n", [true, true, false]),
            ("attributes.n = \"com\"", [true, false, false]),
            ("attributes.n != \"com\"", [false, true, true]),
            ("hasPrefix(attributes.n, \"co\")", [true, false, false]),
            ("hasPrefix(attributes.n, \"\")", [true, true, false]),
            ("NOT attributes.n = \"com\"", [false, true, true]),
            ("NOT hasPrefix(attributes.n,\"co\")", [false, true, true]),
            ("-attributes:n", [false, false, true]),
            ("NOT attributes:n", [false, false, true]),
            ("-attributes.n != \"com\"", [true, false, false]),
            ("NOT (NOT attributes:n)", [true, true, false]),
            ("-(-(attributes:n))", [true, true, false]),
        ];
        for (filter, expected) in table {
            for (message, expected) in [COM, ORG, NONE].into_iter().zip(expected) {
                assert_eq!(matches(filter, message), expected, "{filter} on {message:?}");
            }
        }
    }

    #[test]
    fn operators_bind_as_their_parentheses_say() {
        let table = [
            ("attributes:a AND attributes:b", [false, false, false, true]),
            ("attributes:a OR attributes:b", [false, true, true, true]),
            ("NOT attributes:a AND attributes:b", [false, false, true, false]),
            ("NOT (attributes:a AND attributes:b)", [true, true, true, false]),
            ("NOT attributes:a OR NOT attributes:b", [true, true, true, false]),
            ("attributes:a AND -attributes:b", [false, true, false, false]),
            ("(attributes:a AND NOT attributes:b) OR (attributes:b AND NOT attributes:a)", [false, true, true, false]),
            ("attributes:a AND (attributes:b OR attributes:a)", [false, true, false, true]),
            ("(((attributes:a))) OR ((attributes:b))", [false, true, true, true]),
            ("attributes:a AND attributes:b AND attributes:a", [false, false, false, true]),
        ];
        let messages: [&[(&str, &str)]; 4] = [&[], &[("a", "")], &[("b", "")], &[("a", ""), ("b", "")]];
        for (filter, expected) in table {
            for (message, expected) in messages.into_iter().zip(expected) {
                assert_eq!(matches(filter, message), expected, "{filter} on {message:?}");
            }
        }
    }

    #[test]
    fn the_last_value_of_a_repeated_key_counts() {
        assert!(matches("attributes.k = \"2\"", &[("k", "1"), ("k", "2")]));
        assert!(!matches("attributes.k = \"1\"", &[("k", "1"), ("k", "2")]));
        assert!(!matches("attributes.k != \"2\"", &[("k", "1"), ("k", "2")]));
        assert!(!matches("hasPrefix(attributes.k, \"1\")", &[("k", "1"), ("k", "2")]));
    }

    #[test]
    fn keys_and_values_are_case_sensitive() {
        assert!(!matches("attributes:name", &[("Name", "x")]));
        assert!(matches("attributes:Name", &[("Name", "x")]));
        assert!(!matches("attributes.name = \"X\"", &[("name", "x")]));
        assert!(!matches("hasPrefix(attributes.name, \"X\")", &[("name", "xy")]));
    }

    #[test]
    fn keys_take_letters_digits_underscores_and_hyphens_or_quotes() {
        assert!(matches("attributes:ce-type", &[("ce-type", "x")]));
        assert!(matches("attributes.a_b-1 = \"x\"", &[("a_b-1", "x")]));
        assert!(matches("attributes.1 = \"x\"", &[("1", "x")]));
        assert!(matches("attributes:\"iana.org/language_tag\"", &[("iana.org/language_tag", "x")]));
        assert!(matches("attributes.\"a b\" = \"c\"", &[("a b", "c")]));
        assert!(matches("attributes:AND", &[("AND", "")]));
        assert!(matches("attributes:a- AND attributes:NOT", &[("a-", ""), ("NOT", "")]));
        assert!(matches("hasPrefix(attributes.\"clé\", \"é\")", &[("clé", "été")]));
    }

    #[test]
    fn escapes_stand_for_the_characters_they_name() {
        let table = [
            (r#""a\\b""#, "a\\b"),
            (r#""say \"hi\"""#, "say \"hi\""),
            (r#""\u00e9\u20AC""#, "é€"),
            (r#""\ud83d\ude00""#, "😀"),
            (r#""\x41\xe9""#, "Aé"),
            (r#""\101\351\000""#, "Aé\0"),
            (r#""\a\b\f\n\r\t\v\'""#, "\u{7}\u{8}\u{c}\n\r\t\u{b}'"),
            ("\"tab\there 😀\"", "tab\there 😀"),
        ];
        for (literal, value) in table {
            assert!(matches(&format!("attributes.k = {literal}"), &[("k", value)]), "{literal}");
            assert!(matches(&format!("attributes:{literal}"), &[(value, "")]), "{literal} as a key");
        }
    }

    #[test]
    fn white_space_may_stand_between_any_two_tokens_and_may_be_left_out_where_they_stay_apart() {
        for filter in [
            "attributes:a AND attributes.b=\"1\"",
            " \t\r\n attributes : a\nAND\tattributes . b = \"1\" ",
            "(attributes:a)AND(attributes.b=\"1\")",
            "attributes.b=\"1\"AND attributes:a",
            "hasPrefix ( attributes . b , \"1\" ) AND attributes:a",
            "-  (NOT(attributes:a)OR NOT attributes:b)",
        ] {
            assert!(matches(filter, &[("a", "x"), ("b", "1")]), "{filter}");
            assert!(!matches(filter, &[("a", "x")]), "{filter}");
        }
    }

    #[test]
    fn the_length_limit_counts_bytes() {
        let filter = |value: String| format!("attributes.k = \"{value}\"");
        let room = 256 - filter(String::new()).len();
        assert!(matches(&filter("a".repeat(room)), &[("k", &"a".repeat(room))]));
        assert_eq!(Filter::parse(&filter("a".repeat(room + 1))), Err(FilterError::TooLong { bytes: 257 }));
        let wide = filter("é".repeat(130));
        assert_eq!(Filter::parse(&wide), Err(FilterError::TooLong { bytes: wide.len() }));
    }

    #[test]
    fn the_most_tests_a_filter_can_hold_are_all_judged() {
        let filter = ('a'..='p').map(|c| format!("attributes:{c}")).collect::<Vec<_>>().join(" OR ");
        assert!(filter.len() <= 256, "{}", filter.len());
        for key in 'a'..='q' {
            assert_eq!(matches(&filter, &[(&key.to_string(), "")]), key != 'q', "{key}");
        }
        let filter = ('a'..='o').map(|c| format!("attributes:{c}")).collect::<Vec<_>>().join(" AND ");
        assert!(filter.len() <= 256, "{}", filter.len());
        let keys: Vec<_> = ('a'..='o').map(String::from).collect();
        let all: Vec<_> = keys.iter().map(|k| (k.as_str(), "")).collect();
        assert!(matches(&filter, &all));
        for missing in &keys {
            let rest: Vec<_> = all.iter().copied().filter(|(key, _)| key != missing).collect();
            assert!(!matches(&filter, &rest), "without {missing}");
        }
    }

    #[test]
    fn deep_nesting_within_the_length_limit_is_parsed() {
        let depth = (256 - "attributes:a".len()) / 2;
        let filter = format!("{}attributes:a{}", "(".repeat(depth), ")".repeat(depth));
        assert_eq!(filter.len(), 256);
        assert!(matches(&filter, &[("a", "")]));
        let depth = (256 - "attributes:a".len()) / 3;
        let filter = format!("{}attributes:a{}", "-(".repeat(depth), ")".repeat(depth));
        assert_eq!(matches(&filter, &[("a", "")]), depth.is_multiple_of(2));
    }
}
