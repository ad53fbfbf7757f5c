//! `describe` for ConfigMaps and Secrets. A Secret's values are not shown: only how long each is.

use super::Describe;
use super::report::Report;
use crate::objects::{ConfigMap, Secret};

impl Describe for ConfigMap {
    fn describe(&self, report: &mut Report) {
        if self.immutable {
            report.field(0, "Immutable", "true");
        }
        title("Data", report);
        for (key, text) in &self.data {
            report.title(0, key);
            report.plain(0, "----");
            text.lines().for_each(|line| report.plain(0, line));
            report.plain(0, "");
        }
        title("BinaryData", report);
        for (key, bytes) in &self.binary_data {
            report.plain(0, &format!("{key}: {} bytes", bytes.0.len()));
        }
        report.plain(0, "");
    }
}

impl Describe for Secret {
    fn describe(&self, report: &mut Report) {
        report.field(0, "Type", &self.secret_type);
        if self.immutable {
            report.field(0, "Immutable", "true");
        }
        title("Data", report);
        for (key, bytes) in &self.data {
            report.plain(0, &format!("{key}:  {} bytes", bytes.0.len()));
        }
        report.plain(0, "");
    }
}

/// As kubectl shows data: underlined.
fn title(text: &str, report: &mut Report) {
    report.plain(0, "");
    report.plain(0, text);
    report.plain(0, &"=".repeat(text.len()));
}
