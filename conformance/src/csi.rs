//! Suite `csi`: other people's client at our driver, and their driver under our kubelet.

mod foreign_driver;
mod report;
mod sanity;

use anyhow::{Result, ensure};
use xtask::build;
use xtask::foreign::{CSI_SANITY, csi_sanity, debian_program};
use xtask::progress::{complain, part, say};

use self::report::Counts;

/// In place of a spec's text: the part that is not csi-sanity's.
const FOREIGN_DRIVER: &str = "foreign-driver";

/// `only`: `foreign-driver`, or of csi-sanity what has this in its text.
pub(super) fn run(only: Option<&str>) -> Result<()> {
    part("build the static binaries", build::products)?;
    let mut all = Counts::default();
    if only != Some(FOREIGN_DRIVER) {
        for (program, package) in [("mkfs.xfs", "xfsprogs"), ("mkfs.ext4", "e2fsprogs")] {
            debian_program(program, package)?;
        }
        let program = part(&format!("csi-sanity {CSI_SANITY}"), csi_sanity)?;
        for ground in sanity::GROUNDS {
            let title = format!("csi-sanity on {}", ground.title);
            all += count(part(&title, || sanity::run(&program, &ground, only)));
        }
    }
    if only.is_none_or(|only| only == FOREIGN_DRIVER) {
        let program = part("csi-test's mock driver", foreign_driver::build)?;
        all += count(part("the mock driver under our kubelet", || foreign_driver::run(&program)));
    }
    say(&all.to_string());
    ensure!(all.failed == 0, "{} failed", all.failed);
    ensure!(all.passed > 0, "no spec ran");
    Ok(())
}

/// A part that could not be finished is one failure, and the next one runs.
fn count(part: Result<Counts>) -> Counts {
    part.unwrap_or_else(|error| {
        complain(&format!("error: {error:#}"));
        Counts { failed: 1, ..Counts::default() }
    })
}
