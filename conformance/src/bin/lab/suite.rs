//! The suites of the laboratory: which binaries run in a guest, with which
//! words, and how their lines are counted.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ::tests::binaries::{TARGET, target_dir, workspace_root};
use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde_json::Value;
use xtask::build::{cargo, words};

use super::kernel::Kernel;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Suite {
    /// The kernel interfaces that everything else rests on: the tests of crate `linux`
    Kernel,
    /// The four CNI plugins: their own tests
    Plugins,
    /// The runtime through its CRI socket: sandboxes, containers, cgroups, restarts
    Container,
    /// A volume's daemon and the inodes that the kernel knows, which kernels are asked to forget in different ways
    Volume,
    /// Volumes whose daemons, keeper and driver are killed under applications, by each data path; before Linux 6.9, what a kill does
    Takeover,
    /// Two pods that share a volume and talk over the bridge
    Demo,
    /// Project quotas on ext4 and on XFS, set and seen at work, also with the driver and its volumes and their data path
    Quota,
    /// A node whose power is cut at random moments, and what it acknowledged
    PowerCut,
}

/// Programs of this machine that tests and plugins start, and their packages.
pub(super) const PROGRAMS: [(&str, &str); 25] = [
    ("ip", "iproute2"),
    ("bridge", "iproute2"),
    ("nft", "nftables"),
    ("iptables", "iptables"),
    ("iptables-save", "iptables"),
    ("iptables-restore", "iptables"),
    ("ip6tables", "iptables"),
    ("ip6tables-save", "iptables"),
    ("ip6tables-restore", "iptables"),
    ("iptables-nft", "iptables"),
    ("ip6tables-nft", "iptables"),
    ("iptables-legacy", "iptables"),
    ("iptables-legacy-save", "iptables"),
    ("iptables-legacy-restore", "iptables"),
    ("ip6tables-legacy", "iptables"),
    ("ip6tables-legacy-save", "iptables"),
    ("ip6tables-legacy-restore", "iptables"),
    ("conntrack", "conntrack"),
    ("setpriv", "util-linux"),
    ("fsfreeze", "util-linux"),
    ("mkfs.ext4", "e2fsprogs"),
    ("mkfs.xfs", "xfsprogs"),
    ("mkfs.btrfs", "btrfs-progs"),
    ("btrfs", "btrfs-progs"),
    ("sqlite3", "sqlite3"),
];
/// What iptables loads by itself.
pub(super) const XTABLES: &str = "/usr/lib/x86_64-linux-gnu/xtables";

/// Of the kill suite: what needs no program but sqlite3.
const KILLED_UNDER: [&str; 3] = [
    "one_file_is_what_every_kind_of_write_has_made_of_it",
    "sqlite_loses_no_acknowledged_transaction",
    "every_change_of_a_name_is_made_once_and_answered_rightly",
];
/// The same applications at once, with the data path and the limit that the driver chooses in a pool with
/// quotas.
const KILLED_UNDER_LIMITED: [&str; 1] =
    ["names_files_and_databases_are_whole_in_a_volume_that_the_kernel_limits"];
/// The file system of that pool.
const CHAOS_POOL: &str = "HAWSER_CHAOS_POOL";

/// One line of a suite's script.
#[derive(Debug)]
pub(super) struct Item {
    /// What it is called in the report.
    pub(super) name: String,
    /// The working directory, as cargo would choose it.
    dir: PathBuf,
    program: PathBuf,
    words: Vec<String>,
    /// Of its environment.
    variable: Option<(&'static str, &'static str)>,
}

impl Suite {
    /// Packages whose test binaries it runs.
    pub(super) fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Kernel => &["linux", "netfilter"],
            Self::Plugins => &["cni-bridge", "cni-loopback", "cni-portmap", "ipam-host-local"],
            Self::Container => &["runtime"],
            Self::Volume => &["volume-local"],
            Self::Takeover => &["tests"],
            Self::Demo | Self::Quota | Self::PowerCut => &[],
        }
    }

    pub(super) fn items(self, binaries: &TestBinaries, kernel: &Kernel) -> Result<Vec<Item>> {
        Ok(match self {
            Self::Kernel => vec![
                binaries.item("linux", "linux", &[])?,
                binaries.item("netfilter", "conntrack", &[])?,
                binaries.item("netfilter", "nftables", &[])?,
            ],
            Self::Plugins => vec![
                binaries.item("cni-loopback", "executable", &[])?,
                binaries.item("ipam-host-local", "executable", &[])?,
                binaries.item("cni-bridge", "executable", &[])?,
                binaries.item("cni-portmap", "executable", &[])?,
            ],
            Self::Container => vec![binaries.item("runtime", "cri", &[])?],
            Self::Volume => vec![binaries.item("volume-local", "kernel", &["known::"])?],
            Self::Takeover if kernel.can_send_again() => {
                let limited = |file_system| {
                    let item = binaries.item("tests", "chaos", &KILLED_UNDER_LIMITED)?;
                    Ok(item.with_variable(CHAOS_POOL, file_system))
                };
                let by_daemon = binaries.item("tests", "chaos", &KILLED_UNDER);
                let killed = [by_daemon, limited("ext4"), limited("xfs")];
                [Ok(tool("lab-guest", &["takeover"]))].into_iter().chain(killed).collect::<Result<_>>()?
            }
            Self::Takeover => vec![tool("lab-guest", &["fallback"])],
            Self::Demo => vec![tool("xtask", &["demo"])],
            Self::Quota => {
                let data_path = if kernel.passes_through() { "passthrough" } else { "daemon" };
                vec![tool("lab-guest", &["project-quota", data_path])]
            }
            // One guest a cut: power.rs.
            Self::PowerCut => Vec::new(),
        })
    }

    pub(super) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

