//! The volumes' paths on disk, identical to kubelet's, and the `vol_data.json` files that identify
//! them after a restart (kubernetes, pkg/volume/csi).

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::error::Error;
use super::mounted::mounts_below;

const CSI_PLUGIN: &str = "kubernetes.io~csi";
const EMPTY_DIR_PLUGIN: &str = "kubernetes.io~empty-dir";
const READY: &str = "ready";
pub(super) const VOL_DATA: &str = "vol_data.json";
const TEMPORARY: &str = ".vol_data.json.new";

/// Paths below the root directory.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    root: PathBuf,
}

/// `vol_data.json` of a published volume, in the pod's volume directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PublishData {
    /// The PV's name, or the inline volume's.
    #[serde(rename = "specVolID")]
    pub(crate) spec_vol_id: String,
    pub(crate) volume_handle: String,
    pub(crate) driver_name: String,
    pub(crate) node_name: String,
    #[serde(rename = "attachmentID")]
    pub(crate) attachment_id: String,
    pub(crate) volume_lifecycle_mode: String,
}

/// `vol_data.json` of a staged volume, next to `globalmount`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StageData {
    pub(crate) volume_handle: String,
    pub(crate) driver_name: String,
}

impl Layout {
    pub(crate) fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn pods_dir(&self) -> PathBuf {
        self.root.join("pods")
    }

    /// `uid` is a single path component, as checked at admission.
    pub(crate) fn pod_dir(&self, uid: &str) -> PathBuf {
        self.pods_dir().join(uid)
    }

    /// The parent of the target path; `spec_name` is the PV's name.
    pub(crate) fn csi_volume_dir(&self, uid: &str, spec_name: &str) -> PathBuf {
        self.csi_volumes_dir(uid).join(escape(spec_name))
    }

    pub(crate) fn csi_volumes_dir(&self, uid: &str) -> PathBuf {
        self.pod_dir(uid).join("volumes").join(CSI_PLUGIN)
    }

    pub(crate) fn empty_dir(&self, uid: &str, name: &str) -> PathBuf {
        self.empty_dirs(uid).join(escape(name))
    }

    pub(crate) fn empty_dirs(&self, uid: &str) -> PathBuf {
        self.pod_dir(uid).join("volumes").join(EMPTY_DIR_PLUGIN)
    }

    /// The volumes of one type, by name.
    pub(crate) fn plugin_volumes_dir(&self, uid: &str, plugin: &str) -> PathBuf {
        self.pod_dir(uid).join("volumes").join(plugin)
    }

    /// The mounts of parts of a pod's volumes.
    pub(crate) fn sub_paths(&self, uid: &str) -> PathBuf {
        self.pod_dir(uid).join("volume-subpaths")
    }

    /// The part of volumeMount `number` of a container.
    pub(crate) fn sub_path(&self, uid: &str, volume: &str, container: &str, number: usize) -> PathBuf {
        self.sub_paths(uid).join(volume).join(container).join(number.to_string())
    }

    /// kubelet's marker file of an emptyDir that is ready, including ownership.
    pub(crate) fn empty_dir_ready(&self, uid: &str, name: &str) -> PathBuf {
        self.plugin_dir(uid, EMPTY_DIR_PLUGIN, name).join(READY)
    }

    /// The same marker for a CSI volume; `spec_name` is the PV's name.
    pub(crate) fn csi_ready(&self, uid: &str, spec_name: &str) -> PathBuf {
        self.plugin_dir(uid, CSI_PLUGIN, spec_name).join(READY)
    }

    fn plugin_dir(&self, uid: &str, plugin: &str, volume: &str) -> PathBuf {
        self.pod_dir(uid).join("plugins").join(plugin).join(escape(volume))
    }

    /// The directory of `globalmount` and its vol_data.json.
    pub(crate) fn stage_dir(&self, driver: &str, volume_handle: &str) -> PathBuf {
        self.stage_root().join(driver).join(sha256_hex(volume_handle))
    }

    pub(crate) fn stage_root(&self) -> PathBuf {
        self.root.join("plugins/kubernetes.io/csi")
    }
}

/// The target path below a pod's volume directory; the driver creates it.
pub(crate) fn target(volume_dir: &Path) -> PathBuf {
    volume_dir.join("mount")
}

