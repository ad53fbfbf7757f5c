//! A volume's life as kubelet and its sidecars lead it: brought to just before
//! the call that is to be disturbed, looked at after it, and led to its end.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use proto::csi::volume_capability::access_mode::Mode;
use proto::csi::volume_capability::{AccessType, MountVolume};
use proto::csi::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerGetCapabilitiesRequest,
    ControllerPublishVolumeRequest, ControllerUnpublishVolumeRequest, GetPluginCapabilitiesRequest,
    ListSnapshotsRequest, ListVolumesRequest, NodeExpandVolumeRequest, NodeGetCapabilitiesRequest,
    NodeStageVolumeRequest, VolumeCapability,
};
use tests::csi::scene::{
    Caller, Flags, GI, NODE, Scene, TIMEOUT, capability, create_request, is_uncertain, mounted, text,
};
use tests::csi::snapshots::{
    self, BLOCKING_COPY, data, delete_snapshot, from_snapshot, from_volume, get_snapshot, list_snapshots,
};
use tests::loop_device::FileSystem;
use tests::subvolume;
use tests::trace_steps::{Injection, Places, Trace, Tracing};
use tests::{Daemon, LeakCheck, eventually};
use tonic::Status;

use crate::tree;

const POD: &str = "one";
const NAME: &str = "pvc-1";
const SOURCE: &str = "pvc-0";
const SNAPSHOT: &str = "snap-1";
const LARGER: i64 = 2 * GI;
const GROUP: u32 = 2000;
/// For what ends by itself: a daemon whose connection is gone.
pub(crate) const ENDING: Duration = Duration::from_secs(30);

/// The call that is disturbed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rpc {
    CreateVolume,
    /// CreateVolume from a snapshot.
    Restore,
    /// CreateVolume from a volume that a daemon serves.
    Clone,
    /// [`Self::Restore`] on a file system that cannot share extents.
    RestoreByCopy,
    DeleteVolume,
    /// Of a volume that a daemon serves.
    CreateSnapshot,
    /// The same with `snapshotMode: blocking-copy`, until it is ready.
    CopySnapshot,
    DeleteSnapshot,
    ControllerExpand,
    ControllerPublish,
    ControllerUnpublish,
    /// With a group that the volume's files are given to.
    Stage,
    Publish,
    PublishReadOnly,
    /// Publish of a volume whose daemon has died, so that it is staged anew.
    Restage,
    /// Publish for another group than the volume is staged with, which no pod uses.
    Regroup,
    NodeExpand,
    Unpublish,
    Unstage,
    /// Unstage of a volume whose daemon is to wait for the next stage.
    Park,
    /// Stage of a volume whose daemon waits.
    Unpark,
}

impl Rpc {
    /// It takes away; what it fails to is asked for again, whatever its code.
    pub(crate) fn undoes(self) -> bool {
        matches!(
            self,
            Self::DeleteVolume
                | Self::DeleteSnapshot
                | Self::ControllerUnpublish
                | Self::Unpublish
                | Self::Unstage
                | Self::Park
        )
    }

    /// Whether a call takes back what this one began, answered or not.
    pub(crate) fn is_undone_by_another(self) -> bool {
        matches!(
            self,
            Self::Stage
                | Self::Publish
                | Self::PublishReadOnly
                | Self::Restage
                | Self::Regroup
                | Self::ControllerPublish
                | Self::Unpark
        )
    }

    fn is_nodes(self) -> bool {
        matches!(
            self,
            Self::Stage
                | Self::Publish
                | Self::PublishReadOnly
                | Self::Restage
                | Self::Regroup
                | Self::NodeExpand
                | Self::Unpublish
                | Self::Unstage
                | Self::Park
                | Self::Unpark
        )
    }

    fn parks(self) -> bool {
        matches!(self, Self::Park | Self::Unpark)
    }

    fn attaches(self) -> bool {
        matches!(self, Self::ControllerPublish | Self::ControllerUnpublish)
    }

