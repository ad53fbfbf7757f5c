//! Asks the daemon again and again: each look at a name that is not there is a request of its own. So
//! the longest step is the longest time without an answer.

use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;

use crate::run::Run;

const BETWEEN: Duration = Duration::from_millis(1);

pub(crate) fn run(run: &Run) -> Result<()> {
    for number in 0_u64.. {
        let path = run.dir.join(format!("absent-{number}"));
        let answer = run.step(|| statx(CWD, &path, AtFlags::empty(), StatxFlags::BASIC_STATS))?;
        ensure!(answer.err() == Some(Errno::NOENT), "stat of a name that is not there: {answer:?}");
        if !run.goes_on() {
            break;
        }
        thread::park_timeout(BETWEEN);
    }
    Ok(())
}
