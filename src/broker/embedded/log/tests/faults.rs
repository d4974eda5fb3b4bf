use super::*;

fn set(log: &Log, fault: impl Fn(&Faults) -> &AtomicBool, on: bool) {
    fault(&shared(log).directory.faults).store(on, SeqCst);
}

#[test]
fn after_a_failed_write_the_log_goes_on_in_order_once_it_works() {
    for durability in [Durability::Fsync, Durability::None] {
        let directory = tempfile::tempdir().unwrap();
        let (log, _) = open_after(LogOptions { durability, ..options(directory.path()) }, 0).unwrap();
        put(&log, b"before");
        set(&log, |f| &f.fail_writes, true);
        let stuck = append(&log, AppendKind::Data, b"h", &[b"stuck"]).unwrap();
        let refusal = block_on(log.durable(stuck.position)).unwrap_err();
        assert!(matches!(&refusal, LogError::Unavailable(text) if text.contains("write fault")), "{refusal}");
        assert!(matches!(append(&log, AppendKind::Data, b"h", &[b"refused"]), Err(LogError::Unavailable(_))));
        assert!(matches!(log.admit(AppendKind::Control), Err(LogError::Unavailable(_))));
        // An operation that had begun under the caller's lock is finished.
        append(&log, AppendKind::Control, b"begun", &[]).unwrap();
        assert!(block_on(log.written(stuck.position)).is_err());
        set(&log, |f| &f.fail_writes, false);
        wait_until("the repeated write", || log.admit(AppendKind::Data).is_ok());
        block_on(log.durable(stuck.position)).unwrap();
        put(&log, b"after");
        let copy = copy(directory.path());
        let expected = [record(b"before"), record(b"stuck"), (b"begun".to_vec(), vec![]), record(b"after")];
        assert_eq!(open(copy.path()).1, expected);
    }
}

#[test]
fn after_a_failed_sync_nothing_is_confirmed_any_more() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    let before = put(&log, b"before");
    set(&log, |f| &f.fail_syncs, true);
    let lost = append(&log, AppendKind::Data, b"h", &[b"lost"]).unwrap();
    let refusal = block_on(log.durable(lost.position)).unwrap_err();
    assert!(matches!(&refusal, LogError::Unavailable(text) if text.contains("sync fault")), "{refusal}");
    set(&log, |f| &f.fail_syncs, false);
    for kind in [AppendKind::Data, AppendKind::Control] {
        assert!(matches!(append(&log, kind, b"h", &[b"more"]), Err(LogError::Unavailable(_))));
        assert!(matches!(log.admit(kind), Err(LogError::Unavailable(_))));
    }
    assert!(block_on(log.durable(lost.position)).is_err());
    assert_eq!(block_on(log.durable(before.position)), Ok(()));
    assert_eq!(block_on(log.read(&before.bodies)).unwrap(), [&b"before"[..]]);
    block_on(log.close());
}

#[test]
fn closing_gives_up_on_a_write_that_keeps_failing() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    put(&log, b"before");
    set(&log, |f| &f.fail_writes, true);
    let stuck = append(&log, AppendKind::Data, b"h", &[b"stuck"]).unwrap();
    assert!(block_on(log.durable(stuck.position)).is_err());
    block_on(log.close());
    drop(log);
    assert_eq!(open(directory.path()).1, [record(b"before")]);
}

#[test]
fn a_body_damaged_on_the_disk_is_reported_with_its_place_and_others_still_read() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = open(directory.path());
    let written = append(&log, AppendKind::Data, b"h", &[b"first", b"second", b"third"]).unwrap();
    block_on(log.durable(written.position)).unwrap();
    flip(&segment_file(directory.path(), 1), u64::from(written.bodies[1].offset) + 2);
    let refusal = block_on(log.read(&written.bodies)).unwrap_err();
    let LogError::Damaged(text) = refusal else { panic!("another error: {refusal}") };
    assert!(
        text.contains("0000000001.log is damaged at offset") && text.contains(&written.bodies[1].offset.to_string()),
        "{text}"
    );
    let whole = [written.bodies[0], written.bodies[2]];
    assert_eq!(block_on(log.read(&whole)).unwrap(), [&b"first"[..], b"third"]);
}
