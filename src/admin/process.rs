//! What the kernel knows of this process.

use std::fs;

/// Processor time, memory and files of this process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Process {
    pub cpu_seconds: f64,
    pub resident_bytes: u64,
    pub threads: u64,
    pub open_files: u64,
    pub max_files: u64,
    /// Seconds since the epoch.
    pub started_at: f64,
}

/// Reads them from `/proc`; none where that is not there.
pub fn read() -> Option<Process> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The name in parentheses may hold anything; the state, field 3, comes after it.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    Some(Process {
        cpu_seconds: (field(14)? + field(15)?) as f64 / ticks,
        resident_bytes: field(24)? * rustix::param::page_size() as u64,
        threads: field(20)?,
        open_files: fs::read_dir("/proc/self/fd").ok()?.count() as u64,
        max_files: limit.unwrap_or(u64::MAX),
        started_at: boot_seconds()? as f64 + field(22)? as f64 / ticks,
    })
}

fn boot_seconds() -> Option<u64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::{Duration, SystemTime};

    #[test]
    fn a_process_reads_its_own_numbers() {
        let process = super::read().unwrap();
        assert!(process.resident_bytes > 1_000_000 && process.threads >= 1 && process.open_files >= 3, "{process:?}");
        assert!(process.open_files < process.max_files, "{process:?}");
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let age = now.saturating_sub(Duration::from_secs_f64(process.started_at));
        assert!(age < Duration::from_secs(3600), "{process:?}");
    }
}
