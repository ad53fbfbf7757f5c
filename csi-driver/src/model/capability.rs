//! VolumeCapability, validated: how a volume will be used.

use std::fmt;

use proto::csi::volume_capability::access_mode::Mode;
use proto::csi::volume_capability::{AccessType, MountVolume};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::model::access_mode::AccessMode;
use crate::model::parameters::{
    KNOWN_INODE_LIMITS, LogLevel, MAX_DELETE_DELAY_SECONDS, MAX_GRACE_SECONDS, MAX_THREADS, number,
};
use crate::model::sizes;

/// Mount flags beyond read-only. Every mount is nosuid and nodev as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MountFlag {
    Noexec,
    Noatime,
    Nodiratime,
    Relatime,
    Sync,
}

impl MountFlag {
    pub(crate) const ALL: [Self; 5] =
        [Self::Noexec, Self::Noatime, Self::Nodiratime, Self::Relatime, Self::Sync];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Noexec => "noexec",
            Self::Noatime => "noatime",
            Self::Nodiratime => "nodiratime",
            Self::Relatime => "relatime",
            Self::Sync => "sync",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub(crate) struct MountFlagSet(u8);

impl MountFlagSet {
    pub(crate) fn insert(&mut self, flag: MountFlag) {
        self.0 |= 1 << flag as u8;
    }

    pub(crate) fn contains(self, flag: MountFlag) -> bool {
        self.0 & (1 << flag as u8) != 0
    }

    /// The flags of both.
    pub(crate) fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = MountFlag> {
        MountFlag::ALL.into_iter().filter(move |flag| self.contains(*flag))
    }
}

impl From<MountFlagSet> for Vec<String> {
    fn from(flags: MountFlagSet) -> Self {
        flags.iter().map(|flag| flag.as_str().to_owned()).collect()
    }
}

impl TryFrom<Vec<String>> for MountFlagSet {
    type Error = String;

    fn try_from(names: Vec<String>) -> std::result::Result<Self, String> {
        let mut flags = Self::default();
        for name in names {
            let flag = MountFlag::ALL.into_iter().find(|flag| flag.as_str() == name);
            flags.insert(flag.ok_or_else(|| format!("unknown mount flag {name:?}"))?);
        }
        Ok(flags)
    }
}

/// A capability that this driver supports, or a publish that asks for less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Access {
    pub mode: AccessMode,
    pub read_only: bool,
    /// volume_mount_group: the gid that everything in the volume is to have.
    #[serde(default)]
    pub group: Option<u32>,
    #[serde(default)]
    pub flags: MountFlagSet,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.mode, if self.read_only { "read-only" } else { "read-write" })?;
        if let Some(group) = self.group {
            write!(f, " group {group}")?;
        }
        self.flags.iter().try_for_each(|flag| write!(f, " {}", flag.as_str()))
    }
}

/// Settings of the volume's daemon in a stage's mount options, which override its StorageClass.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct LaunchOverrides {
    pub threads: Option<u32>,
    pub known_inode_limit: Option<u32>,
    pub log_level: Option<LogLevel>,
    pub grace_seconds: Option<u32>,
    pub delete_delay_seconds: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parsed {
    pub access: Access,
    pub overrides: LaunchOverrides,
}

impl Access {
    /// A mode without flags, on a read-write volume.
    #[cfg(test)]
    pub(crate) fn plain(mode: AccessMode) -> Self {
        Self { mode, read_only: false, group: None, flags: MountFlagSet::default() }
    }

    /// A missing or unsupported part is an error that names it.
    pub(crate) fn parse(capability: Option<&proto::csi::VolumeCapability>) -> Result<Self> {
        Parsed::parse(capability).map(|parsed| parsed.access)
    }

    /// At least one capability, each supported.
    pub(crate) fn parse_all(capabilities: &[proto::csi::VolumeCapability]) -> Result<Vec<Self>> {
        if capabilities.is_empty() {
            return Err(Error::MissingField { field: "volume_capabilities" });
        }
        capabilities.iter().map(|c| Self::parse(Some(c))).collect()
    }
}

