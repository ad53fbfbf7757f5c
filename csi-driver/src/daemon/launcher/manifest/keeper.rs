//! The static pod of the keeper.
//!
//! It has no system call that RuntimeDefault refuses, and of the host only the directory with the keeper's
//! own socket. It asks for no network, which only Hawser's runtime understands. What it holds comes through
//! that socket. Its capabilities are those that the registration of backing files and the check of
//! directories need ([`CAPABILITIES`]).
//!
//! Invariant: the file is written only if its content differs. A kubelet replaces the pod of a file
//! that changes, and the keeper with it.

use std::io::ErrorKind;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::{
    Capabilities, Container, HostPathVolumeSource, Pod, PodSpec, ResourceRequirements, SeccompProfile,
    SecurityContext, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use proto::mount_pod::{KEEPER_ROLE, NAMESPACE, NETWORK_ANNOTATION, ROLE_LABEL, RUN_DIR_ANNOTATION};

use super::pod::{NODE_CRITICAL, owned, quantities};
use super::{FILE_MODE, SUFFIX, run_dir_of};
use crate::config::{KEEPER_SOCKET, KeeperPod, keeper_dir};

const CONTAINER: &str = "keeper";
/// Where the socket's directory is in the container.
const SOCKET_DIR: &str = "/run/hawser";
const SOCKET_VOLUME: &str = "socket";
/// SIGTERM ends a keeper that holds nothing; one that holds something would wait until it is killed.
const GRACE_SECONDS: i64 = 1;
/// What a process of the driver has too: many times what it needs.
const MEMORY_LIMIT: &str = "128Mi";
/// For FUSE_DEV_IOC_BACKING_OPEN, and for the user on whose behalf the kernel then reads and writes
/// (`linux::fuse_backing::Registrar`); and to look into a volume's directory that only its owner may enter.
const CAPABILITIES: [&str; 4] = ["DAC_READ_SEARCH", "SETGID", "SETUID", "SYS_ADMIN"];

impl KeeperPod {
    /// Writes the manifest unless it is there, and returns whether it was written.
    pub(crate) fn ensure(&self) -> linux::Result<bool> {
        let (path, wanted) = (self.path(), self.manifest()?);
        match self.found()? {
            Some(found) if found == wanted => Ok(false),
            _ => {
                linux::atomic_file::write_whole(&path, &wanted, FILE_MODE)?;
                tracing::info!(manifest = %path.display(), "the keeper's pod has another manifest now");
                Ok(true)
            }
        }
    }

    /// Whether the manifest is there, with another image.
    pub(crate) fn changes_image(&self) -> linux::Result<bool> {
        let Some(found) = self.found()? else { return Ok(false) };
        let pod = serde_json::from_slice::<Pod>(&found).ok();
        let container = pod.and_then(|pod| pod.spec?.containers.into_iter().next());
        Ok(container.and_then(|container| container.image).as_ref() != Some(&self.image))
    }

    /// Removes the manifest, and returns whether there was one.
    pub(crate) fn remove(&self) -> linux::Result<bool> {
        if self.found()?.is_none() {
            return Ok(false);
        }
        linux::atomic_file::remove(&self.path())?;
        tracing::info!(manifest = %self.path().display(), "the keeper has no pod any more");
        Ok(true)
    }

    fn path(&self) -> PathBuf {
        self.manifests.join(format!("{}{SUFFIX}", self.name))
    }

    /// The manifest that this driver, or an earlier one, has written. Another driver's is an error.
    fn found(&self) -> linux::Result<Option<Vec<u8>>> {
        let path = self.path();
        // Of a driver that was killed before its rename.
        linux::atomic_file::remove_leftovers(&path)?;
        let found = match linux::atomic_file::read(&path) {
            Ok(found) => found,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(linux::Error::at("read", &path, e)),
        };
        let pod = serde_json::from_slice::<Pod>(&found);
        match pod.ok().as_ref().and_then(run_dir_of) {
            Some(run_dir) if run_dir == self.run_dir => Ok(Some(found)),
            other => {
                let run_dir = other.map(|run_dir| run_dir.display().to_string());
                let reason = format!(
                    "a keeper's pod with run directory {:?} is there, which is not that of this driver: remove it, \
                     or choose another --driver-name",
                    run_dir.unwrap_or_default()
                );
                Err(linux::Error::at("replace", &path, std::io::Error::other(reason)))
            }
        }
    }

    /// JSON, which is YAML too.
    fn manifest(&self) -> linux::Result<Vec<u8>> {
        serde_json::to_vec_pretty(&self.pod())
            .map_err(|e| linux::Error::at("write a pod for", &self.run_dir, std::io::Error::from(e)))
    }

    fn pod(&self) -> Pod {
        let host_path = HostPathVolumeSource {
            path: keeper_dir(&self.run_dir).to_string_lossy().into_owned(),
            type_: Some("Directory".to_owned()),
        };
        let run_dir = self.run_dir.to_string_lossy();
        Pod {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                namespace: Some(NAMESPACE.to_owned()),
                labels: Some(owned([
                    ("app.kubernetes.io/managed-by", "hawser-csi"),
                    (ROLE_LABEL, KEEPER_ROLE),
                ])),
                annotations: Some(owned([(NETWORK_ANNOTATION, "none"), (RUN_DIR_ANNOTATION, &run_dir)])),
                ..ObjectMeta::default()
            },
            spec: Some(PodSpec {
                restart_policy: Some("Always".to_owned()),
                priority_class_name: Some("system-node-critical".to_owned()),
                priority: Some(NODE_CRITICAL),
                termination_grace_period_seconds: Some(GRACE_SECONDS),
                enable_service_links: Some(false),
                automount_service_account_token: Some(false),
                containers: vec![container(&self.image)],
                volumes: Some(vec![Volume {
                    name: SOCKET_VOLUME.to_owned(),
                    host_path: Some(host_path),
                    ..Volume::default()
                }]),
                ..PodSpec::default()
            }),
            ..Pod::default()
        }
    }
}

