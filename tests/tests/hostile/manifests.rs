//! Manifests that are made to stop the kubelet: the pods of other files start,
//! clients are answered, and SIGTERM ends the kubelet in its time.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tests::attacker::Attack;
use tests::{Node, Sandbox};

use crate::node;

/// The kubelet waits up to 6 s for its clients, and for system calls that do not return; tests share the machine.
const DEADLINE: Duration = Duration::from_secs(30);
/// A healthy node needs a second or two, tests share the machine; the attack took minutes.
const PROMPT: Duration = Duration::from_secs(30);

/// 25 KB with 2,000 fields that no pod has.
fn unknown_fields() -> String {
    let fields: String = (0..2000).map(|field| format!("  u{field}: 1\n")).collect();
    format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: fields}}\nspec:\n  containers: []\n{fields}")
}

fn alias_bomb() -> String {
    let mut text = "a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n".to_owned();
    for level in 1..12 {
        let before = level - 1;
        text += &format!("a{level}: &a{level} [{}]\n", vec![format!("*a{before}"); 9].join(", "));
    }
    text
}

/// Puts every hostile file into the manifest directory.
fn attack(node: &Node<'_>) -> Result<()> {
    let dir = node.manifests();
    node.put_manifest("a-fields.yaml", &unknown_fields())?;
    node.put_manifest("a-brackets.yaml", &"[".repeat(400_000))?;
    node.put_manifest("a-bomb.yaml", &alias_bomb())?;
    node.put_manifest("a-large.yaml", &"- x\n".repeat(1 << 20))?;
    node.put_manifest("a-documents.yaml", &"---\na: b\n".repeat(10_000))?;
    node.put_manifest("a-deep.json", &"{\"a\":".repeat(200_000))?;
    fs::write(dir.join("a-nul.yaml"), b"a: \0\n")?;
    fs::write(dir.join("a-latin.yaml"), b"a: \xe4\n")?;
    symlink("/dev/zero", dir.join("a-zero.yaml"))?;
    ensure!(Command::new("mkfifo").arg(dir.join("a-fifo.yaml")).status()?.success());
    Ok(())
}

#[test]
fn hostile_manifests_delay_no_other_pod_and_not_the_kubelets_end() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox);
    attack(&node).unwrap();
    let rewriting = AtomicBool::new(true);
    std::thread::scope(|scope| {
        // Something hostile is being read at any moment.
        let (dir, rewriting) = (node.manifests(), &rewriting);
        scope.spawn(move || {
            while rewriting.load(Ordering::Relaxed) {
                let fields = format!("{}\n# {:?}", unknown_fields(), Instant::now());
                for (name, text) in [("a-again.yaml", fields), ("a-more.yaml", "[{a: ".repeat(80_000))] {
                    let temporary = dir.join(format!(".{name}.tmp"));
                    fs::write(&temporary, text).unwrap();
                    fs::rename(&temporary, dir.join(name)).unwrap();
                }
            }
        });
        let begun = Instant::now();
        let neighbour = Attack::new("neighbour", "echo well");
        let ran = crate::run(&node, &neighbour);
        let took = begun.elapsed();
        let applied =
            node.client_output(&["apply", "-f", node.manifests().join("a-brackets.yaml").to_str().unwrap()]);
        rewriting.store(false, Ordering::Relaxed);
        assert_eq!(ran.unwrap(), "well\n");
        assert!(took < PROMPT, "the neighbour took {took:?}");
        let told = String::from_utf8_lossy(&applied.unwrap().stderr).into_owned();
        assert!(told.contains("a-brackets.yaml:1:65: more than 64 levels"), "{told}");
    });
    for (file, words) in [
        ("a-brackets.yaml:1:65:", "at most 64 are read"),
        ("a-bomb.yaml:", "at most 50000 are read"),
        ("a-large.yaml:1:1:", "at most 3145728 (3 MiB) are read"),
        ("a-documents.yaml:", "at most 1000 are read"),
        ("a-deep.json:", "at most 64 are read"),
        ("a-nul.yaml:1:4:", "NUL"),
        ("a-latin.yaml:1:4:", "not UTF-8"),
    ] {
        node.wait_for_event("InvalidManifest", &[file, words]).unwrap();
    }
    end_while_reading(&mut node);
    // The next kubelet finds all of it when it starts, and is ended at once.
    node.start_kubelet().unwrap();
    end_while_reading(&mut node);
    node.start_kubelet().unwrap();
    node.wait_until_registered().unwrap();
    node.finish(&idle).unwrap();
}

fn end_while_reading(node: &mut Node<'_>) {
    node.put_manifest("a-again.yaml", &unknown_fields()).expect("put");
    node.put_manifest("a-more.yaml", &"[".repeat(3 << 20)).expect("put");
    let begun = Instant::now();
    let status = node.kubelet().and_then(|kubelet| kubelet.stop(DEADLINE)).expect("the kubelet ends");
    assert!(status.success(), "ended with {status} after {:?}", begun.elapsed());
}

#[test]
fn no_pods_grace_keeps_the_node_from_being_stopped() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox);
    let deaf = "trap '' TERM; while :; do sleep 1; done";
    let grace = |seconds: i64| format!("terminationGracePeriodSeconds: {seconds}");
    let slow = Attack::new("slow", deaf).yaml().replace(&grace(1), &grace(i64::MAX));
    node.put_manifest("slow.yaml", &slow).unwrap();
    node.wait_for_phase("slow", "Running").unwrap();
    node.client(&["stop", "--pods", "--grace-period", "1"]).unwrap();
    node.kubelet().and_then(|kubelet| kubelet.stop(DEADLINE)).unwrap();
    node.remove_manifest("slow.yaml").unwrap();
    node.start_kubelet().unwrap();
    node.wait_until_registered().unwrap();
    node.finish(&idle).unwrap();
}
