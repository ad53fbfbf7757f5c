//! The daemon's metrics in the Prometheus text format (version 0.0.4). docs/METRICS.md describes
//! every name.

use std::error::Error;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::failure::{Failure, Result};
use crate::figures::{Figures, KnownNow, UsageNow};

/// Upper bounds in seconds: from a cached attribute to a disk that hardly responds.
const BUCKETS: [f64; 16] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 100.0];

const BETWEEN_REASONS: Duration = Duration::from_secs(1);

/// A kind of FUSE request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Lookup,
    Getattr,
    Setattr,
    Readlink,
    Mknod,
    Mkdir,
    Unlink,
    Rmdir,
    Symlink,
    Rename,
    Link,
    Open,
    Read,
    Write,
    Flush,
    Release,
    Fsync,
    Opendir,
    Readdir,
    Readdirplus,
    Releasedir,
    Fsyncdir,
    Statfs,
    Setxattr,
    Getxattr,
    Listxattr,
    Removexattr,
    Create,
    Fallocate,
    Lseek,
    CopyFileRange,
}

/// In the order of [`Operation`].
const NAMES: [&str; 31] = [
    "lookup",
    "getattr",
    "setattr",
    "readlink",
    "mknod",
    "mkdir",
    "unlink",
    "rmdir",
    "symlink",
    "rename",
    "link",
    "open",
    "read",
    "write",
    "flush",
    "release",
    "fsync",
    "opendir",
    "readdir",
    "readdirplus",
    "releasedir",
    "fsyncdir",
    "statfs",
    "setxattr",
    "getxattr",
    "listxattr",
    "removexattr",
    "create",
    "fallocate",
    "lseek",
    "copy_file_range",
];

#[derive(Debug, Default)]
pub(crate) struct Metrics {
    operations: [Counts; NAMES.len()],
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    refused_no_space: AtomicU64,
    last_reason: Mutex<Option<Instant>>,
}

#[derive(Debug, Default)]
struct Counts {
    succeeded: AtomicU64,
    failed: AtomicU64,
    nanoseconds: AtomicU64,
    /// One more than bounds, for slower requests.
    buckets: [AtomicU64; BUCKETS.len() + 1],
}

/// A request that is being served.
#[derive(Debug)]
pub(crate) struct Call {
    metrics: Arc<Metrics>,
    operation: Operation,
    began: Instant,
}

/// Values that are read, not counted.
#[derive(Debug)]
pub(crate) struct Gauges {
    pub(crate) figures: Figures,
    pub(crate) paused: Duration,
}

impl Call {
    pub(crate) fn begin(metrics: &Arc<Metrics>, operation: Operation) -> Self {
        Self { metrics: Arc::clone(metrics), operation, began: Instant::now() }
    }

    /// Counts the request, and returns its result.
    pub(crate) fn ended<T>(self, result: Result<T>) -> Result<T> {
        let errno = result.as_ref().err().map(Failure::errno);
        self.metrics.count(self.operation, errno, self.began.elapsed());
        if let Some(reason) = result.as_ref().err().and_then(Failure::reason) {
            self.metrics.log(self.operation, reason);
        }
        result
    }
}

