//! A container's environment: ConfigMaps and Secrets as a whole, literal values, values with `$(VAR)`,
//! keys of ConfigMaps and Secrets, and fields of the pod (kubernetes, `makeEnvironmentVariables`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::path::Path;

use crate::container_config::expansion::expand;
use crate::objects::{Container, EnvFromSource, EnvVarSource, KeySelector, Kind, Pod};
use crate::pod::fields::{self, PodFacts};
use crate::pod::resources::node_capacity;
use crate::store::Store;

/// The kernel's limit for one string (MAX_ARG_STRLEN, without the terminating NUL).
const MAX_TEXT_BYTES: usize = (128 << 10) - 1;
/// The kernel's limit for all strings (three quarters of `_STK_LIM`, fs/exec.c).
const MAX_BYTES: usize = 6 << 20;

/// A variable without a valid value: CreateContainerConfigError.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    #[error("env {name}: valueFrom.fieldRef.fieldPath {field:?} is not supported")]
    Field { name: String, field: String },
    #[error("env {name}: valueFrom.resourceFieldRef: no container or no resource {resource:?}")]
    Resource { name: String, resource: String },
    #[error("env {name}: valueFrom has no source")]
    Source { name: String },
    #[error("{} \"{name}\" not found", kind.as_str().to_lowercase())]
    ObjectMissing { kind: Kind, name: String },
    #[error("couldn't find key {key} in {kind} {namespace}/{name}")]
    KeyMissing { kind: Kind, namespace: String, name: String, key: String },
    #[error("{what}: missing value for {name:?}")]
    Missing { what: String, name: String },
    #[error("env {name}: the value is not text: mount it as a file")]
    NotText { name: String },
    #[error(
        "{what}: longer than {MAX_TEXT_BYTES} bytes after $(VAR) is replaced; the kernel cannot start a program with it"
    )]
    TextTooLong { what: String },
    #[error(
        "{what}: env, command and args are longer than {MAX_BYTES} bytes after $(VAR) is replaced; the kernel cannot start a program with them"
    )]
    TooLong { what: String },
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

/// Where a container's variables come from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origins<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) container: &'a Container,
    pub(crate) facts: &'a PodFacts,
    pub(crate) store: &'a Store,
    pub(crate) root_dir: &'a Path,
}

impl Environment {
    pub(crate) fn of(origins: Origins<'_>) -> Result<Self, Error> {
        let mut environment = Self::default();
        for source in &origins.container.env_from {
            environment.add_all(source, origins)?;
        }
        for variable in &origins.container.env {
            environment.count_name(variable.name.len())?;
            let value = match &variable.value_from {
                None => Some(environment.expand(&format!("env {}", variable.name), &variable.value)?),
                Some(source) => environment.value_from(&variable.name, source, origins)?,
            };
            // An optional key that is missing sets no variable.
            if let Some(value) = value {
                environment.set(&variable.name, value);
            }
        }
        Ok(environment)
    }

    /// Every key is a valid name: `manifest` has checked it, and the prefix.
    fn add_all(
        &mut self,
        source: &EnvFromSource,
        Origins { pod, store, .. }: Origins<'_>,
    ) -> Result<(), Error> {
        let namespace = &pod.metadata.namespace;
        let missing = |kind, name: &str| Err(Error::ObjectMissing { kind, name: name.to_owned() });
        if let Some(wanted) = &source.config_map_ref {
            match store.config_map(namespace, &wanted.name) {
                // As with kubelet, binaryData has no variables.
                Some(map) => map.data.iter().try_for_each(|(key, text)| {
                    let name = self.prefixed(&source.prefix, key)?;
                    self.add(name, text.clone())
                })?,
                None if wanted.optional => {}
                None => return missing(Kind::ConfigMap, &wanted.name),
            }
        }
        if let Some(wanted) = &source.secret_ref {
            match store.secret(namespace, &wanted.name) {
                Some(secret) => secret.entries().into_iter().try_for_each(|(key, bytes)| {
                    let name = self.prefixed(&source.prefix, key)?;
                    let value = as_text(&name, bytes)?;
                    self.add(name, value)
                })?,
                None if wanted.optional => {}
                None => return missing(Kind::Secret, &wanted.name),
            }
        }
        Ok(())
    }