    /// On which pool there are snapshots and clones, if there are any.
    fn copies_on(self) -> Option<FileSystem> {
        match self {
            Self::Restore | Self::Clone | Self::CreateSnapshot | Self::DeleteSnapshot => {
                Some(FileSystem::Xfs)
            }
            Self::RestoreByCopy | Self::CopySnapshot => Some(FileSystem::Ext4),
            _ => None,
        }
    }

    fn copies(self) -> bool {
        self.copies_on().is_some()
    }

    /// Whether a failure that is final leaves all as it was. Not of a copy that was
    /// answered before it failed, which stays until it is deleted; nor for a daemon that
    /// waited or was to be replaced, which has ended then.
    pub(crate) fn fails_without_a_trace(self) -> bool {
        !self.undoes() && !matches!(self, Self::CopySnapshot | Self::Unpark | Self::Restage | Self::Regroup)
    }
}

fn for_group() -> VolumeCapability {
    let mount = MountVolume { volume_mount_group: GROUP.to_string(), ..Default::default() };
    VolumeCapability { access_type: Some(AccessType::Mount(mount)), ..capability(Mode::MultiNodeMultiWriter) }
}

/// By the group of [`for_group`].
fn ensure_owned(root: &Path) -> Result<()> {
    let owner = std::os::unix::fs::MetadataExt::gid(&fs::metadata(root.join("dir/other"))?);
    ensure!(owner == GROUP, "dir/other belongs to group {owner}");
    Ok(())
}

/// The file system of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pool {
    /// What the call needs.
    Usual,
    /// Btrfs with quota groups: volumes and snapshots are subvolumes.
    QuotaGroups,
}

/// Names that are empty are of nothing.
pub(crate) struct World {
    pub(crate) rpc: Rpc,
    pub(crate) pool: Pool,
    pub(crate) scene: Scene,
    volume: String,
    /// Of what is copied.
    source: String,
    snapshot: String,
    context: HashMap<String, String>,
}

impl World {
    pub(crate) fn new(rpc: Rpc) -> Self {
        Self::on(rpc, Pool::Usual)
    }

    pub(crate) fn on(rpc: Rpc, pool: Pool) -> Self {
        let mut flags = Flags::process();
        if rpc.attaches() {
            flags.0.push("--attach".to_owned());
        }
        let scene = match pool {
            Pool::QuotaGroups => snapshots::scene_with_quota_groups(flags),
            Pool::Usual => rpc.copies_on().map_or_else(|| Scene::start(flags), snapshots::scene_on),
        };
        let none = String::new;
        Self { rpc, pool, scene, volume: none(), source: none(), snapshot: none(), context: HashMap::new() }
    }

    /// The kernel tells a daemon a moment later that a removed file has no user any more.
    fn ensure_nothing_deleted_is_open(&self) -> Result<()> {
        for daemon in self.scene.daemons() {
            for entry in fs::read_dir(format!("/proc/{daemon}/fd"))? {
                // Closed meanwhile, perhaps.
                let Ok(target) = fs::read_link(entry?.path()) else { continue };
                ensure!(!target.to_string_lossy().ends_with(" (deleted)"), "{}", target.display());
            }
        }
        Ok(())
    }

