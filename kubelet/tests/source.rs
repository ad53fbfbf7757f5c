//! The manifest directory, with real files and inotify.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail the test")]

use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kubelet::source::{Config, DirectorySource, ObjectSource};
use kubelet::store::Store;

const TIMEOUT: Duration = Duration::from_secs(30);
const CLAIM: &str = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: data}\nspec:\n  \
                     accessModes: [ReadWriteMany]\n  resources: {requests: {storage: 1Gi}}\n";

fn pod(name: &str, image: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  containers:\n  - {{name: c, image: \"{image}\"}}\n"
    )
}

struct Node {
    root: tempfile::TempDir,
    dir: PathBuf,
    store: Store,
    run: tokio::task::JoinHandle<()>,
}

impl Node {
    async fn start(prepare: impl FnOnce(&Path)) -> Self {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("manifests");
        fs::create_dir(&dir).unwrap();
        prepare(&dir);
        Self::start_in(root, dir).await
    }

    async fn start_in(root: tempfile::TempDir, dir: PathBuf) -> Self {
        let store = Store::open(root.path(), "node").unwrap();
        let config = Config { dir: dir.clone(), state_file: root.path().join("hawser/manifests.json") };
        let mut source: Box<dyn ObjectSource> = Box::new(DirectorySource::new(config, store.clone()));
        source.report_all().await;
        let run = tokio::spawn(source.follow(Box::pin(std::future::pending())));
        Self { root, dir, store, run }
    }

    async fn restart(self, meanwhile: impl FnOnce(&Path)) -> Self {
        self.run.abort();
        drop(self.run.await);
        meanwhile(&self.dir);
        Self::start_in(self.root, self.dir).await
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.dir.join(name), text).unwrap();
    }

    fn runs(&self, name: &str) -> bool {
        self.store.pod("default", name).is_some_and(|pod| !pod.metadata.is_deleted())
    }

    fn has_event(&self, reason: &str) -> bool {
        self.store.events().iter().any(|event| event.reason == reason)
    }

    /// Waits on the store's changes until `holds`.
    async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let mut changes = self.store.subscribe();
        let waited = tokio::time::timeout(TIMEOUT, async {
            while !holds(self) {
                changes.recv().await.unwrap();
            }
        });
        assert!(
            waited.await.is_ok(),
            "{what}: pods {:?}, events {:#?}",
            self.store.pods(),
            self.store.events()
        );
    }

    /// Waits until the source has scanned twice, for changes that must have no effect: a new file
    /// needs one scan, and its removal two.
    async fn until_looked_twice(&self) {
        self.write("witness.yaml", &pod("witness", "demo:1"));
        self.until("the witness", |node| node.runs("witness")).await;
        fs::remove_file(self.dir.join("witness.yaml")).unwrap();
        self.until("the end of the witness", |node| !node.runs("witness")).await;
    }
}

#[tokio::test]
async fn files_of_any_name_count_and_hidden_ones_do_not() {
    let node = Node::start(|dir| {
        fs::write(dir.join("nosuffix"), pod("a", "demo:1")).unwrap();
        fs::write(dir.join(".hidden.yaml"), pod("b", "demo:1")).unwrap();
        fs::create_dir(dir.join("sub")).unwrap();
        fs::write(dir.join("sub/c.yaml"), pod("c", "demo:1")).unwrap();
    })
    .await;
    assert!(node.runs("a"), "known when report_all() returns");
    assert_eq!(node.store.pods().len(), 1);
}

/// A second scan comes at least 50 ms after the first: an earlier start proves that one scan was
/// enough. A busy machine may be late in all attempts but one.
#[tokio::test]
async fn a_renamed_manifest_starts_within_milliseconds() {
    const ATTEMPTS: usize = 200;
    let node = Node::start(|_| {}).await;
    let mut took = Vec::new();
    while took.last().is_none_or(|last| *last >= Duration::from_millis(40)) {
        assert!(took.len() < ATTEMPTS, "never below the time of a second look: {took:?}");
        node.write(".web.yaml.tmp", &pod("web", "demo:1"));
        let begin = std::time::Instant::now();
        fs::rename(node.dir.join(".web.yaml.tmp"), node.dir.join("web.yaml")).unwrap();
        node.until("the pod", |node| node.runs("web")).await;
        took.push(begin.elapsed());
        fs::remove_file(node.dir.join("web.yaml")).unwrap();
        node.until("its end", |node| !node.runs("web")).await;
    }
}

