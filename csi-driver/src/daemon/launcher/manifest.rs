//! Daemons as static pods: one manifest a volume in the directory that a kubelet watches, and one for
//! the keeper.

mod keeper;
mod pod;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use proto::mount_pod::{NAMESPACE, RUN_DIR_ANNOTATION};

use super::process::processes_of_root;
use super::program::Program;
use super::{LaunchId, LaunchSpec, Launched, Launcher};
use crate::daemon::dial::DialDir;
use crate::model::launch::{LaunchKey, ProcessId};

const SUFFIX: &str = ".yaml";
/// Digits of the nonce in a pod's name; the rest of it stays secret.
const START_DIGITS: usize = 5;
/// A manifest is written within moments.
const LONGEST_WRITE: Duration = Duration::from_secs(3600);
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
        let name = launch_name(&spec.settings.name_prefix, spec.key);
        // Of this boot alone: after a power cut it may be gone, but a part of one would stay.
        linux::atomic_file::write_whole(&self.path(&name), &self.manifest(spec)?, FILE_MODE)?;
        Ok(LaunchId::StaticPod(name))
    }

    fn list(&self) -> linux::Result<Vec<Launched>> {
        let mut launched = Vec::new();
        for name in file_names(&self.manifests)? {
            if let Some(pod) = name.strip_suffix(SUFFIX)
                && let Some(key) = parse_launch_name(pod)
                && self.is_own(&name, &key)?
            {
                launched.push(Launched { key, id: LaunchId::StaticPod(pod.to_owned()) });
            }
        }
        Ok(launched)
    }

    fn launch_of(&self, key: &LaunchKey, _daemon: ProcessId) -> linux::Result<Option<LaunchId>> {
        let found = self.list()?.into_iter().find(|launched| launched.key == *key);
        Ok(found.map(|launched| launched.id))
    }

    fn daemons(&self) -> linux::Result<Vec<ProcessId>> {
        processes_of_root(pod::PROCESS.as_bytes())
    }

    /// Finds the pod by the dial directory, which is mounted in it.
    fn launch_by(&self, daemon: ProcessId) -> linux::Result<Option<Launched>> {
        let table = PathBuf::from(format!("/proc/{}/mountinfo", daemon.pid));
        let mounts = linux::mountinfo::read_at(&table)?;
        let dial_dir = mounts.iter().rfind(|mount| mount.mount_point == Path::new(pod::DIAL_DIR));
        let name = dial_dir.and_then(|mount| mount.root.file_name()?.to_str());
        let Some(key) = name.and_then(LaunchKey::parse) else { return Ok(None) };
        let launched = self.list()?.into_iter().find(|launched| launched.key == key);
        // Checked afterwards: only then the pid was still the daemon's.
        Ok(if daemon.is_alive()? { launched } else { None })
    }

    fn remove_leftovers(&self) -> linux::Result<()> {
        for name in file_names(&self.manifests)? {
            if let Some(key) = key_of_temporary(&name)
                && self.is_leftover(&name, &key)?
            {
                linux::atomic_file::remove(&self.manifests.join(name))?;
            }
        }
        Ok(())
    }

    fn configured_program(&self) -> linux::Result<Program> {
        Ok(Program::Image(self.mount_image.clone()))
    }

    fn program_of(&self, id: &LaunchId, _daemon: ProcessId) -> linux::Result<Option<Program>> {
        let LaunchId::StaticPod(name) = id else { return Ok(None) };
        let path = self.path(name);
        let pod = match linux::atomic_file::read(&path) {
            // Another party has removed it, or it is in YAML, which drivers wrote until 0.1.0.
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            Err(e) => return Err(linux::Error::at("read", &path, e)),
            Ok(text) => serde_json::from_slice::<Pod>(&text).ok(),
        };
        let image = pod.and_then(|pod| pod.spec?.containers.into_iter().next()?.image);
        Ok(image.map(Program::Image))
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

    fn adopt(&self, _key: &LaunchKey) -> linux::Result<()> {
        // kubelet keeps its log.
        Ok(())
    }

    fn last_log_line(&self, _key: &LaunchKey) -> Option<String> {
        None
    }

    fn clear(&self, _key: &LaunchKey) -> linux::Result<()> {
        // kubelet removes its pod.
        Ok(())
    }

    fn describe(&self, spec: LaunchSpec<'_>) -> String {
        let name = pod_name(spec);
        format!("pod {NAMESPACE}/{name} with image {}", self.image(spec))
    }
}