    /// Everything until just before the call.
    pub(crate) fn prepare(&mut self) -> Result<()> {
        let caller = self.scene.caller();
        if self.rpc.copies() {
            self.source = caller.create_named(SOURCE)?;
            tree::make(&data(&self.scene, &self.source));
        }
        match self.rpc {
            Rpc::CreateVolume => {}
            Rpc::Restore | Rpc::RestoreByCopy | Rpc::DeleteSnapshot => {
                self.make_snapshot(&caller)?;
                // A snapshot outlives its volume.
                caller.delete(&std::mem::take(&mut self.source))?;
            }
            Rpc::Clone | Rpc::CreateSnapshot | Rpc::CopySnapshot => {
                caller.stage(&self.source)?;
                caller.publish(&self.source, POD)?;
                // A change waits until the daemon has counted the volume, and a copy is
                // ABORTED until then.
                let settled = caller.target_path(POD).join("settled");
                fs::write(&settled, "").and_then(|()| fs::remove_file(&settled)).context("settle")?;
                eventually("its daemon lets go of it", TIMEOUT, || self.ensure_nothing_deleted_is_open())?;
            }
            _ => {
                let mut request = create_request(NAME);
                if self.rpc.parks() {
                    request.parameters = [("mountPodDeleteDelaySeconds".into(), "3600".into())].into();
                }
                self.volume = caller.create(request)?.volume_id;
                tree::make(&data(&self.scene, &self.volume));
            }
        }
        match self.rpc {
            Rpc::ControllerUnpublish => self.attach(&caller)?,
            Rpc::Stage => fs::create_dir_all(caller.staging_path(&self.volume))?,
            Rpc::Publish | Rpc::PublishReadOnly | Rpc::Restage | Rpc::Regroup | Rpc::Unstage => {
                caller.stage(&self.volume)?;
                if self.rpc == Rpc::Restage {
                    self.scene.kill_daemon();
                }
                let target = caller.target_path(POD);
                fs::create_dir_all(target.parent().context("a target has a parent")?)?;
            }
            Rpc::Park => caller.stage(&self.volume)?,
            Rpc::Unpark => {
                caller.stage(&self.volume)?;
                caller.unstage(&self.volume)?;
                self.ensure_daemons(1).context("parked")?;
                fs::create_dir_all(caller.staging_path(&self.volume))?;
            }
            Rpc::ControllerExpand | Rpc::NodeExpand | Rpc::Unpublish => {
                caller.stage(&self.volume)?;
                caller.publish(&self.volume, POD)?;
            }
            _ => {}
        }
        if self.rpc == Rpc::NodeExpand {
            self.expand(&caller)?;
        }
        Ok(())
    }

    /// The call, on a connection of its own, after that for what the driver can do.
    pub(crate) fn call(&mut self, caller: &Caller) -> Result<(), Status> {
        if self.rpc.is_nodes() {
            caller.node(async |mut n| n.node_get_capabilities(NodeGetCapabilitiesRequest {}).await)?;
        } else {
            let plugin = GetPluginCapabilitiesRequest {};
            caller.identity(async |mut i| i.get_plugin_capabilities(plugin).await)?;
            let controller = ControllerGetCapabilitiesRequest {};
            caller.controller(async |mut c| c.controller_get_capabilities(controller).await)?;
        }
        match self.rpc {
            Rpc::CreateVolume => self.volume = caller.create_named(NAME)?,
            Rpc::Restore | Rpc::RestoreByCopy => {
                self.volume = caller.create(from_snapshot(NAME, &self.snapshot))?.volume_id;
            }
            Rpc::Clone => self.volume = caller.create(from_volume(NAME, &self.source))?.volume_id,
            Rpc::DeleteVolume => caller.delete(&self.volume)?,
            Rpc::CreateSnapshot | Rpc::CopySnapshot => self.make_snapshot(caller)?,
            Rpc::DeleteSnapshot => delete_snapshot(caller, &self.snapshot)?,
            Rpc::ControllerExpand => self.expand(caller)?,
            Rpc::ControllerPublish => self.attach(caller)?,
            Rpc::ControllerUnpublish => self.detach(caller)?,
            Rpc::Stage => self.stage_for_group(caller)?,
            Rpc::Publish | Rpc::Restage => caller.publish(&self.volume, POD)?,
            Rpc::Regroup => caller
                .publish_with(&self.volume, POD, |request| request.volume_capability = Some(for_group()))?,
            Rpc::PublishReadOnly => {
                caller.publish_with(&self.volume, POD, |request| request.readonly = true)?;
            }
            Rpc::NodeExpand => self.expand_on_node(caller)?,
            Rpc::Unpublish => caller.unpublish(&self.volume, POD)?,
            Rpc::Unstage | Rpc::Park => caller.unstage(&self.volume)?,
            Rpc::Unpark => caller.stage(&self.volume)?,
        }
        Ok(())
    }

    /// The call until it is answered otherwise than by "call again".
    pub(crate) fn retry(&mut self) -> Result<()> {
        let caller = self.scene.caller();
        let answer = eventually("the retry", TIMEOUT, || match self.call(&caller) {
            Err(status) if is_uncertain(&status) => bail!("{status:?}"),
            Err(status) if status.message().ends_with("delete it and make it again") => {
                // It may be that nobody was told its id before.
                let id = status.message().split(' ').find(|word| word.starts_with("snap-"));
                delete_snapshot(&caller, id.context("the failed snapshot's id")?)?;
                bail!("{status:?}")
            }
            answer => Ok(answer),
        });
        answer?.context("the retry")
    }

