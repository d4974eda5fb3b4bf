use std::fs::OpenOptions;

use super::*;
use crate::broker::embedded::log::frame::{FIRST_FRAME, FRAME_HEADER};

/// A log whose frames hold one record each, as a killed process would leave it. Answers where the frames begin, the last
/// entry being the end.
fn killed(bodies: &[&[u8]]) -> (tempfile::TempDir, Vec<u64>) {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    let mut edges = vec![u64::from(FIRST_FRAME)];
    for body in bodies {
        let position = put(&log, body).position;
        edges.push(u64::from(FIRST_FRAME) + position);
    }
    (copy(directory.path()), edges)
}

fn truncate(directory: &Path, length: u64) {
    OpenOptions::new().write(true).open(segment_file(directory, 1)).unwrap().set_len(length).unwrap();
}

#[test]
fn cut_at_any_byte_the_log_keeps_every_whole_frame_and_goes_on() {
    let bodies: [&[u8]; 3] = [b"one", b"the second", b"3"];
    let (directory, edges) = killed(&bodies);
    for length in edges[0]..=edges[3] {
        let cut = copy(directory.path());
        truncate(cut.path(), length);
        let whole = edges[1..].iter().filter(|edge| **edge <= length).count();
        let (log, found) = open(cut.path());
        assert_eq!(found, bodies[..whole].iter().map(|body| record(body)).collect::<Vec<_>>(), "cut at {length}");
        put(&log, b"next");
        let after = copy(cut.path());
        let expected: Vec<Record> = bodies[..whole].iter().chain([&&b"next"[..]]).map(|body| record(body)).collect();
        assert_eq!(open(after.path()).1, expected, "cut at {length}");
    }
}

#[test]
fn any_changed_byte_before_a_later_frame_refuses_the_start_and_names_the_place() {
    let (directory, edges) = killed(&[b"one", b"the second", b"3"]);
    for frame in 0..2 {
        for offset in edges[frame]..edges[frame + 1] {
            let damaged = copy(directory.path());
            flip(&segment_file(damaged.path(), 1), offset);
            let text = damage(open_after(options(damaged.path()), 0));
            let place = format!("0000000001.log is damaged at offset {}", edges[frame]);
            assert!(text.contains(&place), "byte {offset}: {text}");
        }
    }
}

#[test]
fn any_changed_byte_of_the_last_frame_cuts_only_that() {
    let (directory, edges) = killed(&[b"one", b"the second", b"3"]);
    for offset in edges[2]..edges[3] {
        let damaged = copy(directory.path());
        flip(&segment_file(damaged.path(), 1), offset);
        assert_eq!(open(damaged.path()).1, [record(b"one"), record(b"the second")], "byte {offset}");
    }
}

#[test]
fn damage_to_the_last_frame_of_a_closed_or_resting_log_refuses_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    let last = put(&log, b"last").bodies[0].offset;
    wait_until("the note of what is durable", || shared(&log).marked.load(SeqCst) == log.durable_position());
    let resting = copy(directory.path());
    drop(log);
    for directory in [resting.path(), directory.path()] {
        flip(&segment_file(directory, 1), u64::from(last));
        damage(open_after(options(directory), 0));
    }
}

#[test]
fn after_a_clean_close_a_note_of_what_is_durable_takes_the_closing_frames_place() {
    let directory = tempfile::tempdir().unwrap();
    let mut expected = Vec::new();
    let mut ends = vec![0];
    for n in 0..4u8 {
        let (log, found) = open(directory.path());
        assert_eq!(found, expected);
        let at = log.position();
        assert_eq!(at - ends[usize::from(n)], if n == 0 { 0 } else { FRAME_HEADER as u64 });
        let last = put(&log, &[n; 10]);
        ends.push(last.position);
        expected.push(record(&[n; 10]));
        // At once, without any rest: a start after a crash knows that the records before were durable.
        let damaged = copy(directory.path());
        if n > 0 {
            flip(&segment_file(damaged.path(), 1), u64::from(FIRST_FRAME) + ends[usize::from(n)] - 1);
            damage(open_after(options(damaged.path()), 0));
        }
    }
}

