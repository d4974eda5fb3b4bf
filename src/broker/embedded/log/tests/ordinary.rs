use super::*;
use crate::broker::embedded::log::Location;

#[test]
fn records_read_back_at_once_and_after_a_start() {
    let directory = tempfile::tempdir().unwrap();
    let (log, found) = open(directory.path());
    assert!(found.is_empty());
    let first = append(&log, AppendKind::Data, b"publish", &[b"one", b"", b"three"]).unwrap();
    let second = append(&log, AppendKind::Control, b"ack", &[]).unwrap();
    assert!(first.position < second.position);
    block_on(log.durable(second.position)).unwrap();
    assert_eq!(block_on(log.read(&first.bodies)).unwrap(), [&b"one"[..], b"", b"three"]);
    assert_eq!(log.position(), second.position);
    drop(log);
    let (log, found) = open(directory.path());
    let publish = (b"publish".to_vec(), vec![b"one".to_vec(), vec![], b"three".to_vec()]);
    assert_eq!(found, [publish, (b"ack".to_vec(), vec![])]);
    assert_eq!(block_on(log.read(&first.bodies[2..])).unwrap(), [&b"three"[..]]);
    assert!(log.position() >= second.position);
    assert!(put(&log, b"next").position > second.position);
}

#[test]
fn a_start_repeats_only_what_the_checkpoint_does_not_cover() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    let positions: Vec<u64> = (0..5u8).map(|n| put(&log, &[n]).position).collect();
    drop(log);
    for (n, position) in positions.iter().enumerate() {
        let (_log, found) = open_after(options(directory.path()), *position).unwrap();
        assert_eq!(found, (n as u8 + 1..5).map(|n| record(&[n])).collect::<Vec<_>>());
    }
}

#[test]
fn bodies_are_read_in_any_order_and_from_several_segments() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    let body = |n: usize| vec![n as u8; 100 + n * 37 % 2000];
    let locations: Vec<Location> = (0..300).map(|n| append_waiting(&log, &body(n)).bodies[0]).collect();
    assert!(log.segments().len() > 3);
    for order in [(0..300).collect::<Vec<_>>(), (0..300).rev().collect(), (0..300).map(|n| n * 7 % 300).collect()] {
        let asked: Vec<Location> = order.iter().map(|n| locations[*n]).collect();
        let read = block_on(log.read(&asked)).unwrap();
        assert!(order.iter().zip(read).all(|(n, found)| found == body(*n)));
    }
}

#[test]
fn a_record_as_large_as_a_segment_fits_and_a_larger_one_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    // Page of the segment's header, frame's header, lengths of header and body, the header's byte, the body's checksum.
    let largest = MIN_SEGMENT_BYTES as usize - 4096 - 48 - 8 - 4 - 1 - 4;
    let before = log.position();
    assert!(matches!(append(&log, AppendKind::Data, b"h", &[&vec![1; largest + 1]]), Err(LogError::Full(_))));
    assert_eq!(log.position(), before);
    for n in 1..4 {
        append_waiting(&log, &[n]);
        append_waiting(&log, &vec![n; largest]);
    }
    drop(log);
    let (_log, found) = open(directory.path());
    let expected: Vec<Record> = (1..4).flat_map(|n| [record(&[n]), record(&vec![n; largest])]).collect();
    assert_eq!(found, expected);
}

#[test]
fn lengths_that_do_not_add_up_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    assert!(log.append(AppendKind::Data, true, b"h", b"body", &[3]).is_err());
    assert!(log.append(AppendKind::Data, true, b"h", b"body", &[3, 2]).is_err());
    assert_eq!(log.position(), 0);
}

#[test]
fn a_second_opener_is_told_who_has_the_directory_until_the_first_closes() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    let refusal = open_after(options(directory.path()), 0).map(|_| ()).unwrap_err();
    let LogError::Unavailable(text) = refusal else { panic!("another error: {refusal}") };
    assert!(text.contains(&format!("in use by process {}", std::process::id())), "{text}");
    block_on(log.close());
    assert!(open_after(options(directory.path()), 0).is_ok());
}

#[test]
fn a_closed_log_refuses_appends_and_ends_waits() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    let appended = append(&log, AppendKind::Data, b"h", &[b"last"]).unwrap();
    block_on(log.close());
    assert_eq!(block_on(log.durable(appended.position)), Ok(()));
    assert!(matches!(append(&log, AppendKind::Control, b"h", &[]), Err(LogError::Unavailable(_))));
    assert!(matches!(log.admit(AppendKind::Control), Err(LogError::Unavailable(_))));
    assert!(matches!(block_on(log.durable(u64::MAX)), Err(LogError::Unavailable(_))));
    assert_eq!(block_on(log.read(&appended.bodies)).unwrap(), [&b"last"[..]]);
    drop(log);
    assert_eq!(open(directory.path()).1, [record(b"last")]);
}

