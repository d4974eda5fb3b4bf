//! Text to postfix steps, with an explicit stack: nesting costs no call depth.

use super::{Condition, Expected, Filter, FilterError, Found, Step, Test, string};
use crate::model::limits::MAX_FILTER_BYTES;

/// One level of parentheses while it is being read.
#[derive(Default)]
struct Level {
    /// The operator that joins the level's operands, once there is one.
    joiner: Option<Step>,
    /// The level as a whole is negated.
    negated: bool,
}

pub(super) fn parse(text: &str) -> Result<Filter, FilterError> {
    if text.len() > MAX_FILTER_BYTES {
        return Err(FilterError::TooLong { bytes: text.len() });
    }
    let mut cursor = Cursor { text, at: 0 };
    let mut filter = Filter { tests: Vec::new(), steps: Vec::new() };
    let mut outer: Vec<Level> = Vec::new();
    let mut level = Level::default();
    // A joined operand applies its operator when it is complete; a first operand has none.
    loop {
        cursor.skip_white_space();
        let negated = cursor.eat_negation();
        cursor.skip_white_space();
        if cursor.eat("(") {
            outer.push(std::mem::replace(&mut level, Level { joiner: None, negated }));
            continue;
        }
        let test = read_test(&mut cursor, negated)?;
        filter.steps.push(Step::Test(filter.tests.len() as u8));
        filter.tests.push(test);
        complete(&mut filter.steps, negated, level.joiner);
        loop {
            cursor.skip_white_space();
            if !outer.is_empty() && cursor.eat(")") {
                let inner = std::mem::replace(&mut level, outer.pop().unwrap_or_default());
                complete(&mut filter.steps, inner.negated, level.joiner);
            } else if cursor.rest().is_empty() && outer.is_empty() {
                return Ok(filter);
            } else {
                level.joiner = Some(read_joiner(&mut cursor, level.joiner, outer.is_empty())?);
                break;
            }
        }
    }
}

/// An operand is complete: negate it, then join it to the operands before it.
fn complete(steps: &mut Vec<Step>, negated: bool, joiner: Option<Step>) {
    steps.extend(negated.then_some(Step::Not));
    steps.extend(joiner);
}

fn read_joiner(cursor: &mut Cursor<'_>, joiner: Option<Step>, top: bool) -> Result<Step, FilterError> {
    let expected = if top { Expected::OperatorOrEnd } else { Expected::OperatorOrClosing };
    let found = match cursor.word() {
        "AND" => Step::And,
        "OR" => Step::Or,
        _ => return Err(cursor.expected(expected)),
    };
    match joiner {
        Some(Step::And) if found == Step::Or => return Err(cursor.expected(Expected::OnlyAnd)),
        Some(Step::Or) if found == Step::And => return Err(cursor.expected(Expected::OnlyOr)),
        _ => {}
    }
    cursor.at += cursor.word().len();
    Ok(found)
}

fn read_test(cursor: &mut Cursor<'_>, negated: bool) -> Result<Test, FilterError> {
    if cursor.eat_word("attributes") {
        return read_comparison(cursor);
    }
    if !cursor.eat_word("hasPrefix") {
        return Err(cursor.expected(if negated { Expected::NegatedOperand } else { Expected::Operand }));
    }
    cursor.require("(", Expected::OpeningParenthesis)?;
    cursor.skip_white_space();
    if !cursor.eat_word("attributes") {
        return Err(cursor.expected(Expected::Attributes));
    }
    cursor.require(".", Expected::Dot)?;
    let key = read_key(cursor)?;
    cursor.require(",", Expected::Comma)?;
    let prefix = read_literal(cursor)?;
    cursor.require(")", Expected::ClosingParenthesis)?;
    Ok(Test { key, condition: Condition::HasPrefix(prefix) })
}

/// Reads what follows the word `attributes`.
fn read_comparison(cursor: &mut Cursor<'_>) -> Result<Test, FilterError> {
    cursor.skip_white_space();
    if cursor.eat(":") {
        return Ok(Test { key: read_key(cursor)?, condition: Condition::Present });
    }
    cursor.require(".", Expected::Accessor)?;
    let key = read_key(cursor)?;
    cursor.skip_white_space();
    let condition = if cursor.eat("!=") {
        Condition::Differs
    } else {
        cursor.require("=", Expected::Comparison)?;
        Condition::Equals
    };
    Ok(Test { key, condition: condition(read_literal(cursor)?) })
}

