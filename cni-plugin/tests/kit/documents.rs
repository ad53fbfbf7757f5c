//! docs/CNI.md against the parsers: the tables name the keys that are asked
//! for, and no others. Part of each plugin's tests by `#[path]`.

use std::collections::BTreeSet;
use std::path::PathBuf;

use cni_plugin::conf::KeysAsked;
use cni_plugin::{Command, Invocation, NetConf};

const DOCUMENT: &str = include_str!("../../../docs/CNI.md");
/// The section of what each plugin shares.
pub(crate) const COMMON: &str = "Keys of every configuration";

/// Fails unless the section's table and the common one have just these keys:
/// all of the section's, some of the common ones.
pub(crate) fn assert_section(section: &str, asked: &KeysAsked) {
    let (asked, common) = (asked.leaves(), keys(COMMON));
    let documented = keys(section);
    // A parser may look whether there is a prevResult, and find none.
    let is_common = |key: &String| {
        common
            .iter()
            .any(|known| known.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
    };
    let unwritten: Vec<&String> =
        asked.iter().filter(|key| !documented.contains(*key) && !is_common(key)).collect();
    assert!(unwritten.is_empty(), "asked for, not in docs/CNI.md, \"{section}\": {unwritten:#?}");
    let unread: Vec<&String> = documented.difference(&asked).collect();
    assert!(unread.is_empty(), "in docs/CNI.md, \"{section}\", but not asked for: {unread:#?}");
}

/// The first cells of the section's first table whose head begins with `key`.
pub(crate) fn keys(section: &str) -> BTreeSet<String> {
    let heading = format!("## {section}");
    let mut lines = DOCUMENT.lines().skip_while(|line| *line != heading).skip(1).peekable();
    assert!(lines.peek().is_some(), "docs/CNI.md has no section {section:?}");
    let table = lines
        .take_while(|line| !line.starts_with("## "))
        .skip_while(|line| !line.starts_with("| key |"))
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    let key = |row: &str| row.split('`').nth(1).expect("a row begins with a key").to_owned();
    table.map(key).collect()
}

/// A call whose configuration tells `asked` what is read of it.
pub(crate) fn call(asked: &KeysAsked, configuration: &str) -> Invocation {
    Invocation {
        command: Command::Add,
        container_id: "c".to_owned(),
        netns: Some(PathBuf::from("/run/netns/c")),
        ifname: "eth0".to_owned(),
        args: String::new(),
        path: Vec::new(),
        conf: NetConf::parse_noting(configuration.into(), asked.clone()).expect("a sound configuration"),
    }
}
