//! fio writes blocks with checksums from four jobs, and reads and verifies them.

use std::fs;

use anyhow::{Context, Result};

use crate::run::Run;

pub(crate) fn run(run: &Run, how: &[&str]) -> Result<()> {
    let mut round = 0_u64;
    while run.goes_on() || round == 0 {
        let dir = run.dir.join(format!("fio-{round}"));
        run.step(|| fs::create_dir(&dir))?.context("mkdir")?;
        let mut fio = run.command("fio");
        fio.args(["--name=kill", "--rw=randwrite", "--size=1m", "--bsrange=4k-16k", "--numjobs=4"]).args(how);
        fio.args(["--verify=crc32c", "--verify_backlog=32", "--do_verify=1", "--verify_fatal=1"]);
        fio.args(["--verify_state_save=0", "--group_reporting", "--output-format=normal"]);
        fio.arg(format!("--directory={}", dir.display())).arg(format!("--randseed={}", run.seed + round));
        run.program(fio)?;
        run.step(|| fs::remove_dir_all(&dir))?.context("remove fio's files")?;
        round += 1;
    }
    Ok(())
}
