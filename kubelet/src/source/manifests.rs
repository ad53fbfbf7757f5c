//! The manifest directory as a source of objects.
//!
//! - Every event in the directory triggers a full scan.
//! - New or changed files are applied at once.
//! - Removed or broken files count only if a second scan after `CONFIRM_AFTER` finds them
//!   unchanged: editors save by renaming, and writers need several writes.
//! - A directory that is missing, renamed or replaced by an empty one does not count as empty:
//!   every object stays as it is.

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
use crate::store::{self, Source, Store};
use directory::{Directory, Files};
use plan::{Finding, Names, Plan};
use seen::Fingerprint;
use watch::Watch;

/// How soon to scan again for a file that is still being read.
const UNREAD_RETRY: Duration = Duration::from_millis(50);
/// How long a file must be removed or broken to count. Editors rename within a millisecond or two.
const CONFIRM_AFTER: Duration = Duration::from_millis(50);
/// kubelet's fileCheckFrequency: finds changes that inotify does not report (a mount over the
/// directory, a renamed ancestor, a network file system).
const RESCAN_PERIOD: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub struct Config {
    /// The directory. Every file counts, whatever its suffix, unless its name begins with a dot.
    pub dir: PathBuf,
    /// Stores the directory's identity (device and inode) while the kubelet is stopped.
    pub state_file: PathBuf,
}

/// Keeps the store up to date with a directory.
#[derive(Debug)]
pub struct DirectorySource {
    config: Config,
    store: Store,
    watch: Watch,
    /// `None` after a panic in a scan.
    state: Option<ScanState>,
}

impl DirectorySource {
    pub fn new(config: Config, store: Store) -> Self {
        let watch = Watch::new(&config.dir);
        let state = Some(ScanState::new(&config, store.clone()));
        Self { config, store, watch, state }
    }

    /// Scans until every file was read, within the time limit for one file.
    async fn scan_all(&mut self) {
        let begun = Instant::now();
        self.scan(Scope::Everything).await;
        while self.is_unread() && begun.elapsed() < TIME {
            self.scan(Scope::Everything).await;
        }
    }

    async fn run(mut self) {
        let mut rescan_at = Instant::now() + RESCAN_PERIOD;
        let mut confirm = self.confirm_at();
        loop {
            let wake = confirm.map_or(rescan_at, |at| at.min(rescan_at));
            // A timeout triggers a scan, as an event does.
            let _elapsed =
                timeout(wake.saturating_duration_since(Instant::now()), self.watch.changed()).await;
            let scope = if Instant::now() >= rescan_at {
                rescan_at = Instant::now() + RESCAN_PERIOD;
                Scope::Everything
            } else {
                Scope::ChangedFiles
            };
            self.scan(scope).await;
            confirm = self.confirm_at();
        }
    }

    /// Scans once; reads files outside the async threads.
    async fn scan(&mut self, scope: Scope) {
        // Watch first, then list: changes in between cause an event.
        self.watch.renew();
        let mut state = self.state.take().unwrap_or_else(|| ScanState::new(&self.config, self.store.clone()));
        let scanned = tokio::task::spawn_blocking(move || {
            state.scan(scope);
            state
        });
        match scanned.await {
            Ok(state) => self.state = Some(state),
            // This is a bug. The next scan starts with empty state.
            Err(cause) => tracing::error!(error = %cause, "a scan of the manifest directory panicked"),
        }
    }

    fn is_unread(&self) -> bool {
        self.state.as_ref().is_some_and(|state| state.scan_again_at.is_some())
    }

    fn confirm_at(&self) -> Option<Instant> {
        let state = self.state.as_ref()?;
        let finding = state.findings.values().min().map(|since| *since + CONFIRM_AFTER);
        finding.into_iter().chain(state.scan_again_at).min()
    }
}

impl ObjectSource for DirectorySource {
    fn report_all(&mut self) -> Task<'_> {
        Box::pin(self.scan_all())
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

/// Which objects a scan applies. Refused objects are retried periodically, since the reason may be
/// gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    ChangedFiles,
    Everything,
}