/// The uid selects a pod's resources: with another pod's uid it would get that pod's containers.
#[tokio::test]
async fn a_manifest_does_not_choose_the_uid() {
    let node = Node::start(|dir| fs::write(dir.join("web.yaml"), pod("web", "demo:1")).unwrap()).await;
    let uid = node.store.pods()[0].metadata.uid.clone();
    let thief = pod("thief", "demo:1").replace("{name: thief", &format!("{{uid: {uid}, name: thief"));
    assert!(thief.contains(&uid));
    node.write("thief.yaml", &thief);
    node.until("the pod", |node| node.runs("thief")).await;
    assert_ne!(node.store.pod("default", "thief").unwrap().metadata.uid, uid);
    assert_eq!(node.store.pod("default", "web").unwrap().metadata.uid, uid);
}

#[tokio::test]
async fn saving_by_rename_does_not_stop_a_pod() {
    let node = Node::start(|dir| fs::write(dir.join("web.yaml"), pod("web", "demo:1")).unwrap()).await;
    let uid = node.store.pods()[0].metadata.uid.clone();
    // Like vi: move the old file away, then create a new one with its name.
    fs::rename(node.dir.join("web.yaml"), node.dir.join(".web.yaml~")).unwrap();
    node.write("web.yaml", &pod("web", "demo:1"));
    node.until_looked_twice().await;
    let pod = node.store.pod("default", "web").unwrap();
    assert_eq!((pod.metadata.uid.clone(), pod.metadata.is_deleted()), (uid, false));
}

#[tokio::test]
async fn a_broken_edit_keeps_the_pod_and_is_reported_until_fixed() {
    let node = Node::start(|dir| fs::write(dir.join("web.yaml"), pod("web", "demo:1")).unwrap()).await;
    node.write("web.yaml", &format!("{}---\nkind: [", pod("other", "demo:1")));
    node.until("the mistake", |node| node.has_event("InvalidManifest")).await;
    assert!(node.runs("web"), "described by the broken part, perhaps");
    assert!(node.runs("other"), "a bad document does not hide a good one");
    let message = node.store.events().iter().find(|e| e.reason == "InvalidManifest").unwrap().message.clone();
    assert!(message.contains("web.yaml:8:"), "{message}");

    node.write("web.yaml", &pod("other", "demo:1"));
    node.until("healing", |node| node.has_event("ManifestRead") && !node.runs("web")).await;
    assert!(node.runs("other"));
}

#[tokio::test]
async fn renaming_the_directory_and_back_stops_no_pod() {
    let node = Node::start(|dir| fs::write(dir.join("web.yaml"), pod("web", "demo:1")).unwrap()).await;
    let aside = node.root.path().join("aside");
    fs::rename(&node.dir, &aside).unwrap();
    node.until("the warning", |node| node.has_event("ManifestDirectoryMissing")).await;
    assert!(node.runs("web"));
    fs::rename(&aside, &node.dir).unwrap();
    node.until("the relief", |node| node.has_event("ManifestDirectoryFound")).await;
    node.write("more.yaml", &pod("more", "demo:1"));
    node.until("more", |node| node.runs("more")).await;
    assert!(node.runs("web"));
}

#[tokio::test]
async fn replacing_the_directory_by_an_empty_one_stops_no_pod_even_while_stopped() {
    let node = Node::start(|dir| {
        fs::write(dir.join("web.yaml"), pod("web", "demo:1")).unwrap();
        fs::write(dir.join("claim.yaml"), CLAIM).unwrap();
    })
    .await;
    let swap = |dir: &Path| {
        fs::rename(dir, dir.with_file_name("was")).unwrap();
        fs::create_dir(dir).unwrap();
    };
    let node = node.restart(swap).await;
    assert!(node.has_event("ManifestDirectoryMissing"));
    assert!(node.runs("web"));
    assert!(node.store.claim("default", "data").unwrap().metadata.annotations.is_empty());
}

