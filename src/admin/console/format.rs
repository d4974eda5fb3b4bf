//! Numbers and times as people read them.

use std::fmt::Write;

/// A length of time, in its largest unit.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.max(0.0) as u64;
    match whole {
        0..=59 => format!("{whole} s"),
        60..=3599 => format!("{} min", whole / 60),
        3600..=86_399 => format!("{} h", whole / 3600),
        _ => format!("{} d", whole / 86_400),
    }
}

/// A number of bytes.
pub fn size(bytes: u64) -> String {
    let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} B"),
    }
}

/// A point in time, milliseconds since the epoch, as RFC 3339 writes it.
pub fn time(ms: u64) -> String {
    let seconds = i64::try_from(ms / 1000).unwrap_or(i64::MAX);
    prost_types::Timestamp { seconds, nanos: (ms % 1000 * 1_000_000) as i32 }.to_string()
}

/// Bytes in rows of 16, with their offsets and what of them is ASCII.
pub fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for (row, chunk) in bytes.chunks(16).enumerate() {
        let mut codes = String::new();
        chunk.iter().for_each(|byte| {
            let _ = write!(codes, "{byte:02x} ");
        });
        let shown: String = chunk.iter().map(|b| if b.is_ascii_graphic() || *b == b' ' { char::from(*b) } else { '.' }).collect();
        let _ = writeln!(text, "{:06x}  {codes:<48} {shown}", row * 16);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_for_people() {
        assert_eq!([0.4, 61.0, 7200.0, 200_000.0].map(duration), ["0 s", "1 min", "2 h", "2 d"]);
        assert_eq!([10, 2048, 5 << 20, 3 << 30].map(size), ["10 B", "2.0 KiB", "5.0 MiB", "3.0 GiB"]);
        assert_eq!(time(1_660_319_789_732), "2022-08-12T15:56:29.732Z");
    }

    #[test]
    fn bytes_are_shown_in_rows_with_their_offsets() {
        let text = hex(b"0123456789abcdef\x00<");
        assert_eq!(
            text,
            "000000  30 31 32 33 34 35 36 37 38 39 61 62 63 64 65 66  0123456789abcdef\n000010  00 3c                                            .<\n"
        );
    }
}
