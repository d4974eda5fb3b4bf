//! String literals: double quotes around characters and escapes.

use super::{Expected, FilterError, parser::Cursor};

/// Reads a literal whose opening quote is the cursor's next character. `\xHH` and `\ooo` name code points, like `\uXXXX`.
pub(super) fn read(cursor: &mut Cursor<'_>) -> Result<String, FilterError> {
    let mut value = String::new();
    cursor.next();
    loop {
        match cursor.peek() {
            None => return Err(cursor.expected(Expected::ClosingQuote)),
            Some('"') => {
                cursor.next();
                return Ok(value);
            }
            Some('\\') => value.push(escape(cursor)?),
            Some(character) => {
                cursor.next();
                value.push(character);
            }
        }
    }
}

/// Reads one escape, the backslash included.
fn escape(cursor: &mut Cursor<'_>) -> Result<char, FilterError> {
    let start = cursor.position();
    cursor.next();
    let Some(kind) = cursor.peek() else { return Err(cursor.expected(Expected::Escape)) };
    if matches!(kind, '0'..='7') {
        let value = digits(cursor, 8, 3).filter(|value| *value <= 0o377);
        return value.and_then(char::from_u32).ok_or_else(|| cursor.expected_at(start, Expected::OctalDigits));
    }
    let plain = match kind {
        '\\' | '"' | '\'' => kind,
        'a' => '\u{7}',
        'b' => '\u{8}',
        'f' => '\u{c}',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'v' => '\u{b}',
        'x' | 'u' => return numeric(cursor, start, kind),
        _ => return Err(cursor.expected(Expected::Escape)),
    };
    cursor.next();
    Ok(plain)
}

/// Reads `xHH` or `uXXXX`, two of the latter when they are a surrogate pair.
fn numeric(cursor: &mut Cursor<'_>, start: usize, kind: char) -> Result<char, FilterError> {
    cursor.next();
    let count = if kind == 'x' { 2 } else { 4 };
    let Some(first) = digits(cursor, 16, count) else { return Err(cursor.expected_at(start, Expected::HexDigits(count))) };
    let code = match first {
        0xd800..=0xdbff if cursor.eat("\\u") => match digits(cursor, 16, 4) {
            Some(second @ 0xdc00..=0xdfff) => 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00),
            Some(_) => first,
            None => return Err(cursor.expected_at(start + "\\uXXXX".len(), Expected::HexDigits(4))),
        },
        _ => first,
    };
    char::from_u32(code).ok_or_else(|| cursor.expected_at(start, Expected::CodePoint))
}

/// Reads exactly `count` digits.
fn digits(cursor: &mut Cursor<'_>, radix: u32, count: u8) -> Option<u32> {
    let mut value = 0;
    for _ in 0..count {
        value = value * radix + cursor.peek()?.to_digit(radix)?;
        cursor.next();
    }
    Some(value)
}