impl Metrics {
    pub(crate) fn read(&self, bytes: usize) {
        self.read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn written(&self, bytes: usize) {
        self.written_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn count(&self, operation: Operation, failure: Option<Errno>, took: Duration) {
        let counts = &self.operations[operation as usize];
        let result = if failure.is_some() { &counts.failed } else { &counts.succeeded };
        result.fetch_add(1, Ordering::Relaxed);
        if failure == Some(Errno::NOSPC) {
            self.refused_no_space.fetch_add(1, Ordering::Relaxed);
        }
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        counts.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
        let seconds = took.as_secs_f64();
        let bucket = BUCKETS.iter().position(|bound| seconds <= *bound).unwrap_or(BUCKETS.len());
        counts.buckets[bucket].fetch_add(1, Ordering::Relaxed);
    }

    /// Logs why a request failed, at most once a second, since applications retry.
    fn log(&self, operation: Operation, reason: &(dyn Error + Send + Sync + 'static)) {
        let mut last = self.last_reason.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|last| last.elapsed() >= BETWEEN_REASONS) {
            *last = Some(Instant::now());
            drop(last);
            tracing::warn!(operation = NAMES[operation as usize], reason, "a request has failed");
        }
    }

    /// Omits operations that were never requested.
    pub(crate) fn render(&self, gauges: &Gauges) -> String {
        let mut page = Page::default();
        self.render_operations(&mut page);
        let bytes = "hawser_volume_bytes_total";
        page.head(bytes, "counter", "Bytes read and written by the volume's users.");
        page.sample(bytes, "direction=\"read\"", load(&self.read_bytes));
        page.sample(bytes, "direction=\"written\"", load(&self.written_bytes));
        let refused = load(&self.refused_no_space);
        page.alone("refused_no_space_total", "counter", "Operations that failed with ENOSPC.", refused);
        let UsageNow { limits, used, counting } = gauges.figures.usage;
        page.alone("used_bytes", "gauge", "Bytes charged to the volume.", used.bytes);
        page.alone("capacity_bytes", "gauge", "Bytes it may hold; 0: no limit.", limits.bytes);
        page.alone("used_inodes", "gauge", "Files, directories and links in the volume.", used.inodes);
        page.alone("inode_limit", "gauge", "How many it may hold; 0: no limit.", limits.inodes);
        page.alone("counting", "gauge", "1 while the use is counted and changes wait.", u64::from(counting));
        page.alone("open_files", "gauge", "Open files.", gauges.figures.open_files as u64);
        let KnownNow { nodes, limit, nameless, asked_to_forget, refused } = gauges.figures.known;
        page.alone("known_nodes", "gauge", "Inodes that the kernel knows.", nodes);
        page.alone("known_node_limit", "gauge", "Beyond it the kernel is asked to forget.", limit);
        page.alone("removed_nodes", "gauge", "Removed files that are still held.", nameless);
        let forget = "forget_requests_total";
        page.alone(forget, "counter", "Inodes that the kernel was asked to forget.", asked_to_forget);
        page.alone("refused_nodes_total", "counter", "Lookups and creations refused with ENFILE.", refused);
        let paused = gauges.paused.as_secs_f64();
        page.alone("pause_seconds_total", "counter", "Time in which changes waited for snapshots.", paused);
        page.text
    }

    fn render_operations(&self, page: &mut Page) {
        let asked = || {
            NAMES.iter().zip(&self.operations).filter_map(|(name, counts)| {
                let total = load(&counts.succeeded) + load(&counts.failed);
                (total > 0).then_some((name, counts))
            })
        };
        let operations = "hawser_volume_operations_total";
        page.head(operations, "counter", "FUSE requests answered.");
        for (name, counts) in asked() {
            for (result, count) in [("ok", &counts.succeeded), ("error", &counts.failed)] {
                page.sample(operations, &format!("operation=\"{name}\",result=\"{result}\""), load(count));
            }
        }
        let seconds = "hawser_volume_operation_seconds";
        page.head(seconds, "histogram", "From a FUSE request to its answer.");
        for (name, counts) in asked() {
            let mut sum = 0;
            for (bound, count) in
                BUCKETS.iter().map(f64::to_string).chain(["+Inf".to_owned()]).zip(&counts.buckets)
            {
                sum += load(count);
                let labels = format!("operation=\"{name}\",le=\"{bound}\"");
                page.sample(&format!("{seconds}_bucket"), &labels, sum);
            }
            let labels = format!("operation=\"{name}\"");
            let total = Duration::from_nanos(load(&counts.nanoseconds)).as_secs_f64();
            page.sample(&format!("{seconds}_sum"), &labels, total);
            page.sample(&format!("{seconds}_count"), &labels, sum);
        }
    }
}

#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        self.line(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}"));
    }

