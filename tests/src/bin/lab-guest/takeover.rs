//! A takeover from a daemon that was killed and cannot end before another one answers for it.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tests::csi::scene::{Flags, Scene, TIMEOUT, create_request};
use tests::csi::snapshots::with;
use tests::loop_device::{FileSystem, IMAGE_BYTES, LoopMount};
use tests::{Sandbox, eventually};

const FILES: usize = 1200;
/// Less than the three deadlines after which a volume is given up.
const DEADLINE: Duration = Duration::from_secs(20);

/// While the pool is frozen, a change waits in a directory that the kernel has locked for it, and the
/// daemon asks the kernel to forget files of that directory. Killed then, it does not end.
pub(super) fn from_a_daemon_that_cannot_end() -> Result<()> {
    takes_over(DEADLINE)
}

/// The driver kills no daemon then, but follows one that is killed.
pub(super) fn from_a_daemon_that_cannot_end_without_a_deadline() -> Result<()> {
    takes_over(Duration::ZERO)
}

fn takes_over(deadline: Duration) -> Result<()> {
    let sandbox = Sandbox::new();
    let pool = LoopMount::new(&sandbox, "pool", FileSystem::Ext4, IMAGE_BYTES)?;
    let deadline = deadline.as_secs().to_string();
    let flags = Flags::process_with_keeper().with(&["--daemon-deadline".to_owned(), deadline]);
    let scene = Scene::start_in(sandbox, flags);
    let caller = scene.caller();
    let request = with(create_request("pvc-1"), &[("knownInodeLimit", "1000"), ("dataPath", "daemon")]);
    let id = caller.create(request)?.volume_id;
    caller.stage(&id)?;
    caller.publish(&id, "one")?;
    let directory = caller.target_path("one").join("directory");
    fs::create_dir(&directory)?;
    // Started before: the new processes of this one would wait for the frozen pool.
    let mut freezer = Helper::start(
        "read go; fsfreeze --freeze \"$0\" && echo done; read end; fsfreeze --unfreeze \"$0\"",
        pool.dir(),
    )?;
    let mut changer = Helper::start("read go; echo done; mkdir \"$0/new\"", &directory)?;
    scene.sandbox.switch_fuse_guard_off();
    for n in 0..FILES {
        fs::write(directory.join(format!("file-{n}")), "")?;
    }
    let [daemon] = scene.serving_daemons()[..] else { anyhow::bail!("not one daemon") };
    freezer.go()?;
    changer.go()?;
    eventually("the daemon waits for the directory", TIMEOUT, || {
        ensure!(waits_in_write(daemon, "pruner")?, "its pruner does not wait");
        Ok(())
    })?;
    // It does not end yet.
    scene.signal_daemon(Signal::SIGKILL);
    freezer.end().context("thaw the pool")?;
    eventually("only the pruner is left", TIMEOUT, || {
        // The driver may have looked meanwhile.
        let has_ended = !Path::new("/proc").join(daemon.to_string()).exists();
        ensure!(has_ended || linux::process::only_notifies_fuse(daemon), "it has other threads");
        Ok(())
    })?;
    changer.end().context("the change")?;
    ensure!(directory.join("new").is_dir(), "the change is lost");
    let [successor] = scene.serving_daemons()[..] else {
        anyhow::bail!("{:?} serve", scene.serving_daemons())
    };
    ensure!(successor != daemon, "it is the same daemon");
    eventually("the killed daemon ends", TIMEOUT, || {
        ensure!(!Path::new("/proc").join(daemon.to_string()).exists(), "it is still there");
        Ok(())
    })?;
    fs::write(directory.join("last"), "x")?;
    caller.take_down(&id, &["one"])?;
    scene.assert_nothing_left();
    scene.end_keeper();
    Ok(())
}

/// A shell that begins once it is asked to, and answers `done`.
struct Helper(Child);

impl Helper {
    fn start(script: &str, path: &Path) -> Result<Self> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
        Ok(Self(command.spawn().context("start a shell")?))
    }

    fn go(&mut self) -> Result<()> {
        self.0.stdin.as_mut().context("its input")?.write_all(b"go\n")?;
        let mut answer = [0; 5];
        self.0.stdout.as_mut().context("its output")?.read_exact(&mut answer)?;
        ensure!(&answer == b"done\n", "{answer:?}");
        Ok(())
    }

    /// Lets it end, and waits for that.
    fn end(&mut self) -> Result<()> {
        drop(self.0.stdin.take());
        let status = self.0.wait()?;
        ensure!(status.success(), "{status}");
        Ok(())
    }
}

/// Whether the process's thread of that name sleeps uninterruptibly in write(2).
fn waits_in_write(pid: i32, name: &str) -> Result<bool> {
    for task in fs::read_dir(format!("/proc/{pid}/task")).context("the daemon's threads")? {
        let task = task?.path();
        let read = |file: &str| fs::read_to_string(task.join(file)).context("a thread");
        if read("comm")?.trim_end() == name {
            let call = read("syscall")?;
            return Ok(read("status")?.contains("State:\tD") && call.starts_with("1 "));
        }
    }
    anyhow::bail!("no thread {name}")
}
