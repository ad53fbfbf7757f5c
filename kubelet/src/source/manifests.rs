//! The manifest directory as a source of objects.
//!
//! Every event in the directory leads to a full re-list; an event is only the
//! reason to look. What is new or changed is applied at once. What is gone, and
//! what is broken, counts only when a second look `CONFIRM_AFTER` finds it
//! the same: editors save by renaming, and writers need more than one write.
//! A directory that is missing, renamed, or replaced by an empty one is not an
//! empty directory: every object stays as it is.

mod directory;
mod plan;
mod reader;
mod seen;
mod watch;

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tokio::time::timeout;

use super::{ObjectSource, Task};
use crate::manifest::TIME;
use crate::objects::{EventType, ObjectRef};
use crate::standalone::store::{self, Source, Store};
use directory::{Directory, Files};
use plan::{Finding, Plan};
use seen::Fingerprint;
use watch::Watch;

/// How soon to look again at a file that is still being read.
const UNREAD_AGAIN: Duration = Duration::from_millis(50);
/// How long something must be gone or broken to count. Renames of editors are
/// done within a millisecond or two.
const CONFIRM_AFTER: Duration = Duration::from_millis(50);
/// As kubelet's fileCheckFrequency: finds what inotify does not report (a mount
/// on top, a renamed ancestor, a network file system).
const LOOK_ANYWAY: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub struct Config {
    /// The directory: every file in it that does not begin with a dot, whatever its suffix.
    pub dir: PathBuf,
    /// Remembers which directory it was (device and inode) while the kubelet is stopped.
    pub state_file: PathBuf,
}

/// Keeps the store up to date with a directory.
#[derive(Debug)]
pub struct DirectorySource {
    config: Config,
    store: Store,
    watch: Watch,
    /// None where a look ended early.
    sight: Option<Sight>,
}

impl DirectorySource {
    pub fn new(config: Config, store: Store) -> Self {
        let watch = Watch::new(&config.dir);
        let sight = Some(Sight::new(&config, store.clone()));
        Self { config, store, watch, sight }
    }

    /// Looks until every file was read, but not longer than one file may take.
    async fn look_at_all(&mut self) {
        let begun = Instant::now();
        self.look(Scope::Everything).await;
        while self.is_unread() && begun.elapsed() < TIME {
            self.look(Scope::Everything).await;
        }
    }

    async fn run(mut self) {
        let mut look_anyway = Instant::now() + LOOK_ANYWAY;
        let mut confirm = self.confirm_at();
        loop {
            let wake = confirm.map_or(look_anyway, |at| at.min(look_anyway));
            // A timeout is a reason to look as good as an event.
            drop(timeout(wake.saturating_duration_since(Instant::now()), self.watch.changed()).await);
            let scope = if Instant::now() >= look_anyway {
                look_anyway = Instant::now() + LOOK_ANYWAY;
                Scope::Everything
            } else {
                Scope::ChangedFiles
            };
            self.look(scope).await;
            confirm = self.confirm_at();
        }
    }

    /// One look: files are read off the async threads.
    async fn look(&mut self, scope: Scope) {
        // Watch first, then list: an event follows for what comes in between.
        self.watch.renew();
        let mut sight = self.sight.take().unwrap_or_else(|| Sight::new(&self.config, self.store.clone()));
        let looked = tokio::task::spawn_blocking(move || {
            sight.look(scope);
            sight
        });
        match looked.await {
            Ok(sight) => self.sight = Some(sight),
            // A bug. The next look knows nothing of this one, and begins anew.
            Err(cause) => tracing::error!(error = %cause, "a look at the manifest directory ended early"),
        }
    }

    fn is_unread(&self) -> bool {
        self.sight.as_ref().is_some_and(|sight| sight.look_again.is_some())
    }

    fn confirm_at(&self) -> Option<Instant> {
        let sight = self.sight.as_ref()?;
        let finding = sight.findings.values().min().map(|since| *since + CONFIRM_AFTER);
        finding.into_iter().chain(sight.look_again).min()
    }
}

impl ObjectSource for DirectorySource {
    fn report_all(&mut self) -> Task<'_> {
        Box::pin(self.look_at_all())
    }

    fn follow(self: Box<Self>, ended: Task<'static>) -> Task<'static> {
        Box::pin(async move {
            tokio::select! {
                () = self.run() => {}
                () = ended => {}
            }
        })
    }
}

/// Which files' objects are applied: a refused one is tried again now and then,
/// since what refused it may be gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    ChangedFiles,
    Everything,
}

/// What was seen, and what has been made of it.
#[derive(Debug)]
struct Sight {
    directory: Directory,
    store: Store,
    /// What looked gone or broken, and since when.
    findings: HashMap<Finding, Instant>,
    /// Files whose mistakes have been reported, as they were then.
    reported: HashMap<PathBuf, Fingerprint>,
    /// Why the last look saw nothing.
    unreadable: Option<String>,
    /// When a file that is still being read may have been read.
    look_again: Option<Instant>,
}

