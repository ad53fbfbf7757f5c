//! The suite's mounts. Programs of ours stand in front of mount(8) and umount(8): they stage a volume
//! where the suite mounts a device, and unstage it. So each mount of a test is a FUSE connection and a
//! daemon of its own.
//!
//! Others stand in front of df(1) and findmnt(8), which show the type `fuse.hawser`: the suite knows `fuse`.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use ::tests::csi::scene::{Caller, Scene, capability, mounted, text};
use ::tests::mounts;
use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Parser;
use linux::mount::{MountFlags, UnmountMode};
use linux::mountinfo::MountEntry;
use proto::csi::volume_capability::access_mode::Mode;
use proto::csi::volume_capability::{AccessType, MountVolume};
use proto::csi::{NodeStageVolumeRequest, NodeUnstageVolumeRequest, VolumeCapability};
use xtask::foreign::find_program;

use super::STANDARD_PATH;

/// The first argument of this program where it is mount(8) or umount(8) of the suite.
pub(crate) const COMMAND: &str = "suite-mount";
/// The suite's part of a file system's type, behind `fuse`.
const SUBTYPE: &str = ".hawser";
const FILE_SYSTEM: &str = "fuse.hawser";
const DF: &str = "#!/bin/sh\nshown=$('PROGRAM' \"$@\"); code=$?\n\
    printf '%s\\n' \"$shown\" | sed 's/fuse\\.hawser/fuse       /'\nexit $code\n";
const FINDMNT: &str = "#!/bin/bash\nwords=()\n\
    for word; do [ \"$word\" = fuse ] && word=fuse.hawser; words+=(\"$word\"); done\n\
    exec 'PROGRAM' \"${words[@]}\"\n";

/// A volume, and where the suite mounts it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    volume_id: String,
    path: PathBuf,
}

/// Everything that is there for one process of the suite, on a tmpfs below kubelet's directory.
#[derive(Debug)]
pub(super) struct Places {
    dir: PathBuf,
    caller: Caller,
    /// Where fusectl is mounted.
    connections: PathBuf,
    test: Place,
    scratch: Place,
}

impl Places {
    /// `name`: of the directory.
    pub(super) fn new(scene: &Scene, name: &str, [test, scratch]: &[String; 2]) -> Result<Self> {
        let dir = scene.kubelet_dir().join(name);
        fs::create_dir(&dir).with_context(|| dir.display().to_string())?;
        linux::mount::mount_fs("tmpfs", "suite", &dir, MountFlags::default(), "mode=755")?;
        // Kubelet's directory is mounted on itself, and what is mounted in it is seen twice. Here it is not,
        // and findmnt(8) finds one mount of each volume.
        linux::mount::make_private(&dir)?;
        linux::mount::make_shared(&dir)?;
        let place = |volume_id: &str, name: &str| -> Result<Place> {
            let path = dir.join(name);
            fs::create_dir(&path).with_context(|| path.display().to_string())?;
            Ok(Place { volume_id: volume_id.to_owned(), path })
        };
        let (test, scratch) = (place(test, "test")?, place(scratch, "scratch")?);
        let connections = scene.sandbox.path("fusectl");
        let places = Self { dir, caller: scene.caller(), connections, test, scratch };
        places.install()?;
        Ok(places)
    }

    /// For what the suite needs beside its volumes.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A command of the suite, with what it must know.
    pub(super) fn configure(&self, check: &mut Command, results: &Path) {
        check.env("PATH", format!("{}:{STANDARD_PATH}", self.file("bin").display()));
        check.env("FSTYP", "fuse").env("FUSE_SUBTYP", SUBTYPE);
        check.env("TEST_DEV", &self.test.volume_id).env("TEST_DIR", &self.test.path);
        check.env("SCRATCH_DEV", &self.scratch.volume_id).env("SCRATCH_MNT", &self.scratch.path);
        check.env("RESULT_BASE", results).env("TMPDIR", self.file("tmp"));
        // An empty one, not that of the machine.
        check.env("HOST_OPTIONS", self.file("config"));
    }

