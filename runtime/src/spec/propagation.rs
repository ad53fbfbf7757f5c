//! Whether mounts can propagate from and to a volume at all: the kernel takes a private mount's copy as a slave or a
//! peer without an error, and nothing propagates.

use std::path::Path;

use linux::mountinfo::{self, MountEntry};
use proto::cri::MountPropagation;
use rustix::fs::{Mode, OFlags};

use crate::error::{Error, Result};

/// `source`: without links, and existing. Mounts of the host reach a container also from a shared mount below the
/// source, and those of a container reach the host only if the source's own mount is shared.
pub(super) fn check(field: String, wanted: MountPropagation, source: &Path) -> Result<()> {
    if wanted == MountPropagation::PropagationPrivate {
        return Ok(());
    }
    let found = rustix::fs::open(source, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| Error::io("open mount source", source, e.into()))?;
    let Some(mount) = mountinfo::of_id(linux::mount::id_of(found)?)? else { return Ok(()) };
    let propagates = match wanted {
        MountPropagation::PropagationBidirectional => has(&mount, &["shared:"]),
        _ => receives(&mount) || mountinfo::below(source)?.iter().any(receives),
    };
    if propagates {
        return Ok(());
    }
    let (path, mount_point) = (source.to_owned(), mount.mount_point);
    Err(Error::NotShared { field, wanted: wanted.as_str_name(), path, mount_point })
}

fn receives(mount: &MountEntry) -> bool {
    has(mount, &["shared:", "master:"])
}

fn has(mount: &MountEntry, fields: &[&str]) -> bool {
    mount.optional_fields.iter().any(|found| fields.iter().any(|field| found.starts_with(field)))
}
