//! The objects of one kind that the runtime has: by id, by owner (of a sandbox, the uid in its metadata; of a
//! container, its sandbox), and by the pod that its labels name.
//!
//! Each step of a pod's start asks for those of one pod, several times. To look at all takes up to 0.2 ms
//! among 300 pods.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// The label with the pod's uid, which every kubelet sets and asks for
/// (k8s.io/cri-client/pkg/types, `KubernetesPodUIDLabel`).
const POD_UID: &str = "io.kubernetes.pod.uid";

type Labels = HashMap<String, String>;

#[derive(Debug)]
pub(crate) struct Objects<T> {
    by_id: BTreeMap<String, Entry<T>>,
    by_owner: Index,
    /// By the label `POD_UID`.
    by_pod: Index,
}

#[derive(Debug)]
struct Entry<T> {
    owner: String,
    pod: Option<String>,
    object: Arc<T>,
}

/// Ids by a key that objects share.
#[derive(Debug, Default)]
struct Index(HashMap<String, BTreeSet<String>>);

impl Index {
    fn add(&mut self, key: &str, id: &str) {
        self.0.entry(key.to_owned()).or_default().insert(id.to_owned());
    }

    fn remove(&mut self, key: &str, id: &str) {
        let Some(ids) = self.0.get_mut(key) else { return };
        ids.remove(id);
        if ids.is_empty() {
            self.0.remove(key);
        }
    }

    /// In order.
    fn ids(&self, key: &str) -> impl Iterator<Item = &String> {
        self.0.get(key).into_iter().flatten()
    }
}

impl<T> Default for Objects<T> {
    fn default() -> Self {
        Self { by_id: BTreeMap::new(), by_owner: Index::default(), by_pod: Index::default() }
    }
}

impl<T> Objects<T> {
    /// `owner` and `labels` must not change as long as the object is here.
    pub(crate) fn insert(&mut self, id: &str, owner: &str, labels: &Labels, object: Arc<T>) {
        self.remove(id);
        let pod = labels.get(POD_UID).cloned();
        if let Some(pod) = &pod {
            self.by_pod.add(pod, id);
        }
        self.by_owner.add(owner, id);
        self.by_id.insert(id.to_owned(), Entry { owner: owner.to_owned(), pod, object });
    }

    pub(crate) fn remove(&mut self, id: &str) {
        let Some(Entry { owner, pod, .. }) = self.by_id.remove(id) else { return };
        self.by_owner.remove(&owner, id);
        if let Some(pod) = pod {
            self.by_pod.remove(&pod, id);
        }
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<T>> {
        self.by_id.values().map(|entry| &entry.object)
    }

    /// In order of their ids.
    pub(crate) fn of_owner(&self, owner: &str) -> Vec<Arc<T>> {
        self.objects(self.by_owner.ids(owner))
    }

    /// Those that may have all of `labels`, in order of their ids: of one pod, or all.
    pub(crate) fn candidates(&self, labels: &Labels) -> Vec<Arc<T>> {
        match labels.get(POD_UID) {
            Some(pod) => self.objects(self.by_pod.ids(pod)),
            None => self.all().cloned().collect(),
        }
    }

    fn objects<'a>(&'a self, ids: impl Iterator<Item = &'a String>) -> Vec<Arc<T>> {
        ids.filter_map(|id| self.by_id.get(id)).map(|entry| Arc::clone(&entry.object)).collect()
    }

    /// By id, or by a unique prefix of one (as crictl users type them).
    pub(crate) fn find(&self, id: &str) -> Option<Arc<T>> {
        if let Some(found) = self.by_id.get(id) {
            return Some(Arc::clone(&found.object));
        }
        if id.is_empty() {
            return None;
        }
        let mut matches = self.by_id.range(id.to_owned()..).take_while(|(known, _)| known.starts_with(id));
        let (_, first) = matches.next()?;
        matches.next().is_none().then(|| Arc::clone(&first.object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(uid: &str) -> Labels {
        Labels::from([(POD_UID.to_owned(), uid.to_owned())])
    }

    #[test]
    fn those_of_one_pod_are_found_until_they_are_removed() {
        let mut objects = Objects::default();
        for (id, uid) in [("b", "one"), ("a", "one"), ("c", "two")] {
            objects.insert(id, uid, &labels(uid), Arc::new(id));
        }
        objects.insert("d", "two", &Labels::new(), Arc::new("d"));
        let found = |objects: &Objects<&'static str>, wanted: &Labels| -> Vec<&'static str> {
            objects.candidates(wanted).iter().map(|object| **object).collect()
        };
        assert_eq!(found(&objects, &labels("one")), ["a", "b"]);
        assert_eq!(found(&objects, &labels("three")), [""; 0]);
        assert_eq!(found(&objects, &Labels::new()), ["a", "b", "c", "d"]);
        objects.insert("a", "one", &labels("two"), Arc::new("again"));
        assert_eq!(found(&objects, &labels("two")), ["again", "c"]);
        let owned = |owner| objects.of_owner(owner).iter().map(|object| **object).collect::<Vec<_>>();
        assert_eq!(
            (owned("one"), owned("two"), owned("three")),
            (vec!["again", "b"], vec!["c", "d"], vec![])
        );
        for id in ["a", "b", "c", "d", "never"] {
            objects.remove(id);
        }
        assert!(objects.by_id.is_empty() && objects.by_owner.0.is_empty() && objects.by_pod.0.is_empty());
    }

    #[test]
    fn a_prefix_finds_one_object_or_none() {
        let mut objects = Objects::default();
        for id in ["ab", "abc", "b1"] {
            objects.insert(id, "", &Labels::new(), Arc::new(id));
        }
        for (asked, found) in [("ab", Some("ab")), ("a", None), ("b", Some("b1")), ("c", None), ("", None)] {
            assert_eq!(objects.find(asked).map(|object| *object), found, "{asked}");
        }
    }
}
