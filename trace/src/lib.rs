//! Logs and traces of our processes: finished tracing spans as JSON lines for the timeline, and
//! events on one line each.
//!
//! Every Hawser process with a trace file appends one line for each span when it closes. Times are
//! CLOCK_MONOTONIC, so the lines of all processes of a machine share one time line. Each line is
//! one write(2) with O_APPEND, so lines of several processes never mix.

mod layer;
mod one_line;

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use one_line::OneLine;
use serde::{Deserialize, Serialize};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt};

pub use layer::SpanLines;
pub use one_line::escaped;

/// One finished span.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpanLine {
    /// The program: `hawser-kubelet`.
    pub process: String,
    pub pid: u32,
    /// The span's name, unless it recorded a field `span` (for names known only at run time).
    pub name: String,
    /// CLOCK_MONOTONIC, nanoseconds.
    pub start_ns: u64,
    pub end_ns: u64,
    pub fields: serde_json::Map<String, serde_json::Value>,
}

/// Sends events to stderr (filtered by `filter`, in the syntax of
/// `tracing_subscriber::EnvFilter`) and finished spans to `trace_file`.
/// Call once, early in `main`.
pub fn init(process: &'static str, filter: &str, trace_file: Option<&Path>) -> io::Result<()> {
    let filter = filter_of(filter).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
    let spans = trace_file.map(|path| span_lines(process, path)).transpose()?;
    let format = OneLine(fmt::format().with_target(false));
    let stderr = fmt::layer().with_writer(io::stderr).with_ansi(false).event_format(format);
    tracing_subscriber::registry()
        .with(tracing_subscriber::Layer::with_filter(stderr, filter))
        .with(spans)
        .try_init()
        .map_err(io::Error::other)
}

/// h2 warns of each wrong frame, and a peer may send millions of them. A filter that names h2 decides itself.
fn filter_of(filter: &str) -> Result<EnvFilter, tracing_subscriber::filter::ParseError> {
    let names_h2 = filter.split(',').any(|directive| directive.trim_start().starts_with("h2"));
    let filter = EnvFilter::try_new(filter)?;
    Ok(if names_h2 { filter } else { filter.add_directive("h2=error".parse()?) })
}

fn span_lines(process: &'static str, path: &Path) -> io::Result<SpanLines> {
    let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
    Ok(SpanLines::new(process, file))
}

/// CLOCK_MONOTONIC in nanoseconds, the clock of [`SpanLine`].
pub fn monotonic_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
        .expect("CLOCK_MONOTONIC is there since Linux 2.6");
    let (seconds, nanoseconds) = (now.tv_sec().cast_unsigned(), now.tv_nsec().cast_unsigned());
    seconds * 1_000_000_000 + nanoseconds
}

/// At most about `most_bytes` of a text, in whole characters; `...` marks a shortened text.
pub fn shortened(mut text: String, most_bytes: usize) -> String {
    if text.len() > most_bytes {
        text.truncate(text.floor_char_boundary(most_bytes));
        text.push_str("...");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_peer_can_make_h2_say_is_left_out_unless_it_is_asked_for() {
        let filter = |text: &str| filter_of(text).unwrap().to_string();
        assert!(filter("info").contains("h2=error") && filter("kubelet=debug").contains("h2=error"));
        assert_eq!(filter("h2=trace"), "h2=trace");
    }
}