#[test]
fn options_out_of_range_are_refused_with_the_range() {
    let directory = tempfile::tempdir().unwrap();
    let small = LogOptions { segment_bytes: 1000, ..options(directory.path()) };
    let refusal = open_after(small, 0).map(|_| ()).unwrap_err();
    assert!(refusal.to_string().contains("segment_bytes is 1000, but must be from 65536"), "{refusal}");
}

#[test]
fn the_callback_has_seen_a_position_before_its_waiters_go_on() {
    for durability in [Durability::Fsync, Durability::None] {
        let directory = tempfile::tempdir().unwrap();
        let (log, _) = open_after(LogOptions { durability, ..options(directory.path()) }, 0).unwrap();
        let seen = Arc::new(std::sync::atomic::AtomicU64::new(0));
        let callback = seen.clone();
        log.on_durable(Box::new(move |position| _ = callback.fetch_max(position, SeqCst)));
        for n in 0..200u8 {
            let appended = append(&log, AppendKind::Data, b"h", &[&[n]]).unwrap();
            block_on(log.durable(appended.position)).unwrap();
            assert!(seen.load(SeqCst) >= appended.position);
        }
    }
}

#[test]
fn a_record_that_need_not_be_synced_is_when_somebody_waits_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    let lease = log.append(AppendKind::Control, false, b"lease", &[], &[]).unwrap();
    block_on(log.written(lease.position)).unwrap();
    assert!(log.durable_position() < lease.position);
    block_on(log.durable(lease.position)).unwrap();
    assert!(log.durable_position() >= lease.position);
}

#[test]
fn a_record_nobody_waits_for_is_written_all_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    for n in 0..3u8 {
        let lease = log.append(AppendKind::Control, false, &[n], &[], &[]).unwrap();
        wait_until("the write", || shared(&log).written.reached() >= lease.position);
    }
    let copy = copy(directory.path());
    assert_eq!(open(copy.path()).1, (0..3u8).map(|n| (vec![n], vec![])).collect::<Vec<_>>());
}

#[test]
fn without_durability_a_confirmed_record_survives_the_process() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open_after(LogOptions { durability: Durability::None, ..options(directory.path()) }, 0).unwrap();
    let bodies: Vec<Vec<u8>> = (0..400u32).map(|n| n.to_le_bytes().repeat(100)).collect();
    bodies.iter().for_each(|body| drop(append_waiting(&log, body)));
    assert!(log.segments().len() > 2);
    let copy = copy(directory.path());
    assert_eq!(open(copy.path()).1, bodies.iter().map(|body| record(body)).collect::<Vec<_>>());
    // Full segments are synced behind the back, so that damage there can be told from a torn tail.
    let full = log.segments().len() as u32 - 1;
    let end = shared(&log).segments.read()[&full].end();
    wait_until("the sync", || shared(&log).synced.load(SeqCst) >= end);
}

#[test]
fn trimmed_segments_are_recycled_and_their_old_records_never_come_back() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    let mut trimmed = 0;
    let mut since = Vec::new();
    for round in 0..40u32 {
        // Bodies of equal size put frames at the same offsets in every segment.
        for n in 0..20u32 {
            let body = (round * 100 + n).to_le_bytes().repeat(250);
            append_waiting(&log, &body);
            since.push(record(&body));
        }
        if round % 4 == 3 {
            trimmed = log.position();
            log.trim(trimmed, &|_| false);
            since.clear();
        }
        let copy = copy(directory.path());
        let (_copied, found) = open_after(options(copy.path()), trimmed).unwrap();
        assert_eq!(found, since);
    }
    wait_until("the removal of segments", || fs::read_dir(directory.path()).unwrap().count() < 8);
    assert!(log.usage().bytes < 8 * u64::from(MIN_SEGMENT_BYTES));
}

#[test]
fn a_trim_spares_segments_that_are_kept_not_durable_or_not_over() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    let written: Vec<Appended> = (0..30u8).map(|n| append_waiting(&log, &[n; 8000])).collect();
    let segments = log.segments();
    assert!(segments.len() > 3, "{segments:?}");
    log.trim(written[14].position, &|segment| segment == 1);
    let kept = log.segments();
    assert!(kept.contains(&1) && !kept.contains(&2), "{kept:?}");
    let read = |n: usize| block_on(log.read(&written[n].bodies));
    assert_eq!(read(0).unwrap(), [&[0; 8000][..]]);
    assert!(matches!(read(9), Err(LogError::Damaged(text)) if text.contains("segment 2 is not in the log")));
    assert!((15..30u8).all(|n| read(n as usize).unwrap() == [&[n; 8000][..]]));
    log.trim(u64::MAX, &|_| false);
    assert_eq!(log.segments(), segments[segments.len() - 1..]);
    let checkpoint = written[29].position;
    drop(log);
    let (log, found) = open_after(options(directory.path()), checkpoint).unwrap();
    assert!(found.is_empty());
    assert_eq!(log.segments(), segments[segments.len() - 1..]);
}