impl ManifestLauncher {
    fn path(&self, pod_name: &str) -> PathBuf {
        self.manifests.join(format!("{pod_name}{SUFFIX}"))
    }

    fn image<'a>(&'a self, spec: LaunchSpec<'a>) -> &'a str {
        match spec.program {
            Some(Program::Image(image)) => image,
            Some(Program::File { .. }) | None => &self.mount_image,
        }
    }

    /// A pod whose name merely looks like one of ours is its user's, or another driver's,
    /// which has its own run directory.
    fn is_own(&self, file_name: &str, key: &LaunchKey) -> linux::Result<bool> {
        let path = self.manifests.join(file_name);
        match linux::atomic_file::read(&path) {
            Ok(text) => Ok(serde_json::from_slice(&text)
                .map_or_else(|_| self.is_of_older_form(&text, key), |pod| self.has_written(&pod))),
            Err(e) if e.raw_os_error().is_none() || e.kind() == ErrorKind::NotFound => Ok(false),
            Err(e) => Err(linux::Error::at("read", &path, e)),
        }
    }

    /// Whether an earlier driver with this run directory was writing it, or nothing has for an hour: another
    /// driver may be writing its own now.
    fn is_leftover(&self, file_name: &str, key: &LaunchKey) -> linux::Result<bool> {
        if DialDir::of(&self.run_dir, key).path().is_dir() {
            return Ok(true);
        }
        let path = self.manifests.join(file_name);
        match std::fs::symlink_metadata(&path).and_then(|found| found.modified()) {
            Ok(modified) => Ok(modified.elapsed().is_ok_and(|age| age > LONGEST_WRITE)),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
            Err(e) => Err(linux::Error::at("look at", &path, e)),
        }
    }

    fn has_written(&self, pod: &Pod) -> bool {
        run_dir_of(pod) == Some(&self.run_dir)
    }

    /// YAML without the annotation, which drivers wrote until 0.1.0: known by its dial directory.
    fn is_of_older_form(&self, text: &[u8], key: &LaunchKey) -> bool {
        let dial_dir = DialDir::of(&self.run_dir, key);
        let line = format!("      path: {}", serde_json::Value::from(dial_dir.path().to_string_lossy()));
        text.split(|byte| *byte == b'\n').any(|found| found == line.as_bytes())
    }

    /// JSON, which is YAML too.
    fn manifest(&self, spec: LaunchSpec<'_>) -> linux::Result<Vec<u8>> {
        let image = self.image(spec);
        let pod = pod::of(pod_name(spec), spec, image, &self.run_dir);
        serde_json::to_vec_pretty(&pod)
            .map_err(|e| linux::Error::at("write a pod for", &self.run_dir, std::io::Error::from(e)))
    }
}

/// Of the driver that wrote the pod.
fn run_dir_of(pod: &Pod) -> Option<&Path> {
    pod.metadata.annotations.as_ref()?.get(RUN_DIR_ANNOTATION).map(Path::new)
}

/// The name of the launch in the journal, and of the manifest's file.
fn launch_name(prefix: &str, key: &LaunchKey) -> String {
    format!("{prefix}-{key}")
}

