//! The JSON report of a Go program whose tests ginkgo runs.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Suite {
    spec_reports: Vec<Spec>,
}

/// `types.SpecReport` of ginkgo.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Spec {
    container_hierarchy_texts: Option<Vec<String>>,
    leaf_node_text: String,
    /// `It` for a spec; others set up and clean up.
    #[serde(default)]
    leaf_node_type: String,
    pub(super) state: String,
    pub(super) failure: Option<Failure>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Failure {
    message: String,
}

/// All specs of a report. A report without specs is an error.
pub(super) fn specs(json: &[u8]) -> Result<Vec<Spec>> {
    let suites: Vec<Suite> = serde_json::from_slice(json).context("parse")?;
    let specs: Vec<Spec> = suites.into_iter().flat_map(|suite| suite.spec_reports).collect();
    ensure!(!specs.is_empty(), "it has no spec");
    Ok(specs)
}

/// As a regular expression that means itself.
pub(super) fn quote(text: &str) -> String {
    let mut quoted = String::new();
    for character in text.chars() {
        if !character.is_alphanumeric() && character != ' ' {
            quoted.push('\\');
        }
        quoted.push(character);
    }
    quoted
}

impl Spec {
    pub(super) fn name(&self) -> String {
        let containers = self.container_hierarchy_texts.iter().flatten();
        let words = containers.chain([&self.leaf_node_text]).filter(|text| !text.is_empty());
        words.map(String::as_str).collect::<Vec<_>>().join(" ")
    }

    /// Whether it is one that sets up or cleans up for all specs.
    pub(super) fn is_of_the_suite(&self) -> bool {
        !matches!(self.leaf_node_type.as_str(), "" | "It")
    }

    pub(super) fn says(&self) -> &str {
        self.failure.as_ref().map_or("", |failure| failure.message.trim())
    }

    /// Without gomega's dump of the fields of a gRPC status.
    pub(super) fn says_in_short(&self) -> String {
        let is_dump = |line: &&str| line.trim() == "{";
        let lines: Vec<&str> = self.says().lines().take_while(|line| !is_dump(line)).collect();
        lines.join("\n")
    }
}
