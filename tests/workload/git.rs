//! git commits, clones, collects garbage and checks every object.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::run::{Run, expect_content};

const COMMITS: usize = 3;
const FILES: usize = 12;

pub(crate) fn run(run: &Run) -> Result<()> {
    let mut random = run.random();
    let mut round = 0_u64;
    while run.goes_on() || round == 0 {
        let (source, clone) =
            (run.dir.join(format!("source-{round}")), run.dir.join(format!("clone-{round}")));
        git(run, &run.dir, &["init", "--quiet", "--initial-branch=main", &text(&source)])?;
        let mut files: Vec<Vec<u8>> = Vec::new();
        for commit in 0..COMMITS {
            files = (0..FILES).map(|number| random.bytes(100 + 700 * number)).collect();
            for (number, content) in files.iter().enumerate() {
                let path = source.join(format!("file-{number}"));
                run.step(|| fs::write(&path, content))?.context("write")?;
            }
            git(run, &source, &["add", "--all"])?;
            git(run, &source, &["commit", "--quiet", "--message", &format!("commit {commit}")])?;
        }
        git(run, &run.dir, &["clone", "--quiet", "--no-local", &text(&source), &text(&clone)])?;
        git(run, &source, &["gc", "--quiet"])?;
        for repository in [&source, &clone] {
            git(run, repository, &["fsck", "--full", "--strict"])?;
            ensure!(git(run, repository, &["status", "--porcelain"])?.is_empty(), "a file has changed");
            let commits = git(run, repository, &["rev-list", "--count", "HEAD"])?;
            ensure!(commits.trim() == COMMITS.to_string(), "{commits} commits, not {COMMITS}");
            for (number, content) in files.iter().enumerate() {
                expect_content(&repository.join(format!("file-{number}")), content)?;
            }
            run.step(|| fs::remove_dir_all(repository))?.context("remove a repository")?;
        }
        round += 1;
    }
    Ok(())
}

fn git(run: &Run, repository: &Path, arguments: &[&str]) -> Result<String> {
    let mut git = run.command("git");
    git.arg("-C").arg(repository);
    let settings =
        ["user.name=Test", "user.email=test@example.com", "gc.auto=0", "safe.directory=*", "core.fsync=all"];
    for setting in settings {
        git.args(["-c", setting]);
    }
    git.args(arguments);
    run.program(git)
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