#[tokio::test]
async fn a_lost_mount_is_not_an_empty_directory() {
    let mount = |words: &[&str], dir: &Path| {
        assert!(std::process::Command::new(words[0]).args(&words[1..]).arg(dir).status().unwrap().success());
    };
    let node = Node::start(|dir| {
        mount(&["mount", "-t", "tmpfs", "manifests"], dir);
        fs::write(dir.join("web.yaml"), pod("web", "demo:1")).unwrap();
    })
    .await;
    assert!(node.runs("web"));
    mount(&["umount"], &node.dir);
    node.until("the warning", |node| node.has_event("ManifestDirectoryMissing")).await;
    assert!(node.runs("web"));
}

#[tokio::test]
async fn emptying_the_directory_stops_pods_and_keeps_claims() {
    let node = Node::start(|dir| {
        fs::write(dir.join("web.yaml"), pod("web", "demo:1")).unwrap();
        fs::write(dir.join("claim.yaml"), CLAIM).unwrap();
    })
    .await;
    for name in ["web.yaml", "claim.yaml"] {
        fs::remove_file(node.dir.join(name)).unwrap();
    }
    node.until("the end of both", |node| !node.runs("web") && node.has_event("ManifestMissing")).await;
    assert_eq!(
        node.store.claim("default", "data").unwrap().metadata.annotations["hawser.dev/source"],
        "missing"
    );
}

#[tokio::test]
async fn a_directory_created_later_is_found() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("a/b");
    let node = Node::start_in(root, dir.clone()).await;
    assert!(node.has_event("ManifestDirectoryMissing"));
    fs::create_dir(dir.parent().unwrap()).unwrap();
    fs::create_dir(&dir).unwrap();
    node.until("the directory", |node| node.has_event("ManifestDirectoryFound")).await;
    node.write("web.yaml", &pod("web", "demo:1"));
    node.until("the pod", |node| node.runs("web")).await;
}

#[tokio::test]
async fn unsupported_fields_and_duplicate_descriptions_are_reported() {
    let node = Node::start(|dir| {
        fs::write(dir.join("a.yaml"), pod("web", "demo:1") + "  overhead: {cpu: 1}\n").unwrap();
        fs::write(dir.join("b.yaml"), pod("web", "demo:2")).unwrap();
    })
    .await;
    assert_eq!(node.store.pods()[0].spec.containers[0].image, "demo:1");
    let events: Vec<String> =
        node.store.events().iter().map(|e| format!("{} {}", e.reason, e.message)).collect();
    assert!(
        events.iter().any(|e| e.starts_with("UnsupportedField") && e.contains("spec.overhead")),
        "{events:?}"
    );
    assert!(events.iter().any(|e| e.starts_with("ManifestRefused") && e.contains("a.yaml")), "{events:?}");
}

/// A scan after which only files were added looks at nothing else.
#[tokio::test]
async fn an_added_file_is_used_reported_or_refused_beside_known_ones() {
    let node = Node::start(|dir| fs::write(dir.join("a.yaml"), pod("a", "demo:1")).unwrap()).await;
    node.write("b.yaml", &pod("b", "demo:1"));
    node.until("the added pod", |node| node.runs("b")).await;
    node.write("c.yaml", &(pod("a", "demo:2") + "---\n" + &pod("c", "demo:1")));
    node.until("the pod beside a known one", |node| node.runs("c")).await;
    node.until("the refusal", |node| node.has_event("ManifestRefused")).await;
    assert_eq!(node.store.pod("default", "a").unwrap().spec.containers[0].image, "demo:1");
    node.write("d.yaml", "kind: Pod\n");
    node.until("the report", |node| node.has_event("InvalidManifest")).await;
    fs::rename(node.dir.join("b.yaml"), node.dir.join("e.yaml")).unwrap();
    node.until_looked_twice().await;
    assert!(node.runs("b") && node.runs("c"));
    fs::remove_file(node.dir.join("e.yaml")).unwrap();
    node.until("the end of a pod whose file is gone", |node| !node.runs("b")).await;
}

#[tokio::test]
async fn truncating_a_file_in_place_removes_nothing() {
    let node = Node::start(|dir| fs::write(dir.join("web.yaml"), pod("web", "demo:1")).unwrap()).await;
    node.write("web.yaml", "");
    node.until("the mistake", |node| node.has_event("InvalidManifest")).await;
    assert!(node.runs("web"));
}

