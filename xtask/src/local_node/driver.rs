//! How the node calls `hawser-csi`: the driver itself, and the script with which users ask it.

use std::ffi::OsString;
use std::fs;

use ::tests::examples;
use anyhow::{Context, Result};

use super::place::Place;

pub(super) const PROGRAM: &str = "hawser-csi";

/// Of the driver.
pub(super) fn arguments(place: &Place) -> Result<Vec<OsString>> {
    let node = fs::read_to_string("/proc/sys/kernel/hostname").context("the host name")?;
    let mut arguments: Vec<OsString> =
        ["--node-id", node.trim(), "--paths", "kubelet-dir", "--kubelet-dir"].map(OsString::from).into();
    arguments.extend([place.kubelet().into(), "--pool".into(), place.pool().into()]);
    arguments.extend(directories(place));
    arguments.extend(["--manifests".into(), place.manifests().into()]);
    arguments.extend(["--mount-image", examples::VOLUME_IMAGE].map(OsString::from));
    Ok(arguments)
}

fn directories(place: &Place) -> [OsString; 4] {
    ["--state-dir".into(), place.state().into(), "--run-dir".into(), place.run().into()]
}

/// The doctor needs all flags of the driver; the other commands need those of its directories.
pub(super) fn script(place: &Place) -> Result<String> {
    let words = |arguments: &[OsString]| {
        let quoted = arguments.iter().map(|word| format!("'{}'", word.to_string_lossy()));
        quoted.collect::<Vec<_>>().join(" ")
    };
    let program = place.program(PROGRAM);
    let program = program.display();
    let (all, directories) = (words(&arguments(place)?), words(&directories(place)));
    Ok(format!(
        "#!/bin/sh\n# hawser-csi for the node of cargo xtask up.\ncommand=$1\ncase \"$command\" in\n\
         doctor) shift; exec '{program}' doctor {all} \"$@\" ;;\n\
         mounts | volumes | snapshots | upgrade) shift; exec '{program}' \"$command\" {directories} \"$@\" ;;\n\
         *) exec '{program}' \"$@\" ;;\nesac\n"
    ))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_script_gives_each_command_the_flags_that_it_takes() {
        let place = Place::new(Path::new(super::super::place::DEFAULT_DIR)).unwrap();
        let script = script(&place).unwrap();
        let line = |command: &str| script.lines().find(|line| line.starts_with(command)).unwrap();
        for (command, has_pool) in [("doctor)", true), ("mounts |", false)] {
            let found = line(command);
            assert!(found.contains("'--state-dir' ") && found.contains("'--run-dir' "), "{found}");
            assert_eq!(found.contains("'--pool' "), has_pool, "{found}");
        }
    }
}
