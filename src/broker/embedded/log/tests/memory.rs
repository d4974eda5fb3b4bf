use super::*;

fn memory(max_bytes: Option<u64>) -> Arc<Log> {
    Log::open(LogOptions { max_bytes, ..LogOptions::in_memory() }, None, |_, _| Ok(())).unwrap()
}

#[test]
fn bodies_in_memory_read_back_from_open_and_full_segments() {
    let log = memory(None);
    let body = |n: usize| vec![n as u8; n % 5000];
    let written: Vec<Appended> =
        (0..2000).map(|n| append(&log, AppendKind::Data, b"h", &[&body(n), &body(n + 1)]).unwrap()).collect();
    assert!(log.segments().len() > 2);
    assert!(written.windows(2).all(|pair| pair[0].position < pair[1].position));
    for (n, appended) in written.iter().enumerate() {
        assert_eq!(block_on(log.read(&appended.bodies)).unwrap(), [body(n), body(n + 1)]);
    }
}

#[test]
fn a_body_larger_than_a_segment_in_memory_has_one_of_its_own() {
    let log = memory(None);
    let large = vec![3; 11 << 20];
    let written: Vec<Appended> = [&b"small"[..], &large, b"last"].map(|body| put(&log, body)).into();
    assert_eq!(block_on(log.read(&written[1].bodies)).unwrap(), [large]);
    assert_eq!(block_on(log.read(&[written[0].bodies[0], written[2].bodies[0]])).unwrap(), [&b"small"[..], b"last"]);
}

#[test]
fn trimming_in_memory_frees_what_is_not_kept() {
    let log = memory(None);
    let written: Vec<Appended> = (0..10u8).map(|n| put(&log, &vec![n; 1 << 20])).collect();
    assert_eq!(log.usage().bytes, 10 << 20);
    log.trim(written[7].position, &|segment| segment == written[2].bodies[0].segment);
    assert_eq!(log.usage().bytes, 3 << 20);
    assert_eq!(block_on(log.read(&written[2].bodies)).unwrap(), [vec![2; 1 << 20]]);
    assert!(matches!(block_on(log.read(&written[3].bodies)), Err(LogError::Damaged(_))));
    log.trim(log.position(), &|_| false);
    assert_eq!((log.usage().bytes, log.segments().len()), (0, 0));
    let next = put(&log, b"next");
    assert!(next.position > written[9].position && next.bodies[0].segment > written[9].bodies[0].segment);
    assert_eq!(block_on(log.read(&next.bodies)).unwrap(), [&b"next"[..]]);
}

#[test]
fn a_bounded_memory_refuses_messages_but_not_what_frees_it() {
    let log = memory(Some(1000));
    put(&log, &[1; 900]);
    let refusal = append(&log, AppendKind::Data, b"h", &[&[2; 101]]).unwrap_err();
    assert!(matches!(refusal, LogError::Full(_)));
    append(&log, AppendKind::Control, b"ack", &[]).unwrap();
    log.trim(log.position(), &|_| false);
    put(&log, &[2; 101]);
}

#[test]
fn the_callback_follows_waits_in_memory() {
    let log = memory(None);
    let seen = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let callback = seen.clone();
    log.on_durable(Box::new(move |position| callback.lock().push(position)));
    let first = append(&log, AppendKind::Data, b"h", &[b"1"]).unwrap().position;
    let second = append(&log, AppendKind::Data, b"h", &[b"2"]).unwrap().position;
    for position in [second, first, second] {
        block_on(log.durable(position)).unwrap();
    }
    assert_eq!(*seen.lock(), [second]);
}