    fn sample(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        self.line(format_args!("{name}{{{labels}}} {value}"));
    }

    fn alone(&mut self, name: &str, kind: &str, help: &str, value: impl std::fmt::Display) {
        let name = format!("hawser_volume_{name}");
        self.head(&name, kind, help);
        self.line(format_args!("{name} {value}"));
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.text, "{line}").expect("a String takes any text");
    }
}

fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::{Counted, Limits};

    fn gauges() -> Gauges {
        let usage = UsageNow {
            limits: Limits { bytes: 100, inodes: 0 },
            used: Counted { bytes: 42, inodes: 7 },
            counting: false,
        };
        let known = KnownNow { nodes: 4, limit: 5, ..KnownNow::default() };
        let figures = Figures { usage, open_files: 3, known };
        Gauges { figures, paused: Duration::from_millis(1500) }
    }

    #[test]
    fn results_and_times_are_counted_by_operation() {
        let metrics = Arc::new(Metrics::default());
        metrics.count(Operation::Write, None, Duration::from_micros(200));
        metrics.count(Operation::Write, Some(Errno::NOSPC), Duration::from_secs(200));
        metrics.count(Operation::CopyFileRange, Some(Errno::IO), Duration::from_millis(1));
        metrics.written(5);
        let page = metrics.render(&gauges());
        for line in [
            r#"hawser_volume_operations_total{operation="write",result="ok"} 1"#,
            r#"hawser_volume_operations_total{operation="write",result="error"} 1"#,
            r#"hawser_volume_operations_total{operation="copy_file_range",result="error"} 1"#,
            r#"hawser_volume_operation_seconds_bucket{operation="write",le="0.0001"} 0"#,
            r#"hawser_volume_operation_seconds_bucket{operation="write",le="0.00025"} 1"#,
            r#"hawser_volume_operation_seconds_bucket{operation="write",le="100"} 1"#,
            r#"hawser_volume_operation_seconds_bucket{operation="write",le="+Inf"} 2"#,
            r#"hawser_volume_operation_seconds_sum{operation="write"} 200.0002"#,
            r#"hawser_volume_operation_seconds_count{operation="write"} 2"#,
            r#"hawser_volume_bytes_total{direction="written"} 5"#,
            "hawser_volume_refused_no_space_total 1",
            "hawser_volume_used_bytes 42",
            "hawser_volume_capacity_bytes 100",
            "hawser_volume_pause_seconds_total 1.5",
        ] {
            assert!(page.lines().any(|found| found == line), "{line} is not in\n{page}");
        }
        assert!(!page.contains("lookup"), "it was not requested");
    }

    #[test]
    fn every_operation_has_its_name() {
        assert_eq!(NAMES[Operation::Lookup as usize], "lookup");
        assert_eq!(NAMES[Operation::Fsync as usize], "fsync");
        assert_eq!(NAMES[Operation::CopyFileRange as usize], "copy_file_range");
        assert_eq!(Operation::CopyFileRange as usize, NAMES.len() - 1);
    }

    #[test]
    fn what_is_shown_is_documented_and_what_is_documented_is_shown() {
        const DOCUMENT: &str = include_str!("../../docs/METRICS.md");
        let metrics = Arc::new(Metrics::default());
        let page = metrics.render(&gauges());
        let shown: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        let rows = DOCUMENT.lines().filter_map(|line| line.strip_prefix("| `hawser_volume_"));
        let documented: Vec<String> = rows
            .map(|row| {
                let (name, rest) = row.split_once(['`', '{']).expect("a name ends");
                let kind = rest.split('|').nth(1).expect("a kind stands in the second column").trim();
                format!("hawser_volume_{name} {kind}")
            })
            .collect();
        let sorted = |mut names: Vec<String>| {
            names.sort();
            names
        };
        assert_eq!(sorted(shown.into_iter().map(str::to_owned).collect()), sorted(documented));
    }
}
