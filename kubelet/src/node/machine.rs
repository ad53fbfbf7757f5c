//! What the kernel says of the whole machine: proc_meminfo(5), proc_stat(5), proc_loadavg(5).

/// `USER_HZ` is 100 on every architecture that Linux still has except Alpha.
const TICK_NANOSECONDS: u64 = 10_000_000;

/// Bytes of a line of `/proc/meminfo`, such as `MemTotal`.
pub(crate) fn memory(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().trim_end_matches(" kB").parse::<u64>().ok()?.checked_mul(1024)
}

/// Nanoseconds that all processors have worked, from `/proc/stat`: all but idle and iowait. What guests
/// used is part of user and nice.
pub(crate) fn processor_time(stat: &str) -> Option<u64> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    // user, nice, system, idle, iowait, irq, softirq, steal
    let ticks = line.split_whitespace().take(8).map(str::parse);
    let ticks: Vec<u64> = ticks.collect::<Result<_, _>>().ok()?;
    let busy = ticks.iter().enumerate().filter(|(at, _)| !matches!(at, 3 | 4)).map(|(_, ticks)| ticks);
    Some(busy.sum::<u64>().saturating_mul(TICK_NANOSECONDS))
}

/// All tasks, from `/proc/loadavg`: the second number of `runnable/all`.
pub(crate) fn tasks(loadavg: &str) -> Option<u64> {
    loadavg.split_whitespace().nth(3)?.split_once('/')?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_are_read_as_the_kernel_writes_them() {
        let text = "cpu  10 1 5 1000 50 2 3 4 7 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        assert_eq!(processor_time(text), Some((10 + 1 + 5 + 2 + 3 + 4) * TICK_NANOSECONDS));
        assert_eq!(processor_time("intr 5\n"), None);
        let text = "MemTotal:        8000 kB\nInactive:         400 kB\nInactive(file):   50 kB\n";
        assert_eq!(memory(text, "MemTotal"), Some(8000 << 10));
        assert_eq!(memory(text, "Inactive(file)"), Some(50 << 10));
        assert_eq!(memory(text, "MemFree"), None);
        assert_eq!(tasks("0.00 0.01 0.05 3/234 5678\n"), Some(234));
        assert_eq!(tasks(""), None);
    }
}
