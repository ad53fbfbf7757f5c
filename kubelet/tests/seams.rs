//! Custom sources and sinks through the public API: an API server can replace the manifest
//! directory without a change of the engine.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail the test")]

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kubelet::engine::eviction::ImageGc;
use kubelet::engine::{self, RuntimeEndpoint};
use kubelet::manifest;
use kubelet::node::Node;
use kubelet::objects::{EventType, ObjectRef, PodStatus};
use kubelet::sink::{Sinks, StatusSink};
use kubelet::source::{ObjectSource, Task};
use kubelet::store::{Source, Store};
use tokio::sync::mpsc;

/// A server's watch event for one pod.
#[derive(Debug)]
enum Watched {
    Pod(String),
    Deleted(String),
}

/// A server's pods: a list, then changes.
#[derive(Debug)]
struct Server {
    store: Store,
    list: Vec<String>,
    changes: mpsc::Receiver<Watched>,
}

impl Server {
    fn apply(store: &Store, manifest: &str) {
        for manifest in manifest::parse(manifest.as_bytes(), "server").manifests {
            store.apply(manifest.described(), Source::Api).unwrap();
        }
    }
}

impl ObjectSource for Server {
    fn report_all(&mut self) -> Task<'_> {
        Box::pin(async { self.list.iter().for_each(|pod| Self::apply(&self.store, pod)) })
    }

    fn follow(mut self: Box<Self>, ended: Task<'static>) -> Task<'static> {
        let changes = async move {
            while let Some(change) = self.changes.recv().await {
                match change {
                    Watched::Pod(pod) => Self::apply(&self.store, &pod),
                    Watched::Deleted(name) => {
                        assert!(self.store.mark_pod_deleted("default", &name, Some(0)).unwrap());
                    }
                }
            }
        };
        Box::pin(async move {
            tokio::select! {
                () = changes => {}
                () = ended => {}
            }
        })
    }
}

fn pod(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{containers: [{{name: c, image: demo}}]}}\n"
    )
}

#[tokio::test]
async fn a_server_is_a_source_like_the_directory() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path(), "node").unwrap();
    let (sender, changes) = mpsc::channel(1);
    let mut source: Box<dyn ObjectSource> =
        Box::new(Server { store: store.clone(), list: vec![pod("listed")], changes });
    source.report_all().await;
    assert!(store.pod("default", "listed").is_some(), "before the engine starts");

    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let following = tokio::spawn(source.follow(Box::pin(async { drop(ended.await) })));
    let mut seen = store.subscribe();
    sender.send(Watched::Pod(pod("added"))).await.unwrap();
    sender.send(Watched::Deleted("listed".to_owned())).await.unwrap();
    while !store.pod("default", "listed").unwrap().metadata.is_deleted() {
        seen.recv().await.unwrap();
    }
    assert!(store.pod("default", "added").is_some());
    end.send(()).unwrap();
    following.await.unwrap();
}

/// All calls in order.
#[derive(Debug, Default, Clone)]
struct Received(Arc<Mutex<Vec<String>>>);

impl StatusSink for Received {
    fn set_pod_status(&self, pod: &ObjectRef, status: PodStatus) {
        self.0.lock().unwrap().push(format!("{} {:?}", pod.name, status.phase));
    }

    fn record(&self, object: &ObjectRef, _event_type: EventType, reason: &str, message: &str) {
        self.0.lock().unwrap().push(format!("{} {reason} {message}", object.name));
    }
}

fn config(root: &Path) -> engine::Config {
    engine::Config {
        node: Node::claim(root).unwrap(),
        node_name: "node".to_owned(),
        runtime: RuntimeEndpoint::Remote(root.join("none.sock")),
        log_dir: root.join("logs"),
        cgroup_root: "/none".to_owned(),
        max_pods: 110,
        pod_pids_limit: None,
        seccomp_default: false,
        logs: kubelet::engine::log_rotation::Limits { max_size: 1 << 20, max_files: 2 },
        image_gc: ImageGc { high_percent: 100, low_percent: 100, min_age: Duration::ZERO },
        pressure: kubelet::capacity::pressure::PressureLimits::default(),
    }
}

#[tokio::test]
async fn every_sink_receives_the_engines_reports() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    let config = config(&root);
    let store = Store::open(&root, "node").unwrap();
    Server::apply(&store, &pod("web"));
    let received = Received::default();
    let sinks = Sinks::new(store.clone(), vec![Box::new(received.clone())]);
    let (_engine, handle) = engine::new(config, store.clone(), sinks);
    handle.warn(&store.pod("default", "web").unwrap(), "Odd", "look");
    assert_eq!(*received.0.lock().unwrap(), ["web Odd look"]);
    assert_eq!(store.events()[0].reason, "Odd");
}
