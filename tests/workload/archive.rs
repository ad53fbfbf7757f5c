//! tar packs and unpacks a tree; checksums and comparisons find any difference.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use anyhow::{Context, Result};
use tests::random::Random;

use crate::run::Run;

const FILES: usize = 80;

pub(crate) fn run(run: &Run) -> Result<()> {
    let tree = run.report.join("tree");
    make_tree(&tree, &mut run.random()).context("make a tree outside of the volume")?;
    let sums = run.program({
        let mut sums = run.command("find");
        sums.current_dir(&tree).args([".", "-type", "f", "-exec", "sha256sum", "{}", "+"]);
        sums
    })?;
    let list = run.report.join("sums");
    fs::write(&list, sums).context("write the checksums")?;
    let mut round = 0_u64;
    while run.goes_on() || round == 0 {
        let archive = run.dir.join(format!("tree-{round}.tar"));
        let (unpacked, copy) = (run.dir.join(format!("tree-{round}")), run.dir.join(format!("copy-{round}")));
        tar(run, "--create", &archive, &tree)?;
        run.step(|| fs::create_dir(&unpacked))?.context("mkdir")?;
        tar(run, "--extract", &archive, &unpacked)?;
        let mut check = run.command("sha256sum");
        run.program({
            check.current_dir(&unpacked).args(["--check", "--quiet", "--strict"]).arg(&list);
            check
        })?;
        // Modes, times and links too.
        tar(run, "--diff", &archive, &unpacked)?;
        let mut copied = run.command("cp");
        copied.arg("--archive").arg(&unpacked).arg(&copy);
        run.program(copied)?;
        let mut differences = run.command("diff");
        differences.args(["--recursive", "--no-dereference"]).arg(&tree).arg(&copy);
        run.program(differences)?;
        run.step(|| fs::remove_file(&archive))?.context("unlink")?;
        for dir in [&unpacked, &copy] {
            run.step(|| fs::remove_dir_all(dir))?.context("remove a tree")?;
        }
        round += 1;
    }
    Ok(())
}

fn tar(run: &Run, what: &str, archive: &Path, dir: &Path) -> Result<()> {
    let mut tar = run.command("tar");
    tar.arg(what).arg("--file").arg(archive).arg("--directory").arg(dir);
    if what != "--extract" {
        tar.arg(".");
    }
    run.program(tar).map(drop)
}

fn make_tree(tree: &Path, random: &mut Random) -> std::io::Result<()> {
    for number in 0..FILES {
        let dir = tree.join(format!("dir-{}", number % 9));
        fs::create_dir_all(&dir)?;
        let file = dir.join(format!("file-{number}"));
        let length = random.index(40 << 10);
        fs::write(&file, random.bytes(length))?;
        let mode = *random.pick(&[0o600, 0o644, 0o755]);
        fs::set_permissions(&file, fs::Permissions::from_mode(mode))?;
        if number % 8 == 0 {
            symlink(format!("file-{number}"), dir.join(format!("link-{number}")))?;
            fs::hard_link(&file, dir.join(format!("other-name-{number}")))?;
        }
    }
    Ok(())
}