fn container(image: &str) -> Container {
    Container {
        name: CONTAINER.to_owned(),
        image: Some(image.to_owned()),
        image_pull_policy: Some("Never".to_owned()),
        command: Some(vec!["/hawser-keeper".to_owned()]),
        args: Some(vec!["--socket".to_owned(), format!("{SOCKET_DIR}/{KEEPER_SOCKET}")]),
        resources: Some(ResourceRequirements {
            requests: Some(quantities([("cpu", "10m"), ("memory", "8Mi")])),
            limits: Some(quantities([("memory", MEMORY_LIMIT)])),
            ..ResourceRequirements::default()
        }),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            read_only_root_filesystem: Some(true),
            capabilities: Some(Capabilities {
                drop: Some(vec!["ALL".to_owned()]),
                add: Some(CAPABILITIES.map(str::to_owned).into()),
            }),
            seccomp_profile: Some(SeccompProfile {
                type_: "RuntimeDefault".to_owned(),
                ..SeccompProfile::default()
            }),
            ..SecurityContext::default()
        }),
        volume_mounts: Some(vec![VolumeMount {
            name: SOCKET_VOLUME.to_owned(),
            mount_path: SOCKET_DIR.to_owned(),
            ..VolumeMount::default()
        }]),
        ..Container::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::path::Path;

    fn pod(manifests: &Path) -> KeeperPod {
        KeeperPod {
            name: "hawser-csi-hawser-dev-keeper".to_owned(),
            manifests: manifests.to_owned(),
            image: "hawser.dev/hawser-volume:1".to_owned(),
            run_dir: "/run/hawser".into(),
        }
    }

    #[test]
    fn the_manifest_is_the_recorded_one() {
        let found: serde_json::Value =
            serde_json::from_slice(&pod(Path::new("/m")).manifest().unwrap()).unwrap();
        let recorded: serde_json::Value = serde_json::from_str(include_str!("keeper.json")).unwrap();
        assert_eq!(found, recorded, "{found:#}");
    }

    #[test]
    fn the_file_is_written_only_if_it_differs_and_is_removed_once() {
        let dir = tempfile::tempdir().unwrap();
        let keeper = pod(dir.path());
        let leftover = dir.path().join(".hawser-csi-hawser-dev-keeper.yaml.7.tmp");
        std::fs::write(&leftover, "half").unwrap();
        assert!(keeper.ensure().unwrap());
        assert!(!leftover.exists());
        let path = dir.path().join("hawser-csi-hawser-dev-keeper.yaml");
        let state = || {
            let found = std::fs::metadata(&path).unwrap();
            (found.ino(), found.mtime(), found.mtime_nsec(), found.permissions().mode() & 0o777)
        };
        let written = state();
        assert_eq!(written.3, FILE_MODE);
        assert!(!keeper.ensure().unwrap());
        assert_eq!(state(), written);
        let other = KeeperPod { image: "another".to_owned(), ..keeper.clone() };
        assert!(other.changes_image().unwrap() && !keeper.changes_image().unwrap());
        assert!(other.ensure().unwrap());
        assert_ne!(state().0, written.0);
        assert!(keeper.remove().unwrap());
        assert!(!keeper.remove().unwrap() && !path.exists());
        assert!(!keeper.changes_image().unwrap(), "there is none");
    }

    #[test]
    fn the_manifest_of_another_driver_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let keeper = pod(dir.path());
        keeper.ensure().unwrap();
        let other = KeeperPod { run_dir: "/run/other".into(), ..keeper.clone() };
        for error in [other.ensure().unwrap_err(), other.remove().unwrap_err()] {
            let text = linux::chain(&error);
            assert!(text.contains("keeper.yaml") && text.contains("\"/run/hawser\""), "{text}");
        }
        assert!(!keeper.ensure().unwrap());
    }
}
