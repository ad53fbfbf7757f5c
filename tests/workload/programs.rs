//! Starts programs while files of the volume are open. Each program's process closes its copies before
//! it begins, which waits for a daemon: meanwhile reads of its /proc/PID/stat wait too.

use std::fs::File;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::run::Run;

pub(crate) fn run(run: &Run) -> Result<()> {
    let path = run.dir.join("open");
    let _open = run.step(|| File::create_new(&path))?.context("create")?;
    while run.goes_on() {
        let mut program = Command::new("/bin/true");
        program.stdin(Stdio::null()).current_dir(&run.report);
        // No time limit: the start itself waits, and the suite has one.
        let status = run.step(|| program.status())?.context("start /bin/true")?;
        ensure!(status.success(), "/bin/true: {status}");
    }
    Ok(())
}
