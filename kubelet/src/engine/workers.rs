//! One worker per pod, and the rules for waking it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Notify, mpsc};
use tracing::{error, info};

use super::events::ContainerEvent;
use crate::objects::{ContainerState, Kind, ObjectRef, Pod};
use crate::store::{Change, Store};
use crate::worker::{Tools, Worker, tear_down_orphan};

/// A container whose configuration is incomplete.
const CONFIG_ERROR: &str = "CreateContainerConfigError";

#[derive(Debug)]
pub(super) struct Workers {
    tools: Arc<Tools>,
    by_uid: HashMap<String, Running>,
    /// Namespace, name and uid of each.
    by_name: BTreeSet<(String, String, String)>,
    ended: mpsc::UnboundedReceiver<String>,
    end: mpsc::UnboundedSender<String>,
}

#[derive(Debug)]
struct Running {
    namespace: String,
    name: String,
    wake: Arc<Notify>,
}

impl Workers {
    pub(super) fn new(tools: Arc<Tools>) -> Self {
        let (end, ended) = mpsc::unbounded_channel();
        Self { tools, by_uid: HashMap::new(), by_name: BTreeSet::new(), ended, end }
    }

    /// Starts a worker for every pod of the store.
    pub(super) fn follow(&mut self, store: &Store) {
        for pod in store.pods() {
            self.ensure(&pod);
        }
    }

    /// Tears down a pod without an object. A pod of the same name waits until this is done.
    pub(super) fn tear_down(&mut self, orphan: ObjectRef) {
        info!(uid = orphan.uid, name = orphan.name, "tearing down a pod without an object");
        let (uid, end, tools) = (orphan.uid.clone(), self.end.clone(), Arc::clone(&self.tools));
        self.insert(&orphan.namespace, &orphan.name, &uid, Arc::default());
        tokio::spawn(async move {
            tear_down_orphan(tools, orphan).await;
            let _receiver_gone = end.send(uid);
        });
    }

    pub(super) fn on_change(&mut self, store: &Store, change: Result<Change, RecvError>) {
        match change {
            Ok(change) if change.kind == Kind::Pod => {
                if let Some(pod) = store.pod(&change.namespace, &change.name) {
                    self.ensure(&pod);
                }
                self.of_name(&change.namespace, &change.name).for_each(|worker| worker.wake.notify_one());
            }
            Ok(change) if matches!(change.kind, Kind::ConfigMap | Kind::Secret) => {
                self.wake_unconfigured(store, &change.namespace);
            }
            Ok(_) => {}
            Err(RecvError::Lagged(_) | RecvError::Closed) => {
                self.follow(store);
                self.wake_all();
            }
        }
    }

    pub(super) fn on_event(&self, event: &ContainerEvent) {
        match event {
            ContainerEvent::Pod { uid } => {
                if let Some(worker) = self.by_uid.get(uid) {
                    worker.wake.notify_one();
                }
            }
            ContainerEvent::Any => self.wake_all(),
        }
    }

    /// The uid of a worker that ended.
    pub(super) async fn ended(&mut self) -> Option<String> {
        self.ended.recv().await
    }

    /// Removes an ended worker; starts a new one if the store still (or again) has its pod.
    pub(super) fn remove(&mut self, uid: &str, store: &Store) {
        let Some(Running { namespace, name, .. }) = self.by_uid.remove(uid) else { return };
        let pod = store.pod(&namespace, &name);
        self.by_name.remove(&(namespace, name, uid.to_owned()));
        if let Some(pod) = pod {
            self.ensure(&pod);
        }
    }

    fn of_name(&self, namespace: &str, name: &str) -> impl Iterator<Item = &Running> {
        let first = (namespace.to_owned(), name.to_owned(), String::new());
        let names = self.by_name.range(first..);
        let names = names.take_while(move |(of, named, _)| of == namespace && named == name);
        names.filter_map(|(_, _, uid)| self.by_uid.get(uid))
    }

    fn insert(&mut self, namespace: &str, name: &str, uid: &str, wake: Arc<Notify>) {
        let (namespace, name, uid) = (namespace.to_owned(), name.to_owned(), uid.to_owned());
        let of_name = (namespace.clone(), name.clone(), uid.clone());
        if let Some(before) = self.by_uid.insert(uid.clone(), Running { namespace, name, wake }) {
            self.by_name.remove(&(before.namespace, before.name, uid));
        }
        self.by_name.insert(of_name);
    }

    fn ensure(&mut self, pod: &Arc<Pod>) {
        let metadata = &pod.metadata;
        // A predecessor with the same name must end first; its end calls this function again.
        if self.of_name(&metadata.namespace, &metadata.name).next().is_some() {
            return;
        }
        let wake = Arc::new(Notify::new());
        let worker = Worker::new(Arc::clone(&self.tools), Arc::clone(pod), Arc::clone(&wake));
        self.insert(&metadata.namespace, &metadata.name, &metadata.uid, wake);
        let (uid, end) = (metadata.uid.clone(), self.end.clone());
        tokio::spawn(async move {
            if let Err(panic) = tokio::spawn(worker.run()).await {
                error!(uid, %panic, "a pod's worker panicked, starting another");
            }
            let _receiver_gone = end.send(uid);
        });
    }

    /// Wakes the pods whose containers wait for a ConfigMap or Secret. Their workers also try again
    /// by themselves.
    fn wake_unconfigured(&self, store: &Store, namespace: &str) {
        for pod in store.pods().iter().filter(|pod| pod.metadata.namespace == namespace) {
            let statuses = pod.status.init_container_statuses.iter().chain(&pod.status.container_statuses);
            let waits = statuses.into_iter().any(
                |status| matches!(&status.state, ContainerState::Waiting(why) if why.reason == CONFIG_ERROR),
            );
            if let Some(worker) = self.by_uid.get(&pod.metadata.uid).filter(|_| waits) {
                worker.wake.notify_one();
            }
        }
    }

    fn wake_all(&self) {
        self.by_uid.values().for_each(|worker| worker.wake.notify_one());
    }
}
