//! Daemons as static pods: one manifest a volume in the directory that a kubelet watches.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use proto::mount_pod::{NETWORK_ANNOTATION, ROLE, ROLE_LABEL, VOLUME_ID_ANNOTATION, VOLUME_LABEL};

use super::{LaunchId, LaunchSpec, Launched, Launcher, memory};
use crate::daemon::dial::DialDir;
use crate::model::capacity::parse_quantity;
use crate::model::ids::VolumeId;
use crate::model::parameters::Resources;

const NAMESPACE: &str = "hawser-system";
/// What the class `system-node-critical` stands for. No admission fills it in for a
/// static pod, and kubelet's graceful node shutdown ends pods by it: a mount pod ends
/// after the pods that use its volume.
const NODE_CRITICAL: i32 = 2_000_001_000;
const SUFFIX: &str = ".yaml";
/// The first line of our manifests, with the volume's id behind it.
const MARK: &str = "# hawser-csi: volume ";
/// Digits of the nonce in a pod's name; the rest of it stays secret.
const START_DIGITS: usize = 5;
/// It carries the nonce.
const FILE_MODE: u32 = 0o600;

#[derive(Debug)]
pub(crate) struct ManifestLauncher {
    pub manifests: PathBuf,
    pub mount_image: String,
    pub run_dir: PathBuf,
}

impl Launcher for ManifestLauncher {
    fn ensure(&self, spec: LaunchSpec<'_>) -> linux::Result<LaunchId> {
        let name = launch_name(&spec.settings.name_prefix, spec.volume_id);
        // Of this boot alone: after a power cut it may be gone, but a part of one would stay.
        linux::atomic_file::write_whole(&self.path(&name), self.manifest(spec).as_bytes(), FILE_MODE)?;
        Ok(LaunchId::StaticPod(name))
    }

    fn list(&self) -> linux::Result<Vec<Launched>> {
        let mut launched = Vec::new();
        for name in file_names(&self.manifests)? {
            if let Some(pod) = name.strip_suffix(SUFFIX)
                && let Some(volume_id) = parse_launch_name(pod)
                && self.is_own(&name, &volume_id)?
            {
                launched.push(Launched { volume_id, id: LaunchId::StaticPod(pod.to_owned()) });
            } else if is_temporary(&name) {
                // Of a driver that was killed before its rename.
                linux::atomic_file::remove(&self.manifests.join(name))?;
            }
        }
        Ok(launched)
    }

    fn stands(&self, id: &LaunchId) -> linux::Result<bool> {
        match id {
            LaunchId::StaticPod(name) => {
                let path = self.path(name);
                path.try_exists().map_err(|e| linux::Error::at("look at", &path, e))
            }
            LaunchId::Process(_) => Ok(false),
        }
    }

    fn remove(&self, id: &LaunchId) -> linux::Result<()> {
        match id {
            LaunchId::StaticPod(name) => linux::atomic_file::remove(&self.path(name)),
            // Of a driver with the other launcher; the caller ends the process.
            LaunchId::Process(_) => Ok(()),
        }
    }

    fn adopt(&self, _volume_id: &VolumeId) -> linux::Result<()> {
        // kubelet keeps its log.
        Ok(())
    }

    fn last_words(&self, _volume_id: &VolumeId) -> Option<String> {
        None
    }

    fn clear(&self, _volume_id: &VolumeId) -> linux::Result<()> {
        // kubelet removes its pod.
        Ok(())
    }

    fn describe(&self, spec: LaunchSpec<'_>) -> String {
        let name = pod_name(spec);
        format!("pod {NAMESPACE}/{name} with image {}", self.mount_image)
    }
}

impl ManifestLauncher {
    fn path(&self, pod_name: &str) -> PathBuf {
        self.manifests.join(format!("{pod_name}{SUFFIX}"))
    }