    /// And waits for it where it is answered before it is ready.
    fn make_snapshot(&mut self, caller: &Caller) -> Result<(), Status> {
        let parameters =
            if self.rpc.copies_on() == Some(FileSystem::Ext4) { &[BLOCKING_COPY][..] } else { &[] };
        let made = snapshots::snapshot_with(caller, SNAPSHOT, &self.source, parameters)?;
        self.snapshot = made.snapshot_id;
        let ready =
            eventually("the snapshot is ready", TIMEOUT, || match get_snapshot(caller, &self.snapshot) {
                Ok(snapshot) => {
                    ensure!(snapshot.ready_to_use, "{snapshot:?}");
                    Ok(Ok(()))
                }
                Err(status) => Ok(Err(status)),
            });
        ready.unwrap_or_else(|error| Err(Status::deadline_exceeded(format!("{error:#}"))))
    }

    fn attach(&mut self, caller: &Caller) -> Result<(), Status> {
        let request = ControllerPublishVolumeRequest {
            volume_id: self.volume.clone(),
            node_id: NODE.into(),
            volume_capability: Some(capability(Mode::MultiNodeMultiWriter)),
            ..Default::default()
        };
        let reply = caller.controller(async |mut c| c.controller_publish_volume(request).await)?;
        self.context = reply.into_inner().publish_context;
        Ok(())
    }

    fn detach(&self, caller: &Caller) -> Result<(), Status> {
        let request = ControllerUnpublishVolumeRequest {
            volume_id: self.volume.clone(),
            node_id: NODE.into(),
            ..Default::default()
        };
        caller.controller(async |mut c| c.controller_unpublish_volume(request).await).map(drop)
    }

    fn expand(&self, caller: &Caller) -> Result<(), Status> {
        let request = ControllerExpandVolumeRequest {
            volume_id: self.volume.clone(),
            capacity_range: Some(CapacityRange { required_bytes: LARGER, limit_bytes: 0 }),
            ..Default::default()
        };
        caller.controller(async |mut c| c.controller_expand_volume(request).await).map(drop)
    }

    fn expand_on_node(&self, caller: &Caller) -> Result<(), Status> {
        let request = NodeExpandVolumeRequest {
            volume_id: self.volume.clone(),
            volume_path: text(&caller.target_path(POD)),
            capacity_range: Some(CapacityRange { required_bytes: LARGER, limit_bytes: 0 }),
            ..Default::default()
        };
        caller.node(async |mut n| n.node_expand_volume(request).await).map(drop)
    }

    fn stage_for_group(&self, caller: &Caller) -> Result<(), Status> {
        let path = caller.staging_path(&self.volume);
        if mounted(&path).is_none() {
            fs::create_dir_all(&path).unwrap();
        }
        let request = NodeStageVolumeRequest {
            volume_id: self.volume.clone(),
            staging_target_path: text(&path),
            volume_capability: Some(for_group()),
            publish_context: self.context.clone(),
            ..Default::default()
        };
        caller.node(async |mut n| n.node_stage_volume(request).await).map(drop)
    }

    /// Each volume and snapshot is a subvolume, each volume has its limit, and there are no others.
    fn ensure_limited(&self) -> Result<()> {
        let pool = self.scene.sandbox.path("pool");
        let mut wanted = Vec::new();
        for kind in ["snapshots", "volumes"] {
            for entry in fs::read_dir(pool.join(kind))? {
                let name = entry?.file_name().to_string_lossy().into_owned();
                if kind == "volumes" {
                    let (_, limit) = subvolume::group(&data(&self.scene, &name))?;
                    ensure!(limit == Some(GI.cast_unsigned()), "{name} has the limit {limit:?}");
                }
                wanted.push(format!("{kind}/{name}/data"));
            }
        }
        let mut found = subvolume::list(&pool)?;
        found.sort();
        wanted.sort();
        ensure!(found == wanted, "subvolumes: {found:?}, not {wanted:?}");
        Ok(())
    }