    fn value_from(
        &self,
        name: &str,
        source: &EnvVarSource,
        origins: Origins<'_>,
    ) -> Result<Option<String>, Error> {
        let Origins { pod, container, facts, store, root_dir } = origins;
        let named = || name.to_owned();
        let value = if let Some(field) = &source.field_ref {
            let value = fields::of_variable(&field.field_path, pod, facts);
            value.ok_or_else(|| Error::Field { name: named(), field: field.field_path.clone() })?
        } else if let Some(wanted) = &source.resource_field_ref {
            let value = fields::of_resource(wanted, Some(container), pod, node_capacity(root_dir));
            value.ok_or_else(|| Error::Resource { name: named(), resource: wanted.resource.clone() })?
        } else if let Some(wanted) = &source.config_map_key_ref {
            let map = store.config_map(&pod.metadata.namespace, &wanted.name);
            let entry = map.as_ref().map(|map| map.data.get(&wanted.key));
            match found(Kind::ConfigMap, wanted, pod, entry)? {
                Some(text) => text.clone(),
                None => return Ok(None),
            }
        } else if let Some(wanted) = &source.secret_key_ref {
            let secret = store.secret(&pod.metadata.namespace, &wanted.name);
            let entry = secret.as_ref().map(|secret| secret.data.get(&wanted.key));
            match found(Kind::Secret, wanted, pod, entry)? {
                Some(bytes) => as_text(name, &bytes.0)?,
                None => return Ok(None),
            }
        } else {
            return Err(Error::Source { name: named() });
        };
        self.count(&format!("env {name}"), &value)?;
        Ok(Some(value))
    }

    /// Replaces `$(VAR)` in a command, argument or value; errors name it as `what`.
    pub(crate) fn expand(&self, what: &str, text: &str) -> Result<String, Error> {
        let value_of = |name: &str| Some(self.variables.get(*self.places.get(name)?)?.1.as_str());
        let expanded = expand(text, value_of, MAX_TEXT_BYTES)
            .ok_or_else(|| Error::TextTooLong { what: what.to_owned() })?;
        self.count(what, &expanded)?;
        Ok(expanded)
    }

    /// [`Environment::expand`], but every variable must be set.
    pub(crate) fn expand_all(&self, what: &str, text: &str) -> Result<String, Error> {
        let missing = RefCell::new(None);
        let value_of = |name: &str| {
            let value = self.places.get(name).map(|place| self.variables[*place].1.as_str());
            if value.is_none() {
                missing.borrow_mut().get_or_insert_with(|| name.to_owned());
            }
            value
        };
        let expanded = expand(text, value_of, MAX_TEXT_BYTES);
        match (missing.take(), expanded) {
            (Some(name), _) => Err(Error::Missing { what: what.to_owned(), name }),
            (None, Some(expanded)) => Ok(expanded),
            (None, None) => Err(Error::TextTooLong { what: what.to_owned() }),
        }
    }

    /// Refuses what the kernel would refuse.
    fn count(&self, what: &str, text: &str) -> Result<(), Error> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(Error::TextTooLong { what: what.to_owned() });
        }
        self.bytes.set(self.bytes.get() + text.len());
        if self.bytes.get() > MAX_BYTES {
            return Err(Error::TooLong { what: what.to_owned() });
        }
        Ok(())
    }

    /// The kernel needs a `=`, a NUL and a pointer more for each variable.
    fn count_name(&self, length: usize) -> Result<(), Error> {
        if length > MAX_TEXT_BYTES {
            return Err(Error::TextTooLong { what: "the name of a variable".to_owned() });
        }
        self.bytes.set(self.bytes.get() + length + 2 + size_of::<usize>());
        if self.bytes.get() > MAX_BYTES {
            return Err(Error::TooLong { what: "the names of variables".to_owned() });
        }
        Ok(())
    }

    /// Refuses the name before it is made: a prefix may be long, and there may be many keys.
    fn prefixed(&self, prefix: &str, key: &str) -> Result<String, Error> {
        self.count_name(prefix.len() + key.len())?;
        Ok(format!("{prefix}{key}"))
    }

    fn add(&mut self, name: String, value: String) -> Result<(), Error> {
        self.count(&format!("env {name}"), &value)?;
        if value.contains('\0') {
            return Err(Error::NotText { name });
        }
        self.set(&name, value);
        Ok(())
    }

    pub(crate) fn into_variables(self) -> Vec<(String, String)> {
        self.variables
    }

    fn set(&mut self, name: &str, value: String) {
        let next = self.variables.len();
        let place = *self.places.entry(name.to_owned()).or_insert(next);
        match self.variables.get_mut(place) {
            Some(known) => known.1 = value,
            None => self.variables.push((name.to_owned(), value)),
        }
    }
}

