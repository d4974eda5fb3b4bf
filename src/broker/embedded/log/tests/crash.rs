//! A process of its own writes and is killed, again and again.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Command, Stdio},
};

use super::*;

const DIRECTORY: &str = "LANDLINE_LOG_CRASH_DIRECTORY";
const AFTER: &str = "LANDLINE_LOG_CRASH_AFTER";
const ROUNDS: u32 = 12;

fn crash_options(directory: &Path) -> LogOptions {
    LogOptions { segment_bytes: 256 << 10, ..options(directory) }
}

fn body(sequence: u64) -> Vec<u8> {
    sequence.to_le_bytes().repeat(10 + (sequence * 7919 % 300) as usize)
}

/// The sequences of a log's records, which hold together.
fn sequences(found: &[Record]) -> Vec<u64> {
    let sequence = |(header, bodies): &Record| {
        let sequence = u64::from_le_bytes(header[..8].try_into().unwrap());
        assert_eq!(bodies, &[body(sequence)]);
        sequence
    };
    found.iter().map(sequence).collect()
}

/// The child: says what is confirmed and up to where it is about to trim.
fn write_until_killed(directory: &Path) {
    let after = std::env::var(AFTER).unwrap();
    let (mut after, mut next) = after.split_once(' ').map(|(a, n)| (a.parse().unwrap(), n.parse().unwrap())).unwrap();
    let (log, found) = open_after(crash_options(directory), after).unwrap();
    next = sequences(&found).last().map_or(next, |last| last + 1);
    let mut out = std::io::stdout();
    loop {
        let batch: Vec<(u64, u64)> = (next..next + 1 + next % 5)
            .filter_map(|n| append(&log, AppendKind::Data, &n.to_le_bytes(), &[&body(n)]).ok().map(|a| (n, a.position)))
            .collect();
        let Some((last, position)) = batch.last().copied() else {
            std::thread::yield_now();
            continue;
        };
        next = last + 1;
        block_on(log.durable(position)).unwrap();
        writeln!(out, "confirmed {last}").unwrap();
        if position - after > 1 << 20 {
            after = position;
            writeln!(out, "checkpoint {after} {next}").unwrap();
            log.trim(after, &|_| false);
        }
    }
}

#[test]
fn what_was_confirmed_before_a_kill_is_there_after_it() {
    if let Ok(directory) = std::env::var(DIRECTORY) {
        write_until_killed(Path::new(&directory));
    }
    let directory = tempfile::tempdir().unwrap();
    let name = std::thread::current().name().unwrap().to_owned();
    let (mut checkpoint, mut from, mut confirmed) = (0u64, 0u64, None);
    for round in 0..ROUNDS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", &name])
            .env(DIRECTORY, directory.path())
            .env(AFTER, format!("{checkpoint} {from}"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let target = confirmed.map_or(0, |c| c + 1) + u64::from(50 + round * 397 % 1500);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let mut note = |line: String| match line.split(' ').collect::<Vec<_>>()[..] {
            ["confirmed", n] => confirmed = n.parse().ok().or(confirmed),
            ["checkpoint", p, n] => (checkpoint, from) = (p.parse().unwrap(), n.parse().unwrap()),
            _ => {}
        };
        let reached = |line: &str| line.strip_prefix("confirmed ").and_then(|n| n.parse().ok()).is_some_and(|n: u64| n >= target);
        for line in lines.by_ref() {
            let done = reached(&line);
            note(line);
            if done {
                break;
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // What it had said before it died counts too; its last line may be cut short, so only whole ones do.
        lines.for_each(&mut note);
        let (_log, found) = open_after(crash_options(directory.path()), checkpoint).unwrap();
        let found = sequences(&found);
        assert_eq!(found, (from..from + found.len() as u64).collect::<Vec<_>>(), "round {round}");
        assert!(from + found.len() as u64 > confirmed.unwrap(), "round {round}: {confirmed:?} was confirmed");
    }
}
