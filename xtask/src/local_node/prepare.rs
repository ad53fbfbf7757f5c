//! What the node needs before its daemons start. Each step may be repeated: `up` continues what an
//! interrupted `up` has begun.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use ::tests::binaries::{CNI_PLUGINS, PRODUCTS};
use ::tests::examples;
use ::tests::image::{Program, write_archive, write_archive_of_two};
use anyhow::{Context, Result};
use linux::atomic_file;

use super::driver;
use super::network;
use super::place::Place;

/// The examples to try; the StorageClass is the node's own.
const EXAMPLES: [&str; 6] = [
    "claim.yaml",
    "pod-one.yaml",
    "pod-two.yaml",
    "snapshot/1-volume.yaml",
    "snapshot/2-snapshot.yaml",
    "snapshot/3-restored.yaml",
];
pub(super) const CLASS: &str = "storageclass.yaml";

/// Copies of the static programs: a later build does not change a running node.
pub(super) fn copy_programs(place: &Place, products: &Path) -> Result<()> {
    make_directory(&place.programs())?;
    for (_package, binary) in PRODUCTS.into_iter().chain(CNI_PLUGINS) {
        let (from, to) = (products.join(binary), place.program(binary));
        let unfinished = place.program(&format!(".{binary}.new"));
        fs::copy(&from, &unfinished)
            .and_then(|_bytes| fs::set_permissions(&unfinished, Permissions::from_mode(0o755)))
            .and_then(|()| fs::rename(&unfinished, &to))
            .with_context(|| format!("copy {} to {}", from.display(), to.display()))?;
    }
    Ok(())
}

/// The image of the sample pods, and that of the volumes' daemons.
pub(super) fn make_images(place: &Place) -> Result<()> {
    make_directory(&place.images())?;
    let sample = Program {
        image: examples::DEMO_IMAGE,
        binary: &place.program("demo-app"),
        path: "demo-app",
        directories: &["data", "tmp"],
    };
    write_archive(&sample, &place.images().join("demo-app.tar"))?;
    let volume = Program {
        image: examples::VOLUME_IMAGE,
        binary: &place.program("hawser-volume"),
        path: "hawser-volume",
        directories: &["run", "run/hawser"],
    };
    let archive = place.images().join("hawser-volume.tar");
    write_archive_of_two(&volume, &place.program("hawser-keeper"), &archive)
}

/// Directories, the network's configuration, the examples, and the script that calls the kubelet.
pub(super) fn write_configuration(place: &Place) -> Result<()> {
    for dir in [place.manifests(), place.network(), place.pool(), place.examples().join("snapshot")] {
        make_directory(&dir)?;
    }
    // Daemons of volumes reach directories of the pool only through the descriptors that they get.
    fs::set_permissions(place.pool(), Permissions::from_mode(0o700)).context("chmod the pool")?;
    let conflist = serde_json::to_vec_pretty(&network::conflist(place)).context("write the conflist")?;
    atomic_file::replace(&place.network().join("10-hawser-up.conflist"), &conflist, 0o644)?;
    for name in EXAMPLES {
        put_example(name, &place.examples())?;
    }
    put_example(CLASS, place.dir())?;
    atomic_file::replace(&place.command(), script(place).as_bytes(), 0o755)?;
    Ok(atomic_file::replace(&place.driver_command(), driver::script(place)?.as_bytes(), 0o755)?)
}

fn script(place: &Place) -> String {
    format!(
        "#!/bin/sh\n# hawser-kubelet for the node of cargo xtask up.\nHAWSER_COMMAND={} HAWSER_ROOT_DIR={} \
         HAWSER_START='cargo xtask up{}' exec {} \"$@\"\n",
        place.command().display(),
        place.kubelet().display(),
        place.directory_flag(),
        place.program("hawser-kubelet").display(),
    )
}

fn put_example(name: &str, dir: &Path) -> Result<()> {
    Ok(atomic_file::replace(&dir.join(name), examples::read(name)?.as_bytes(), 0o644)?)
}

fn make_directory(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("create {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_has_the_command_that_starts_its_node() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::new(&dir.path().canonicalize().unwrap().join("up")).unwrap();
        let start = format!(" HAWSER_START='cargo xtask up --dir {}' exec ", place.dir().display());
        assert!(script(&place).contains(&start), "{}", script(&place));
        let place = Place::new(Path::new(super::super::place::DEFAULT_DIR)).unwrap();
        assert!(script(&place).contains(" HAWSER_START='cargo xtask up' exec "), "{}", script(&place));
    }
}