/// The value of `wanted`: `entry` is `None` without the object, `Some(None)` without the key. Both are
/// errors unless the reference is optional.
fn found<T>(
    kind: Kind,
    wanted: &KeySelector,
    pod: &Pod,
    entry: Option<Option<T>>,
) -> Result<Option<T>, Error> {
    let (name, key) = (wanted.name.clone(), wanted.key.clone());
    match entry {
        Some(Some(value)) => Ok(Some(value)),
        _ if wanted.optional => Ok(None),
        Some(None) => Err(Error::KeyMissing { kind, namespace: pod.metadata.namespace.clone(), name, key }),
        None => Err(Error::ObjectMissing { kind, name }),
    }
}

/// No variable can hold a NUL, and CRI's are text.
fn as_text(name: &str, bytes: &[u8]) -> Result<String, Error> {
    match String::from_utf8(bytes.to_vec()) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err(Error::NotText { name: name.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OBJECTS: &str = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings, namespace: shop}\n\
                           data: {color: blue, size: large}\nbinaryData: {raw: AP8=}\n---\n\
                           apiVersion: v1\nkind: Secret\nmetadata: {name: token, namespace: shop}\n\
                           data: {raw: AP8=}\nstringData: {password: hush}\n";

    fn environment(env: serde_json::Value) -> Result<Vec<(String, String)>, Error> {
        environment_of(serde_json::json!({"name": "c", "env": env}))
    }

    fn environment_of(container: serde_json::Value) -> Result<Vec<(String, String)>, Error> {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path(), "node").unwrap();
        for object in crate::manifest::parse(OBJECTS.as_bytes(), "test.yaml").manifests {
            store.apply(object.described(), crate::store::Source::Api).unwrap();
        }
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "web", "namespace": "shop", "uid": "u", "labels": {"app": "x"}},
            "spec": {"containers": [container]}
        }))
        .unwrap();
        let facts = PodFacts { pod_ips: vec!["10.0.0.2".into(), "fd00::2".into()], ..PodFacts::default() };
        let container = &pod.spec.containers[0];
        let origins = Origins { pod: &pod, container, facts: &facts, store: &store, root_dir: root.path() };
        Environment::of(origins).map(Environment::into_variables)
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

    #[test]
    fn whole_objects_come_first_and_are_replaced_by_single_variables() {
        let container = serde_json::json!({
            "name": "c",
            "envFrom": [
                {"prefix": "S_", "configMapRef": {"name": "settings"}},
                {"secretRef": {"name": "none", "optional": true}},
                {"configMapRef": {"name": "none", "optional": true}},
            ],
            "env": [
                {"name": "S_size", "value": "$(S_size)r"},
                {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "token", "key": "password"}}},
                {"name": "COLOR", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "color"}}},
                {"name": "NONE", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "x", "optional": true}}},
                {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}}},
            ],
            "resources": {"limits": {"cpu": "1500m"}},
        });
        let expected = [
            ("S_color", "blue"),
            ("S_size", "larger"),
            ("PASSWORD", "hush"),
            ("COLOR", "blue"),
            ("CPU", "1500"),
        ];
        assert_eq!(environment_of(container).unwrap(), pairs(&expected));
    }

    #[test]
    fn what_is_missing_or_no_text_is_named_without_its_value() {
        let error = |container: serde_json::Value| environment_of(container).unwrap_err().to_string();
        let from = |source: serde_json::Value| serde_json::json!({"name": "c", "envFrom": [source]});
        let one = |source: serde_json::Value| serde_json::json!({"name": "c", "env": [{"name": "A", "valueFrom": source}]});
        for (container, expected) in [
            (from(serde_json::json!({"configMapRef": {"name": "none"}})), "configmap \"none\" not found"),
            (from(serde_json::json!({"secretRef": {"name": "none"}})), "secret \"none\" not found"),
            (
                from(serde_json::json!({"secretRef": {"name": "token"}})),
                "env raw: the value is not text: mount it as a file",
            ),
            (
                one(serde_json::json!({"secretKeyRef": {"name": "none", "key": "a"}})),
                "secret \"none\" not found",
            ),
            (
                one(serde_json::json!({"configMapKeyRef": {"name": "settings", "key": "a"}})),
                "couldn't find key a in ConfigMap shop/settings",
            ),
            (
                one(
                    serde_json::json!({"resourceFieldRef": {"containerName": "x", "resource": "limits.cpu"}}),
                ),
                "env A: valueFrom.resourceFieldRef: no container or no resource \"limits.cpu\"",
            ),
        ] {
            assert_eq!(error(container), expected);
        }
    }
}
