//! `cargo xtask lab`: our binaries and tests on the kernels that users have, each booted
//! under QEMU with cgroup v2 alone. docs/LAB.md says how to use it.

mod disk;
mod guest;
mod kernel;
mod power;
mod suite;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use ::tests::binaries::{self, target_dir, workspace_root};
use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use xtask::build::{self, cargo, products, require_root};
use xtask::libtest::{Counts, failed_test};
use xtask::progress::{exit_code, part, say};

use self::disk::Staging;
use self::guest::{Disk, Guest, Writes};
use self::kernel::{Kernel, RELEASES};
use self::suite::{Suite, TestBinaries};

/// A suite that takes longer hangs.
const TIMEOUT: Duration = Duration::from_secs(1200);

/// On kernels of distributions, booted under QEMU with cgroup v2 alone (docs/LAB.md)
#[derive(Debug, Parser)]
#[command(bin_name = "xtask lab")]
struct Arguments {
    /// debian-12, debian-13, a kernel's package, or a directory with boot/ and lib/modules/ [default: both of Debian]
    #[arg(long, value_name = "KERNEL")]
    kernel: Option<String>,
    /// Default: all
    suites: Vec<Suite>,
}

fn main() -> ExitCode {
    let Arguments { kernel, suites } = Arguments::parse();
    exit_code(run(kernel.as_deref(), &suites))
}

/// `kernel`: as [`Kernel::fetch`] takes it; without one, all of [`RELEASES`].
fn run(kernel: Option<&str>, suites: &[Suite]) -> Result<()> {
    require_root("lab")?;
    let kernels = kernel.map_or_else(|| RELEASES.map(|(name, _)| name).to_vec(), |one| vec![one]);
    let suites = if suites.is_empty() { Suite::value_variants() } else { suites };
    let binaries = part("build the static binaries and tests", || build_binaries(suites))?;
    let mut report = Report::default();
    for wanted in kernels {
        let kernel = part(&format!("kernel {wanted}"), || Kernel::fetch(wanted))?;
        let laboratory = part("disk of the guests", || Laboratory::new(kernel, &binaries))?;
        for suite in suites {
            laboratory.run(*suite, &binaries, &mut report)?;
        }
    }
    for name in &report.failures {
        say(&format!("failed: {name}"));
    }
    say(&format!("{} passed, {} failed", report.counts.passed, report.counts.failed));
    ensure!(report.counts.ignored == 0, "{} tests were ignored", report.counts.ignored);
    ensure!(report.counts.failed == 0, "{} failed in the laboratory", report.counts.failed);
    ensure!(report.counts.passed > 0, "no test ran");
    Ok(())
}

fn build_binaries(suites: &[Suite]) -> Result<TestBinaries> {
    products()?;
    let mut tools = cargo();
    tools.args(["build", "--target", binaries::TARGET, "--bin", "xtask", "--bin", "lab-guest"]);
    tools.args(["--features", "tests/csi"]);
    build::run(suite::static_flags(&mut tools))?;
    let mut packages: Vec<&str> = suites.iter().flat_map(|suite| suite.packages()).copied().collect();
    packages.sort_unstable();
    packages.dedup();
    TestBinaries::build(&packages)
}

#[derive(Debug, Default)]
struct Report {
    counts: Counts,
    failures: Vec<String>,
}

/// One kernel with what its guests boot from.
struct Laboratory {
    kernel: Kernel,
    dir: PathBuf,
    initramfs: PathBuf,
    root: PathBuf,
}