#[test]
fn kept_segments_can_be_read_after_a_start_though_those_after_them_are_gone() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    let written: Vec<Appended> = (0..30u8).map(|n| append_waiting(&log, &[n; 8000])).collect();
    let checkpoint = written[25].position;
    log.trim(checkpoint, &|segment| segment == 1);
    drop(log);
    let (log, found) = open_after(options(directory.path()), checkpoint).unwrap();
    assert_eq!(found.len(), 4);
    assert_eq!(block_on(log.read(&written[3].bodies)).unwrap(), [&[3; 8000][..]]);
    log.trim(checkpoint, &|_| false);
    assert!(!log.segments().contains(&1));
    drop(log);
    let missing = damage(open_after(options(directory.path()), 0));
    assert!(missing.contains("are missing"), "{missing}");
}

#[test]
fn pending_bytes_are_bounded_while_the_disk_does_not_keep_up() {
    let directory = tempfile::tempdir().unwrap();
    let bounded = LogOptions { max_pending_bytes: 20_000, ..options(directory.path()) };
    let (log, _) = open_after(bounded, 0).unwrap();
    let mut taken = 0;
    {
        let _busy = shared(&log).tail.lock();
        while append(&log, AppendKind::Data, b"h", &[&[7; 1000]]).is_ok() {
            taken += 1;
            assert!(log.usage().pending_bytes <= 20_000);
        }
        let refusal = append(&log, AppendKind::Data, b"h", &[&[7; 1000]]).unwrap_err();
        assert!(matches!(&refusal, LogError::Unavailable(text) if text.contains("wait to be written")), "{refusal}");
    }
    assert!(taken >= 15);
    block_on(log.durable(log.position())).unwrap();
    assert_eq!(log.usage().pending_bytes, 0);
    put(&log, b"again");
}

#[test]
fn many_waiters_share_writes_and_all_of_them_go_on() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open_after(LogOptions { segment_bytes: 1 << 20, ..options(directory.path()) }, 0).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build().unwrap();
    let publish = |n: u8| {
        let log = log.clone();
        async move {
            for _ in 0..50 {
                let mut appended = append(&log, AppendKind::Data, &[n], &[&[n; 60]]);
                while let Err(LogError::Unavailable(_)) = appended {
                    tokio::task::yield_now().await;
                    appended = append(&log, AppendKind::Data, &[n], &[&[n; 60]]);
                }
                let appended = appended.unwrap();
                log.durable(appended.position).await.unwrap();
                assert_eq!(log.read(&appended.bodies).await.unwrap(), [&[n; 60][..]]);
            }
        }
    };
    let tasks: Vec<_> = (0..200).map(|n| runtime.spawn(publish(n))).collect();
    let all = async { futures::future::try_join_all(tasks).await.unwrap() };
    runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), all).await.unwrap() });
    drop(runtime);
    drop(log);
    let (_log, found) = open_after(LogOptions { segment_bytes: 1 << 20, ..options(directory.path()) }, 0).unwrap();
    assert_eq!(found.len(), 200 * 50);
}

#[test]
fn publishers_that_go_on_together_share_the_next_slow_sync() {
    const ROUNDS: u64 = 20;
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    let faults = &shared(&log).directory.faults;
    faults.slow_syncs.store(40, SeqCst);
    let before = faults.syncs.load(SeqCst);
    let publish = || {
        for _ in 0..ROUNDS {
            let appended = append(&log, AppendKind::Data, b"h", &[b"body"]).unwrap();
            block_on(log.durable(appended.position)).unwrap();
        }
    };
    std::thread::scope(|scope| (0..16).for_each(|_| _ = scope.spawn(publish)));
    let syncs = faults.syncs.load(SeqCst) - before;
    assert!((ROUNDS..ROUNDS * 3 / 2).contains(&syncs), "{syncs} syncs for {ROUNDS} rounds");
    faults.slow_syncs.store(0, SeqCst);
}

#[test]
fn dropping_the_log_writes_what_is_pending() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    for n in 0..100u8 {
        append(&log, AppendKind::Data, b"h", &[&[n]]).unwrap();
    }
    drop(log);
    assert_eq!(open(directory.path()).1, (0..100u8).map(|n| record(&[n])).collect::<Vec<_>>());
}

#[test]
fn other_files_of_the_directory_are_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("checkpoint"), b"mine").unwrap();
    fs::write(directory.path().join("0000000001.log.new"), b"half made").unwrap();
    drop(open(directory.path()));
    assert_eq!(fs::read(directory.path().join("checkpoint")).unwrap(), b"mine");
    assert!(!directory.path().join("0000000001.log.new").exists());
}
