//! Which replicas must have a write before it is confirmed.
//!
//! Redis promotes any replica, also one that is behind the others: Sentinel compares them by what they said some seconds ago.
//! So it is not enough that the asked number has the write. Everyone who may be promoted must have it: all that are connected
//! to the master, and for a while nothing is confirmed without one that left, because it may have left to be promoted itself.

use std::time::{Duration, Instant};

/// How long nothing is confirmed after a replica has left. A Sentinel that promotes one, because it takes a living master for
/// dead, points the others to it within some seconds; then no replica is left for the old master to confirm with.
const FAREWELL: Duration = Duration::from_secs(10);

/// The replicas that a master had lately.
#[derive(Debug, Default)]
pub struct Attached {
    now: u32,
    most: u32,
    /// Since when there are as few as now.
    fewer_since: Option<Instant>,
}

impl Attached {
    /// How many are connected, as far as is known.
    pub fn now(&self) -> u32 {
        self.now
    }

    /// Takes note of how many are connected, and answers how many must have a write.
    pub fn note(&mut self, connected: u32, at: Instant) -> u32 {
        if connected >= self.most {
            (self.most, self.fewer_since) = (connected, None);
        } else if connected != self.now {
            self.fewer_since = Some(at);
        } else if self.fewer_since.is_none_or(|since| at - since >= FAREWELL) {
            (self.most, self.fewer_since) = (connected, None);
        }
        self.now = connected;
        self.most
    }
}

/// How many replicas follow a master, from its `INFO replication`. Those that are still being filled don't count.
pub fn connected(info: &str) -> u32 {
    info.lines().filter(|line| line.starts_with("slave") && line.contains("state=online")).count() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everyone_who_is_connected_must_have_a_write() {
        let (mut attached, start) = (Attached::default(), Instant::now());
        assert_eq!([1, 3, 3].map(|n| attached.note(n, start)), [1, 3, 3]);
        assert_eq!(attached.now(), 3);
    }

    #[test]
    fn one_that_left_is_missed_for_a_while() {
        let (mut attached, start) = (Attached::default(), Instant::now());
        attached.note(3, start);
        let mut note = |connected, ms| attached.note(connected, start + Duration::from_millis(ms));
        assert_eq!([note(2, 60_000), note(2, 69_999), note(2, 70_000)], [3, 3, 2]);
        // Each that leaves is missed for as long, and who comes back is not missed.
        assert_eq!([note(1, 71_000), note(2, 72_000), note(1, 73_000)], [2, 2, 2]);
        assert_eq!([note(0, 80_000), note(0, 89_999), note(0, 90_000)], [2, 2, 0]);
    }

    #[test]
    fn replicas_that_are_being_filled_do_not_count() {
        let info = "role:master\r\nconnected_slaves:2\r\n\
                    slave0:ip=127.0.0.1,port=1,state=online,offset=5,lag=0\r\n\
                    slave1:ip=127.0.0.1,port=2,state=wait_bgsave,offset=0,lag=0\r\n";
        assert_eq!(connected(info), 1);
    }
}