    /// What was asked for is there, and nothing besides.
    pub(crate) fn ensure_as_asked(&mut self) -> Result<()> {
        let caller = self.scene.caller();
        let data_of = |id: &str| data(&self.scene, id);
        if self.pool == Pool::QuotaGroups {
            self.ensure_limited()?;
        }
        match self.rpc {
            Rpc::CreateVolume => {
                self.ensure_listed(&caller, &[(&self.volume, GI)])?;
                let entries = fs::read_dir(data_of(&self.volume)).context("the volume's directory")?.count();
                ensure!(entries == 0, "a new volume has {entries} entries");
                Ok(())
            }
            Rpc::Restore | Rpc::RestoreByCopy => {
                self.ensure_listed(&caller, &[(&self.volume, GI)])?;
                tree::ensure_whole(&data_of(&self.volume))
            }
            Rpc::Clone => {
                self.ensure_listed(&caller, &[(&self.source, GI), (&self.volume, GI)])?;
                tree::ensure_whole(&data_of(&self.volume))?;
                self.ensure_written(&caller)
            }
            Rpc::DeleteVolume => self.ensure_listed(&caller, &[]),
            Rpc::CreateSnapshot | Rpc::CopySnapshot => {
                let snapshot = get_snapshot(&caller, &self.snapshot)?;
                ensure!(snapshot.ready_to_use, "{snapshot:?}");
                let listed = snapshots::ids(&list_snapshots(&caller, ListSnapshotsRequest::default())?);
                ensure!(listed == [self.snapshot.clone()], "listed: {listed:?}");
                tree::ensure_whole(&data_of(&self.snapshot))?;
                // Its writers go on.
                self.ensure_written(&caller)
            }
            Rpc::DeleteSnapshot => {
                let listed = snapshots::ids(&list_snapshots(&caller, ListSnapshotsRequest::default())?);
                ensure!(listed.is_empty(), "listed: {listed:?}");
                Ok(())
            }
            Rpc::ControllerExpand | Rpc::NodeExpand => {
                self.ensure_listed(&caller, &[(&self.volume, LARGER)])?;
                let fs = nix::sys::statvfs::statvfs(&caller.target_path(POD)).context("statvfs")?;
                let size = fs.blocks() * fs.fragment_size();
                ensure!(size == LARGER.cast_unsigned(), "the pod sees {size} bytes");
                self.ensure_written(&caller)
            }
            Rpc::ControllerPublish => self.ensure_attached(&caller, &[NODE]),
            Rpc::ControllerUnpublish => self.ensure_attached(&caller, &[]),
            Rpc::Stage | Rpc::Unpublish => {
                let path = caller.staging_path(&self.volume);
                self.ensure_mounted(&path)?;
                self.ensure_one_daemon()?;
                if self.rpc == Rpc::Unpublish {
                    let target = caller.target_path(POD);
                    ensure!(mounted(&target).is_none() && !target.exists(), "the target is there");
                } else {
                    return ensure_owned(&path);
                }
                tree::ensure_whole(&path)
            }
            Rpc::Publish | Rpc::Restage | Rpc::Regroup => {
                self.ensure_mounted(&caller.target_path(POD))?;
                self.ensure_one_daemon()?;
                if self.rpc == Rpc::Regroup {
                    return ensure_owned(&caller.target_path(POD));
                }
                tree::ensure_whole(&caller.target_path(POD))?;
                self.ensure_written(&caller)
            }
            Rpc::PublishReadOnly => {
                self.ensure_mounted(&caller.target_path(POD))?;
                tree::ensure_whole(&caller.target_path(POD))?;
                let written = fs::write(caller.target_path(POD).join("new"), "").map_err(|e| e.kind());
                ensure!(written == Err(std::io::ErrorKind::ReadOnlyFilesystem), "a write: {written:?}");
                Ok(())
            }
            Rpc::Park => {
                // After a fault it does not wait.
                ensure!(mounted(&caller.staging_path(&self.volume)).is_none(), "it is mounted");
                ensure!(self.scene.daemons().len() <= 1, "{:?}", self.scene.daemons());
                tree::ensure_whole(&data_of(&self.volume))
            }
            Rpc::Unpark => {
                let path = caller.staging_path(&self.volume);
                self.ensure_mounted(&path)?;
                self.ensure_one_daemon()?;
                tree::ensure_whole(&path)
            }
            Rpc::Unstage => {
                ensure!(mounted(&caller.staging_path(&self.volume)).is_none(), "it is mounted");
                ensure!(!self.scene.dial_dir(&self.volume).exists(), "its dial directory is there");
                self.ensure_daemons(0)?;
                tree::ensure_whole(&data_of(&self.volume))
            }
        }
    }