fn read_key(cursor: &mut Cursor<'_>) -> Result<String, FilterError> {
    cursor.skip_white_space();
    if cursor.peek() == Some('"') {
        return string::read(cursor);
    }
    let length = cursor.rest().bytes().take_while(|b| is_word_byte(*b) || *b == b'-').count();
    if length == 0 {
        return Err(cursor.expected(Expected::Key));
    }
    let key = cursor.rest()[..length].to_owned();
    cursor.at += length;
    Ok(key)
}

fn read_literal(cursor: &mut Cursor<'_>) -> Result<String, FilterError> {
    cursor.skip_white_space();
    if cursor.peek() != Some('"') {
        return Err(cursor.expected(Expected::Literal));
    }
    string::read(cursor)
}

/// Bytes that make up keywords; two words need something between them.
pub(super) fn is_word_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// A place in the text, always between two characters.
pub(super) struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn position(&self) -> usize {
        self.at
    }

    pub(super) fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    /// Steps over one character.
    pub(super) fn next(&mut self) {
        self.at += self.peek().map_or(0, char::len_utf8);
    }

    /// Steps over `token` if it comes next.
    pub(super) fn eat(&mut self, token: &str) -> bool {
        let found = self.rest().starts_with(token);
        self.at += if found { token.len() } else { 0 };
        found
    }

    pub(super) fn expected(&self, expected: Expected) -> FilterError {
        self.expected_at(self.at, expected)
    }

    pub(super) fn expected_at(&self, position: usize, expected: Expected) -> FilterError {
        FilterError::Syntax { position, expected, found: Found::at(&self.text[position..]) }
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// The word that comes next, perhaps empty.
    fn word(&self) -> &'a str {
        let rest = self.rest();
        &rest[..rest.bytes().take_while(|b| is_word_byte(*b)).count()]
    }

    fn eat_word(&mut self, word: &str) -> bool {
        self.word() == word && self.eat(word)
    }

    fn eat_negation(&mut self) -> bool {
        self.eat("-") || self.eat_word("NOT")
    }

    fn require(&mut self, token: &str, expected: Expected) -> Result<(), FilterError> {
        self.skip_white_space();
        if self.eat(token) { Ok(()) } else { Err(self.expected(expected)) }
    }

    fn skip_white_space(&mut self) {
        self.at += self.rest().bytes().take_while(u8::is_ascii_whitespace).count();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn refused(text: &str, at: usize, wanted: Expected) {
        match parse(text) {
            Err(FilterError::Syntax { position, expected, .. }) => assert_eq!((position, expected), (at, wanted), "{text}"),
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn a_text_outside_the_grammar_is_refused_at_the_byte_where_it_leaves_it() {
        for (text, at, expected) in [
            ("", 0, Expected::Operand),
            ("  ", 2, Expected::Operand),
            ("()", 1, Expected::Operand),
            ("attributes", 10, Expected::Accessor),
            ("attributes:", 11, Expected::Key),
            ("attributes:a and attributes:b", 13, Expected::OperatorOrEnd),
            ("attributes:a AND", 16, Expected::Operand),
            ("attributes:a ANDattributes:b", 13, Expected::OperatorOrEnd),
            ("attributes:a attributes:b", 13, Expected::OperatorOrEnd),
            ("attributes:a -attributes:b", 13, Expected::OperatorOrEnd),
            ("attributes:a)", 12, Expected::OperatorOrEnd),
            ("(attributes:a", 13, Expected::OperatorOrClosing),
            ("(attributes:a))", 14, Expected::OperatorOrEnd),
            ("not attributes:a", 0, Expected::Operand),
            ("NOT", 3, Expected::NegatedOperand),
            ("NOT NOT attributes:a", 4, Expected::NegatedOperand),
            ("--attributes:a", 1, Expected::NegatedOperand),
            ("NOTattributes:a", 0, Expected::Operand),
            ("AND attributes:a", 0, Expected::Operand),
            ("Attributes:a", 0, Expected::Operand),
            ("attribute:a", 0, Expected::Operand),
            ("HASPREFIX(attributes.a, \"x\")", 0, Expected::Operand),
            ("hasSuffix(attributes.a,\"x\")", 0, Expected::Operand),
            ("hasPrefix attributes.a", 10, Expected::OpeningParenthesis),
            ("hasPrefix(attributes.a)", 22, Expected::Comma),
            ("hasPrefix(attributes:a, \"x\")", 20, Expected::Dot),
            ("hasPrefix(\"x\", attributes.a)", 10, Expected::Attributes),
            ("hasPrefix(attributes.a, x)", 24, Expected::Literal),
            ("hasPrefix(attributes.a, \"x\", \"y\")", 27, Expected::ClosingParenthesis),
            ("\"com\" = attributes.x", 0, Expected::Operand),
            ("attributes.a = attributes.b", 15, Expected::Literal),
            ("attributes.a = (\"x\" OR \"y\")", 15, Expected::Literal),
            ("attributes.a > \"1\"", 13, Expected::Comparison),
            ("attributes.a <= \"1\"", 13, Expected::Comparison),
            ("attributes.a == \"1\"", 14, Expected::Literal),
            ("attributes.a = 1", 15, Expected::Literal),
            ("attributes.a=-1", 13, Expected::Literal),
            ("attributes.a = 'x'", 15, Expected::Literal),
            ("attributes.a = *", 15, Expected::Literal),
            ("attributes.a", 12, Expected::Comparison),
            ("attributes[\"a\"] = \"x\"", 10, Expected::Accessor),
            ("data = \"x\"", 0, Expected::Operand),
            ("message_id = \"1\"", 0, Expected::Operand),
            ("attributes:iana.org/x", 15, Expected::OperatorOrEnd),
            ("attributes:é", 11, Expected::Key),
            ("attributes:a AND attributes:b OR attributes:c", 30, Expected::OnlyAnd),
            ("attributes:a OR attributes:b AND attributes:c", 29, Expected::OnlyOr),
            ("(attributes:a AND attributes:b OR attributes:c)", 31, Expected::OnlyAnd),
            ("attributes.a = \"x", 17, Expected::ClosingQuote),
            ("attributes.a = \"x\\", 18, Expected::Escape),
            ("attributes.a = \"\\q\"", 17, Expected::Escape),
            ("attributes.a = \"\\x4\"", 16, Expected::HexDigits(2)),
            ("attributes.a = \"\\u12g4\"", 16, Expected::HexDigits(4)),
            ("attributes.a = \"\\12\"", 16, Expected::OctalDigits),
            ("attributes.a = \"\\400\"", 16, Expected::OctalDigits),
            ("attributes.a = \"\\ud800\"", 16, Expected::CodePoint),
            ("attributes.a = \"\\ud800\\u0041\"", 16, Expected::CodePoint),
            ("attributes.a = \"\\ud800\\u00\"", 22, Expected::HexDigits(4)),
            ("attributes.a = \"\\udc00\"", 16, Expected::CodePoint),
            ("attributes:a\u{a0}AND attributes:b", 12, Expected::OperatorOrEnd),
        ] {
            refused(text, at, expected);
        }
    }

    #[test]
    fn a_filter_full_of_openers_is_refused_without_deep_recursion() {
        refused(&"(".repeat(256), 256, Expected::Operand);
        refused(&"-".repeat(256), 1, Expected::NegatedOperand);
        refused(&"NOT ".repeat(64), 4, Expected::NegatedOperand);
        refused(&"-(".repeat(128), 256, Expected::Operand);
        refused(&")".repeat(256), 0, Expected::Operand);
    }

    #[test]
    fn the_error_names_what_was_found() {
        let text = |filter: &str| parse(filter).unwrap_err().to_string();
        assert_eq!(
            text("attributes:a and attributes:b"),
            "The filter is not valid at byte 13: expected 'AND', 'OR' or the end of the filter, found 'and'."
        );
        assert_eq!(text("attributes.a ="), {
            "The filter is not valid at byte 14: expected a string in double quotes, found the end of the filter."
        });
        assert!(text("attributes.a > \"\"").ends_with("found '>'."));
        assert!(text("attributes.a \u{1}").ends_with("found '\\u{1}'."));
    }
}
