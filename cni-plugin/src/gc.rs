//! The input of GC: the attachments that are still in use (CNI specification 1.1.0, "GC",
//! `cni.dev/valid-attachments`).

use std::collections::BTreeSet;

use crate::conf::COMMON_KEYS;
use crate::{CniError, NetConf};

const KEY: &str = "cni.dev/valid-attachments";
/// The key in libcni before 1.2, which sends both.
const OLD_KEY: &str = "cni.dev/attachments";
const MISSING: &str = "missing; GC removes nothing: pass the attachments in use as a list of \
                       {\"containerID\", \"ifname\"}, [] if there are none";

/// The attachments of one network that are in use. GC treats all others of that network as stale.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ValidAttachments {
    /// Container id and interface name.
    pairs: BTreeSet<(String, String)>,
}

impl ValidAttachments {
    /// A list that is `null` is empty: libcni sends a nil slice if nothing is in use. A missing
    /// list is an error, since it says nothing about what is in use (`cnitool gc` sends none).
    pub fn read(conf: &NetConf) -> Result<Self, CniError> {
        let fields = conf.fields(COMMON_KEYS);
        let keys = [KEY, OLD_KEY];
        // A list under one key takes precedence over a `null` under the other.
        let listed = keys.into_iter().find(|key| fields.get(key).is_some());
        let key = listed.or_else(|| keys.into_iter().find(|key| fields.has(key)));
        let key = key.ok_or_else(|| CniError::config(format_args!("{KEY}: {MISSING}")))?;
        let mut pairs = BTreeSet::new();
        for entry in fields.objects(key)? {
            let required = |key: &str| {
                let text = entry.string(key)?.filter(|text| !text.is_empty());
                text.ok_or_else(|| CniError::config(format_args!("{}: missing", entry.path_of(key))))
            };
            pairs.insert((required("containerID")?, required("ifname")?));
        }
        Ok(Self { pairs })
    }

    pub fn contains(&self, container_id: &str, ifname: &str) -> bool {
        self.pairs.contains(&(container_id.to_owned(), ifname.to_owned()))
    }

    /// Whether any interface of the container is in use.
    pub fn contains_container(&self, container_id: &str) -> bool {
        self.iter().any(|(id, _)| id == container_id)
    }

    /// Container id and interface name of each.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.pairs.iter().map(|(id, ifname)| (id.as_str(), ifname.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(list: &str) -> Result<ValidAttachments, CniError> {
        let text = format!(r#"{{"name":"n","cniVersion":"1.1.0"{list}}}"#);
        ValidAttachments::read(&NetConf::parse(text.into_bytes()).unwrap())
    }

    #[test]
    fn a_missing_list_is_no_empty_list() {
        let err = read("").unwrap_err();
        assert!(
            err.msg.starts_with("cni.dev/valid-attachments: missing; GC removes nothing: pass "),
            "{err:?}"
        );
        assert!(err.msg.contains(r#"{"containerID", "ifname"}"#), "{err:?}");
        assert_eq!(read(r#","cni.dev/valid-attachments":[]"#).unwrap(), ValidAttachments::default());
    }

    #[test]
    fn a_null_list_is_libcnis_empty_list() {
        for key in ["cni.dev/valid-attachments", "cni.dev/attachments"] {
            assert_eq!(read(&format!(r#","{key}":null"#)).unwrap(), ValidAttachments::default());
        }
    }

    #[test]
    fn both_names_of_the_list_are_known_and_the_new_one_wins() {
        let old = r#","cni.dev/attachments":[{"containerID":"a","ifname":"eth0"}]"#;
        let valid = read(old).unwrap();
        assert!(valid.contains("a", "eth0") && valid.contains_container("a"));
        assert!(!valid.contains("a", "eth1") && !valid.contains_container("b"));
        let both = format!(r#"{old},"cni.dev/valid-attachments":[{{"containerID":"b","ifname":"e"}}]"#);
        assert_eq!(read(&both).unwrap().iter().collect::<Vec<_>>(), [("b", "e")]);
    }

    #[test]
    fn an_incomplete_entry_is_named() {
        let err = read(r#","cni.dev/valid-attachments":[{"containerID":"a"}]"#).unwrap_err();
        assert_eq!(err.msg, "cni.dev/valid-attachments[0].ifname: missing");
    }
}
