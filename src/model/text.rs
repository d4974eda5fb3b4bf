//! Texts of callers inside our own.

use std::borrow::Cow;

/// Bytes of a caller's text that an error repeats: any legal name of common length, and any ack id. An error travels twice in
/// the trailers of its call, percent-encoded and in base64, and clients read 8 KiB of them unless they are told otherwise.
const MAX_SHOWN_BYTES: usize = 300;

/// The beginning of a caller's text, for an error: all of it where it is not long.
pub fn clipped(text: &str) -> Cow<'_, str> {
    if text.len() <= MAX_SHOWN_BYTES {
        return text.into();
    }
    let end = (0..=MAX_SHOWN_BYTES).rev().find(|end| text.is_char_boundary(*end)).unwrap_or_default();
    format!("{}...", &text[..end]).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_between_characters_and_says_so() {
        assert_eq!(clipped(&"a".repeat(300)), "a".repeat(300));
        assert_eq!(clipped(&"a".repeat(301)), format!("{}...", "a".repeat(300)));
        assert_eq!(clipped(&format!("{}é", "a".repeat(299))), format!("{}...", "a".repeat(299)));
        assert_eq!(clipped(""), "");
    }
}