    fn ensure_listed(&self, caller: &Caller, wanted: &[(&String, i64)]) -> Result<()> {
        let listed = caller.controller(async |mut c| c.list_volumes(ListVolumesRequest::default()).await)?;
        let volumes = listed.into_inner().entries.into_iter().filter_map(|entry| entry.volume);
        let mut listed: Vec<_> = volumes.map(|volume| (volume.volume_id, volume.capacity_bytes)).collect();
        let mut wanted: Vec<_> = wanted.iter().map(|(id, bytes)| ((*id).clone(), *bytes)).collect();
        listed.sort();
        wanted.sort();
        ensure!(listed == wanted, "listed: {listed:?}, wanted {wanted:?}");
        Ok(())
    }

    fn ensure_attached(&mut self, caller: &Caller, nodes: &[&str]) -> Result<()> {
        let listed = caller.controller(async |mut c| c.list_volumes(ListVolumesRequest::default()).await)?;
        let listed = listed.into_inner().entries.into_iter().filter_map(|entry| entry.status);
        let listed: Vec<String> = listed.flat_map(|status| status.published_node_ids).collect();
        ensure!(listed == nodes, "attached to {listed:?}");
        if self.rpc == Rpc::ControllerPublish {
            let context = self.context.clone();
            self.attach(caller)?;
            ensure!(context == self.context, "another number for the same attachment");
        }
        Ok(())
    }

    fn ensure_mounted(&self, path: &Path) -> Result<()> {
        let mount = mounted(path).with_context(|| format!("{}: not mounted", path.display()))?;
        ensure!(mount.source == *self.volume, "a mount of {}", mount.source.display());
        Ok(())
    }

    /// What a pod writes, the pool has.
    fn ensure_written(&self, caller: &Caller) -> Result<()> {
        let id = if self.rpc.copies() { &self.source } else { &self.volume };
        let file = caller.target_path(POD).join("written");
        fs::write(&file, "by a pod").with_context(|| file.display().to_string())?;
        let found = fs::read(data(&self.scene, id).join("written")).context("in the pool")?;
        ensure!(found == b"by a pod", "the pool has {found:?}");
        Ok(())
    }

    fn ensure_one_daemon(&self) -> Result<()> {
        self.ensure_daemons(1)
    }

    fn ensure_daemons(&self, wanted: usize) -> Result<()> {
        eventually("daemons", ENDING, || {
            let daemons = self.scene.daemons();
            ensure!(daemons.len() == wanted, "{daemons:?}");
            Ok(())
        })
    }

    /// The rest of a life: what was made can be used, and what was deleted made anew.
    pub(crate) fn live_on(&mut self) -> Result<()> {
        let caller = self.scene.caller();
        match self.rpc {
            Rpc::DeleteVolume => self.volume = caller.create_named(NAME)?,
            Rpc::ControllerPublish => {
                self.stage_for_group(&caller)?;
                return Ok(());
            }
            Rpc::ControllerUnpublish | Rpc::DeleteSnapshot | Rpc::CreateSnapshot | Rpc::CopySnapshot => {
                return Ok(());
            }
            _ => {}
        }
        if !matches!(self.rpc, Rpc::Clone | Rpc::PublishReadOnly | Rpc::Regroup) {
            if self.rpc == Rpc::Stage {
                caller.publish(&self.volume, POD)?;
            } else {
                caller.stage(&self.volume)?;
                caller.publish(&self.volume, POD)?;
            }
            fs::write(caller.target_path(POD).join("last"), "word").context("write as a pod")?;
        }
        Ok(())
    }