    /// A pod whose name merely looks like one of ours is its user's, or another driver's,
    /// which has its own run directory.
    fn is_own(&self, file_name: &str, volume_id: &VolumeId) -> linux::Result<bool> {
        let path = self.manifests.join(file_name);
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(text.lines().any(|line| line == self.host_path(volume_id))),
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::InvalidData) => Ok(false),
            Err(e) => Err(linux::Error::at("read", &path, e)),
        }
    }

    /// The line that lets a pod reach its dial socket.
    fn host_path(&self, volume_id: &VolumeId) -> String {
        let dial_dir = DialDir::of(&self.run_dir, volume_id);
        format!("      path: {}", quoted(&dial_dir.path().to_string_lossy()))
    }

    /// The pod gets no network, no privilege but the six that serving several
    /// owners' files takes, no system call that RuntimeDefault refuses, no /dev/fuse,
    /// and of the host only the directory with its own dial socket. It is never restarted: a daemon that ended has
    /// lost its connection, and the next stage starts another.
    fn manifest(&self, spec: LaunchSpec<'_>) -> String {
        let settings = spec.settings;
        let name = pod_name(spec);
        let (key, id) = (spec.volume_id.key(), spec.volume_id);
        let image = quoted(&self.mount_image);
        let nonce = quoted(spec.nonce);
        let labels: String = settings
            .labels
            .iter()
            .map(|(key, value)| format!("    {}: {}\n", quoted(key), quoted(value)))
            .collect();
        let (grace, log_level) = (settings.grace_seconds, settings.log_level.as_str());
        let default_limit = memory::default_limit_bytes(spec.inode_limit, settings.known_inodes());
        let resources = resources(&settings.resources, default_limit);
        let host_path = self.host_path(spec.volume_id);
        format!(
            r#"{MARK}{id}
apiVersion: v1
kind: Pod
metadata:
  name: {name}
  namespace: {NAMESPACE}
  labels:
    app.kubernetes.io/managed-by: hawser-csi
    {ROLE_LABEL}: {ROLE}
    {VOLUME_LABEL}: "{key}"
{labels}  annotations:
    {NETWORK_ANNOTATION}: none
    {VOLUME_ID_ANNOTATION}: {id}
spec:
  restartPolicy: Never
  priorityClassName: system-node-critical
  priority: {NODE_CRITICAL}
  terminationGracePeriodSeconds: {grace}
  enableServiceLinks: false
  automountServiceAccountToken: false
  containers:
  - name: volume
    image: {image}
    imagePullPolicy: Never
    command: ["/hawser-volume"]
    args: ["serve", "--socket", "/run/hawser/dial.sock", "--log-level", "{log_level}"]
    env:
    - name: HAWSER_NONCE
      value: {nonce}
    resources:
{resources}    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop: ["ALL"]
        add: ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETUID", "SETGID"]
      seccompProfile:
        type: RuntimeDefault
    volumeMounts:
    - name: dial
      mountPath: /run/hawser
      readOnly: true
  volumes:
  - name: dial
    hostPath:
{host_path}
      type: Directory
"#
        )
    }
}

/// Kubernetes refuses a pod whose limit is below its request: where one of the
/// two is given, the other gives way.
fn resources(given: &Resources, default_limit_bytes: u64) -> String {
    let cpu_request = given.cpu_request.as_deref().or(given.cpu_limit.as_deref()).unwrap_or("10m");
    let memory_request = given.memory_request.as_deref().unwrap_or("32Mi");
    let bytes = |quantity| parse_quantity(quantity).unwrap_or_default();
    let default_limit = if default_limit_bytes < bytes(memory_request) {
        memory_request.to_owned()
    } else {
        format!("{}Mi", default_limit_bytes >> 20)
    };
    let memory_limit = given.memory_limit.as_ref().unwrap_or(&default_limit);
    let mut text = format!("      requests:\n        cpu: {}\n", quoted(cpu_request));
    text += &format!("        memory: {}\n      limits:\n", quoted(memory_request));
    if let Some(limit) = &given.cpu_limit {
        text += &format!("        cpu: {}\n", quoted(limit));
    }
    text + &format!("        memory: {}\n", quoted(memory_limit))
}