/// Another one at each start: kubelet lets a static pod wait, for 10 s and more, while one
/// of the same name is ending. At most 63 bytes, with the longest prefix.
fn pod_name(spec: LaunchSpec<'_>) -> String {
    let start = spec.nonce.get(..START_DIGITS).unwrap_or(spec.nonce);
    format!("{}-{start}", launch_name(&spec.settings.name_prefix, spec.key))
}

fn parse_launch_name(name: &str) -> Option<LaunchKey> {
    name.rsplit_once('-').and_then(|(_prefix, key)| LaunchKey::parse(key))
}

/// Of `.<pod>.yaml.<number>.tmp`, as atomic files are called before their rename.
fn key_of_temporary(file_name: &str) -> Option<LaunchKey> {
    let (pod, rest) = file_name.strip_prefix('.')?.split_once(".yaml.")?;
    let is_number = rest.strip_suffix(".tmp")?.bytes().all(|b| b.is_ascii_digit());
    parse_launch_name(pod).filter(|_| is_number)
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
    use crate::model::ids::VolumeId;
    use crate::model::parameters::LogLevel;
    use crate::model::settings::LaunchSettings;
    use std::os::unix::fs::PermissionsExt;

    fn launcher(manifests: &Path) -> ManifestLauncher {
        ManifestLauncher {
            manifests: manifests.into(),
            mount_image: "hawser/volume:1 \"odd\"".into(),
            run_dir: "/run/h".into(),
        }
    }

    fn read(path: &Path) -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    #[test]
    fn a_manifest_appears_whole_is_listed_and_goes() {
        let dir = tempfile::tempdir().unwrap();
        let launcher = launcher(dir.path());
        let volume_id = VolumeId::from_key("0123456789abcdef0123456789abcdef").unwrap();
        let key = LaunchKey::from(&volume_id);
        std::fs::write(dir.path().join("users-pod.yaml"), "").unwrap();
        let id = launcher
            .ensure(LaunchSpec {
                key: &key,
                volume_id: Some(&volume_id),
                nonce: "n0nce",
                settings: &LaunchSettings::default(),
                inode_limit: 0,
                program: None,
            })
            .unwrap();
        assert_eq!(launcher.list().unwrap(), [Launched { key, id: id.clone() }]);
        let path = dir.path().join("hawser-volume-0123456789abcdef0123456789abcdef.yaml");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, FILE_MODE);
        let pod = read(&path);
        assert_eq!(pod["spec"]["containers"][0]["image"], "hawser/volume:1 \"odd\"");
        assert!(launcher.stands(&id).unwrap());
        launcher.remove(&id).unwrap();
        assert!(!launcher.stands(&id).unwrap());
        launcher.remove(&id).unwrap();
        assert_eq!(file_names(dir.path()).unwrap(), ["users-pod.yaml"]);
    }

    #[test]
    fn what_a_killed_driver_was_writing_goes_and_what_another_writes_stays() {
        let (dir, run_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let launcher = ManifestLauncher { run_dir: run_dir.path().into(), ..launcher(dir.path()) };
        let [own, others, old] = ["a", "b", "c"].map(|digit| {
            let path = dir.path().join(format!(".hawser-volume-{}.yaml.7.tmp", digit.repeat(32)));
            std::fs::write(&path, "half").unwrap();
            path
        });
        let key = LaunchKey::parse(&"a".repeat(32)).unwrap();
        std::fs::create_dir(DialDir::of(run_dir.path(), &key).path()).unwrap();
        let long_ago = std::time::SystemTime::now() - 2 * LONGEST_WRITE;
        std::fs::File::options().write(true).open(&old).unwrap().set_modified(long_ago).unwrap();
        assert_eq!(launcher.list().unwrap(), []);
        assert!(own.exists() && others.exists() && old.exists(), "a look changes nothing");
        launcher.remove_leftovers().unwrap();
        assert!(!own.exists() && others.exists() && !old.exists());
    }

    #[test]
    fn a_missing_directory_has_no_manifests_and_takes_none() {
        let launcher = launcher(Path::new("/nonexistent/manifests"));
        assert_eq!(launcher.list().unwrap(), []);
        launcher.remove_leftovers().unwrap();
        let volume_id = VolumeId::from_key("0123456789abcdef0123456789abcdef").unwrap();
        let key = LaunchKey::from(&volume_id);
        let err = launcher
            .ensure(LaunchSpec {
                key: &key,
                volume_id: Some(&volume_id),
                nonce: "",
                settings: &LaunchSettings::default(),
                inode_limit: 0,
                program: None,
            })
            .unwrap_err();
        assert_eq!(err.errno(), nix::errno::Errno::ENOENT);
    }

    #[test]
    fn settings_reach_the_manifest_and_its_pod_is_found_by_any_name() {
        let dir = tempfile::tempdir().unwrap();
        let manifests = launcher(dir.path());
        let volume_id = VolumeId::from_key("0123456789abcdef0123456789abcdef").unwrap();
        let key = LaunchKey::from(&volume_id);
        let settings = LaunchSettings {
            name_prefix: "fast".into(),
            labels: [("example.com/tier".into(), "1".into())].into(),
            log_level: LogLevel::Debug,
            grace_seconds: 17,
            ..LaunchSettings::default()
        };
        let id = manifests
            .ensure(LaunchSpec {
                key: &key,
                volume_id: Some(&volume_id),
                nonce: "n",
                settings: &settings,
                inode_limit: 0,
                program: None,
            })
            .unwrap();
        let users = dir.path().join(format!("users-{}.yaml", "0".repeat(32)));
        std::fs::write(&users, "kind: Pod\n").unwrap();
        assert_eq!(manifests.list().unwrap(), [Launched { key, id: id.clone() }]);
        let other = ManifestLauncher { run_dir: "/run/other".into(), ..launcher(dir.path()) };
        assert_eq!(other.list().unwrap(), [], "of another driver beside it");
        let path = dir.path().join("fast-0123456789abcdef0123456789abcdef.yaml");
        let pod = read(&path);
        assert_eq!(pod["metadata"]["name"], "fast-0123456789abcdef0123456789abcdef-n");
        assert_eq!(pod["metadata"]["labels"]["example.com/tier"], "1");
        assert_eq!(pod["spec"]["priority"], 2_000_001_000);
        assert_eq!(pod["spec"]["terminationGracePeriodSeconds"], 17);
        let arguments = pod["spec"]["containers"][0]["args"].as_array().unwrap();
        assert!(arguments.windows(2).any(|pair| pair == ["--log-level", "debug"]), "{arguments:?}");
        manifests.remove(&id).unwrap();
        assert!(users.exists() && !path.exists());
    }

    #[test]
    fn each_start_has_a_pod_name_of_its_own_and_the_same_manifest() {
        let dir = tempfile::tempdir().unwrap();
        let manifests = launcher(dir.path());
        let volume_id = VolumeId::from_key("0123456789abcdef0123456789abcdef").unwrap();
        let key = LaunchKey::from(&volume_id);
        let settings = LaunchSettings { name_prefix: "p".repeat(24), ..LaunchSettings::default() };
        let started = ["aaaaabbbb", "cccccbbbb"].map(|nonce| {
            let spec = LaunchSpec {
                key: &key,
                volume_id: Some(&volume_id),
                nonce,
                settings: &settings,
                inode_limit: 0,
                program: None,
            };
            let id = manifests.ensure(spec).unwrap();
            let LaunchId::StaticPod(launch) = &id else { panic!("{id:?}") };
            let pod = read(&dir.path().join(format!("{launch}.yaml")));
            let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
            assert!(manifests.describe(spec).contains(&name) && name.len() <= 63, "{name}");
            (id, name)
        });
        assert_eq!(started[0].0, started[1].0);
        assert_ne!(started[0].1, started[1].1);
        assert_eq!(manifests.list().unwrap().len(), 1);
    }
}