impl Parsed {
    /// [`Access::parse`], and the settings that only a stage has.
    pub(crate) fn parse(capability: Option<&proto::csi::VolumeCapability>) -> Result<Self> {
        let field = "volume_capability";
        let capability = capability.ok_or(Error::MissingField { field })?;
        let mount = match &capability.access_type {
            None => return Err(Error::MissingField { field: "volume_capability.access_type" }),
            Some(AccessType::Block(_)) => {
                return Err(Error::invalid(field, "block", "volumes are file systems: use mount"));
            }
            Some(AccessType::Mount(mount)) => mount,
        };
        let number = capability.access_mode.as_ref().map_or(0, |m| m.mode);
        let mode = Mode::try_from(number).ok().and_then(AccessMode::from_wire).ok_or_else(|| {
            Error::invalid("volume_capability.access_mode", number.to_string(), "unknown access mode")
        })?;
        parse_mount(mode, mount)
    }
}

const FLAGS_FIELD: &str = "volume_capability.mount.mount_flags";
const KNOWN_FLAGS: &str = "ro, rw, nosuid, nodev, noexec, noatime, relatime, nodiratime, sync, \
                           hawser.threads=N, hawser.known-inode-limit=N, hawser.log-level=LEVEL, hawser.grace=SECONDS, \
                           hawser.delete-delay=SECONDS";

fn parse_mount(mode: AccessMode, mount: &MountVolume) -> Result<Parsed> {
    // fs_type is for formatting a block volume; some provisioners send a default.
    if !matches!(mount.fs_type.as_str(), "" | "fuse" | "fuse.hawser") {
        let field = "volume_capability.mount.fs_type";
        return Err(Error::invalid(field, &mount.fs_type, "volumes are FUSE: leave it empty"));
    }
    let flags = Flags::parse(&mount.mount_flags)?;
    let access = Access {
        mode,
        read_only: flags.read_only.unwrap_or(false) || mode.is_reader_only(),
        group: parse_group(&mount.volume_mount_group)?,
        flags: flags.set,
    };
    Ok(Parsed { access, overrides: flags.overrides })
}

/// Parses a gid in decimal; the empty text is `None`.
fn parse_group(text: &str) -> Result<Option<u32>> {
    if text.is_empty() {
        return Ok(None);
    }
    let gid = Some(text).filter(|t| t.bytes().all(|b| b.is_ascii_digit())).and_then(|t| t.parse().ok());
    match gid {
        // chown(2) reserves the last value for "do not change".
        Some(gid) if gid != u32::MAX => Ok(Some(gid)),
        _ => {
            let field = "volume_capability.mount.volume_mount_group";
            Err(Error::invalid(field, text, "a gid in decimal is wanted"))
        }
    }
}

#[derive(Debug, Default)]
struct Flags {
    read_only: Option<bool>,
    set: MountFlagSet,
    overrides: LaunchOverrides,
}

impl Flags {
    fn parse(flags: &[String]) -> Result<Self> {
        let bytes: usize = flags.iter().map(String::len).sum();
        if bytes > sizes::MAX_MAP_BYTES {
            let reason = format!("at most {} bytes together are allowed", sizes::MAX_MAP_BYTES);
            return Err(Error::invalid(FLAGS_FIELD, format!("{bytes} bytes"), reason));
        }
        let mut parsed = Self::default();
        for flag in flags {
            sizes::bounded(FLAGS_FIELD, flag)?;
            parsed.add(flag)?;
        }
        if parsed.set.contains(MountFlag::Noatime) && parsed.set.contains(MountFlag::Relatime) {
            return Err(Error::invalid(FLAGS_FIELD, "relatime", "contradicts noatime"));
        }
        Ok(parsed)
    }