/// The state of the scans.
#[derive(Debug)]
struct ScanState {
    directory: Directory,
    store: Store,
    /// Removed or broken files, and when a scan first found them.
    findings: HashMap<Finding, Instant>,
    /// Of the objects of the last plan; `None` if the next plan must be a full one.
    names: Option<Names>,
    /// Files whose mistakes were reported, with their fingerprint at that time.
    reported: HashMap<PathBuf, Fingerprint>,
    /// Why the last scan could not read the directory.
    unreadable: Option<String>,
    /// When to scan again for a file that is still being read.
    scan_again_at: Option<Instant>,
}

impl ScanState {
    fn new(config: &Config, store: Store) -> Self {
        Self {
            directory: Directory::open(config.dir.clone(), config.state_file.clone()),
            store,
            findings: HashMap::new(),
            names: None,
            reported: HashMap::new(),
            unreadable: None,
            scan_again_at: None,
        }
    }

    fn scan(&mut self, scope: Scope) {
        self.scan_again_at = None;
        match self.directory.list(self.store.has_declared()) {
            Err(unreadable) => self.report_unreadable(unreadable.to_string()),
            Ok(files) => {
                self.report_readable();
                self.scan_again_at = files.is_unread().then(|| Instant::now() + UNREAD_RETRY);
                let plan = self.plan(&files, scope);
                self.apply(&plan);
                self.report_duplicates(&plan);
                self.confirm_findings(plan.findings, &files);
                self.directory.remember(files);
            }
        }
    }

    fn plan<'f>(&mut self, files: &'f Files, scope: Scope) -> Plan<'f> {
        let only_adds = scope == Scope::ChangedFiles && files.keeps_known && self.findings.is_empty();
        let added = self.names.as_mut().filter(|_| only_adds).and_then(|names| Plan::of_added(files, names));
        added.unwrap_or_else(|| {
            self.names = Some(Names::of(files));
            self.store.look_at_declared(|declared| Plan::new(files, scope, declared))
        })
    }

    fn apply(&self, plan: &Plan<'_>) {
        for wanted in &plan.wanted {
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
            let message =
                format!("{path}:{line}: not used: {} already describes this object", winner.display());
            let reference = second.manifest.object.reference();
            self.store.record(&reference, EventType::Warning, "ManifestRefused", &message);
        }
    }

    fn report_refused(&self, reference: &ObjectRef, error: Option<store::Error>) {
        if let Some(error) = error {
            let message = linux::chain(&error);
            self.store.record(reference, EventType::Warning, "ManifestRefused", &message);
        }
    }

    /// Confirms findings that have lasted; discards the others.
    fn confirm_findings(&mut self, findings: Vec<Finding>, files: &Files) {
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
        let valid_again: Vec<PathBuf> =
            self.reported.keys().filter(|path| files.is_valid(path)).cloned().collect();
        for path in valid_again {
            self.reported.remove(&path);
            let message = format!("{} is valid again", path.display());
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
                if let Err(error) = self.store.withdraw(&declared) {
                    // The store still has it as declared, so the next full plan finds it again.
                    self.names = None;
                    tracing::error!(error = %linux::chain(&error), "cannot withdraw {}, which no manifest describes", declared.name);
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
        self.names = None;
        if self.unreadable.as_ref() == Some(&reason) {
            return;
        }
        let message = format!("{reason}; all objects are kept and pods keep running");
        let node = ObjectRef::node(self.store.node_name());
        self.store.record(&node, EventType::Warning, "ManifestDirectoryMissing", &message);
        self.unreadable = Some(reason);
    }

    fn report_readable(&mut self) {
        if self.unreadable.take().is_some() {
            let node = ObjectRef::node(self.store.node_name());
            let message = format!("{} is readable again", self.directory.path().display());
            self.store.record(&node, EventType::Normal, "ManifestDirectoryFound", &message);
        }
    }
}

/// A file as an event's object.
fn file_reference(path: &std::path::Path) -> ObjectRef {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    ObjectRef { kind: "File".to_owned(), name, ..ObjectRef::default() }
}
