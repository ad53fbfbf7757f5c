//! Compares the manifests of sources with the store: an object is new, unchanged, changed, or
//! belongs to another source.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use sha2::{Digest, Sha256};

use super::disk::Durability;
use super::entries::{Entry, Key, PodEntry};
use super::in_place::{self, FixedField};
use super::{Error, SOURCE_ANNOTATION, SOURCE_MISSING, Source, State, Store, Stored, VOLUME_BEING_CREATED};
use crate::capacity::admission;
use crate::command_line::called_as::called_as;
use crate::objects::{
    ConfigMap, CsiDriver, Document, EventType, Kind, Object, ObjectMeta, ObjectRef, PersistentVolume,
    PersistentVolumeClaim, Pod, Secret, StorageClass, VolumeSnapshot, VolumeSnapshotClass,
    VolumeSnapshotContent, new_uid, now,
};

/// Any object that a manifest can describe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnyObject {
    Pod(Box<Pod>),
    Volume(Box<PersistentVolume>),
    Claim(Box<PersistentVolumeClaim>),
    Class(Box<StorageClass>),
    CsiDriver(Box<CsiDriver>),
    Snapshot(Box<VolumeSnapshot>),
    SnapshotClass(Box<VolumeSnapshotClass>),
    SnapshotContent(Box<VolumeSnapshotContent>),
    ConfigMap(Box<ConfigMap>),
    Secret(Box<Secret>),
}

impl AnyObject {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Pod(_) => Kind::Pod,
            Self::Volume(_) => Kind::PersistentVolume,
            Self::Claim(_) => Kind::PersistentVolumeClaim,
            Self::Class(_) => Kind::StorageClass,
            Self::CsiDriver(_) => Kind::CsiDriver,
            Self::Snapshot(_) => Kind::VolumeSnapshot,
            Self::SnapshotClass(_) => Kind::VolumeSnapshotClass,
            Self::SnapshotContent(_) => Kind::VolumeSnapshotContent,
            Self::ConfigMap(_) => Kind::ConfigMap,
            Self::Secret(_) => Kind::Secret,
        }
    }

    pub fn metadata(&self) -> &ObjectMeta {
        match self {
            Self::Pod(pod) => &pod.metadata,
            Self::Volume(volume) => &volume.metadata,
            Self::Claim(claim) => &claim.metadata,
            Self::Class(class) => &class.metadata,
            Self::CsiDriver(driver) => &driver.metadata,
            Self::Snapshot(snapshot) => &snapshot.metadata,
            Self::SnapshotClass(class) => &class.metadata,
            Self::SnapshotContent(content) => &content.metadata,
            Self::ConfigMap(map) => &map.metadata,
            Self::Secret(secret) => &secret.metadata,
        }
    }

    pub fn reference(&self) -> ObjectRef {
        match self {
            Self::Pod(pod) => pod.reference(),
            Self::Volume(volume) => volume.reference(),
            Self::Claim(claim) => claim.reference(),
            Self::Class(class) => class.reference(),
            Self::CsiDriver(driver) => driver.reference(),
            Self::Snapshot(snapshot) => snapshot.reference(),
            Self::SnapshotClass(class) => class.reference(),
            Self::SnapshotContent(content) => content.reference(),
            Self::ConfigMap(map) => map.reference(),
            Self::Secret(secret) => secret.reference(),
        }
    }
}

/// An object as a source describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    /// The fields that the kubelet acts on, checked.
    pub object: AnyObject,
    /// Every field.
    pub document: Document,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Created,
    Configured,
    Unchanged,
}

/// An object whose latest description is a file.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Declared {
    pub path: PathBuf,
    pub kind: Kind,
    pub namespace: String,
    pub name: String,
}

/// [`Declared`], in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Declaration<'a> {
    pub path: &'a Path,
    pub kind: Kind,
    pub namespace: &'a str,
    pub name: &'a str,
}

