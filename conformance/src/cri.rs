//! Suite `cri`: critest of cri-tools at our runtime, and at Debian's containerd with the same images and plugins.

mod expected;
mod images;
mod node;
mod outcome;
mod plan;
mod registry;
mod work;

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Instant;

use ::tests::binaries;
use anyhow::{Context, Result, anyhow, ensure};
use tempfile::TempDir;
use xtask::build;
use xtask::foreign::{CRITEST, critest, debian_program};
use xtask::progress::{complain, part, say};

use self::expected::{Counts, Expected};
use self::images::Images;
pub(super) use self::node::{COMMAND as NODE_COMMAND, enter as enter_node};
use self::outcome::{Outcome, Outcomes};
use self::plan::{Plan, Side, Streams};
use crate::ginkgo::quote;

/// What the protocol of streams changes.
const STREAMING: &str = "[k8s.io] Streaming";

/// A run, and which specs it has.
struct Run {
    title: &'static str,
    side: Side,
    streams: Streams,
    /// Only specs whose name begins with this.
    part: Option<&'static str>,
}

const RUNS: [Run; 3] = [
    Run { title: "hawser-runtime, SPDY", side: Side::Hawser, streams: Streams::Spdy, part: None },
    Run {
        title: "hawser-runtime, WebSocket",
        side: Side::Hawser,
        streams: Streams::WebSocket,
        part: Some(STREAMING),
    },
    Run { title: "containerd, SPDY", side: Side::Containerd, streams: Streams::Spdy, part: None },
];

/// Programs that critest or containerd start.
const PROGRAMS: [(&str, &str); 4] =
    [("runc", "runc"), ("iptables", "iptables"), ("ip", "iproute2"), ("ipcmk", "util-linux")];

/// What all runs share.
struct Ground {
    images: Images,
    plugins: PathBuf,
    containerd: PathBuf,
    _dir: TempDir,
}

/// `only`: of specs whose name contains this. `keep`: logs and reports stay.
pub(super) fn run(only: Option<&str>, keep: bool) -> Result<()> {
    let expected = Expected::read()?;
    let ground = Ground::prepare()?;
    let runs: Vec<(&Run, Result<Outcomes>)> = part("critest", || {
        Ok(thread::scope(|scope| {
            let ground = &ground;
            let start = |run| (run, scope.spawn(move || on(ground, run, only, keep)));
            let threads: Vec<_> = RUNS.iter().map(start).collect();
            let join = |(run, thread): (_, thread::ScopedJoinHandle<'_, Result<Outcomes>>)| {
                (run, thread.join().unwrap_or_else(|_| Err(anyhow!("the thread of the run panicked"))))
            };
            threads.into_iter().map(join).collect()
        }))
    })?;
    let counts = compare(&expected, &runs, only.is_none());
    say(&counts.to_string());
    ensure!(counts.failed == 0, "{} failed", counts.failed);
    ensure!(counts.passed > 0, "no spec passed");
    Ok(())
}

impl Run {
    /// As a regular expression: specs of the run's part, and of those only what was asked for.
    fn focus(&self, only: Option<&str>) -> Option<String> {
        match (self.part, only) {
            (Some(part), Some(only)) if !part.contains(only) => {
                Some(format!("{}.*{}", quote(part), quote(only.trim_start_matches(part))))
            }
            (part, only) => part.or(only).map(quote),
        }
    }
}

impl Ground {
    fn prepare() -> Result<Self> {
        let plugins = part("build the static binaries", build::products)?;
        let program = part(&format!("critest {CRITEST}"), critest)?;
        let containerd = part("containerd, runc, iptables", || {
            for (program, package) in PROGRAMS {
                debian_program(program, package)?;
            }
            debian_program("containerd", "containerd")
        })?;
        let dir = tempfile::Builder::new().prefix("hw-cri-images-").tempdir().context("for images")?;
        let images = part("images", || images::make(dir.path(), &program))?;
        Ok(Self { images, plugins, containerd, _dir: dir })
    }
}

fn on(ground: &Ground, run: &Run, only: Option<&str>, keep: bool) -> Result<Outcomes> {
    let started = Instant::now();
    // Short, since sockets are in it.
    let mut builder = tempfile::Builder::new();
    let dir =
        builder.prefix("hw-").rand_bytes(4).disable_cleanup(keep).tempdir_in("/tmp").context("for a node")?;
    if keep {
        say(&format!("{}: {}", run.title, dir.path().display()));
    }
    let plan = Plan {
        dir: dir.path().to_owned(),
        side: run.side,
        streams: run.streams,
        focus: run.focus(only),
        critest: ground.images.critest.clone(),
        images: ground.images.layout.clone(),
        plugins: ground.plugins.clone(),
        runtime: match run.side {
            Side::Hawser => binaries::find("hawser-runtime")?,
            Side::Containerd => ground.containerd.clone(),
        },
    };
    node::run(&plan)?;
    let report = fs::read(plan.report()).with_context(|| plan.report().display().to_string())?;
    let outcomes = Outcomes::parse(&report)?;
    // None of what was asked for may be in the run's part.
    ensure!(run.part.is_some() || !outcomes.is_empty(), "no spec ran");
    say(&format!("{}: {} in {:.0} s", run.title, outcomes.sums(), started.elapsed().as_secs_f64()));
    Ok(outcomes)
}

/// Prints what differs from the page, and what containerd fails.
fn compare(expected: &Expected, runs: &[(&Run, Result<Outcomes>)], is_whole: bool) -> Counts {
    let of_containerd = runs.iter().find(|(run, _)| run.side == Side::Containerd);
    let reference = of_containerd.and_then(|(_, outcomes)| outcomes.as_ref().ok());
    let mut all = Counts::default();
    for (run, outcomes) in runs {
        match outcomes {
            Err(error) => {
                complain(&format!("error: {}: {error:#}", run.title));
                all.failed += 1;
            }
            Ok(outcomes) if run.side == Side::Containerd => {
                for (spec, outcome) in outcomes.iter() {
                    if let Outcome::Failed(text) = outcome {
                        let line = text.lines().next().unwrap_or_default();
                        say(&format!("{} fails {spec}: {line}", run.title));
                    }
                }
            }
            Ok(outcomes) => {
                let (counts, complaints) =
                    expected.judge(outcomes, reference, is_whole && run.part.is_none());
                for complaint in complaints {
                    complain(&format!("{}: {complaint}", run.title));
                }
                say(&format!("{}: {counts}", run.title));
                all += counts;
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_of_a_part_has_only_what_was_asked_for_of_it() {
        let [whole, part, _] = &RUNS;
        assert_eq!(whole.focus(None), None);
        assert_eq!(whole.focus(Some("attach")).as_deref(), Some("attach"));
        let streaming = r"\[k8s\.io\] Streaming";
        assert_eq!(part.focus(None).as_deref(), Some(streaming));
        assert_eq!(part.focus(Some("Stream")).as_deref(), Some(streaming));
        assert_eq!(part.focus(Some("attach")), Some(format!("{streaming}.*attach")));
        assert_eq!(part.focus(Some("[k8s.io] Streaming x")), Some(format!("{streaming}.* x")));
    }
}