    fn add(&mut self, flag: &str) -> Result<()> {
        let overrides = &mut self.overrides;
        match flag.split_once('=') {
            Some(("hawser.threads", value)) => {
                let threads = whole(flag, number(FLAGS_FIELD, value, 1..=MAX_THREADS))?;
                return once(&mut overrides.threads, threads, flag);
            }
            Some(("hawser.known-inode-limit", value)) => {
                let limit = whole(flag, number(FLAGS_FIELD, value, KNOWN_INODE_LIMITS))?;
                return once(&mut overrides.known_inode_limit, limit, flag);
            }
            Some(("hawser.log-level", value)) => {
                let level = whole(flag, LogLevel::parse(FLAGS_FIELD, value))?;
                return once(&mut overrides.log_level, level, flag);
            }
            Some(("hawser.grace", value)) => {
                let seconds = whole(flag, number(FLAGS_FIELD, value, 0..=MAX_GRACE_SECONDS))?;
                return once(&mut overrides.grace_seconds, seconds, flag);
            }
            Some(("hawser.delete-delay", value)) => {
                let seconds = whole(flag, number(FLAGS_FIELD, value, 0..=MAX_DELETE_DELAY_SECONDS))?;
                return once(&mut overrides.delete_delay_seconds, seconds, flag);
            }
            Some(_) | None => {}
        }
        match flag {
            "ro" => once(&mut self.read_only, true, flag),
            "rw" => once(&mut self.read_only, false, flag),
            // Every volume has these flags.
            "nosuid" | "nodev" => Ok(()),
            _ => match MountFlag::ALL.into_iter().find(|known| known.as_str() == flag) {
                Some(known) => {
                    self.set.insert(known);
                    Ok(())
                }
                None => Err(Error::invalid(FLAGS_FIELD, flag, format!("known are {KNOWN_FLAGS}"))),
            },
        }
    }
}

/// An error shows the whole option: with several options, the value alone is not enough.
fn whole<T>(flag: &str, parsed: Result<T>) -> Result<T> {
    parsed.map_err(|error| match error {
        Error::InvalidField { field, reason, .. } => Error::invalid(field, flag, reason),
        other => other,
    })
}

