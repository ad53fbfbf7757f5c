//! The directions of DESIGN, as cargo knows them: who may use whom. A package
//! that is not in the table fails the test, so that a new one gets its rule.

use std::collections::{BTreeMap, BTreeSet};

use cargo_metadata::{DependencyKind, MetadataCommand, Package};

/// Package: the packages of this workspace that it may use, and packages of
/// others that it must not.
const RULES: &[(&str, &[&str], &[&str])] = &[
    // Wire contracts and the kernel know nobody.
    ("proto", &[], &["nix", "rustix", "libc"]),
    ("linux", &[], &["tonic", "prost", "serde_json"]),
    ("netfilter", &["linux"], &["tonic", "prost", "serde_json"]),
    ("quantity", &[], &["tonic", "nix", "rustix"]),
    ("trace", &[], &["tonic"]),
    // The CNI contract has no hands.
    ("cni-plugin", &["trace", "linux"], &["netlink-sys", "netlink-packet-route", "tonic", "nix", "rustix"]),
    // Plugins do not import each other, nor gRPC.
    ("cni-bridge", &["cni-plugin", "linux", "netfilter", "trace"], &["tonic", "prost"]),
    ("cni-loopback", &["cni-plugin", "linux", "trace"], &["tonic", "prost"]),
    ("cni-portmap", &["cni-plugin", "linux", "netfilter", "trace"], &["tonic", "prost"]),
    ("ipam-host-local", &["cni-plugin", "linux", "trace"], &["tonic", "prost"]),
    // The daemon in the mount pod knows neither CSI nor Kubernetes: of `proto` it takes the hand-over only.
    ("volume-fs", &["keeper", "linux", "proto"], &["tonic", "tokio", "granit-parser"]),
    // A backend knows requests and answers, never FUSE.
    ("volume-local", &["keeper", "linux", "proto", "volume-fs"], &["fuser", "tonic", "tokio", "granit-parser"]),
    // It stays when all others die: whatever it links is memory that a node gives for ever.
    ("keeper", &["linux"], &["tonic", "tokio", "prost", "clap", "tracing-subscriber"]),
    ("csi-driver", &["keeper", "linux", "proto", "quantity", "trace"], &["fuser"]),
    ("runtime", &["linux", "proto", "trace"], &["fuser"]),
    // The kubelet reaches plugins and drivers by exec and by socket.
    ("kubelet", &["linux", "proto", "quantity", "runtime", "trace"], &["fuser", "netlink-sys"]),
    ("demo-app", &[], &["tonic", "tokio"]),
    ("tests", &["linux", "proto", "trace"], &[]),
    // A launcher: of what it starts it knows the command line only.
    ("xtask", &["tests", "trace"], &["tokio", "tonic"]),
    ("bench", &["linux", "proto", "tests", "trace", "xtask"], &[]),
    ("conformance", &["linux", "proto", "tests", "xtask"], &[]),
];

fn packages() -> Vec<Package> {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
    MetadataCommand::new().manifest_path(manifest).no_deps().exec().expect("cargo metadata answers").packages
}

/// What is linked: neither for tests nor for the build.
fn linked(package: &Package) -> BTreeSet<&str> {
    let normal = package.dependencies.iter().filter(|dependency| dependency.kind == DependencyKind::Normal);
    normal.map(|dependency| dependency.name.as_str()).collect()
}

#[test]
fn packages_use_only_those_they_may() {
    let packages = packages();
    let ours: BTreeSet<&str> = packages.iter().map(|package| package.name.as_str()).collect();
    let rules: BTreeMap<&str, (&[&str], &[&str])> =
        RULES.iter().map(|&(name, may, not)| (name, (may, not))).collect();
    let mut broken = Vec::new();
    for package in &packages {
        let name = package.name.as_str();
        let Some((may, must_not)) = rules.get(name) else {
            broken.push(format!("{name} has no rule"));
            continue;
        };
        for used in linked(package) {
            if (ours.contains(used) && !may.contains(&used)) || must_not.contains(&used) {
                broken.push(format!("{name} must not use {used}"));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn the_test_kit_is_linked_into_no_product() {
    for package in packages() {
        if !["tests", "bench", "conformance", "xtask"].contains(&package.name.as_str()) {
            assert!(!linked(&package).contains("tests"), "{} links the test kit", package.name);
        }
    }
}

#[test]
fn no_product_but_linux_relaxes_the_ban_on_unsafe_code() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    for package in packages().iter().filter(|package| package.name.as_str() != "linux") {
        let dir = package.manifest_path.parent().expect("a manifest lies in a directory");
        let mut sources = Vec::new();
        // A test may need what no safe call gives, such as a mapping of a file under test.
        collect_sources(dir.join("src").as_std_path(), &mut sources);
        assert!(!sources.is_empty(), "{dir} has sources below {root}");
        for source in sources {
            let text = std::fs::read_to_string(&source).expect("a source file");
            let relaxed =
                ["expect", "allow"].iter().any(|level| text.contains(&format!("{level}({}_code", "unsafe")));
            assert!(!relaxed, "{} relaxes unsafe_code", source.display());
        }
        let manifest = std::fs::read_to_string(&package.manifest_path).expect("a manifest");
        assert!(
            manifest.contains("[lints]\nworkspace = true"),
            "{} takes the workspace's lints",
            package.name
        );
    }
}

#[test]
fn each_package_names_its_readme() {
    let fuzz = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/Cargo.toml");
    let fuzz = MetadataCommand::new().manifest_path(fuzz).no_deps().exec().expect("cargo metadata answers");
    let mut broken = Vec::new();
    for package in packages().into_iter().chain(fuzz.packages) {
        let manifest = std::fs::read_to_string(&package.manifest_path).expect("a manifest");
        // Cargo reports a README.md as the readme even if the manifest has no such line.
        let is_named = manifest.lines().any(|line| line == "readme = \"README.md\"");
        let dir = package.manifest_path.parent().expect("a manifest lies in a directory");
        if !is_named || !dir.join("README.md").is_file() {
            broken.push(package.name.to_string());
        }
    }
    assert!(broken.is_empty(), "without a readme: {broken:?}");
}

fn collect_sources(dir: &std::path::Path, sources: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(dir).expect("a directory").flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect_sources(&path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push(path);
        }
    }
}