#[test]
fn what_a_cut_removed_never_comes_back() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    // Written, never synced: after a crash of the machine any of them may be missing.
    let frames: Vec<u64> = (0..4u8)
        .map(|n| {
            let position = log.append(AppendKind::Control, false, b"h", &[n; 10], &[10]).unwrap().position;
            block_on(log.written(position)).unwrap();
            position
        })
        .collect();
    let crashed = copy(directory.path());
    flip(&segment_file(crashed.path(), 1), u64::from(FIRST_FRAME) + frames[0] + FRAME_HEADER as u64);
    let (log, found) = open(crashed.path());
    assert_eq!(found, [record(&[0; 10])]);
    // With the note that the start wrote, a record of this size ends exactly where the fourth one began.
    assert_eq!(put(&log, &[9; 45]).position, frames[2]);
    let again = copy(crashed.path());
    assert_eq!(open(again.path()).1, [record(&[0; 10]), record(&[9; 45])]);
}

/// A killed log of several segments.
fn several_segments() -> (tempfile::TempDir, Vec<Appended>) {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    let mut written = Vec::new();
    for n in 0..24u8 {
        written.push(append_waiting(&log, &[n; 8000]));
    }
    assert!(log.segments().len() > 3);
    (copy(directory.path()), written)
}

#[test]
fn a_missing_segment_refuses_the_start() {
    let (directory, written) = several_segments();
    let last = written[23].bodies[0].segment;
    for number in 1..last {
        let incomplete = copy(directory.path());
        fs::remove_file(segment_file(incomplete.path(), number)).unwrap();
        let text = damage(open_after(options(incomplete.path()), 0));
        assert!(text.contains("missing"), "{text}");
    }
}

#[test]
fn a_log_that_ends_before_the_checkpoint_refuses_the_start() {
    let (directory, written) = several_segments();
    let last = written[23].bodies[0].segment;
    for number in last..=last + 1 {
        let _ = fs::remove_file(segment_file(directory.path(), number));
    }
    let text = damage(open_after(options(directory.path()), written[23].position));
    assert!(text.contains("but it reached"), "{text}");
    let empty = tempfile::tempdir().unwrap();
    let text = damage(open_after(options(empty.path()), 1));
    assert!(text.contains("holds no log segments"), "{text}");
}

#[test]
fn a_damaged_segment_header_refuses_the_start() {
    let (directory, _) = several_segments();
    for number in 1..=2 {
        let damaged = copy(directory.path());
        flip(&segment_file(damaged.path(), number), 17);
        let text = damage(open_after(options(damaged.path()), 0));
        assert!(text.contains(&format!("{number:010}.log is damaged at offset 0")), "{text}");
    }
}

#[test]
fn a_damaged_first_frame_of_any_segment_refuses_the_start() {
    let (directory, written) = several_segments();
    for number in 1..written[23].bodies[0].segment {
        let damaged = copy(directory.path());
        flip(&segment_file(damaged.path(), number), u64::from(FIRST_FRAME));
        let text = damage(open_after(options(damaged.path()), 0));
        assert!(text.contains("is damaged at offset"), "{text}");
    }
}

#[test]
fn a_segment_of_a_newer_format_is_refused_with_both_versions() {
    let (directory, _) = killed(&[b"one"]);
    let path = segment_file(directory.path(), 1);
    let mut bytes = fs::read(&path).unwrap();
    bytes[8] = 2;
    fs::write(&path, bytes).unwrap();
    let text = damage(open_after(options(directory.path()), 0));
    assert!(text.contains("format version 2, and this program knows versions up to 1"), "{text}");
}

#[test]
fn a_segment_under_another_number_is_refused() {
    let (directory, _) = killed(&[b"one"]);
    fs::rename(segment_file(directory.path(), 1), segment_file(directory.path(), 2)).unwrap();
    let text = damage(open_after(options(directory.path()), 0));
    assert!(text.contains("it is the header of segment 1"), "{text}");
}

#[test]
fn a_message_that_imitates_frames_is_not_taken_for_any() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    put(&log, b"genuine");
    // The forger knows everything but the stamp, and the torn frame exposes the message behind the log's end.
    let forged = crate::broker::embedded::log::frame::FrameHeader {
        closing: false,
        records: 0,
        stamp: 0,
        position: log.position(),
        durable: u64::MAX,
        length: 0,
        payload_checksum: 0,
    };
    let position = put(&log, &forged.encode().repeat(20)).bodies[0].offset;
    let crashed = copy(directory.path());
    flip(&segment_file(crashed.path(), 1), u64::from(position) - 40);
    assert_eq!(open(crashed.path()).1, [record(b"genuine")]);
}
