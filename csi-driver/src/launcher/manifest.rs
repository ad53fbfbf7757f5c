//! Daemons as static pods: one manifest a volume in the directory that a kubelet watches.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{LaunchId, LaunchSpec, Launched, Launcher};
use crate::dial::DialDir;
use crate::volume::VolumeId;

const POD_PREFIX: &str = "hawser-volume-";
const SUFFIX: &str = ".yaml";
/// It carries the nonce.
const FILE_MODE: u32 = 0o600;

#[derive(Debug)]
pub(crate) struct ManifestLauncher {
    pub manifests: PathBuf,
    pub mount_image: String,
    pub run_dir: PathBuf,
    pub patience: Duration,
}

impl Launcher for ManifestLauncher {
    fn ensure(&self, spec: LaunchSpec<'_>) -> linux::Result<LaunchId> {
        let name = pod_name(spec.volume_id);
        linux::atomic_file::write(&self.path(&name), self.manifest(spec).as_bytes(), FILE_MODE)?;
        Ok(LaunchId::StaticPod(name))
    }

    fn list(&self) -> linux::Result<Vec<Launched>> {
        let mut launched = Vec::new();
        for name in file_names(&self.manifests)? {
            if let Some(pod) = name.strip_suffix(SUFFIX)
                && let Some(volume_id) = pod.strip_prefix(POD_PREFIX).and_then(VolumeId::from_key)
            {
                launched.push(Launched { volume_id, id: LaunchId::StaticPod(pod.to_owned()) });
            } else if name.starts_with(&format!(".{POD_PREFIX}")) && name.ends_with(".tmp") {
                // Of a driver that was killed before its rename.
                linux::atomic_file::remove(&self.manifests.join(name))?;
            }
        }
        Ok(launched)
    }

    fn remove(&self, id: &LaunchId) -> linux::Result<()> {
        match id {
            LaunchId::StaticPod(name) => linux::atomic_file::remove(&self.path(name)),
            // Of a driver with the other launcher; the caller ends the process.
            LaunchId::Process(_) => Ok(()),
        }
    }

    fn patience(&self) -> Duration {
        self.patience
    }
}

impl ManifestLauncher {
    fn path(&self, pod_name: &str) -> PathBuf {
        self.manifests.join(format!("{pod_name}{SUFFIX}"))
    }

    /// The pod gets no network, no privilege but the six that serving several
    /// owners' files takes, no /dev/fuse, and of the host only the directory
    /// with its own dial socket. It is never restarted: a daemon that ended has
    /// lost its connection, and the next stage starts another.
    fn manifest(&self, spec: LaunchSpec<'_>) -> String {
        let name = pod_name(spec.volume_id);
        let (key, id) = (spec.volume_id.key(), spec.volume_id);
        let image = quoted(&self.mount_image);
        let nonce = quoted(spec.nonce);
        let dial_dir = quoted(&DialDir::of(&self.run_dir, spec.volume_id).path().to_string_lossy());
        format!(
            r#"apiVersion: v1
kind: Pod
metadata:
  name: {name}
  namespace: hawser-system
  labels:
    app.kubernetes.io/managed-by: hawser-csi
    hawser.dev/role: mount-pod
    hawser.dev/volume: "{key}"
  annotations:
    hawser.dev/network: none
    hawser.dev/volume-id: {id}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 5
  enableServiceLinks: false
  automountServiceAccountToken: false
  containers:
  - name: volume
    image: {image}
    imagePullPolicy: Never
    command: ["/hawser-volume"]
    args: ["serve", "--socket", "/run/hawser/dial.sock"]
    env:
    - name: HAWSER_NONCE
      value: {nonce}
    resources:
      requests:
        cpu: 10m
        memory: 32Mi
      limits:
        memory: 512Mi
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop: ["ALL"]
        add: ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETUID", "SETGID"]
    volumeMounts:
    - name: dial
      mountPath: /run/hawser
      readOnly: true
  volumes:
  - name: dial
    hostPath:
      path: {dial_dir}
      type: Directory
"#
        )
    }
}

fn pod_name(volume_id: &VolumeId) -> String {
    format!("{POD_PREFIX}{}", volume_id.key())
}

/// A JSON string is a YAML string.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// None where the directory is missing: then there are no manifests either.
fn file_names(dir: &Path) -> linux::Result<Vec<String>> {
    let listed = |e| linux::Error::at("list", dir, e);
    match std::fs::read_dir(dir) {
        Ok(entries) => entries
            .map(|entry| entry.map(|e| e.file_name().to_string_lossy().into_owned()).map_err(listed))
            .collect(),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(listed(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn launcher(manifests: &Path) -> ManifestLauncher {
        ManifestLauncher {
            manifests: manifests.into(),
            mount_image: "hawser/volume:1 \"odd\"".into(),
            run_dir: "/run/h".into(),
            patience: Duration::ZERO,
        }
    }

    #[test]
    fn a_manifest_appears_whole_is_listed_and_goes() {
        let dir = tempfile::tempdir().unwrap();
        let launcher = launcher(dir.path());
        let volume_id = VolumeId::from_key("0123456789abcdef0123456789abcdef").unwrap();
        std::fs::write(dir.path().join(".hawser-volume-x.yaml.7.tmp"), "half").unwrap();
        std::fs::write(dir.path().join("users-pod.yaml"), "").unwrap();
        let id = launcher.ensure(LaunchSpec { volume_id: &volume_id, nonce: "n0nce" }).unwrap();
        assert_eq!(launcher.list().unwrap(), [Launched { volume_id, id: id.clone() }]);
        let path = dir.path().join("hawser-volume-0123456789abcdef0123456789abcdef.yaml");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, FILE_MODE);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains("image: \"hawser/volume:1 \\\"odd\\\"\""), "{text}");
        launcher.remove(&id).unwrap();
        launcher.remove(&id).unwrap();
        assert_eq!(file_names(dir.path()).unwrap(), ["users-pod.yaml"]);
    }

    #[test]
    fn a_missing_directory_has_no_manifests_and_takes_none() {
        let launcher = launcher(Path::new("/nonexistent/manifests"));
        assert_eq!(launcher.list().unwrap(), []);
        let volume_id = VolumeId::from_key("0123456789abcdef0123456789abcdef").unwrap();
        let err = launcher.ensure(LaunchSpec { volume_id: &volume_id, nonce: "" }).unwrap_err();
        assert_eq!(err.errno(), nix::errno::Errno::ENOENT);
    }
}
