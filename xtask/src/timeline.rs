//! The timeline: finished spans of every process on one clock, as bars in the
//! terminal and as JSON.
//!
//! Invariant: nothing is measured here. Every bar is a line that a process of
//! Hawser wrote (see crate `trace`); phases are the demo's own intervals.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;
use trace::SpanLine;

/// Readable in a terminal of 100 columns.
const NAME_WIDTH: usize = 44;
const BAR_WIDTH: usize = 34;

/// What takes less is noise to a person.
const SHORTEST_SHOWN_MS: f64 = 0.5;

/// An interval of the demo, under which its spans are shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Phase {
    pub name: String,
    pub start_ns: u64,
    pub end_ns: u64,
}

/// Everything about one run, as it is written to the JSON file.
#[derive(Debug, Serialize)]
struct Document<'a> {
    phases: Vec<PhaseSpans<'a>>,
}

#[derive(Debug, Serialize)]
struct PhaseSpans<'a> {
    name: &'a str,
    start_ms: f64,
    length_ms: f64,
    spans: Vec<Bar<'a>>,
}

/// One span; times are relative to the start of the first phase.
#[derive(Debug, Serialize)]
struct Bar<'a> {
    name: &'a str,
    /// What the span is about: a pod, a volume, a container.
    subject: String,
    process: &'a str,
    start_ms: f64,
    length_ms: f64,
    /// Whose step it is: 0 the pod's, 1 the kubelet's, 2 a plugin's or the driver's, 3 within those.
    depth: usize,
    fields: &'a serde_json::Map<String, serde_json::Value>,
}

/// The spans of a trace file, by start.
pub fn read(trace_file: &Path) -> Result<Vec<SpanLine>> {
    let text = fs::read_to_string(trace_file).with_context(|| trace_file.display().to_string())?;
    let parse = |(number, line)| {
        serde_json::from_str(line).with_context(|| format!("{}:{}: {line}", trace_file.display(), number + 1))
    };
    let mut spans: Vec<SpanLine> = text.lines().enumerate().map(parse).collect::<Result<_>>()?;
    spans.sort_by_key(|span| (span.start_ns, u64::MAX - span.end_ns));
    Ok(spans)
}

/// The bars for a person.
pub fn render(phases: &[Phase], spans: &[SpanLine]) -> String {
    let mut text = String::new();
    for phase in document(phases, spans).phases {
        writeln!(text, "\n{} ({:.0} ms)", phase.name, phase.length_ms).expect("a String takes any text");
        if phase.spans.is_empty() {
            continue;
        }
        writeln!(text, "  {:NAME_WIDTH$} {:>8} {:>7}", "step", "start ms", "ms")
            .expect("a String takes any text");
        // Spans may outlast the phase in which they began.
        let end = phase.spans.iter().map(|bar| bar.start_ms + bar.length_ms).fold(phase.start_ms, f64::max);
        let scale = Scale { start_ms: phase.start_ms, length_ms: end - phase.start_ms };
        let (shown, short): (Vec<&Bar<'_>>, Vec<&Bar<'_>>) =
            phase.spans.iter().partition(|bar| bar.length_ms >= SHORTEST_SHOWN_MS);
        for bar in shown {
            let name =
                shorten(&format!("{}{} {}", "  ".repeat(bar.depth), bar.name, bar.subject), NAME_WIDTH);
            let start = bar.start_ms - phase.start_ms;
            let bars = scale.bar(bar.start_ms, bar.length_ms);
            writeln!(text, "  {name:NAME_WIDTH$} {start:>8.1} {:>7.1} {bars}", bar.length_ms)
                .expect("a String takes any text");
        }
        if !short.is_empty() {
            writeln!(text, "  and {} shorter than {SHORTEST_SHOWN_MS} ms, in the JSON", short.len())
                .expect("a String takes any text");
        }
    }
    text
}

/// The same for a program.
pub fn json(phases: &[Phase], spans: &[SpanLine]) -> Result<String> {
    serde_json::to_string_pretty(&document(phases, spans)).context("write the timeline")
}

fn document<'a>(phases: &'a [Phase], spans: &'a [SpanLine]) -> Document<'a> {
    let origin = phases.iter().map(|phase| phase.start_ns).min().unwrap_or(0);
    let phases = phases.iter().map(|phase| {
        let within = spans.iter().filter(|span| (phase.start_ns..phase.end_ns).contains(&span.start_ns));
        let bars = without_callers(within.collect()).into_iter().map(|(span, subject)| Bar {
            name: &span.name,
            subject,
            process: &span.process,
            start_ms: milliseconds(span.start_ns.saturating_sub(origin)),
            length_ms: milliseconds(span.end_ns.saturating_sub(span.start_ns)),
            depth: depth(&span.name),
            fields: &span.fields,
        });
        let bars: Vec<Bar<'_>> = bars.collect();
        PhaseSpans {
            name: &phase.name,
            start_ms: milliseconds(phase.start_ns - origin),
            length_ms: milliseconds(phase.end_ns - phase.start_ns),
            spans: bars,
        }
    });
    Document { phases: phases.collect() }
}

