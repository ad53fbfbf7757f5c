//! The tests of the workspace, by name.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The [`plain`] text of each file with a test of this name.
pub(crate) struct Tests(BTreeMap<String, Vec<String>>);

impl Tests {
    pub(crate) fn read() -> Self {
        let mut tests = BTreeMap::<String, Vec<String>>::new();
        for path in sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..")) {
            let text = fs::read_to_string(&path).expect("a source file");
            for name in names(&text) {
                tests.entry(name.to_owned()).or_default().push(plain(&text));
            }
        }
        Self(tests)
    }

    pub(crate) fn exist(&self, test: &str) -> bool {
        self.0.contains_key(test)
    }

    /// Whether the file of the test has the last part of the field's path, as YAML or Rust writes it.
    pub(crate) fn name_field(&self, test: &str, field: &str) -> bool {
        let name = plain(field.rsplit('.').next().unwrap_or_default());
        self.0.get(test).into_iter().flatten().any(|text| text.contains(&name))
    }
}

/// The functions with an attribute that makes them tests.
fn names(text: &str) -> impl Iterator<Item = &str> {
    let mut is_test = false;
    text.lines().map(str::trim_start).filter_map(move |line| {
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            is_test = true;
        }
        let rest = line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ")?;
        std::mem::take(&mut is_test).then(|| rest.split('(').next().unwrap_or_default())
    })
}

/// `hostPath`, `host_path` and `HostPath` are one name.
fn plain(text: &str) -> String {
    text.chars().filter(|letter| *letter != '_').map(|letter| letter.to_ascii_lowercase()).collect()
}

fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).expect("a directory").flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let kind = entry.file_type().expect("the type of an entry");
        // Neither the build's output nor this test's own files.
        if kind.is_dir() && name != "target" && name != "fields" && !name.as_encoded_bytes().starts_with(b".")
        {
            found.extend(sources(&path));
        } else if kind.is_file() && path.extension().is_some_and(|suffix| suffix == "rs") {
            found.push(path);
        }
    }
    found
}