    /// Ends all that there may be, each call until it is answered, and sees that nothing is left.
    pub(crate) fn end(&mut self) -> Result<()> {
        let caller = self.scene.caller();
        let until_done = |what: &str, call: &dyn Fn() -> Result<(), Status>| {
            eventually(what, TIMEOUT, || call().map_err(|status| anyhow::anyhow!("{status:?}")))
        };
        for id in [&self.volume, &self.source].into_iter().filter(|id| !id.is_empty()) {
            until_done("unpublish", &|| caller.unpublish(id, POD))?;
            until_done("unstage", &|| caller.unstage(id))?;
            if self.rpc.attaches() {
                until_done("detach", &|| self.detach(&caller))?;
            }
            until_done("delete", &|| caller.delete(id))?;
        }
        if !self.snapshot.is_empty() {
            until_done("delete the snapshot", &|| delete_snapshot(&caller, &self.snapshot))?;
        }
        for name in [&mut self.volume, &mut self.source, &mut self.snapshot] {
            name.clear();
        }
        self.context.clear();
        self.remove_kubelets_directories(&caller)?;
        self.scene.ensure_nothing_left(ENDING).context("at the end")
    }

    /// Of a volume that was not published in the end.
    fn remove_kubelets_directories(&self, caller: &Caller) -> Result<()> {
        let mut dir = caller.target_path(POD);
        while dir.pop() && dir != self.scene.kubelet_dir().join("pods") {
            match fs::remove_dir(&dir) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(e).with_context(|| dir.display().to_string());
                }
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }

    /// Files of a volume that come with its first stage and go with the volume.
    pub(crate) fn ground(&self) -> LeakCheck {
        // A daemon writes the one, and the driver what the daemon has said, after the call.
        let late = |id: &String| {
            [data(&self.scene, id).with_file_name("usage"), self.scene.dial_dir(id).join("daemon.log")]
        };
        self.scene.ground([&self.volume, &self.source].map(late).concat())
    }

    pub(crate) fn trace(
        &self,
        injection: Option<Injection>,
        reached: impl FnOnce() + Send + 'static,
    ) -> Result<Tracing> {
        let driver = self.scene.driver.as_ref().context("the driver runs")?;
        Tracing::start(driver.pid(), self.places(), injection, reached)
    }

    fn places(&self) -> Places {
        let mut ignored: Vec<PathBuf> =
            ["driver.log", "k/plugins_registry"].map(|name| self.scene.sandbox.path(name)).to_vec();
        // Written when the daemon says something, at any step of the driver.
        ignored.extend(["daemon.log", "daemon.log.1"].map(PathBuf::from));
        Places { root: self.scene.sandbox.dir().to_owned(), ignored }
    }

    /// Starts a driver in the place of the one that is dead, traced from its first call
    /// until it serves, or is dead.
    pub(crate) fn start_traced(&mut self, injection: Option<Injection>) -> Result<Trace> {
        let said_before = self.scene.log().len();
        let command = self.scene.driver_command();
        let mut gate = self.scene.sandbox.command(Path::new("/bin/sh"));
        // It stops itself before it becomes the driver.
        gate.args(["-c", "kill -STOP $$; exec \"$0\" \"$@\""]);
        gate.arg(command.get_program()).args(command.get_args());
        let driver = Daemon::start("hawser-csi", gate, &self.scene.sandbox.path("driver.log"))?;
        let stat = format!("/proc/{}/stat", driver.pid());
        eventually("the gate is reached", TIMEOUT, || {
            ensure!(fs::read_to_string(&stat)?.contains(") T "), "it is not stopped");
            Ok(())
        })?;
        let tracing = Tracing::start(driver.pid(), self.places(), injection, || {})?;
        let started = eventually("the driver serves, or is dead", TIMEOUT, || {
            let log = self.scene.log();
            ensure!(tracing.is_over() || log[said_before..].contains(" serving "), "{}", &log[said_before..]);
            Ok(())
        });
        let trace = tracing.finish();
        self.scene.driver = Some(driver);
        started?;
        trace
    }
}