    fn install(&self) -> Result<()> {
        for name in ["bin", "tmp"] {
            fs::create_dir(self.file(name)).context("a new tmpfs")?;
        }
        // Of every user.
        fs::set_permissions(self.file("tmp"), Permissions::from_mode(0o1777))?;
        fs::write(self.file("config"), "")?;
        let this = std::env::current_exe().context("this program")?;
        let volumes = [&self.test, &self.scratch].map(|p| format!("{}={}", p.volume_id, p.path.display()));
        let ours = format!(
            "exec '{}' {COMMAND} '{}' {} --",
            this.display(),
            self.dir.parent().unwrap_or(&self.dir).display(),
            volumes.join(" ")
        );
        let mount = format!(
            "#!/bin/sh\ncase \" $* \" in *' {FILE_SYSTEM} '*) {ours} mount \"$@\" ;; esac\nexec 'PROGRAM' \"$@\"\n"
        );
        let umount = format!("#!/bin/sh\n{ours} umount \"$@\"\n");
        for (name, script) in [("mount", &*mount), ("umount", &*umount), ("df", DF), ("findmnt", FINDMNT)] {
            let program = find_program(name).with_context(|| format!("no {name} in PATH"))?;
            let path = self.file("bin").join(name);
            fs::write(&path, script.replace("PROGRAM", &program.display().to_string()))?;
            fs::set_permissions(&path, Permissions::from_mode(0o755))?;
        }
        Ok(())
    }

    /// Ends what waits for the volumes' daemons.
    pub(super) fn abort(&self) -> Result<()> {
        for place in [&self.test, &self.scratch] {
            if let Some(mount) = mounted(&place.path) {
                linux::mount::abort_fuse(&self.connections, mount.minor)?;
            }
        }
        Ok(())
    }

    /// Unstages both.
    pub(super) fn remove(self) -> Result<()> {
        for place in [&self.test, &self.scratch] {
            place.unstage(&self.caller)?;
        }
        linux::mount::unmount(&self.dir, UnmountMode::Detach)?;
        fs::remove_dir(&self.dir).with_context(|| self.dir.display().to_string())
    }
}

impl Place {
    fn stage(&self, caller: &Caller, flags: Vec<String>) -> Result<()> {
        let access_type =
            Some(AccessType::Mount(MountVolume { mount_flags: flags, ..MountVolume::default() }));
        let request = NodeStageVolumeRequest {
            volume_id: self.volume_id.clone(),
            staging_target_path: text(&self.path),
            volume_capability: Some(VolumeCapability {
                access_type,
                ..capability(Mode::MultiNodeMultiWriter)
            }),
            ..NodeStageVolumeRequest::default()
        };
        let staged = caller.node(async |mut node| node.node_stage_volume(request).await);
        staged.map(drop).map_err(|status| anyhow!("mount {}: {}", self.path.display(), status.message()))
    }

    fn unstage(&self, caller: &Caller) -> Result<()> {
        let request = NodeUnstageVolumeRequest {
            volume_id: self.volume_id.clone(),
            staging_target_path: text(&self.path),
        };
        let unstaged = caller.node(async |mut node| node.node_unstage_volume(request).await);
        unstaged.map(drop).map_err(|status| anyhow!("umount {}: {}", self.path.display(), status.message()))
    }

    /// Whether umount(8) with this argument means the volume's mount. It may mean another one over it.
    fn is_meant(&self, target: &str) -> Result<bool> {
        if target == self.volume_id {
            let is_its = |mount: &MountEntry| {
                mount.source == self.volume_id.as_str() && mount.mount_point == self.path
            };
            return Ok(mounts()?.iter().any(is_its));
        }
        let is_shown = mounted(&self.path).is_some_and(|mount| mount.source == self.volume_id.as_str());
        Ok(Path::new(target) == self.path && is_shown)
    }
}

impl FromStr for Place {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (volume_id, path) = text.split_once('=').with_context(|| format!("{text:?}: ID=PATH"))?;
        Ok(Self { volume_id: volume_id.to_owned(), path: path.into() })
    }
}

/// In place of mount(8) and umount(8), for the suite
#[derive(Debug, Parser)]
struct Arguments {
    kubelet_dir: PathBuf,
    volumes: Vec<Place>,
    /// `mount` or `umount`, with its arguments
    #[arg(last = true)]
    command: Vec<String>,
}