impl Declaration<'_> {
    pub fn to_declared(self) -> Declared {
        let Self { path, kind, namespace, name } = self;
        Declared { path: path.to_owned(), kind, namespace: namespace.to_owned(), name: name.to_owned() }
    }
}

impl Store {
    /// Applies a valid object from `source`.
    pub fn apply(&self, described: Described, source: Source) -> Result<Outcome, Error> {
        let Described { object, document } = described;
        match object {
            AnyObject::Pod(pod) => self.apply_pod(*pod, document, source),
            AnyObject::Volume(volume) => self.apply_volume(*volume, document, source),
            AnyObject::Claim(mut claim) => {
                // The kubelet's own, about the claim that was shown: another claim must not get it.
                let is_noted = claim.metadata.annotations.remove(VOLUME_BEING_CREATED).is_some();
                let document = if is_noted { without_note(&document) } else { document };
                let _writing = self.writing();
                self.refuse_resize(&claim)?;
                self.apply_locked(*claim, document, source)
            }
            AnyObject::Class(class) => self.apply_plain(*class, document, source),
            AnyObject::CsiDriver(driver) => self.apply_plain(*driver, document, source),
            AnyObject::Snapshot(snapshot) => self.apply_plain(*snapshot, document, source),
            AnyObject::SnapshotClass(class) => self.apply_plain(*class, document, source),
            AnyObject::SnapshotContent(content) => self.apply_plain(*content, document, source),
            AnyObject::ConfigMap(map) => self.apply_plain(*map, document, source),
            AnyObject::Secret(secret) => self.apply_plain(*secret, document, source),
        }
    }

    /// Removes the description of an object. A pod is deleted. ConfigMaps and Secrets go with it,
    /// since it is all they are. All other objects stay, marked, since they may hold data.
    pub fn withdraw(&self, declared: &Declared) -> Result<(), Error> {
        match declared.kind {
            Kind::Pod => self.mark_pod_deleted(&declared.namespace, &declared.name, None).map(drop),
            Kind::PersistentVolume => self.mark_missing::<PersistentVolume>(declared),
            Kind::PersistentVolumeClaim => self.mark_missing::<PersistentVolumeClaim>(declared),
            Kind::StorageClass => self.mark_missing::<StorageClass>(declared),
            Kind::CsiDriver => self.mark_missing::<CsiDriver>(declared),
            Kind::VolumeSnapshot => self.mark_missing::<VolumeSnapshot>(declared),
            Kind::VolumeSnapshotClass => self.mark_missing::<VolumeSnapshotClass>(declared),
            Kind::VolumeSnapshotContent => self.mark_missing::<VolumeSnapshotContent>(declared),
            Kind::ConfigMap => self.remove_config_map(&declared.namespace, &declared.name),
            Kind::Secret => self.remove_secret(&declared.namespace, &declared.name),
            Kind::Event | Kind::Node => Ok(()),
        }
    }

