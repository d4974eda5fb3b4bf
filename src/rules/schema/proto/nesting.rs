//! A look at a `.proto` source before it is parsed: the parser calls itself for every level of braces.

/// Levels of braces and brackets. Google's own compiler gives up at 32 nested messages.
const MAX_NESTING: usize = 32;

/// Checks that nothing is nested too deeply. Reads comments and strings as the parser does, and refuses those that the
/// parser would refuse, so that both agree on what is inside them.
///
/// # Errors
/// What is wrong, and in which line.
pub(super) fn check(source: &str) -> Result<(), String> {
    let mut rest = source;
    let mut depth = 0usize;
    while let Some(next) = rest.chars().next() {
        let error = |text: &str| Err(format!("line {}: {text}", 1 + source[..source.len() - rest.len()].matches('\n').count()));
        let mut length = next.len_utf8();
        match next {
            '{' | '[' | '<' | '(' => {
                depth += 1;
                if depth > MAX_NESTING {
                    return error(&format!("more than {MAX_NESTING} levels of nesting"));
                }
            }
            '}' | ']' | '>' | ')' => depth = depth.saturating_sub(1),
            '#' => return error("unexpected '#'"),
            '/' if rest.starts_with("//") => length = rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => match rest[2..].split_once("*/") {
                Some((comment, _)) if !comment.contains("/*") => length = comment.len() + 4,
                Some(_) => return error("a comment inside a comment"),
                None => return error("a comment without an end"),
            },
            '"' | '\'' => match string_length(rest) {
                Some(found) => length = found,
                None => return error("a string without an end, or with an unknown escape"),
            },
            _ => {}
        }
        rest = &rest[length..];
    }
    Ok(())
}

/// The length of the string literal at the start of `text`, quotes included.
fn string_length(text: &str) -> Option<usize> {
    let quote = text.chars().next()?;
    let mut at = 1;
    loop {
        let next = text[at..].chars().next()?;
        at += match next {
            '\n' | '\0' => return None,
            '\\' => 1 + escape_length(&text[at + 1..])?,
            _ => next.len_utf8(),
        };
        if next == quote {
            return Some(at);
        }
    }
}

/// The length of an escape after its backslash; digits beyond the first ones needed count as plain characters.
fn escape_length(text: &str) -> Option<usize> {
    let hex = |count: usize| text.get(1..=count).is_some_and(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
    match text.bytes().next()? {
        b'a' | b'b' | b'f' | b'n' | b'r' | b't' | b'v' | b'?' | b'\\' | b'\'' | b'"' | b'0'..=b'7' => Some(1),
        b'x' | b'X' => hex(1).then_some(2),
        b'u' => hex(4).then_some(5),
        b'U' => hex(8).then_some(9),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nesting_is_counted_outside_comments_and_strings() {
        let deep = format!("{}{}", "{".repeat(32), "}".repeat(32));
        assert_eq!(check(&deep), Ok(()));
        assert_eq!(check(&deep.repeat(20)), Ok(()));
        assert!(check(&format!("{{{deep}}}")).unwrap_err().contains("line 1: more than 32"));
        let quiet = format!("// {0}\n/* {0} */ '{0}' \"\\\"{0}\" '\"{0}\\\\'", "{".repeat(100));
        assert_eq!(check(&quiet), Ok(()));
    }

    #[test]
    fn closers_inside_comments_and_strings_hide_no_opener() {
        for quiet in ["// }\n", "/* } */", "'}'", "\"\\x7d}\""] {
            assert!(check(&format!("{{{quiet}").repeat(33)).is_err(), "{quiet}");
        }
    }

    #[test]
    fn what_the_parser_would_read_in_another_way_is_refused() {
        for text in
            ["'a", "'a\n'", "'\0'", "'\\q'", "'\\x'", "'\\u12'", "'\\", "/* ", "/* /* */ */", "\n# x\n", "'a\"", "'\\U0000004'"]
        {
            assert!(check(text).is_err(), "{text:?}");
        }
        assert!(check("\n\n#").unwrap_err().starts_with("line 3"));
    }
}
