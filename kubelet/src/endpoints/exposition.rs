//! The Prometheus text format, version 0.0.4.

use std::fmt::Write;

pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    Counter,
    Gauge,
}

/// Text that grows metric by metric.
#[derive(Debug, Default)]
pub(super) struct Exposition(String);

/// The samples of one metric.
#[derive(Debug)]
pub(super) struct Metric<'a> {
    text: &'a mut String,
    name: &'static str,
}

impl Exposition {
    /// Begins a metric.
    pub(super) fn metric(&mut self, name: &'static str, kind: Kind, help: &str) -> Metric<'_> {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        };
        // Writing to a String cannot fail.
        let _infallible = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
        Metric { text: &mut self.0, name }
    }

    pub(super) fn into_text(self) -> String {
        self.0
    }
}

impl Metric<'_> {
    /// Adds a sample. `time`: of the measurement, in milliseconds since 1970.
    pub(super) fn sample(&mut self, labels: &[(&str, &str)], value: f64, time: Option<i64>) -> &mut Self {
        let text = &mut *self.text;
        text.push_str(self.name);
        for (at, (name, value)) in labels.iter().enumerate() {
            text.push(if at == 0 { '{' } else { ',' });
            let _infallible = write!(text, "{name}=\"{}\"", escaped(value));
        }
        if !labels.is_empty() {
            text.push('}');
        }
        let _infallible = write!(text, " {value}");
        if let Some(time) = time {
            let _infallible = write!(text, " {time}");
        }
        text.push('\n');
        self
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_labels_values_and_times() {
        let mut text = Exposition::default();
        text.metric("pod_cpu_usage_seconds_total", Kind::Counter, "Time.")
            .sample(&[("namespace", "default"), ("pod", "a\"b\\c\nd")], 1.5, Some(1700))
            .sample(&[], 20_000_000_000.0, None);
        assert_eq!(
            text.into_text(),
            "# HELP pod_cpu_usage_seconds_total Time.\n# TYPE pod_cpu_usage_seconds_total counter\n\
             pod_cpu_usage_seconds_total{namespace=\"default\",pod=\"a\\\"b\\\\c\\nd\"} 1.5 1700\n\
             pod_cpu_usage_seconds_total 20000000000\n"
        );
    }
}