/// What the journal and the manifest's file are called by: one a volume.
fn launch_name(prefix: &str, volume_id: &VolumeId) -> String {
    format!("{prefix}-{}", volume_id.key())
}

/// Another one at each start: kubelet lets a static pod wait, for 10 s and more, while one
/// of the same name is ending. At most 63 bytes, with the longest prefix.
fn pod_name(spec: LaunchSpec<'_>) -> String {
    let start = spec.nonce.get(..START_DIGITS).unwrap_or(spec.nonce);
    format!("{}-{start}", launch_name(&spec.settings.name_prefix, spec.volume_id))
}

fn parse_launch_name(name: &str) -> Option<VolumeId> {
    name.rsplit_once('-').and_then(|(_prefix, key)| VolumeId::from_key(key))
}

/// `.<pod>.yaml.<number>.tmp`, as atomic files are called before their rename.
fn is_temporary(file_name: &str) -> bool {
    let number =
        |name: &str| name.strip_suffix(".tmp").is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()));
    file_name
        .strip_prefix('.')
        .and_then(|name| name.split_once(".yaml."))
        .is_some_and(|(pod, rest)| parse_launch_name(pod).is_some() && number(rest))
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
    use crate::model::parameters::{LogLevel, PodParameters};
    use crate::model::settings::LaunchSettings;
    use std::os::unix::fs::PermissionsExt;

    fn launcher(manifests: &Path) -> ManifestLauncher {
        ManifestLauncher {
            manifests: manifests.into(),
            mount_image: "hawser/volume:1 \"odd\"".into(),
            run_dir: "/run/h".into(),
        }
    }

    #[test]
    fn a_manifest_appears_whole_is_listed_and_goes() {
        let dir = tempfile::tempdir().unwrap();
        let launcher = launcher(dir.path());
        let volume_id = VolumeId::from_key("0123456789abcdef0123456789abcdef").unwrap();
        std::fs::write(dir.path().join(".hawser-volume-0123456789abcdef0123456789abcdef.yaml.7.tmp"), "half")
            .unwrap();
        std::fs::write(dir.path().join("users-pod.yaml"), "").unwrap();
        let id = launcher
            .ensure(LaunchSpec {
                volume_id: &volume_id,
                nonce: "n0nce",
                settings: &LaunchSettings::default(),
                inode_limit: 0,
            })
            .unwrap();
        assert_eq!(launcher.list().unwrap(), [Launched { volume_id, id: id.clone() }]);
        let path = dir.path().join("hawser-volume-0123456789abcdef0123456789abcdef.yaml");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, FILE_MODE);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains("image: \"hawser/volume:1 \\\"odd\\\"\""), "{text}");
        assert!(launcher.stands(&id).unwrap());
        launcher.remove(&id).unwrap();
        assert!(!launcher.stands(&id).unwrap());
        launcher.remove(&id).unwrap();
        assert_eq!(file_names(dir.path()).unwrap(), ["users-pod.yaml"]);
    }

    #[test]
    fn a_missing_directory_has_no_manifests_and_takes_none() {
        let launcher = launcher(Path::new("/nonexistent/manifests"));
        assert_eq!(launcher.list().unwrap(), []);
        let volume_id = VolumeId::from_key("0123456789abcdef0123456789abcdef").unwrap();
        let err = launcher
            .ensure(LaunchSpec {
                volume_id: &volume_id,
                nonce: "",
                settings: &LaunchSettings::default(),
                inode_limit: 0,
            })
            .unwrap_err();
        assert_eq!(err.errno(), nix::errno::Errno::ENOENT);
    }

    #[test]
    fn settings_reach_the_manifest_and_its_pod_is_found_by_any_name() {
        let dir = tempfile::tempdir().unwrap();
        let manifests = launcher(dir.path());
        let volume_id = VolumeId::from_key("0123456789abcdef0123456789abcdef").unwrap();
        let settings = LaunchSettings {
            name_prefix: "fast".into(),
            labels: [("example.com/tier".into(), "1".into())].into(),
            log_level: LogLevel::Debug,
            grace_seconds: 17,
            ..LaunchSettings::default()
        };
        let id = manifests
            .ensure(LaunchSpec { volume_id: &volume_id, nonce: "n", settings: &settings, inode_limit: 0 })
            .unwrap();
        let users = dir.path().join(format!("users-{}.yaml", "0".repeat(32)));
        std::fs::write(&users, "kind: Pod\n").unwrap();
        assert_eq!(manifests.list().unwrap(), [Launched { volume_id, id: id.clone() }]);
        let other = ManifestLauncher { run_dir: "/run/other".into(), ..launcher(dir.path()) };
        assert_eq!(other.list().unwrap(), [], "of another driver beside it");
        let path = dir.path().join("fast-0123456789abcdef0123456789abcdef.yaml");
        let text = std::fs::read_to_string(&path).unwrap();
        for line in [
            "  name: fast-0123456789abcdef0123456789abcdef-n\n",
            "    \"example.com/tier\": \"1\"\n  annotations:\n",
            "  priority: 2000001000\n  terminationGracePeriodSeconds: 17\n",
            "\"--log-level\", \"debug\"]\n",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        manifests.remove(&id).unwrap();
        assert!(users.exists() && !path.exists());
    }

    #[test]
    fn each_start_has_a_pod_name_of_its_own_and_the_same_manifest() {
        let dir = tempfile::tempdir().unwrap();
        let manifests = launcher(dir.path());
        let volume_id = VolumeId::from_key("0123456789abcdef0123456789abcdef").unwrap();
        let settings = LaunchSettings { name_prefix: "p".repeat(24), ..LaunchSettings::default() };
        let started = ["aaaaabbbb", "cccccbbbb"].map(|nonce| {
            let spec = LaunchSpec { volume_id: &volume_id, nonce, settings: &settings, inode_limit: 0 };
            let id = manifests.ensure(spec).unwrap();
            let LaunchId::StaticPod(launch) = &id else { panic!("{id:?}") };
            let text = std::fs::read_to_string(dir.path().join(format!("{launch}.yaml"))).unwrap();
            let name = text.lines().find_map(|line| line.strip_prefix("  name: ")).unwrap().to_owned();
            assert!(manifests.describe(spec).contains(&name) && name.len() <= 63, "{name}");
            (id, name)
        });
        assert_eq!(started[0].0, started[1].0);
        assert_ne!(started[0].1, started[1].1);
        assert_eq!(manifests.list().unwrap().len(), 1);
    }

    #[test]
    fn a_limit_is_never_below_its_request() {
        let shown = |pairs: &[(&str, &str)]| {
            let pairs = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            let PodParameters { resources: given, .. } =
                crate::model::parameters::Parameters::parse(&pairs).unwrap().pod;
            resources(&given, 512 << 20).split_whitespace().collect::<Vec<_>>().join(" ").replace('"', "")
        };
        for (given, wanted) in [
            (&[][..], "requests: cpu: 10m memory: 32Mi limits: memory: 512Mi"),
            (&[("mountPodCpuLimit", "5m")], "requests: cpu: 5m memory: 32Mi limits: cpu: 5m memory: 512Mi"),
            (&[("mountPodMemoryRequest", "1Gi")], "requests: cpu: 10m memory: 1Gi limits: memory: 1Gi"),
            (&[("mountPodMemoryLimit", "64Mi")], "requests: cpu: 10m memory: 32Mi limits: memory: 64Mi"),
        ] {
            assert_eq!(shown(given), wanted);
        }
    }
}