/// A call is recorded on both sides. The caller's span is what the pod waited
/// for, the callee's knows what it was about: one bar with the caller's times.
fn without_callers(spans: Vec<&SpanLine>) -> Vec<(&SpanLine, String)> {
    let mut merged: Vec<(&SpanLine, String)> = Vec::new();
    let mut answered: Vec<bool> = Vec::new();
    for span in spans {
        let is_call_of = |at: usize| {
            let caller = merged[at].0;
            !answered[at] && caller.name == span.name && caller.end_ns >= span.end_ns && is_remote(&span.name)
        };
        match (0..merged.len()).rev().find(|&at| is_call_of(at)) {
            Some(at) => {
                answered[at] = true;
                let known = subject(span);
                if !known.is_empty() {
                    merged[at].1 = known;
                }
            }
            None => {
                merged.push((span, subject(span)));
                answered.push(false);
            }
        }
    }
    merged
}

fn is_remote(name: &str) -> bool {
    name.starts_with("cri.") || name.starts_with("csi.")
}

fn depth(name: &str) -> usize {
    match name.split('.').next().unwrap_or_default() {
        "sync_pod" | "provision" => 0,
        "volume_mount" | "cri" => 1,
        "csi" | "cni" => 2,
        _ => 3,
    }
}

/// The first field that names an object.
fn subject(span: &SpanLine) -> String {
    let named = ["pod", "claim", "object", "container", "volume", "volume_id", "container_id"].iter();
    let value = named.filter_map(|name| span.fields.get(*name)).find_map(|value| value.as_str());
    value.unwrap_or_default().to_owned()
}

struct Scale {
    start_ms: f64,
    length_ms: f64,
}

impl Scale {
    /// Blanks up to the start, then at least one block.
    fn bar(&self, start_ms: f64, length_ms: f64) -> String {
        let before = self.columns(start_ms - self.start_ms).min(BAR_WIDTH - 1);
        let length = self.columns(length_ms).clamp(1, BAR_WIDTH - before);
        format!("{}{}", " ".repeat(before), "█".repeat(length))
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of BAR_WIDTH; a float-to-integer cast saturates"
    )]
    fn columns(&self, ms: f64) -> usize {
        const WIDTH: f64 = 34.0;
        if self.length_ms <= 0.0 { 0 } else { (ms / self.length_ms * WIDTH).round() as usize }
    }
}

fn shorten(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width - 1).chain(['…']).collect()
}

/// A day is 8.64e13 ns: far from where f64 loses a nanosecond.
#[expect(clippy::cast_precision_loss, reason = "see above")]
fn milliseconds(ns: u64) -> f64 {
    ns as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(name: &str, pod: &str, start_ms: u64, end_ms: u64) -> SpanLine {
        let mut fields = serde_json::Map::new();
        fields.insert("pod".to_owned(), pod.into());
        let (start_ns, end_ns) = (start_ms * 1_000_000, end_ms * 1_000_000);
        SpanLine { process: "p".to_owned(), pid: 1, name: name.to_owned(), start_ns, end_ns, fields }
    }

    fn phase(name: &str, start_ms: u64, end_ms: u64) -> Phase {
        Phase { name: name.to_owned(), start_ns: start_ms * 1_000_000, end_ns: end_ms * 1_000_000 }
    }

    #[test]
    fn bars_stand_where_their_spans_were_indented_by_whose_step_it_is() {
        let phases = [phase("start", 100, 200), phase("stop", 200, 210)];
        let spans = [span("sync_pod", "one", 100, 200), span("cri.RunPodSandbox", "one", 150, 175)];
        let text = render(&phases, &spans);
        let lines: Vec<&str> = text.lines().filter(|line| line.contains('█')).collect();
        assert_eq!(lines[0].chars().filter(|c| *c == '█').count(), BAR_WIDTH);
        assert!(lines[0].starts_with("  sync_pod one "), "{text}");
        assert!(lines[1].starts_with("    cri.RunPodSandbox one "), "{text}");
        assert!(lines[1].contains("    50.0    25.0 "), "{text}");
        assert!(lines.iter().all(|line| line.chars().count() <= 100), "{text}");
    }

    #[test]
    fn a_call_and_its_answer_are_one_bar_with_the_callers_times() {
        let phases = [phase("start", 0, 100)];
        let spans = [
            span("cri.RunPodSandbox", "", 10, 40),
            span("cri.RunPodSandbox", "default/one", 11, 39),
            span("cri.RunPodSandbox", "", 20, 60),
            span("cri.RunPodSandbox", "default/two", 21, 59),
        ];
        let bars = &document(&phases, &spans).phases[0].spans;
        let seen: Vec<(&str, f64)> = bars.iter().map(|bar| (bar.subject.as_str(), bar.length_ms)).collect();
        assert_eq!(seen, [("default/one", 30.0), ("default/two", 40.0)]);
    }

    #[test]
    fn a_span_belongs_to_the_phase_in_which_it_began() {
        let phases = [phase("start", 0, 10), phase("stop", 10, 20)];
        let spans = [span("a", "one", 5, 15), span("b", "one", 10, 11)];
        let document = document(&phases, &spans);
        assert_eq!(document.phases[0].spans.len(), 1);
        assert_eq!(document.phases[1].spans[0].name, "b");
    }

    #[test]
    fn a_line_that_is_no_span_is_an_error_with_its_place() {
        let dir = std::env::temp_dir().join(format!("timeline-{}", std::process::id()));
        fs::write(&dir, "{}\n").unwrap();
        let error = format!("{:#}", read(&dir).unwrap_err());
        fs::remove_file(&dir).unwrap();
        assert!(error.contains(":1: {}"), "{error}");
    }
}
