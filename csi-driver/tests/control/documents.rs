//! docs/CSI.md and the tests say the same things.

use std::fs;
use std::path::Path;

const PAGE: &str = include_str!("../../../docs/CSI.md");

#[test]
fn what_happens_when_is_backed_by_tests() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let sources =
        ["tests", "../keeper/tests", "../tests/tests"].map(|dir| sources(&package.join(dir))).concat();
    let section = PAGE.split("\n## What happens when\n").nth(1).unwrap();
    let rows: Vec<&str> = section.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    assert!(rows.len() >= 10, "{rows:?}");
    for row in rows {
        let named: Vec<&str> =
            row.split('`').skip(1).step_by(2).filter(|name| !name.starts_with("--")).collect();
        assert!(!named.is_empty(), "no test backs: {row}");
        for name in named {
            assert!(is_test(&sources, name), "there is no test {name}");
        }
    }
}

/// Written out, or a name that a macro makes a test of.
fn is_test(sources: &str, name: &str) -> bool {
    sources.contains(&format!("fn {name}()")) || sources.contains(&format!("\n    {name}:"))
}

fn sources(dir: &Path) -> String {
    let mut all = String::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all += &sources(&path);
        } else {
            all += &fs::read_to_string(path).unwrap();
        }
    }
    all
}
