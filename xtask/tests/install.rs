//! `cargo xtask install` as a program, on directories of plugins that are
//! shell scripts.

#![expect(clippy::unwrap_used, reason = "a failure of the set-up fails the test")]

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;
use tests::binaries::{CNI_PLUGINS, PRODUCTS};
use tests::trace_calls::{self, Call, Fault, Injection, Run};

/// asm-generic/fcntl.h.
const O_CREAT: u64 = 0o100;

/// What one sees of a file: content or link, mode, owner, group.
type Seen = (String, u32, u32, u32);

struct Node {
    dir: TempDir,
}

impl Node {
    /// A directory of what is to be installed, and a plugin directory as a
    /// distribution leaves it: of others' files, links, and without portmap.
    fn new() -> Self {
        let node = Self { dir: TempDir::new().unwrap() };
        fs::create_dir_all(node.ours()).unwrap();
        fs::create_dir_all(node.bin()).unwrap();
        for (_package, binary) in PRODUCTS.into_iter().chain(CNI_PLUGINS) {
            node.build(binary, "1");
        }
        node.put("multi-call", "theirs", 0o755);
        node.put("bridge", "their bridge", 0o4710);
        chown(node.bin().join("bridge"), Some(12), Some(34)).unwrap();
        // Of a chown the kernel takes the set-user-id bit away.
        fs::set_permissions(node.bin().join("bridge"), Permissions::from_mode(0o4710)).unwrap();
        symlink("multi-call", node.bin().join("host-local")).unwrap();
        symlink("/nowhere", node.bin().join("loopback")).unwrap();
        node
    }

    fn ours(&self) -> PathBuf {
        self.dir.path().join("ours")
    }

    fn bin(&self) -> PathBuf {
        self.dir.path().join("bin")
    }

    fn build(&self, binary: &str, release: &str) {
        let answer = r#"{"cniVersion":"1.1.0","supportedVersions":["1.0.0","1.1.0"]}"#;
        let script = format!("#!/bin/sh\n# release {release}\necho '{answer}'\n");
        fs::write(self.ours().join(binary), script).unwrap();
        fs::set_permissions(self.ours().join(binary), Permissions::from_mode(0o700)).unwrap();
    }