    /// Every object that a file describes, in the order of kinds and names. The store waits for `look`.
    pub fn look_at_declared<T>(&self, look: impl FnOnce(&[Declaration<'_>]) -> T) -> T {
        let state = self.state();
        let all: Vec<Declaration<'_>> = declarations(&state).collect();
        look(&all)
    }

    /// Whether a file describes any object.
    pub fn has_declared(&self) -> bool {
        declarations(&self.state()).next().is_some()
    }

    /// [`Self::look_at_declared`], copied.
    pub fn declared_by_files(&self) -> Vec<Declared> {
        self.look_at_declared(|all| all.iter().map(|known| known.to_declared()).collect())
    }

    /// The file that describes an object, as of the last scan.
    pub fn describing_file(&self, kind: Kind, namespace: &str, name: &str) -> Option<PathBuf> {
        self.look_at_declared(|all| {
            let found = all
                .iter()
                .find(|known| known.kind == kind && known.namespace == namespace && known.name == name);
            found.map(|known| known.path.to_owned())
        })
    }

    /// The uid of the object of this name; `None` where there is none.
    pub fn uid_of(&self, kind: Kind, namespace: &str, name: &str) -> Option<String> {
        let state = self.state();
        let key = Key::new(namespace, name);
        let meta = match kind {
            Kind::Pod => &state.pods.get(&key)?.current.object.metadata,
            Kind::PersistentVolumeClaim => &state.claims.get(&key)?.object.metadata,
            Kind::PersistentVolume => &state.volumes.get(&key)?.object.metadata,
            Kind::StorageClass => &state.classes.get(&key)?.object.metadata,
            Kind::CsiDriver => &state.csi_drivers.get(&key)?.object.metadata,
            Kind::VolumeSnapshot => &state.snapshots.get(&key)?.object.metadata,
            Kind::VolumeSnapshotClass => &state.snapshot_classes.get(&key)?.object.metadata,
            Kind::VolumeSnapshotContent => &state.snapshot_contents.get(&key)?.object.metadata,
            Kind::ConfigMap => &state.config_maps.get(&key)?.object.metadata,
            Kind::Secret => &state.secrets.get(&key)?.object.metadata,
            Kind::Event | Kind::Node => return None,
        };
        Some(meta.uid.clone())
    }

    fn apply_pod(&self, mut pod: Pod, document: Document, source: Source) -> Result<Outcome, Error> {
        let _writing = self.writing();
        if self.inner.refuses_pods.load(Ordering::Relaxed) {
            return Ok(Outcome::Unchanged);
        }
        let key = Key::of(&pod);
        let digest = digest(&pod);
        let known = self.state().pods.get(&key).cloned();
        if let Some(known) = &known
            && let Some(wanted) = known.wanted()
        {
            refuse_other_source(Kind::Pod, &key, &wanted.source, &source)?;
            if wanted.digest == digest && wanted.source == source {
                return self.keep_pod_document(key, known, document);
            }
            if known.successor.is_none() {
                self.place(&mut pod, &source);
                match in_place::changed(&known.current.object, &pod) {
                    Ok(pod) => {
                        let known = known.clone();
                        let wanted =
                            Entry { source, digest, object: Arc::new(pod), document: Some(document) };
                        return self.change_in_place(key, known, wanted);
                    }
                    Err(FixedField { field, before, after }) if source == Source::Api && is_active(known) => {
                        return Err(Error::RunningPod { name: key.name, field, before, after });
                    }
                    // Another pod takes its place.
                    Err(_) => {}
                }
            }
        }
        self.identify(&mut pod, &source, &digest)?;
        let wanted = Entry { source, digest, object: Arc::new(pod), document: Some(document) };
        match known {
            None => {
                self.keep_pod(key, PodEntry { current: wanted, successor: None })?;
                Ok(Outcome::Created)
            }
            Some(mut entry) => {
                let outcome = if entry.wanted().is_some() { Outcome::Configured } else { Outcome::Created };
                entry.mark_deleted(None, now());
                entry.successor = Some(Box::new(wanted));
                self.keep_pod(key, entry)?;
                Ok(outcome)
            }
        }
    }

    /// The pod keeps its uid: its worker makes it as `wanted` says.
    fn change_in_place(&self, key: Key, mut known: PodEntry, wanted: Entry<Pod>) -> Result<Outcome, Error> {
        if let Some(capacity) = self.inner.capacity.get() {
            let pods = self.pods();
            admission::fits_resized(capacity, &pods, &known.current.object, &wanted.object)
                .map_err(|why| Error::NoRoom { name: key.name.clone(), why: why.message })?;
        }
        known.current = wanted;
        match self.keep_pod(key.clone(), known.clone()) {
            // The next start reads the file again, so memory suffices.
            Err(error) if error.is_full_disk() && known.is_of_a_file() => {
                self.state().pods.replace(&key, known);
                self.announce(Kind::Pod, &key);
            }
            kept => kept?,
        }
        Ok(Outcome::Configured)
    }

    /// Updates only the document: the kubelet's own fields are unchanged, so the pod keeps running.
    fn keep_pod_document(&self, key: Key, known: &PodEntry, document: Document) -> Result<Outcome, Error> {
        let mut entry = known.clone();
        let Some(outcome) = replace_document(entry.wanted_mut(), document) else {
            return Ok(Outcome::Unchanged);
        };
        match self.keep_pod(key.clone(), entry.clone()) {
            // The next start reads the file again, so memory suffices.
            Err(error) if error.is_full_disk() && is_of_a_file(entry.wanted_mut()) => {
                self.state().pods.replace(&key, entry);
            }
            kept => kept?,
        }
        Ok(outcome)
    }

    /// Like [`Store::keep_pod_document`].
    fn keep_document<T: Stored>(
        &self,
        key: Key,
        mut entry: Entry<T>,
        document: Document,
    ) -> Result<Outcome, Error> {
        let Some(outcome) = replace_document(&mut entry, document) else { return Ok(Outcome::Unchanged) };
        match self.keep(key.clone(), entry.clone(), Durability::PowerLoss) {
            Err(error) if error.is_full_disk() && is_of_a_file(&entry) => {
                drop(T::entries_mut(&mut self.state()).insert(key, entry));
            }
            kept => kept?,
        }
        Ok(outcome)
    }

    /// Sets the pod's uid. Like kubelet, derives it from a file's content, path and node: the same
    /// file is the same pod after a restart, and an edited file is another pod.
    fn identify(&self, pod: &mut Pod, source: &Source, digest: &str) -> Result<(), Error> {
        pod.metadata.uid = match source {
            Source::File(path) => {
                let whole = format!("{digest}\nhost:{}\nfile:{}", self.node_name(), path.display());
                base16ct::lower::encode_string(&Sha256::digest(whole.as_bytes()))[..32].to_owned()
            }
            Source::Api | Source::Kubelet => new_uid().map_err(Error::Uid)?,
        };
        self.place(pod, source);
        pod.metadata.creation_timestamp.get_or_insert_with(now);
        pod.metadata.generation = 1;
        Ok(())
    }

    /// Like kubelet, a file's pod is this node's.
    fn place(&self, pod: &mut Pod, source: &Source) {
        if matches!(source, Source::File(_)) || pod.spec.node_name.is_empty() {
            self.node_name().clone_into(&mut pod.spec.node_name);
        }
    }

    fn apply_plain<T: Stored + Mergeable>(
        &self,
        object: T,
        document: Document,
        source: Source,
    ) -> Result<Outcome, Error> {
        let _writing = self.writing();
        self.apply_locked(object, document, source)
    }

    /// The caller holds `writing`.
    pub(super) fn apply_locked<T: Stored + Mergeable>(
        &self,
        mut object: T,
        document: Document,
        source: Source,
    ) -> Result<Outcome, Error> {
        let key = Key::of(&object);
        let digest = digest(&object);
        let known = T::entries(&self.state()).get(&key).cloned();
        let Some(known) = known else {
            object.metadata_mut().uid = new_uid().map_err(Error::Uid)?;
            object.metadata_mut().creation_timestamp.get_or_insert_with(now);
            self.keep(
                key,
                Entry { source, digest, object: Arc::new(object), document: Some(document) },
                Durability::PowerLoss,
            )?;
            return Ok(Outcome::Created);
        };
        let is_missing = is_marked_missing(&*known.object);
        if !is_missing {
            refuse_other_source(T::KIND, &key, &known.source, &source)?;
        }
        if known.digest == digest && known.source == source && !is_missing {
            if known.object.metadata().is_deleted() {
                return Ok(Outcome::Unchanged);
            }
            return self.keep_document(key, known, document);
        }
        if known.object.metadata().is_deleted() {
            return Err(Error::Terminating { kind: T::KIND, name: key.name });
        }
        let outcome = if known.digest == digest { Outcome::Unchanged } else { Outcome::Configured };
        object.merge(&known.object).map_err(|Fixed { field, rule }| Error::Immutable {
            kind: T::KIND,
            name: key.name.clone(),
            field,
            rule,
        })?;
        let meta = object.metadata_mut();
        meta.uid.clone_from(&known.object.metadata().uid);
        meta.creation_timestamp = known.object.metadata().creation_timestamp;
        self.keep(
            key,
            Entry { source, digest, object: Arc::new(object), document: Some(document) },
            Durability::PowerLoss,
        )?;
        Ok(outcome)
    }

    fn mark_missing<T: Stored>(&self, declared: &Declared) -> Result<(), Error> {
        let _writing = self.writing();
        let key = Key::new(&declared.namespace, &declared.name);
        let Some(mut entry) = T::entries(&self.state()).get(&key).cloned() else { return Ok(()) };
        let object = Arc::make_mut(&mut entry.object);
        object.metadata_mut().annotations.insert(SOURCE_ANNOTATION.to_owned(), SOURCE_MISSING.to_owned());
        let reference = object.reference();
        self.keep(key, entry, Durability::PowerLoss)?;
        let (kind, name) = (declared.kind.as_str().to_lowercase(), &declared.name);
        let message = format!(
            "{} is gone or no longer describes this object, which is kept: remove it with '{} delete {kind} {name}'",
            declared.path.display(),
            called_as()
        );
        self.record(&reference, EventType::Warning, "ManifestMissing", &message);
        Ok(())
    }
}

/// Limits how a changed manifest may change an existing object.
pub(super) trait Mergeable: Object {
    /// Copies fields that the manifest omits from `known`. Returns an immutable field that differs,
    /// if any.
    fn merge(&mut self, known: &Self) -> Result<(), Fixed>;
}

/// A field that must not change.
#[derive(Debug)]
pub(super) struct Fixed {
    field: &'static str,
    rule: &'static str,
}

impl Fixed {
    pub(super) fn after_creation(field: &'static str) -> Self {
        Self { field, rule: "field is immutable after creation" }
    }

    fn by_itself(field: &'static str) -> Self {
        Self { field, rule: "field is immutable when `immutable` is set" }
    }
}

impl Mergeable for PersistentVolumeClaim {
    fn merge(&mut self, known: &Self) -> Result<(), Fixed> {
        if self.spec.volume_name.is_empty() {
            self.spec.volume_name.clone_from(&known.spec.volume_name);
        }
        if self.spec.storage_class_name.is_none() {
            self.spec.storage_class_name.clone_from(&known.spec.storage_class_name);
        }
        let note = known.metadata.annotations.get_key_value(VOLUME_BEING_CREATED);
        self.metadata.annotations.extend(note.map(|(key, value)| (key.clone(), value.clone())));
        self.status = known.status.clone();
        let mut same_size = known.spec.clone();
        same_size.resources.requests.clone_from(&self.spec.resources.requests);
        if known.spec.volume_name.is_empty() || self.spec == same_size {
            Ok(())
        } else {
            let rule = "spec is immutable after creation except resources.requests for bound claims";
            Err(Fixed { field: "spec", rule })
        }
    }
}

impl Mergeable for PersistentVolume {
    fn merge(&mut self, known: &Self) -> Result<(), Fixed> {
        if self.spec.claim_ref.as_ref().is_none_or(|claim| claim.uid.is_empty()) {
            self.spec.claim_ref.clone_from(&known.spec.claim_ref);
        }
        self.status = known.status.clone();
        if self.spec.csi == known.spec.csi {
            Ok(())
        } else {
            Err(Fixed::after_creation("spec.persistentvolumesource"))
        }
    }
}

/// A class applies only to claims provisioned later.
impl Mergeable for StorageClass {
    fn merge(&mut self, _known: &Self) -> Result<(), Fixed> {
        Ok(())
    }
}

impl Mergeable for CsiDriver {
    fn merge(&mut self, _known: &Self) -> Result<(), Fixed> {
        Ok(())
    }
}

impl Mergeable for ConfigMap {
    fn merge(&mut self, known: &Self) -> Result<(), Fixed> {
        if !known.immutable {
            return Ok(());
        }
        let same = [
            ("immutable", self.immutable),
            ("data", self.data == known.data),
            ("binaryData", self.binary_data == known.binary_data),
        ];
        same.iter().find(|(_, same)| !same).map_or(Ok(()), |(field, _)| Err(Fixed::by_itself(field)))
    }
}

impl Mergeable for Secret {
    fn merge(&mut self, known: &Self) -> Result<(), Fixed> {
        if self.secret_type != known.secret_type {
            return Err(Fixed::after_creation("type"));
        }
        if !known.immutable {
            return Ok(());
        }
        let same = [("immutable", self.immutable), ("data", self.data == known.data)];
        same.iter().find(|(_, same)| !same).map_or(Ok(()), |(field, _)| Err(Fixed::by_itself(field)))
    }
}

/// An object has one source. A file may replace another file (a rename), but not a client, nor vice
/// versa.
fn refuse_other_source(kind: Kind, key: &Key, holder: &Source, asking: &Source) -> Result<(), Error> {
    let same = match (holder, asking) {
        (Source::File(_), Source::File(_)) => true,
        (holder, asking) => holder == asking,
    };
    if same {
        return Ok(());
    }
    Err(Error::OtherSource { kind, name: key.name.clone(), holder: holder.clone() })
}

/// `None` if the document is unchanged. Adding one to a record of an older build does not count as
/// a change.
fn replace_document<T>(entry: &mut Entry<T>, document: Document) -> Option<Outcome> {
    match &entry.document {
        Some(known) if *known == document => return None,
        _ => {}
    }
    let is_known = entry.document.replace(document).is_some();
    Some(if is_known { Outcome::Configured } else { Outcome::Unchanged })
}

fn without_note(document: &Document) -> Document {
    let mut value = document.value();
    let annotations = value.pointer_mut("/metadata/annotations");
    if let Some(annotations) = annotations.and_then(serde_json::Value::as_object_mut) {
        annotations.shift_remove(VOLUME_BEING_CREATED);
    }
    Document::new(&value)
}

fn is_active(pod: &PodEntry) -> bool {
    !pod.current.object.status.phase.has_ended()
}

fn is_of_a_file<T>(entry: &Entry<T>) -> bool {
    matches!(entry.source, Source::File(_))
}

fn is_marked_missing(object: &impl Object) -> bool {
    object.metadata().annotations.get(SOURCE_ANNOTATION).is_some_and(|value| value == SOURCE_MISSING)
}

fn declarations(state: &State) -> impl Iterator<Item = Declaration<'_>> {
    let pods = state.pods.iter().filter_map(|(key, entry)| Some((key, entry.wanted()?)));
    pods.filter_map(|(key, wanted)| declaration(Kind::Pod, key, &wanted.source))
        .chain(present(&state.claims))
        .chain(present(&state.volumes))
        .chain(present(&state.classes))
        .chain(present(&state.csi_drivers))
        .chain(present(&state.snapshots))
        .chain(present(&state.snapshot_classes))
        .chain(present(&state.snapshot_contents))
        .chain(present(&state.config_maps))
        .chain(present(&state.secrets))
}

fn present<T: Stored>(entries: &super::Entries<T>) -> impl Iterator<Item = Declaration<'_>> {
    let still_there = entries.iter().filter(|(_, entry)| !is_marked_missing(&*entry.object));
    still_there.filter_map(|(key, entry)| declaration(T::KIND, key, &entry.source))
}

fn declaration<'a>(kind: Kind, key: &'a Key, source: &'a Source) -> Option<Declaration<'a>> {
    match source {
        Source::File(path) => Some(Declaration { path, kind, namespace: &key.namespace, name: &key.name }),
        Source::Api | Source::Kubelet => None,
    }
}

fn digest(object: &impl Object) -> String {
    let content = serde_json::to_vec(object).expect("objects have string keys only");
    base16ct::lower::encode_string(&Sha256::digest(&content))
}
