//! One guest: a QEMU process that boots a kernel, and the lines of its suite.
//!
//! Invariant: it ends with this process, at its deadline, or when dropped,
//! whichever is first; no other QEMU of the machine is touched.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use xtask::foreign::{debian_program, find_program};
use xtask::progress::say;

use super::kernel::Kernel;

/// In emulation a boot takes 6 to 20 s; a guest under KVM that works answers within one.
const PROBE_DEADLINE: Duration = Duration::from_secs(20);
/// An emulated guest on a busy machine gets its timer's interrupts late.
const PATIENT: &str = "no_timer_check nowatchdog rcupdate.rcu_cpu_stall_suppress=1";
const MEMORY: &str = "3G";
/// QEMU 7.2 sometimes leaves wrong flags after cmpxchg16b, which Linux 6.12 uses to allocate
/// memory: a double fault. Without the feature kernels do it another way.
const EMULATED_CPU: &str = "max,cx16=off";

/// A disk of a guest, raw.
#[derive(Debug, Clone)]
pub(super) struct Disk {
    pub(super) image: PathBuf,
    pub(super) writes: Writes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Writes {
    /// Gone with the guest.
    Dropped,
    /// In the image once the guest has been asked, and never later.
    Kept,
}

#[derive(Debug)]
pub(super) struct Guest {
    qemu: Child,
    lines: Receiver<String>,
    deadline: Instant,
    timeout: Duration,
    console: PathBuf,
}

impl Guest {
    /// Boots `kernel` with the root file system as the first of `disks`.
    pub(super) fn boot(
        kernel: &Kernel,
        initramfs: &Path,
        disks: &[Disk],
        console: &Path,
        timeout: Duration,
    ) -> Result<Self> {
        let kvm = *KVM.get_or_init(|| kvm_works(kernel, initramfs, console));
        Self::start(kernel, initramfs, disks, console, timeout, kvm, "")
    }

    fn start(
        kernel: &Kernel,
        initramfs: &Path,
        disks: &[Disk],
        console: &Path,
        timeout: Duration,
        kvm: bool,
        words: &str,
    ) -> Result<Self> {
        let mut command = low_priority(&debian_program("qemu-system-x86_64", "qemu-system-x86")?)?;
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-net", "none"]);
        command.args(["-machine", if kvm { "q35,accel=kvm" } else { "q35,accel=tcg" }]);
        command.args(["-cpu", if kvm { "max" } else { EMULATED_CPU }, "-smp", "2", "-m", MEMORY]);
        command.arg("-kernel").arg(&kernel.image).arg("-initrd").arg(initramfs);
        command
            .args(["-append", &format!("console=ttyS0 panic=-1 quiet cgroup_no_v1=all {PATIENT} {words}")]);
        command.arg("-serial").arg(format!("file:{}", console.display()));
        command.args(["-chardev", "stdio,id=out,signal=off", "-serial", "chardev:out"]);
        for disk in disks {
            let kind = match disk.writes {
                Writes::Dropped => "snapshot=on,cache=unsafe",
                Writes::Kept => "cache=writethrough",
            };
            command.args(["-drive", &format!("file={},if=virtio,format=raw,{kind}", disk.image.display())]);
        }
        let log = console.with_extension("qemu");
        let log = File::create(&log).with_context(|| log.display().to_string())?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let mut qemu = command.spawn().context("start qemu-system-x86_64")?;
        let stdout = qemu.stdout.take().context("QEMU has a piped stdout")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let mut stdout = BufReader::new(stdout);
            let mut line = Vec::new();
            // Without its end it is what a power cut left of a line.
            while stdout.read_until(b'\n', &mut line).is_ok() && line.ends_with(b"\n") {
                if sender.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                    break;
                }
                line.clear();
            }
        });
        Ok(Self { qemu, lines, deadline: Instant::now() + timeout, timeout, console: console.to_path_buf() })
    }

    /// The suite's next line; none when the guest has ended.
    pub(super) fn next_line(&mut self) -> Result<Option<String>> {
        match self.lines.recv_timeout(self.deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => Ok(Some(line)),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => {
                bail!("the guest has not ended within {} s{}", self.timeout.as_secs(), self.log_tail())
            }
        }
    }

    /// The next line, if one comes before `moment`.
    pub(super) fn next_line_before(&mut self, moment: Instant) -> Option<String> {
        self.lines.recv_timeout(moment.saturating_duration_since(Instant::now())).ok()
    }

    /// A power cut; the lines that had left the guest by then.
    pub(super) fn cut(mut self) -> Result<Vec<String>> {
        self.qemu.kill().context("end QEMU")?;
        self.qemu.wait().context("wait for QEMU")?;
        Ok(self.lines.iter().collect())
    }

    /// [`Crashed`] where it was QEMU's own end.
    pub(super) fn why_it_ended(&mut self) -> Result<anyhow::Error> {
        let status = self.qemu.wait().context("wait for QEMU")?;
        Ok(match status.signal() {
            Some(signal) => Crashed { signal }.into(),
            None => anyhow!("the guest ended by itself{}", self.log_tail()),
        })
    }

    /// The kernel's last messages, which say why a guest ended.
    fn log_tail(&self) -> String {
        let mut words = String::new();
        for (what, file) in [("kernel", self.console.clone()), ("QEMU", self.console.with_extension("qemu"))]
        {
            let text = std::fs::read(&file).unwrap_or_default();
            let text = String::from_utf8_lossy(&text).into_owned();
            let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
            for line in lines.iter().skip(lines.len().saturating_sub(12)) {
                words.push_str(&format!("\n  {what}: {line}"));
            }
        }
        words
    }
}

/// The emulator ended, not its guest.
#[derive(Debug, thiserror::Error)]
#[error("QEMU was ended by signal {signal}")]
pub(super) struct Crashed {
    signal: i32,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ended_already = self.qemu.kill();
        let _reaped = self.qemu.wait();
    }
}

static KVM: OnceLock<bool> = OnceLock::new();

/// Nested virtualization may be offered and not work: only a guest that has
/// reached user space shows that it does.
fn kvm_works(kernel: &Kernel, initramfs: &Path, console: &Path) -> bool {
    if OpenOptions::new().read(true).write(true).open("/dev/kvm").is_err() {
        say("no /dev/kvm: the guests are emulated");
        return false;
    }
    let console = console.with_extension("probe");
    let answered = Guest::start(kernel, initramfs, &[], &console, PROBE_DEADLINE, true, "lab.probe")
        .and_then(|mut guest| Ok(guest.next_line()?.is_some_and(|line| line == "lab: probe answered")))
        .unwrap_or(false);
    say(if answered {
        "the guests run under KVM"
    } else {
        "/dev/kvm is there, but no guest starts with it: they are emulated"
    });
    answered
}

/// The program behind `nice`, since others need the processors, and ended by
/// the kernel when the thread that started it is gone.
fn low_priority(program: &Path) -> Result<Command> {
    let nice = find_program("nice").context("missing: nice (package coreutils)")?;
    let setpriv = find_program("setpriv").context("missing: setpriv (package util-linux)")?;
    let mut command = Command::new(nice);
    command.args(["-n", "10"]).arg(setpriv).args(["--pdeathsig", "KILL"]).arg(program);
    Ok(command)
}
