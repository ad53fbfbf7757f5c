//! A StorageClass's parameters, checked.

use std::collections::HashMap;

use crate::error::{Error, Result};

const KNOWN: &str = "backend, threads";
/// Kubernetes' own keys, which some provisioners pass on (secrets, claim and volume names).
const KUBERNETES_PREFIX: &str = "csi.storage.k8s.io/";
const MAX_THREADS: u32 = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Parameters {
    /// Event loops of the volume's daemon; 0: the daemon's default.
    pub threads: u32,
}

impl Parameters {
    pub(crate) fn parse(parameters: &HashMap<String, String>) -> Result<Self> {
        let mut parsed = Self { threads: 0 };
        for (name, value) in parameters {
            match name.as_str() {
                "backend" if value == "local" => {}
                "backend" => return Err(Error::invalid("parameters.backend", value, "known is local")),
                "threads" => parsed.threads = parse_threads(value)?,
                name if name.starts_with(KUBERNETES_PREFIX) => {}
                _ => return Err(Error::UnknownParameter { name: name.clone(), known: KNOWN.to_owned() }),
            }
        }
        Ok(parsed)
    }
}

impl std::fmt::Display for Parameters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "threads={}", self.threads)
    }
}

fn parse_threads(value: &str) -> Result<u32> {
    value.parse().ok().filter(|n| (1..=MAX_THREADS).contains(n)).ok_or_else(|| {
        Error::invalid("parameters.threads", value, format!("a number from 1 to {MAX_THREADS} is wanted"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<Parameters> {
        Parameters::parse(&pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
    }

    #[test]
    fn known_parameters_and_kubernetes_own_are_accepted() {
        let parsed = parse(&[("backend", "local"), ("threads", "4"), ("csi.storage.k8s.io/pvc/name", "x")]);
        assert_eq!(parsed.unwrap(), Parameters { threads: 4 });
    }

    #[test]
    fn an_unknown_parameter_is_named() {
        let message = parse(&[("bakend", "local")]).unwrap_err().to_string();
        assert_eq!(message, "parameters: unknown parameter \"bakend\": known are backend, threads");
    }

    #[test]
    fn a_wrong_value_is_shown_with_its_field() {
        let message = parse(&[("threads", "many")]).unwrap_err().to_string();
        assert_eq!(message, "parameters.threads: \"many\": a number from 1 to 16 is wanted");
        assert!(parse(&[("backend", "s3")]).unwrap_err().to_string().contains("\"s3\""));
    }
}