    fn put(&self, name: &str, content: &str, mode: u32) {
        fs::write(self.bin().join(name), content).unwrap();
        fs::set_permissions(self.bin().join(name), Permissions::from_mode(mode)).unwrap();
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command.arg("install").arg("--cni-bin-dir").arg(self.bin()).args(arguments);
        command.env("HAWSER_BIN_DIR", self.ours());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn succeed(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{out}{err}");
        out.into_owned()
    }

    fn fail(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    fn traced(&self, arguments: &[&str], injection: Option<Injection>) -> Run {
        trace_calls::run(&self.command(arguments), b"", injection).unwrap()
    }

    fn seen(&self) -> BTreeMap<String, Seen> {
        let entries = fs::read_dir(self.bin()).unwrap().map(Result::unwrap);
        entries.map(|entry| (entry.file_name().into_string().unwrap(), seen(&entry.path()))).collect()
    }

    fn assert_ours(&self, release: &str) {
        for (_package, plugin) in CNI_PLUGINS {
            let (content, mode, ..) = seen(&self.bin().join(plugin));
            assert!(content.contains(&format!("# release {release}\n")), "{plugin}: {content}");
            assert_eq!(mode & 0o7777, 0o755, "{plugin}");
        }
    }
}

fn seen(path: &Path) -> Seen {
    let found = fs::symlink_metadata(path).unwrap();
    let content = if found.is_symlink() {
        format!("-> {}", fs::read_link(path).unwrap().display())
    } else {
        fs::read_to_string(path).unwrap()
    };
    (content, found.mode(), found.uid(), found.gid())
}

#[test]
fn install_replaces_and_put_back_restores_content_mode_owner_links_and_absence() {
    let node = Node::new();
    let before = node.seen();
    let told = node.succeed(&[]);
    node.assert_ours("1");
    assert_eq!(seen(&node.bin().join("multi-call")).0, "theirs", "a link's target is not the plugin");
    assert_eq!(seen(&node.bin().join("bridge.before-hawser")), before["bridge"]);
    for line in [
        "bridge: installed (CNI 1.1.0); the one before is kept as bridge.before-hawser",
        "portmap: installed (CNI 1.1.0); there was none before",
    ] {
        assert!(told.contains(line), "{told}");
    }
    let told = node.succeed(&["--put-back"]);
    assert!(told.contains("portmap: removed; there was none before"), "{told}");
    assert_eq!(node.seen(), before);
}

#[test]
fn installing_again_keeps_what_was_kept_first() {
    let node = Node::new();
    let before = node.seen();
    node.succeed(&[]);
    for (_package, plugin) in CNI_PLUGINS {
        node.build(plugin, "2");
    }
    node.succeed(&[]);
    node.assert_ours("2");
    node.succeed(&[]);
    assert_eq!(seen(&node.bin().join("bridge.before-hawser")), before["bridge"]);
    node.succeed(&["--put-back"]);
    node.succeed(&["--put-back"]);
    assert_eq!(node.seen(), before);
}

#[test]
fn what_somebody_else_installed_since_is_not_overwritten() {
    let node = Node::new();
    node.succeed(&[]);
    fs::remove_file(node.bin().join("bridge")).unwrap();
    node.put("bridge", "their newer bridge", 0o755);
    let told = node.fail(&[]);
    assert!(told.contains("replaced after it was installed"), "{told}");
    let told = node.succeed(&["--put-back"]);
    assert!(told.contains("bridge: left alone"), "{told}");
    assert_eq!(seen(&node.bin().join("bridge")).0, "their newer bridge");
    assert_eq!(seen(&node.bin().join("bridge.before-hawser")).0, "their bridge");
    assert_eq!(seen(&node.bin().join("host-local")).0, "-> multi-call");
}

#[test]
fn put_back_works_without_the_record() {
    let node = Node::new();
    let before = node.seen();
    node.succeed(&[]);
    fs::remove_file(node.bin().join(".hawser-installed")).unwrap();
    node.succeed(&["--put-back"]);
    assert_eq!(node.seen(), before);
}

#[test]
fn a_plugin_that_does_not_answer_version_replaces_nothing() {
    let node = Node::new();
    let before = node.seen();
    fs::write(node.ours().join("portmap"), "#!/bin/sh\nexit 3\n").unwrap();
    let told = node.fail(&[]);
    assert!(told.contains("VERSION") && told.contains("exit status: 3"), "{told}");
    node.succeed(&["--put-back"]);
    assert_eq!(node.seen(), before);
}

#[test]
fn a_plugin_that_runs_is_replaced() {
    let node = Node::new();
    // A program and not a script: the kernel refuses to open a running one for writing.
    fs::remove_file(node.bin().join("bridge")).unwrap();
    // By a program: a child that another test starts meanwhile would keep a file of this
    // process open for writing, and what is open for writing does not run.
    let copied = Command::new("cp").arg("/bin/cat").arg(node.bin().join("bridge")).status();
    assert!(copied.unwrap().success());
    let before = fs::read(node.bin().join("bridge")).unwrap();
    // Ends with its stdin, and so with this test.
    let mut running = Command::new(node.bin().join("bridge")).stdin(Stdio::piped()).spawn().unwrap();
    node.succeed(&[]);
    node.assert_ours("1");
    node.succeed(&["--put-back"]);
    assert!(running.try_wait().unwrap().is_none());
    assert!(running.wait().unwrap().success());
    assert_eq!(fs::read(node.bin().join("bridge")).unwrap(), before);
}

/// After every system call by which the directory is changed.
#[test]
fn killed_at_any_moment_each_plugin_is_whole_and_both_directions_can_be_run_again() {
    let (install, put_back) = (&[][..], &["--put-back"][..]);
    for direction in [install, put_back] {
        let prepared = || {
            let node = Node::new();
            let before = node.seen();
            if direction == put_back {
                node.succeed(install);
            }
            (node, before)
        };
        let calm = prepared().0.traced(direction, None);
        assert_eq!(calm.code, Some(0), "{}", calm.stderr);
        let changes: Vec<&Call> = calm.calls.iter().filter(|call| changes_the_directory(call)).collect();
        assert!(changes.len() > 10, "{changes:#?}");
        for change in changes {
            for again in [install, put_back] {
                let (node, before) = prepared();
                let injection = Injection { point: change.point, name: change.name, fault: Fault::KillAfter };
                let run = node.traced(direction, Some(injection));
                let injected = trace_calls::ensure_injected(&run).unwrap();
                assert_eq!((place(injected), run.code), (place(change), None));
                let now = node.seen();
                for plugin in ["bridge", "host-local", "loopback"] {
                    let found = &now[plugin];
                    let whole = *found == before[plugin] || found.0.ends_with("'\n");
                    assert!(whole, "after {change}: {plugin} is {found:?}");
                }
                node.succeed(again);
                if again == install {
                    node.assert_ours("1");
                    node.succeed(put_back);
                }
                assert_eq!(node.seen(), before, "after {change}, then {again:?}");
            }
        }
    }
}

fn changes_the_directory(call: &Call) -> bool {
    let creates = call.arguments[2] & O_CREAT != 0;
    let changes = match call.name {
        "openat" => creates,
        name => ["link", "linkat", "rename", "unlink", "unlinkat", "fsync"].contains(&name),
    };
    changes && call.point.process == 0 && call.object.contains("/bin") && call.result >= Some(0)
}

/// The call and its file within the node's directory.
fn place(call: &Call) -> (&str, &str) {
    (call.name, call.object.split_once("/bin").map_or("", |(_, name)| name))
}