/// This process as mount(8) or umount(8), with the arguments of the program that the suite started.
pub(crate) fn run(arguments: impl Iterator<Item = std::ffi::OsString>) -> Result<()> {
    let Arguments { kubelet_dir, volumes, command } = Arguments::parse_from(arguments);
    let caller = Caller::of(&kubelet_dir);
    match command.split_first() {
        Some((name, arguments)) if name == "mount" => mount(&caller, &volumes, arguments),
        Some((name, arguments)) if name == "umount" => unmount(&caller, &volumes, arguments),
        _ => bail!("{command:?}: neither mount nor umount"),
    }
}

/// What mount(8) was asked for.
#[derive(Debug, Default, PartialEq, Eq)]
struct Mount {
    options: Vec<String>,
    source: String,
    target: PathBuf,
}

impl Mount {
    fn parse(arguments: &[String]) -> Result<Self> {
        let (mut options, mut words) = (String::new(), Vec::new());
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "-t" => {
                    let _file_system = arguments.next();
                }
                "-o" => options.extend([",", arguments.next().context("-o without options")?.as_str()]),
                "-r" => options.push_str(",ro"),
                "-w" => options.push_str(",rw"),
                "-n" | "-i" => {}
                word => match word.strip_prefix("-o") {
                    Some(more) => options.extend([",", more]),
                    None => words.push(word.to_owned()),
                },
            }
        }
        let [source, target] = <[String; 2]>::try_from(words)
            .map_err(|words| anyhow!("mount {words:?}: a volume and a directory are wanted"))?;
        let options = options.split(',').filter(|option| !option.is_empty()).map(str::to_owned).collect();
        Ok(Self { options, source, target: target.into() })
    }
}

fn mount(caller: &Caller, volumes: &[Place], arguments: &[String]) -> Result<()> {
    let wanted = Mount::parse(arguments)?;
    if wanted.options.iter().any(|option| option == "remount") {
        // The kernel's part alone: a helper of mount(8) is not there.
        let mut remount = vec!["-i".to_owned()];
        remount.extend_from_slice(arguments);
        return become_program("mount", &remount);
    }
    let place = volumes.iter().find(|place| place.volume_id == wanted.source && place.path == wanted.target);
    let place = place.with_context(|| format!("mount {} on {}", wanted.source, wanted.target.display()))?;
    ensure!(!place.is_meant(&place.volume_id)?, "mount: {}: already mounted", place.volume_id);
    place.stage(caller, wanted.options)
}

fn unmount(caller: &Caller, volumes: &[Place], arguments: &[String]) -> Result<()> {
    let mut others = Vec::new();
    for argument in arguments {
        let mut place = None;
        for volume in volumes {
            if volume.is_meant(argument)? {
                place = Some(volume);
            }
        }
        match place {
            Some(place) => place.unstage(caller)?,
            None => others.push(argument.clone()),
        }
    }
    if others.len() < arguments.len() && others.iter().all(|other| other.starts_with('-')) {
        return Ok(());
    }
    become_program("umount", &others)
}

/// Returns only if it could not be started.
fn become_program(name: &str, arguments: &[String]) -> Result<()> {
    let mut command = Command::new(name);
    command.args(arguments).env("PATH", STANDARD_PATH);
    Err(command.exec()).with_context(|| format!("start {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_of_mount_are_read_in_each_of_their_forms() {
        let parse =
            |line: &str| Mount::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        let mount = |options: &[&str]| Mount {
            options: options.iter().map(|o| (*o).to_owned()).collect(),
            source: "vol-1".to_owned(),
            target: "/m".into(),
        };
        assert_eq!(parse("-t fuse.hawser vol-1 /m").unwrap(), mount(&[]));
        assert_eq!(
            parse("-t fuse.hawser -o noatime,sync -oro vol-1 /m").unwrap(),
            mount(&["noatime", "sync", "ro"])
        );
        assert_eq!(parse("-r -t fuse.hawser -o remount vol-1 /m").unwrap(), mount(&["ro", "remount"]));
        parse("-t fuse.hawser vol-1").unwrap_err();
    }

    #[test]
    fn a_place_is_a_volume_and_its_path() {
        let place = Place { volume_id: "vol-1".to_owned(), path: "/k/suite/test".into() };
        assert_eq!("vol-1=/k/suite/test".parse::<Place>().unwrap(), place);
        "vol-1".parse::<Place>().unwrap_err();
    }
}
