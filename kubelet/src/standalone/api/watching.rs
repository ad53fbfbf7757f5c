//! `watch`: the objects of a kind, and then their changes.
//!
//! Each time something has changed, what is there is compared with what was sent. So a client that is
//! slow gets fewer changes, and none of them is old. Only what the store has changed since is made into
//! JSON: hundreds of pods take milliseconds.

use std::collections::BTreeMap;
use std::time::Duration;

use proto::kubelet::watch_event::Type;
use proto::kubelet::{GetRequest, WatchEvent};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::time::{Instant, sleep_until};

use super::get::{Listed, Version, listed};
use super::{Api, Error, Stopping};
use crate::engine::Handle;
use crate::objects::Kind;
use crate::standalone::store::{Change, Store};

type Answers = mpsc::Sender<Result<WatchEvent, Error>>;
type Known = BTreeMap<(String, String), Listed>;

/// The time between two comparisons: a burst of changes is not a burst of work.
const PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct Watch {
    store: Store,
    engine: Handle,
    request: GetRequest,
    kind: Kind,
    changes: broadcast::Receiver<Change>,
    statuses: watch::Receiver<()>,
    stopping: watch::Receiver<Stopping>,
}

impl Watch {
    pub(super) fn begin(api: &Api, request: GetRequest) -> Result<Self, Error> {
        let store = &api.store;
        Ok(Self {
            stopping: api.stopping.subscribe(),
            kind: request.kind.parse()?,
            changes: store.subscribe(),
            statuses: store.subscribe_statuses(),
            store: store.clone(),
            engine: api.engine.clone(),
            request,
        })
    }

    /// Returns when the client has gone, or the kubelet ends.
    pub(super) async fn send(mut self, answers: Answers) {
        let mut known = Known::new();
        let mut is_first = true;
        loop {
            let seen = |namespace: &str, name: &str, version: &Version| {
                let before = known.get(&(namespace.to_owned(), name.to_owned()));
                before.is_some_and(|before| before.is(version))
            };
            let now = match listed(&self.store, &self.engine, &self.request, &seen) {
                Ok(objects) => objects,
                Err(error) => return drop(answers.send(Err(error)).await),
            };
            let compared = Instant::now();
            let bookmark = std::mem::take(&mut is_first).then(|| event(Type::Bookmark, Vec::new()));
            for event in changed(&mut known, now).into_iter().chain(bookmark) {
                if answers.send(Ok(event)).await.is_err() {
                    return;
                }
            }
            tokio::select! {
                alive = self.change() => if !alive { return },
                () = answers.closed() => return,
            }
            sleep_until(compared + PAUSE).await;
        }
    }

    /// Waits for a change of the kind; `false` when there will be none.
    async fn change(&mut self) -> bool {
        loop {
            tokio::select! {
                change = self.changes.recv() => match change {
                    Ok(change) if change.kind != self.kind => {}
                    Ok(_) | Err(RecvError::Lagged(_)) => return true,
                    Err(RecvError::Closed) => return false,
                },
                status = self.statuses.changed() => match status {
                    Ok(()) if self.kind != Kind::Pod => {}
                    Ok(()) => return true,
                    Err(_) => return false,
                },
                _ = self.stopping.wait_for(|stopping| *stopping == Stopping::Now) => return false,
            }
        }
    }
}

/// What makes `known` into `now`.
fn changed(known: &mut Known, now: Vec<Listed>) -> Vec<WatchEvent> {
    let mut before = std::mem::take(known);
    let (mut deleted, mut changed) = (Vec::new(), Vec::new());
    for object in now {
        let key = (object.namespace.clone(), object.name.clone());
        let kept = match before.remove(&key) {
            Some(seen) if object.json.is_empty() => seen,
            Some(earlier) if earlier.uid == object.uid => {
                if earlier.json != object.json {
                    changed.push(event(Type::Modified, object.json.clone()));
                }
                object
            }
            earlier => {
                deleted.extend(earlier.map(|earlier| event(Type::Deleted, earlier.json)));
                changed.push(event(Type::Added, object.json.clone()));
                object
            }
        };
        known.insert(key, kept);
    }
    deleted.extend(before.into_values().map(|gone| event(Type::Deleted, gone.json)));
    deleted.extend(changed);
    deleted
}

fn event(event_type: Type, object: Vec<u8>) -> WatchEvent {
    WatchEvent { r#type: event_type.into(), object }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_of_the_same_name_is_another_object() {
        let object = |name: &str, uid: &str, json: &str| Listed {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            uid: uid.to_owned(),
            json: json.as_bytes().to_vec(),
            version: None,
        };
        let mut known = Known::new();
        let mut step = |objects: Vec<Listed>| {
            let events = changed(&mut known, objects).into_iter();
            let words = events
                .map(|event| format!("{:?} {}", event.r#type(), String::from_utf8_lossy(&event.object)));
            words.collect::<Vec<_>>()
        };
        assert_eq!(step(vec![object("a", "1", "a1"), object("b", "2", "b2")]), ["Added a1", "Added b2"]);
        assert_eq!(step(vec![object("a", "1", "a1"), object("b", "2", "b3")]), ["Modified b3"]);
        assert_eq!(step(vec![object("a", "1", ""), object("b", "2", "b3")]), [""; 0], "a1 was seen");
        assert_eq!(step(vec![object("a", "3", "a3")]), ["Deleted a1", "Deleted b3", "Added a3"]);
    }
}
