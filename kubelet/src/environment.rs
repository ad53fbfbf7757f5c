//! A container's environment: literal values, values with `$(VAR)`, and fields of the pod.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};

use crate::expansion::expand;
use crate::objects::{Container, EnvVar, Pod};

/// The kernel's limit for one string (MAX_ARG_STRLEN, without the terminating NUL).
const MAX_TEXT_BYTES: usize = (128 << 10) - 1;
/// The kernel's limit for all strings (three quarters of `_STK_LIM`, fs/exec.c).
const MAX_BYTES: usize = 6 << 20;

/// A variable without a valid value: CreateContainerConfigError.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    #[error("env {name}: valueFrom.fieldRef.fieldPath {field:?} is not supported")]
    Field { name: String, field: String },
    #[error("env {name}: the source in valueFrom is not supported: use fieldRef")]
    Source { name: String },
    #[error(
        "{what}: longer than {MAX_TEXT_BYTES} bytes after $(VAR) is replaced; the kernel cannot start a program with it"
    )]
    TextTooLong { what: String },
    #[error(
        "{what}: env, command and args are longer than {MAX_BYTES} bytes after $(VAR) is replaced; the kernel cannot start a program with them"
    )]
    TooLong { what: String },
}

/// The values for fieldRef that are not in the pod's object.
#[derive(Debug, Clone, Default)]
pub(crate) struct PodFacts {
    pub(crate) node_name: String,
    pub(crate) host_ip: String,
    pub(crate) pod_ips: Vec<String>,
}

/// In manifest order; a later variable replaces an earlier one of the same name.
#[derive(Debug, Default)]
pub(crate) struct Environment {
    variables: Vec<(String, String)>,
    /// Index into `variables`, by name.
    places: HashMap<String, usize>,
    /// The total length of all expanded texts.
    bytes: Cell<usize>,
}

impl Environment {
    pub(crate) fn of(container: &Container, pod: &Pod, facts: &PodFacts) -> Result<Self, Error> {
        let mut environment = Self::default();
        for variable in &container.env {
            let value = match &variable.value_from {
                None => environment.expand(&format!("env {}", variable.name), &variable.value)?,
                Some(source) => {
                    let name = || variable.name.clone();
                    let reference =
                        source.field_ref.as_ref().ok_or_else(|| Error::Source { name: name() })?;
                    field(&reference.field_path, pod, facts)
                        .ok_or_else(|| Error::Field { name: name(), field: reference.field_path.clone() })?
                }
            };
            environment.set(variable, value);
        }
        Ok(environment)
    }

    /// Replaces `$(VAR)` in a command, argument or value; errors name it as `what`.
    pub(crate) fn expand(&self, what: &str, text: &str) -> Result<String, Error> {
        let value_of = |name: &str| Some(self.variables.get(*self.places.get(name)?)?.1.as_str());
        let expanded = expand(text, value_of, MAX_TEXT_BYTES)
            .ok_or_else(|| Error::TextTooLong { what: what.to_owned() })?;
        self.bytes.set(self.bytes.get() + expanded.len());
        if self.bytes.get() > MAX_BYTES {
            return Err(Error::TooLong { what: what.to_owned() });
        }
        Ok(expanded)
    }

    pub(crate) fn into_variables(self) -> Vec<(String, String)> {
        self.variables
    }

    fn set(&mut self, variable: &EnvVar, value: String) {
        let next = self.variables.len();
        let place = *self.places.entry(variable.name.clone()).or_insert(next);
        match self.variables.get_mut(place) {
            Some(known) => known.1 = value,
            None => self.variables.push((variable.name.clone(), value)),
        }
    }
}

fn field(path: &str, pod: &Pod, facts: &PodFacts) -> Option<String> {
    let metadata = &pod.metadata;
    let entry = |map: &BTreeMap<String, String>, key: &str| Some(map.get(key).cloned().unwrap_or_default());
    match path {
        "metadata.name" => Some(metadata.name.clone()),
        "metadata.namespace" => Some(metadata.namespace.clone()),
        "metadata.uid" => Some(metadata.uid.clone()),
        "spec.nodeName" => Some(facts.node_name.clone()),
        "status.hostIP" => Some(facts.host_ip.clone()),
        "status.podIP" => Some(facts.pod_ips.first().cloned().unwrap_or_default()),
        "status.podIPs" => Some(facts.pod_ips.join(",")),
        _ => match subscript(path)? {
            ("metadata.labels", key) => entry(&metadata.labels, key),
            ("metadata.annotations", key) => entry(&metadata.annotations, key),
            _ => None,
        },
    }
}

/// Splits `a.b['key']` into (`a.b`, `key`).
fn subscript(path: &str) -> Option<(&str, &str)> {
    let (base, rest) = path.split_once("['")?;
    Some((base, rest.strip_suffix("']")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(env: serde_json::Value) -> Result<Vec<(String, String)>, Error> {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "web", "namespace": "shop", "uid": "u", "labels": {"app": "x"}},
            "spec": {"containers": [{"name": "c", "env": env}]}
        }))
        .unwrap();
        let facts = PodFacts { pod_ips: vec!["10.0.0.2".into(), "fd00::2".into()], ..PodFacts::default() };
        Environment::of(&pod.spec.containers[0], &pod, &facts).map(Environment::into_variables)
    }

    fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
        expected.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn values_see_the_variables_before_them_and_the_pod() {
        let env = serde_json::json!([
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "URL", "value": "http://$(IP):$(PORT)/"},
            {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
            {"name": "IP", "value": "other"},
        ]);
        let expected = [("IP", "other"), ("URL", "http://10.0.0.2:$(PORT)/"), ("APP", "x")];
        assert_eq!(environment(env).unwrap(), pairs(&expected));
    }

    #[test]
    fn variables_that_expand_exponentially_are_refused_early() {
        let doubled = |number: usize| format!("$(A{0})$(A{0})", number - 1);
        let value = |number: usize| if number == 0 { "x".repeat(100) } else { doubled(number) };
        let env: Vec<_> = (0..40)
            .map(|number| serde_json::json!({"name": format!("A{number}"), "value": value(number)}))
            .collect();
        let error = environment(env.into()).unwrap_err();
        assert_eq!(error, Error::TextTooLong { what: "env A11".into() });

        let env: Vec<_> = (0..100)
            .map(|number| serde_json::json!({"name": format!("A{number}"), "value": "x".repeat(100_000)}))
            .collect();
        let error = environment(env.into()).unwrap_err();
        assert_eq!(error, Error::TooLong { what: "env A62".into() });
    }

    #[test]
    fn an_unknown_field_is_named() {
        let env = serde_json::json!([{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.color"}}}]);
        assert_eq!(
            environment(env).unwrap_err(),
            Error::Field { name: "A".into(), field: "spec.color".into() }
        );
    }
}
