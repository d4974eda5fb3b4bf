//! Why a filter is not one.

use std::fmt;

use crate::model::limits::MAX_FILTER_BYTES;

/// A filter that can't be used. Positions are byte offsets into the text, from 0.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FilterError {
    #[error("The filter is too long. You passed {bytes} bytes in the request, but the maximum is {MAX_FILTER_BYTES} bytes.")]
    TooLong { bytes: usize },
    #[error("The filter is not valid at byte {position}: expected {expected}, found {found}.")]
    Syntax { position: usize, expected: Expected, found: Found },
}

impl FilterError {
    /// The byte at which the text leaves the grammar; of a text that is too long, the first byte beyond the limit.
    pub fn position(&self) -> usize {
        match self {
            Self::TooLong { .. } => MAX_FILTER_BYTES,
            Self::Syntax { position, .. } => *position,
        }
    }
}

/// What the grammar allows at a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    Operand,
    /// After NOT or `-`, which are not repeated.
    NegatedOperand,
    Accessor,
    Comparison,
    Key,
    Literal,
    OpeningParenthesis,
    ClosingParenthesis,
    Comma,
    Attributes,
    Dot,
    /// After a complete expression at the top level.
    OperatorOrEnd,
    /// After a complete expression inside parentheses.
    OperatorOrClosing,
    /// The level joins its operands with AND.
    OnlyAnd,
    /// The level joins its operands with OR.
    OnlyOr,
    ClosingQuote,
    Escape,
    HexDigits(u8),
    OctalDigits,
    /// The second half of a surrogate pair, or a code point that stands alone.
    CodePoint,
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Operand => "'attributes', 'hasPrefix', 'NOT', '-' or '('",
            Self::NegatedOperand => "'attributes', 'hasPrefix' or '(' after a negation",
            Self::Accessor => "':' or '.' after 'attributes'",
            Self::Comparison => "'=' or '!='",
            Self::Key => "an attribute key (letters, digits, '_' and '-', or a string in double quotes)",
            Self::Literal => "a string in double quotes",
            Self::OpeningParenthesis => "'('",
            Self::ClosingParenthesis => "')'",
            Self::Comma => "','",
            Self::Attributes => "'attributes'",
            Self::Dot => "'.'",
            Self::OperatorOrEnd => "'AND', 'OR' or the end of the filter",
            Self::OperatorOrClosing => "'AND', 'OR' or ')'",
            Self::OnlyAnd => "'AND' (use parentheses to combine AND and OR)",
            Self::OnlyOr => "'OR' (use parentheses to combine AND and OR)",
            Self::ClosingQuote => "a closing '\"'",
            Self::Escape => "an escape: one of \\\\ \\\" \\' \\a \\b \\f \\n \\r \\t \\v \\uXXXX \\xHH \\ooo",
            Self::HexDigits(count) => return write!(f, "{count} hexadecimal digits"),
            Self::OctalDigits => "3 octal digits, 000 to 377",
            Self::CodePoint => "a Unicode code point (surrogates only as a pair)",
        })
    }
}

/// What stands at a position instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    End,
    Word(String),
    Character(char),
}

impl Found {
    /// Describes the start of `rest`: a whole word, or one character.
    pub(super) fn at(rest: &str) -> Self {
        let word = &rest[..rest.bytes().take_while(|b| super::parser::is_word_byte(*b)).count()];
        match rest.chars().next() {
            None => Self::End,
            Some(character) if word.is_empty() => Self::Character(character),
            Some(_) => Self::Word(word.to_owned()),
        }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::End => f.write_str("the end of the filter"),
            Self::Word(word) => write!(f, "'{word}'"),
            // Quoted by hand: escape_debug would show a quotation mark with a backslash that is not there.
            Self::Character(c) if c.is_control() => write!(f, "'{}'", c.escape_unicode()),
            Self::Character(c) => write!(f, "'{c}'"),
        }
    }
}