impl Laboratory {
    fn new(kernel: Kernel, binaries: &TestBinaries) -> Result<Self> {
        let dir = target_dir().join("lab").join(kernel.name.replace('/', "_"));
        fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
        let laboratory =
            Self { initramfs: dir.join("initramfs.cpio"), root: dir.join("root.ext4"), dir, kernel };
        disk::initramfs(&laboratory.kernel, &laboratory.initramfs)?;
        let mut staging = Staging::new(&laboratory.dir.join("root"))?;
        staging.put_modules(&laboratory.kernel)?;
        let workspace = workspace_root();
        staging.put_tree(&workspace, &workspace)?;
        for (_package, name) in binaries::PRODUCTS.iter().chain(&binaries::CNI_PLUGINS) {
            // Some tests look where `cargo xtask test` builds, or beside themselves, also
            // with another HAWSER_BIN_DIR.
            let beside = suite::static_dir();
            let places = [binaries::dir(), beside.with_file_name("release"), beside];
            staging.put_stripped(&binaries::find(name)?, &places.map(|dir| dir.join(name)))?;
        }
        for program in binaries.programs().chain(binaries.tests()) {
            staging.put_stripped(program, std::slice::from_ref(program))?;
        }
        for tool in ["xtask", "lab-guest"].map(|tool| suite::static_dir().join(tool)) {
            staging.put_stripped(&tool, std::slice::from_ref(&tool))?;
        }
        for (program, package) in suite::PROGRAMS {
            staging.put_program(program, package)?;
        }
        staging.put_files(Path::new(suite::XTABLES))?;
        staging.into_image(&laboratory.root)?;
        Ok(laboratory)
    }

    fn run(&self, suite: Suite, binaries: &TestBinaries, report: &mut Report) -> Result<()> {
        let name = format!("{} on {} ({})", suite.name(), self.kernel.name, self.kernel.release);
        let before = report.counts;
        let ran = part(&name, || match suite {
            Suite::PowerCut => power::run(self, report),
            _ => self.run_items(&suite.items(binaries, &self.kernel)?, &suite.name(), report),
        });
        if let Err(error) = ran {
            say(&format!("{name}: {error:#}"));
            report.counts.failed += 1;
            report.failures.push(name.clone());
        }
        let (passed, failed) = (report.counts.passed - before.passed, report.counts.failed - before.failed);
        say(&format!("==> {name}: {passed} passed, {failed} failed"));
        Ok(())
    }

    /// The root file system and the script, neither of which a guest changes.
    fn disks(&self, script: &Path) -> Result<Vec<Disk>> {
        let images = [self.root.clone(), padded(script)?];
        Ok(images.map(|image| Disk { image, writes: Writes::Dropped }).into())
    }

    fn run_items(&self, items: &[suite::Item], name: &str, report: &mut Report) -> Result<()> {
        let script = self.dir.join(format!("{name}.sh"));
        fs::write(&script, suite::script(items)).with_context(|| script.display().to_string())?;
        let console = self.dir.join(format!("{name}.console"));
        let disks = self.disks(&script)?;
        let mut guest = Guest::boot(&self.kernel, &self.initramfs, &disks, &console, TIMEOUT)?;
        let mut ended = 0;
        let mut failed_before = report.counts.failed;
        let mut passed_before = report.counts.passed;
        let mut current = String::new();
        while let Some(line) = guest.next_line()? {
            say(&line);
            if let Some(begun) = line.strip_prefix(suite::BEGIN) {
                begun.clone_into(&mut current);
                (passed_before, failed_before) = (report.counts.passed, report.counts.failed);
            } else if let Some(code) = line.strip_prefix(suite::END) {
                ended += 1;
                if code != "0" && report.counts.failed == failed_before {
                    report.counts.failed += 1;
                    report.failures.push(format!("{current} (exit code {code})"));
                } else if code == "0" && report.counts.passed == passed_before {
                    // A program that is no test binary is one test.
                    report.counts.passed += 1;
                }
            } else {
                report.counts.add(&line);
                report.failures.extend(failed_test(&line).map(|test| format!("{current}: {test}")));
            }
        }
        if ended < items.len() {
            let done = format!("{ended} of {} are done, and {current:?} is not", items.len());
            return Err(guest.why_it_ended()?.context(done));
        }
        Ok(())
    }
}

/// The script as a disk: whole sectors, the rest newlines.
fn padded(script: &Path) -> Result<PathBuf> {
    let mut text = fs::read(script).with_context(|| script.display().to_string())?;
    text.resize(text.len().next_multiple_of(4096), b'\n');
    let disk = script.with_extension("disk");
    fs::write(&disk, text).with_context(|| disk.display().to_string())?;
    Ok(disk)
}
