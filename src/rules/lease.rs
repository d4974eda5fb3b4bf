//! How long leases last.

use crate::model::limits::{MAX_ACK_DEADLINE_SECONDS, MIN_ACK_DEADLINE_SECONDS};

/// A deadline that is not allowed, with the smallest one that would be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeadlineError {
    pub passed: i32,
    pub low: u32,
}

/// Checks the deadline of a ModifyAckDeadline: 0 gives the message back, anything else must reach from `floor` (at most
/// 10, a setting) to 600 seconds. Answers milliseconds.
///
/// # Errors
/// [`DeadlineError`], also for what lies between 0 and the floor.
pub fn extension_ms(seconds: i32, floor: u32) -> Result<u64, DeadlineError> {
    match u32::try_from(seconds) {
        Ok(value) if value > 0 && value < floor => Err(DeadlineError { passed: seconds, low: floor }),
        Ok(value) if value <= MAX_ACK_DEADLINE_SECONDS => Ok(u64::from(value) * 1000),
        _ => Err(DeadlineError { passed: seconds, low: 0 }),
    }
}

/// Checks the lease length a stream asks for: 10 to 600 seconds. Answers milliseconds.
///
/// # Errors
/// [`DeadlineError`].
pub fn stream_deadline_ms(seconds: i32) -> Result<u64, DeadlineError> {
    match u32::try_from(seconds) {
        Ok(value) if (MIN_ACK_DEADLINE_SECONDS..=MAX_ACK_DEADLINE_SECONDS).contains(&value) => Ok(u64::from(value) * 1000),
        _ => Err(DeadlineError { passed: seconds, low: MIN_ACK_DEADLINE_SECONDS }),
    }
}

/// The length of a new lease: what was asked for, within the longest life a lease may have (0: any).
pub fn first_deadline_ms(asked_ms: u64, max_life_ms: u64) -> u64 {
    if max_life_ms == 0 { asked_ms } else { asked_ms.min(max_life_ms) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_are_zero_or_from_the_floor_to_ten_minutes() {
        assert_eq!(extension_ms(0, 10), Ok(0));
        assert_eq!(extension_ms(10, 10), Ok(10_000));
        assert_eq!(extension_ms(600, 10), Ok(600_000));
        for passed in [1, 5, 9] {
            assert_eq!(extension_ms(passed, 10), Err(DeadlineError { passed, low: 10 }));
        }
        for passed in [-1, 601, 715, i32::MAX, i32::MIN] {
            assert_eq!(extension_ms(passed, 10), Err(DeadlineError { passed, low: 0 }));
        }
    }

    #[test]
    fn a_lower_floor_allows_short_extensions() {
        assert_eq!(extension_ms(1, 0), Ok(1000));
        assert_eq!(extension_ms(5, 5), Ok(5000));
        assert_eq!(extension_ms(4, 5), Err(DeadlineError { passed: 4, low: 5 }));
    }

    #[test]
    fn a_stream_leases_for_ten_to_six_hundred_seconds() {
        assert_eq!(stream_deadline_ms(10), Ok(10_000));
        assert_eq!(stream_deadline_ms(600), Ok(600_000));
        for passed in [-1, 0, 9, 601] {
            assert_eq!(stream_deadline_ms(passed), Err(DeadlineError { passed, low: 10 }));
        }
    }

    #[test]
    fn the_longest_life_also_bounds_the_first_deadline() {
        assert_eq!(first_deadline_ms(10_000, 0), 10_000);
        assert_eq!(first_deadline_ms(10_000, 5000), 5000);
        assert_eq!(first_deadline_ms(10_000, 60_000), 10_000);
    }
}
