//! `watch`: the objects of a kind, and then their changes.
//!
//! Each time something has changed, what is there is compared with what was sent. So a client that is
//! slow gets fewer changes, and none of them is old. Only what the store has changed since is looked
//! into: the JSON of hundreds of pods takes milliseconds.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use proto::kubelet::watch_event::Type;
use proto::kubelet::{GetRequest, WatchEvent};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::time::{Instant, sleep_until};

use super::get::{self, Found};
use super::{Api, Error, Stopping};
use crate::engine::Handle;
use crate::objects::Kind;
use crate::store::{Change, Store};

type Answers = mpsc::Sender<Result<WatchEvent, Error>>;

/// An object, and its JSON as the client has it.
struct Sent {
    object: Found,
    json: Vec<u8>,
}

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
        let mut sent = Vec::new();
        let mut is_first = true;
        loop {
            let found = match get::found(&self.store, &self.engine, &self.request) {
                Ok(objects) => objects,
                Err(error) => return drop(answers.send(Err(error)).await),
            };
            let json = |object: &Found| get::json(&**object, &self.store, &self.request);
            let changes = changes(&mut sent, found, !self.request.whole, json);
            let compared = Instant::now();
            let bookmark = std::mem::take(&mut is_first).then(|| event(Type::Bookmark, Vec::new()));
            for event in changes.into_iter().chain(bookmark) {
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

/// The events from `sent` to `found`. Updates `sent`. `trusts_store`: an object that the store has not changed has
/// the same JSON.
fn changes(
    sent: &mut Vec<Sent>,
    found: Vec<Found>,
    trusts_store: bool,
    json: impl Fn(&Found) -> Vec<u8>,
) -> Vec<WatchEvent> {
    let address = |object: &Found| Arc::as_ptr(object).cast::<()>().addr();
    let mut before: HashMap<usize, Sent> =
        std::mem::take(sent).into_iter().map(|known| (address(&known.object), known)).collect();
    let mut others = Vec::new();
    for object in found {
        match trusts_store.then(|| before.remove(&address(&object))).flatten() {
            Some(same) => sent.push(same),
            None => others.push(object),
        }
    }
    let mut before: BTreeMap<(String, String), Sent> =
        before.into_values().map(|known| (name(&known.object), known)).collect();
    let (mut deleted, mut changed) = (Vec::new(), Vec::new());
    for object in others {
        let json = json(&object);
        match before.remove(&name(&object)) {
            Some(earlier) if earlier.object.metadata().uid == object.metadata().uid => {
                if earlier.json != json {
                    changed.push(event(Type::Modified, json.clone()));
                }
            }
            earlier => {
                deleted.extend(earlier.map(|earlier| event(Type::Deleted, earlier.json)));
                changed.push(event(Type::Added, json.clone()));
            }
        }
        sent.push(Sent { object, json });
    }
    deleted.extend(before.into_values().map(|gone| event(Type::Deleted, gone.json)));
    deleted.extend(changed);
    deleted
}

fn name(object: &Found) -> (String, String) {
    let meta = object.metadata();
    (meta.namespace.clone(), meta.name.clone())
}

fn event(event_type: Type, object: Vec<u8>) -> WatchEvent {
    WatchEvent { r#type: event_type.into(), object }
}

#[cfg(test)]
mod tests {
    use super::super::get::Listable;
    use super::*;
    use crate::objects::ObjectMeta;

    struct Known {
        metadata: ObjectMeta,
        json: String,
    }

    impl Listable for Known {
        fn metadata(&self) -> &ObjectMeta {
            &self.metadata
        }

        fn to_json(&self) -> Vec<u8> {
            self.json.as_bytes().to_vec()
        }
    }

    fn object(name: &str, uid: &str, json: &str) -> Found {
        let (name, uid, namespace) = (name.to_owned(), uid.to_owned(), "default".to_owned());
        let metadata = ObjectMeta { name, uid, namespace, ..ObjectMeta::default() };
        Arc::new(Known { metadata, json: json.to_owned() })
    }

    fn words(events: Vec<WatchEvent>) -> Vec<String> {
        let word =
            |event: WatchEvent| format!("{:?} {}", event.r#type(), String::from_utf8_lossy(&event.object));
        events.into_iter().map(word).collect()
    }

    #[test]
    fn a_successor_of_the_same_name_is_another_object() {
        let mut sent = Vec::new();
        let mut step = |found: Vec<Found>| words(changes(&mut sent, found, true, |object| object.to_json()));
        assert_eq!(step(vec![object("a", "1", "a1"), object("b", "2", "b2")]), ["Added a1", "Added b2"]);
        assert_eq!(step(vec![object("a", "1", "a1"), object("b", "2", "b3")]), ["Modified b3"]);
        assert_eq!(step(vec![object("a", "3", "a3")]), ["Deleted a1", "Deleted b3", "Added a3"]);
    }

    #[test]
    fn an_object_that_the_store_has_not_changed_is_not_made_into_json_again() {
        let mut sent = Vec::new();
        let (a, b) = (object("a", "1", "a1"), object("b", "2", "b2"));
        let of_whole = |_: &Found| b"whole".to_vec();
        assert_eq!(words(changes(&mut sent, vec![a.clone(), b.clone()], true, |o| o.to_json())).len(), 2);
        assert_eq!(words(changes(&mut sent, vec![b.clone(), a.clone()], true, of_whole)), [""; 0]);
        // The rest of a whole object is not part of it.
        let modified = words(changes(&mut sent, vec![a.clone(), b], false, of_whole));
        assert_eq!(modified, ["Modified whole", "Modified whole"]);
        assert_eq!(words(changes(&mut sent, vec![a], true, of_whole)), ["Deleted whole"]);
    }
}