/// Sets an option. A second, different value is an error.
fn once<T: PartialEq>(slot: &mut Option<T>, value: T, flag: &str) -> Result<()> {
    if slot.as_ref().is_some_and(|found| *found != value) {
        return Err(Error::invalid(FLAGS_FIELD, flag, "contradicts an earlier flag"));
    }
    *slot = Some(value);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::csi::VolumeCapability;
    use proto::csi::volume_capability::{AccessMode as WireMode, BlockVolume};

    fn capability(mode: Mode, mount: MountVolume) -> VolumeCapability {
        VolumeCapability {
            access_type: Some(AccessType::Mount(mount)),
            access_mode: Some(WireMode { mode: mode.into() }),
        }
    }

    #[test]
    fn reader_only_modes_and_the_ro_flag_are_read_only() {
        let flags = |f: &str| MountVolume { mount_flags: vec![f.into()], ..Default::default() };
        for (mode, mount, read_only) in [
            (Mode::SingleNodeWriter, MountVolume::default(), false),
            (Mode::SingleNodeWriter, flags("ro"), true),
            (Mode::MultiNodeReaderOnly, flags("rw"), true),
        ] {
            assert_eq!(Access::parse(Some(&capability(mode, mount))).unwrap().read_only, read_only);
        }
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let mount = |m: MountVolume| capability(Mode::SingleNodeWriter, m);
        let block = VolumeCapability {
            access_type: Some(AccessType::Block(BlockVolume {})),
            access_mode: Some(WireMode { mode: 1 }),
        };
        for (wire, named) in [
            (mount(MountVolume { fs_type: "ext4".into(), ..Default::default() }), "fs_type: \"ext4\""),
            (mount(MountVolume { mount_flags: vec!["exec".into()], ..Default::default() }), "\"exec\""),
            (capability(Mode::Unknown, MountVolume::default()), "access_mode"),
            (block, "block"),
            (VolumeCapability { access_type: None, access_mode: None }, "access_type is required"),
        ] {
            let message = Access::parse(Some(&wire)).unwrap_err().to_string();
            assert!(message.contains(named), "{message}");
        }
    }

    #[test]
    fn each_mount_flag_is_accepted_or_named() {
        let parse = |flags: &[&str]| {
            let mount_flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
            let mount = MountVolume { mount_flags, ..Default::default() };
            Parsed::parse(Some(&capability(Mode::MultiNodeMultiWriter, mount)))
        };
        let all = ["noexec", "noatime", "nodiratime", "sync", "nosuid", "nodev", "rw", "rw"];
        let access = parse(&all).unwrap().access;
        assert_eq!(access.to_string(), "MULTI_NODE_MULTI_WRITER read-write noexec noatime nodiratime sync");
        let overrides = parse(&[
            "hawser.threads=2",
            "hawser.known-inode-limit=5000",
            "hawser.log-level=debug",
            "hawser.grace=0",
            "hawser.delete-delay=9",
        ])
        .unwrap()
        .overrides;
        let wanted = LaunchOverrides {
            threads: Some(2),
            known_inode_limit: Some(5000),
            log_level: Some(LogLevel::Debug),
            grace_seconds: Some(0),
            delete_delay_seconds: Some(9),
        };
        assert_eq!(overrides, wanted);
        assert_eq!(parse(&["hawser.threads=2", "hawser.threads=2"]).unwrap().overrides.threads, Some(2));

        let (long, many) = ("x".repeat(129), vec!["nosuid"; 683]);
        for (flags, named) in [
            (&["ro", "rw"][..], "\"rw\": contradicts an earlier flag"),
            (&["noatime", "relatime"], "\"relatime\": contradicts noatime"),
            (&["hawser.threads=1", "hawser.threads=2"], "\"hawser.threads=2\": contradicts"),
            (&["hawser.known-inode-limit=9"], "\"hawser.known-inode-limit=9\": a number from 1000 to"),
            (&["hawser.threads=17"], "\"hawser.threads=17\": a number from 1 to 16"),
            (&["hawser.delete-delay=86401"], "\"hawser.delete-delay=86401\": a number from 0 to 86400"),
            (&["hawser.grace=61"], "\"hawser.grace=61\": a number from 0 to 60"),
            (&["hawser.log-level=loud"], "\"hawser.log-level=loud\": known are"),
            (&["hawser.other=1"], "\"hawser.other=1\": known are ro"),
            (&["suid"], "\"suid\": known are ro"),
            (&["dev"], "\"dev\""),
            (&["exec"], "\"exec\""),
            (&["bind"], "\"bind\""),
            (&["remount"], "\"remount\""),
            (&["dirsync"], "\"dirsync\""),
            (&["noexec=1"], "\"noexec=1\""),
            (&[""], "\"\": known are ro"),
            (&[&long], "\"129 bytes\": at most 128"),
            (&many, "\"4098 bytes\": at most 4096"),
        ] {
            let message = parse(flags).unwrap_err().to_string();
            assert!(message.contains(named), "{named} in {message}");
        }
    }

    #[test]
    fn a_group_is_a_gid() {
        let parse = |group: &str| {
            let mount = MountVolume { volume_mount_group: group.to_owned(), ..Default::default() };
            Access::parse(Some(&capability(Mode::MultiNodeMultiWriter, mount))).map(|access| access.group)
        };
        assert_eq!(parse("").unwrap(), None);
        assert_eq!(parse("0").unwrap(), Some(0));
        assert_eq!(parse("4294967294").unwrap(), Some(u32::MAX - 1));
        for group in ["4294967295", "4294967296", "-1", "+1", "storage", " 7"] {
            let message = parse(group).unwrap_err().to_string();
            assert!(message.contains(&format!("volume_mount_group: {group:?}")), "{message}");
        }
    }
}