/// Unreadable files are ignored and delay no others.
#[tokio::test]
async fn fifos_devices_and_hostile_files_delay_no_others() {
    let node = Node::start(|dir| {
        assert!(
            std::process::Command::new("mkfifo").arg(dir.join("a-fifo.yaml")).status().unwrap().success()
        );
        symlink("/dev/zero", dir.join("b-zero.yaml")).unwrap();
        symlink(dir.join("nowhere"), dir.join("c-dangling.yaml")).unwrap();
        symlink(dir.join("d-circle.yaml"), dir.join("d-circle.yaml")).unwrap();
        fs::write(dir.join("e-deep.yaml"), "[".repeat(400_000)).unwrap();
        fs::write(dir.join("f-large.yaml"), vec![b'x'; 11 << 20]).unwrap();
        fs::write(dir.join("web.yaml"), pod("web", "demo:1")).unwrap();
    })
    .await;
    assert!(node.runs("web"));
    node.until("the mistakes", |node| {
        let events: Vec<String> = node.store.events().iter().map(|event| event.message.clone()).collect();
        let has =
            |file: &str, words: &str| events.iter().any(|said| said.contains(file) && said.contains(words));
        has("e-deep.yaml:1:65", "at most 64") && has("f-large.yaml", "at most 10485760")
    })
    .await;
    let files: Vec<String> =
        node.store.events().iter().map(|event| event.involved_object.name.clone()).collect();
    assert!(!files.iter().any(|file| file.contains("fifo") || file.contains("zero")), "{files:?}");
}

/// The store keeps paths as JSON.
#[tokio::test]
async fn a_file_whose_name_is_not_utf_8_is_reported_and_delays_no_others() {
    let latin = std::ffi::OsStr::from_bytes(b"caf\xe9.yaml");
    let node = Node::start(|dir| fs::write(dir.join(latin), pod("cafe", "demo:1")).unwrap()).await;
    node.until("the mistake", |node| {
        let events = node.store.events();
        events.iter().any(|event| event.message.contains("the name is not UTF-8: rename the file"))
    })
    .await;
    node.write("web.yaml", &pod("web", "demo:1"));
    node.until("the other file", |node| node.runs("web")).await;
    assert!(!node.runs("cafe"));
    fs::rename(node.dir.join(latin), node.dir.join("cafe.yaml")).unwrap();
    node.until("the renamed file", |node| node.runs("cafe")).await;
}

/// Like a ConfigMap volume: the files are links through a link that is swapped.
#[tokio::test]
async fn files_behind_a_swapped_link_are_followed() {
    let version = |dir: &Path, number: u32, image: &str| {
        fs::create_dir(dir.join(format!("..{number}"))).unwrap();
        fs::write(dir.join(format!("..{number}/web.yaml")), pod("web", image)).unwrap();
        symlink(format!("..{number}"), dir.join("..data_tmp")).unwrap();
        fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
    };
    let node = Node::start(|dir| {
        version(dir, 1, "demo:1");
        symlink("..data/web.yaml", dir.join("web.yaml")).unwrap();
    })
    .await;
    assert!(node.runs("web"));
    version(&node.dir, 2, "demo:2");
    node.until("the new image", |node| {
        node.runs("web") && node.store.pods()[0].spec.containers[0].image == "demo:2"
    })
    .await;
}

/// A file that grows endlessly is read up to the limit.
#[tokio::test]
async fn a_file_that_grows_while_it_is_read_delays_no_others() {
    let node = Node::start(|_| {}).await;
    let (path, grows) = (node.dir.join("a-log.yaml"), Arc::new(AtomicBool::new(true)));
    let writer = {
        let (grows, mut file) = (Arc::clone(&grows), fs::File::create(path).unwrap());
        std::thread::spawn(move || {
            while grows.load(Ordering::Relaxed) && file.metadata().unwrap().len() < 32 << 20 {
                file.write_all(&[b'#'; 4096]).unwrap();
            }
        })
    };
    node.write("web.yaml", &pod("web", "demo:1"));
    node.until("the pod", |node| node.runs("web")).await;
    grows.store(false, Ordering::Relaxed);
    writer.join().unwrap();
}
