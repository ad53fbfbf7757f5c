//! The table of a bench: values with their units, and what each is to be.

use std::fmt;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

use super::statistics::median;

/// A line of the table: a value with its unit, and what it is to be.
#[derive(Debug)]
pub(super) struct Row {
    title: String,
    /// Sorted or of one element.
    samples: Vec<f64>,
    unit: &'static str,
    bar: Option<Bar>,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Bar {
    AtMost(f64),
    AtLeast(f64),
}

impl Row {
    pub(super) fn new(
        title: impl Into<String>,
        unit: &'static str,
        mut samples: Vec<f64>,
        bar: Option<Bar>,
    ) -> Self {
        samples.sort_by(f64::total_cmp);
        Self { title: title.into(), samples, unit, bar }
    }
}

#[derive(Debug, Default)]
pub(super) struct Table(pub(super) Vec<Row>);

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n| what | times | median | min..max | unit | bar |\n|---|---|---|---|---|---|")?;
        for row in &self.0 {
            let middle = median(&mut row.samples.clone());
            let (min, max) =
                (row.samples.first().copied().unwrap_or(0.0), row.samples.last().copied().unwrap_or(0.0));
            let met = |is_met| if is_met { "met" } else { "MISSED" };
            let bar = match row.bar {
                None => String::new(),
                Some(Bar::AtMost(bar)) => format!("<= {bar}: {}", met(middle <= bar)),
                Some(Bar::AtLeast(bar)) => format!(">= {bar}: {}", met(middle >= bar)),
            };
            writeln!(
                f,
                "| {} | {} | {middle:.2} | {min:.2}..{max:.2} | {} | {bar} |",
                row.title,
                row.samples.len(),
                row.unit
            )?;
        }
        Ok(())
    }
}

/// VmRSS and Pss of a process in MiB.
pub(super) fn resident(pid: i32) -> Result<(f64, f64)> {
    let kib = |file: &str, key: &str| -> Result<f64> {
        let path = format!("/proc/{pid}/{file}");
        let text = fs::read_to_string(&path).context(path.clone())?;
        let line =
            text.lines().find_map(|line| line.strip_prefix(key)).with_context(|| format!("{path}: {key}"))?;
        line.trim().trim_end_matches(" kB").trim().parse().with_context(|| format!("{path}: {line}"))
    };
    Ok((kib("status", "VmRSS:")? / 1024.0, kib("smaps_rollup", "Pss:")? / 1024.0))
}

pub(super) fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_met_or_missed_by_the_median() {
        let rows = vec![
            Row::new("calls", "ms", vec![9.0, 1.0, 2.0], Some(Bar::AtMost(3.0))),
            Row::new("rate", "a second", vec![29.0], Some(Bar::AtLeast(30.0))),
        ];
        let text = Table(rows).to_string();
        assert!(text.contains("| calls | 3 | 2.00 | 1.00..9.00 | ms | <= 3: met |"), "{text}");
        assert!(text.contains("| rate | 1 | 29.00 | 29.00..29.00 | a second | >= 30: MISSED |"), "{text}");
    }

    #[test]
    fn memory_is_read_of_a_running_process() {
        let (resident_mib, share_mib) = resident(std::process::id().cast_signed()).unwrap();
        assert!(share_mib > 0.1 && resident_mib >= share_mib, "{resident_mib} {share_mib}");
    }
}