pub(super) fn tool(name: &str, words: &[&str]) -> Item {
    Item {
        name: format!("{name} {}", words.join(" ")),
        dir: workspace_root(),
        program: static_dir().join(name),
        words: words.iter().map(|&word| word.to_owned()).collect(),
        variable: None,
    }
}

impl Item {
    fn with_variable(mut self, name: &'static str, value: &'static str) -> Self {
        self.name.push_str(&format!(" {name}={value}"));
        self.variable = Some((name, value));
        self
    }
}

/// Where static test binaries lie, and the programs that they start.
pub(super) fn static_dir() -> PathBuf {
    target_dir().join(TARGET).join("debug")
}

/// The shell script that runs `items` in a guest.
pub(super) fn script(items: &[Item]) -> String {
    let mut script = format!("export RUST_TEST_THREADS=2 HAWSER_TEST_SLOWNESS={SLOWNESS}\n");
    for item in items {
        let words: Vec<String> = item.words.iter().map(|word| quoted(word)).collect();
        script.push_str(&format!(
            "echo {begin}\ncd {dir}\nHAWSER_BIN_DIR={bin} {variable}{program} {words}\necho \"{END}$?\"\n",
            begin = quoted(&format!("{BEGIN}{}", item.name)),
            dir = quoted(&item.dir.to_string_lossy()),
            bin = quoted(&::tests::binaries::dir().to_string_lossy()),
            variable =
                item.variable.map_or_else(String::new, |(name, value)| format!("{name}={} ", quoted(value))),
            program = quoted(&item.program.to_string_lossy()),
            words = words.join(" "),
        ));
    }
    script
}

/// Of an emulated guest on a busy machine.
const SLOWNESS: u32 = 10;
pub(super) const BEGIN: &str = "lab: begin ";
pub(super) const END: &str = "lab: ended with ";

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Static test binaries, by package and name of the target.
#[derive(Debug, Default)]
pub(super) struct TestBinaries {
    found: BTreeMap<(String, String), PathBuf>,
    /// What tests start as `CARGO_BIN_EXE_…`.
    programs: Vec<PathBuf>,
    directories: BTreeMap<String, PathBuf>,
}

impl TestBinaries {
    /// Builds those of `packages`, and the binaries that they start.
    pub(super) fn build(packages: &[&str]) -> Result<Self> {
        let mut binaries = Self::default();
        if packages.is_empty() {
            return Ok(binaries);
        }
        let mut command = cargo();
        command.args(["test", "--no-run", "--target", TARGET, "--message-format", "json-render-diagnostics"]);
        for package in packages {
            command.args(["-p", package]);
        }
        let output =
            static_flags(&mut command).stderr(Stdio::inherit()).output().context("start cargo test")?;
        ensure!(output.status.success(), "{}: {}", words(&command), output.status);
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let Ok(message) = serde_json::from_str::<Value>(line) else { continue };
            binaries.add(&message);
        }
        Ok(binaries)
    }

    /// Adds what cargo says on an artifact that is a test binary.
    fn add(&mut self, message: &Value) {
        let (Some(executable), Some(manifest), Some(target)) = (
            message["executable"].as_str(),
            message["manifest_path"].as_str(),
            message["target"]["name"].as_str(),
        ) else {
            return;
        };
        let Some(dir) = Path::new(manifest).parent() else { return };
        let package = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if message["profile"]["test"] == true {
            self.found.insert((package.clone(), target.to_owned()), PathBuf::from(executable));
        } else {
            self.programs.push(PathBuf::from(executable));
        }
        self.directories.insert(package, dir.to_path_buf());
    }

    pub(super) fn tests(&self) -> impl Iterator<Item = &PathBuf> {
        self.found.values()
    }

    pub(super) fn programs(&self) -> impl Iterator<Item = &PathBuf> {
        self.programs.iter()
    }

    fn item(&self, package: &str, target: &str, words: &[&str]) -> Result<Item> {
        let found = self.found.get(&(package.to_owned(), target.to_owned()));
        let program = found.with_context(|| format!("package {package} has no test target {target}"))?;
        let tests = listed(program)?;
        for word in words {
            let is_known = tests.lines().any(|test| test.contains(word));
            ensure!(is_known, "package {package}, test target {target}: no test {word:?}");
        }
        Ok(Item {
            name: format!("{package} {target}"),
            dir: self.directories[package].clone(),
            program: program.clone(),
            words: words.iter().map(|&word| word.to_owned()).collect(),
            variable: None,
        })
    }
}

/// The names of a binary's tests. In a guest, a word that selects none would succeed.
fn listed(program: &Path) -> Result<String> {
    let output = Command::new(program).arg("--list").output();
    let output = output.with_context(|| format!("start {}", program.display()))?;
    ensure!(output.status.success(), "{} --list: {}", program.display(), output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Flags for binaries that need nothing of the guest but its kernel.
pub(super) fn static_flags(command: &mut Command) -> &mut Command {
    command.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS", "-C target-feature=+crt-static")
}
