//! The directions of DESIGN, as cargo knows them: who may use whom. A package
//! that is not in the table fails the test, so that a new one gets its rule.

use std::collections::{BTreeMap, BTreeSet};

use cargo_metadata::{DependencyKind, MetadataCommand, Package};

/// What one package may link.
struct Rule {
    package: &'static str,
    /// Packages of this workspace.
    may_use: &'static [&'static str],
    /// Packages of others.
    must_not_use: &'static [&'static str],
}

const RULES: &[Rule] = &[
    // Wire contracts and the kernel know nobody.
    Rule { package: "proto", may_use: &[], must_not_use: &["nix", "rustix", "libc"] },
    Rule { package: "linux", may_use: &[], must_not_use: &["tonic", "prost", "serde_json"] },
    Rule { package: "netfilter", may_use: &["linux"], must_not_use: &["tonic", "prost", "serde_json"] },
    Rule { package: "quantity", may_use: &[], must_not_use: &["tonic", "nix", "rustix"] },
    Rule { package: "trace", may_use: &[], must_not_use: &["tonic"] },
    // The CNI contract has no hands.
    Rule {
        package: "cni-plugin",
        may_use: &["trace", "linux"],
        must_not_use: &["netlink-sys", "netlink-packet-route", "tonic", "nix", "rustix"],
    },
    // Plugins do not import each other, nor gRPC.
    Rule {
        package: "cni-bridge",
        may_use: &["cni-plugin", "linux", "netfilter", "trace"],
        must_not_use: &["tonic", "prost"],
    },
    Rule {
        package: "cni-loopback",
        may_use: &["cni-plugin", "linux", "trace"],
        must_not_use: &["tonic", "prost"],
    },
    Rule {
        package: "cni-portmap",
        may_use: &["cni-plugin", "linux", "netfilter", "trace"],
        must_not_use: &["tonic", "prost"],
    },
    Rule {
        package: "ipam-host-local",
        may_use: &["cni-plugin", "linux", "trace"],
        must_not_use: &["tonic", "prost"],
    },
    // The daemon in the mount pod knows neither CSI nor Kubernetes: of `proto` it takes the hand-over only.
    Rule {
        package: "volume-fs",
        may_use: &["keeper", "linux", "proto"],
        must_not_use: &["tonic", "tokio", "granit-parser"],
    },
    // A backend knows requests and answers, never FUSE.
    Rule {
        package: "volume-local",
        may_use: &["keeper", "linux", "proto", "volume-fs"],
        must_not_use: &["fuser", "tonic", "tokio", "granit-parser"],
    },
    // It stays when all others die: each crate it links takes memory of the node for good.
    Rule {
        package: "keeper",
        may_use: &["linux"],
        must_not_use: &["tonic", "tokio", "prost", "clap", "tracing-subscriber"],
    },
    Rule {
        package: "csi-driver",
        may_use: &["keeper", "linux", "proto", "quantity", "trace"],
        must_not_use: &["fuser"],
    },
    Rule { package: "runtime", may_use: &["linux", "proto", "quantity", "trace"], must_not_use: &["fuser"] },
    // The kubelet reaches plugins and drivers by exec and by socket.
    Rule {
        package: "kubelet",
        may_use: &["linux", "proto", "quantity", "runtime", "trace"],
        must_not_use: &["fuser", "netlink-sys"],
    },
    Rule { package: "demo-app", may_use: &[], must_not_use: &["tonic", "tokio"] },
    Rule { package: "tests", may_use: &["linux", "proto", "trace"], must_not_use: &[] },
    // A launcher: of what it starts it knows the command line only.
    Rule { package: "xtask", may_use: &["linux", "tests", "trace"], must_not_use: &["tokio", "tonic"] },
    Rule { package: "bench", may_use: &["linux", "proto", "tests", "trace", "xtask"], must_not_use: &[] },
    Rule { package: "conformance", may_use: &["linux", "proto", "tests", "xtask"], must_not_use: &[] },
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
    let rules: BTreeMap<&str, &Rule> = RULES.iter().map(|rule| (rule.package, rule)).collect();
    let mut broken = Vec::new();
    for package in &packages {
        let name = package.name.as_str();
        let Some(rule) = rules.get(name) else {
            broken.push(format!("{name} has no rule"));
            continue;
        };
        for used in linked(package) {
            if (ours.contains(used) && !rule.may_use.contains(&used)) || rule.must_not_use.contains(&used) {
                broken.push(format!("{name} must not use {used}"));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn the_test_support_is_linked_into_no_product() {
    for package in packages() {
        if !["tests", "bench", "conformance", "xtask"].contains(&package.name.as_str()) {
            assert!(!linked(&package).contains("tests"), "{} links the test support", package.name);
        }
    }
}

#[test]
fn no_product_but_linux_relaxes_the_ban_on_unsafe_code() {
    const EXCEPTIONS: [&str; 2] = [
        // fuser's answer with a backing file has no safe form, and `linux` does not know fuser.
        "volume-fs/src/filesystem/passthrough.rs",
        // A bench maps its own file.
        "bench/src/csi/volume/operations/mapped.rs",
    ];
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
            assert!(
                !relaxed || EXCEPTIONS.iter().any(|exception| source.ends_with(exception)),
                "{} relaxes unsafe_code",
                source.display()
            );
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