impl Sight {
    fn new(config: &Config, store: Store) -> Self {
        Self {
            directory: Directory::open(config.dir.clone(), config.state_file.clone()),
            store,
            findings: HashMap::new(),
            reported: HashMap::new(),
            unreadable: None,
            look_again: None,
        }
    }

    fn look(&mut self, scope: Scope) {
        let declared = self.store.declared_by_files();
        self.look_again = None;
        match self.directory.list(!declared.is_empty()) {
            Err(unreadable) => self.report_unreadable(unreadable.to_string()),
            Ok(files) => {
                self.report_readable();
                self.look_again = files.is_unread().then(|| Instant::now() + UNREAD_AGAIN);
                let plan = Plan::new(&files, &declared);
                self.apply(&plan, scope);
                self.report_duplicates(&plan);
                self.weigh(plan.findings, &files);
                self.directory.remember(files);
            }
        }
    }

    fn apply(&self, plan: &Plan<'_>, scope: Scope) {
        for wanted in &plan.wanted {
            if !wanted.is_new && scope == Scope::ChangedFiles {
                continue;
            }
            let source = Source::File(wanted.path.to_owned());
            let reference = wanted.manifest.object.reference();
            let result = self.store.apply(wanted.manifest.described(), source);
            if wanted.is_new {
                for warning in &wanted.manifest.warnings {
                    self.store.record(&reference, EventType::Warning, "UnsupportedField", warning);
                }
                self.report_refused(&reference, result.err());
            }
        }
    }

    fn report_duplicates(&self, plan: &Plan<'_>) {
        for (second, winner) in &plan.duplicates {
            let (path, line) = (second.path.display(), second.manifest.line);
            let message = format!("{path}:{line}: not used: {} describes it already", winner.display());
            let reference = second.manifest.object.reference();
            self.store.record(&reference, EventType::Warning, "ManifestRefused", &message);
        }
    }

    fn report_refused(&self, reference: &ObjectRef, error: Option<store::Error>) {
        if let Some(error) = error {
            let message = trace::error_chain(&error);
            self.store.record(reference, EventType::Warning, "ManifestRefused", &message);
        }
    }

    /// Acts on findings that have lasted; forgets the others.
    fn weigh(&mut self, findings: Vec<Finding>, files: &Files) {
        let now = Instant::now();
        let before = std::mem::take(&mut self.findings);
        for finding in findings {
            if self.is_reported(&finding, files) {
                continue;
            }
            let since = before.get(&finding).copied().unwrap_or(now);
            if now.duration_since(since) < CONFIRM_AFTER {
                self.findings.insert(finding, since);
            } else {
                self.confirm(finding, files);
            }
        }
        let healed: Vec<PathBuf> = self.reported.keys().filter(|path| files.is_good(path)).cloned().collect();
        for path in healed {
            self.reported.remove(&path);
            let message = format!("{} is good again", path.display());
            self.store.record(&file_reference(&path), EventType::Normal, "ManifestRead", &message);
        }
    }

    fn is_reported(&self, finding: &Finding, files: &Files) -> bool {
        match finding {
            Finding::Gone(_) => false,
            Finding::Broken(path) => {
                let reported = self.reported.get(path);
                reported.is_some() && reported == files.fingerprint(path).as_ref()
            }
        }
    }

    fn confirm(&mut self, finding: Finding, files: &Files) {
        match finding {
            Finding::Gone(declared) => {
                if let Err(error) = self.store.vanish(&declared) {
                    // Still declared in the store: the next look finds it gone again.
                    tracing::error!(error = %trace::error_chain(&error), "cannot remove {}, which the manifests declare no more", declared.name);
                }
            }
            Finding::Broken(path) => {
                for mistake in files.mistakes(&path) {
                    self.store.record(
                        &file_reference(&path),
                        EventType::Warning,
                        "InvalidManifest",
                        &mistake,
                    );
                }
                if let Some(fingerprint) = files.fingerprint(&path) {
                    self.reported.insert(path, fingerprint);
                }
            }
        }
    }

    fn report_unreadable(&mut self, reason: String) {
        self.findings.clear();
        if self.unreadable.as_ref() == Some(&reason) {
            return;
        }
        let message = format!("{reason}; every object is kept as it is, pods run on");
        let node = ObjectRef::node(self.store.node_name());
        self.store.record(&node, EventType::Warning, "ManifestDirectoryMissing", &message);
        self.unreadable = Some(reason);
    }

    fn report_readable(&mut self) {
        if self.unreadable.take().is_some() {
            let node = ObjectRef::node(self.store.node_name());
            let message = format!("{} is back", self.directory.path().display());
            self.store.record(&node, EventType::Normal, "ManifestDirectoryFound", &message);
        }
    }
}

/// A file as the subject of an event.
fn file_reference(path: &std::path::Path) -> ObjectRef {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    ObjectRef { kind: "File".to_owned(), name, ..ObjectRef::default() }
}