/// The staging path below a stage directory; kubelet creates it.
pub(crate) fn globalmount(stage_dir: &Path) -> PathBuf {
    stage_dir.join("globalmount")
}

/// kubelet's name for the VolumeAttachment, even if none exists.
pub(crate) fn attachment_id(volume_handle: &str, driver: &str, node_name: &str) -> String {
    format!("csi-{}", sha256_hex(&format!("{volume_handle}{driver}{node_name}")))
}

/// Writes the file atomically for a kill of this process. After a power loss it may be empty, but
/// then nothing is mounted, and [`read_vol_data`] handles that.
pub(crate) fn write_vol_data(dir: &Path, data: &impl Serialize) -> Result<(), Error> {
    let json = serde_json::to_vec(data).expect("strings are always JSON");
    let (path, temporary) = (dir.join(VOL_DATA), dir.join(TEMPORARY));
    let write = || {
        std::fs::write(&temporary, json)?;
        std::fs::set_permissions(&temporary, Permissions::from_mode(0o640))?;
        std::fs::rename(&temporary, &path)
    };
    write().map_err(|e| Error::io("write", &path, e))
}

/// `None` if the file does not exist, or if it is unreadable and nothing is mounted.
pub(crate) fn read_vol_data<T: for<'de> Deserialize<'de>>(dir: &Path) -> Result<Option<T>, Error> {
    let path = dir.join(VOL_DATA);
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io("read", &path, e)),
    };
    match serde_json::from_slice(&bytes) {
        Ok(data) => Ok(Some(data)),
        Err(_) if mounts_below(dir)?.is_empty() => Ok(None),
        Err(e) => Err(Error::io("parse", &path, io::Error::from(e))),
    }
}

pub(crate) fn remove_vol_data(dir: &Path) -> Result<(), Error> {
    for path in [dir.join(TEMPORARY), dir.join(VOL_DATA)] {
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(Error::io("remove", &path, e)),
            _ => {}
        }
    }
    Ok(())
}

/// A volume's name as one path component (kubernetes, `EscapeQualifiedName`).
fn escape(name: &str) -> String {
    name.replace('/', "~")
}

fn sha256_hex(text: &str) -> String {
    base16ct::lower::encode_string(&Sha256::digest(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_files_are_those_of_a_real_kubelet() {
        let layout = Layout::new(Path::new("/var/lib/kubelet"));
        assert_eq!(
            target(&layout.csi_volume_dir("0a1b", "pvc-1")),
            Path::new("/var/lib/kubelet/pods/0a1b/volumes/kubernetes.io~csi/pvc-1/mount")
        );
        // sha256("h")
        assert_eq!(
            globalmount(&layout.stage_dir("csi.example.com", "h")),
            Path::new(
                "/var/lib/kubelet/plugins/kubernetes.io/csi/csi.example.com/\
                 aaa9402664f1a41f40ebbc52c9993eb66aeb366602958fdfaa283b71e64db123/globalmount"
            )
        );
        let data = PublishData {
            spec_vol_id: "pvc-1".into(),
            volume_handle: "h".into(),
            driver_name: "csi.example.com".into(),
            node_name: "n".into(),
            attachment_id: "csi-0".into(),
            volume_lifecycle_mode: "Persistent".into(),
        };
        assert_eq!(
            serde_json::to_string(&data).unwrap(),
            r#"{"specVolID":"pvc-1","volumeHandle":"h","driverName":"csi.example.com","nodeName":"n","attachmentID":"csi-0","volumeLifecycleMode":"Persistent"}"#
        );
    }

    #[test]
    fn vol_data_survives_the_disk_and_a_missing_one_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let data = StageData { volume_handle: "h".into(), driver_name: "d".into() };
        assert_eq!(read_vol_data::<StageData>(dir.path()).unwrap(), None);
        write_vol_data(dir.path(), &data).unwrap();
        assert_eq!(read_vol_data(dir.path()).unwrap(), Some(data));
        remove_vol_data(dir.path()).unwrap();
        remove_vol_data(dir.path()).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_torn_by_a_power_loss_describes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(VOL_DATA), "").unwrap();
        assert_eq!(read_vol_data::<StageData>(dir.path()).unwrap(), None);
    }
}
