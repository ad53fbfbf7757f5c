//! Volumes and links in the place of what isolates a container.

use anyhow::ensure;
use tests::attacker::Attack;
use tests::node::TIMEOUT;
use tests::{Node, Sandbox, eventually};

use crate::{node, run};

/// A setting of the pod's own network namespace, so that a broken promise breaks no machine.
const SETTING: &str = "/proc/sys/net/ipv4/ip_default_ttl";

/// Waits until the status says that the container is not started, for a reason with these words.
fn wait_for_refusal(node: &Node<'_>, pod: &str, words: &str) {
    eventually(&format!("{pod} is refused"), TIMEOUT, || {
        let status = node.get("pod", pod)?["status"].to_string();
        ensure!(status.contains(words), "{status}\nlog: {:?}", node.logs(pod));
        Ok(())
    })
    .expect("the refusal is in the pod's status");
}

#[test]
fn a_volume_at_dev_never_opens_proc_sys_to_the_next_container() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    // The first run plants the link; the second one tries the masks.
    let script = format!(
        "if [ -L /dev/null ]; then cat /proc/interrupts; echo 77 >/proc/interrupts; cat {SETTING}; exit 0; fi
rm -f /dev/null; ln -s {SETTING} /dev/null; exit 1"
    );
    let yaml = Attack::new("planter", &script)
        .with_pod_fields("volumes: [{name: shared, emptyDir: {}}]")
        .with_container_fields("volumeMounts: [{name: shared, mountPath: /dev}]")
        .yaml()
        .replace("restartPolicy: Never", "restartPolicy: OnFailure");
    node.put_manifest("planter.yaml", &yaml).unwrap();
    wait_for_refusal(&node, "planter", "container_path: refused: ");
    node.finish(&idle).unwrap();
}

#[test]
fn masks_hold_against_a_root_user_inside() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let script = format!(
        "for f in /proc/kcore /proc/interrupts /proc/timer_list /proc/sched_debug /proc/keys; do
  [ -e $f ] || continue
  [ -z \"$(cat $f)\" ] || echo \"readable: $f\"
  chmod 777 $f 2>/dev/null && echo \"mode changed: $f\"
  # The mask is a device of its own, not one that the container can reach otherwise.
  [ \"$(stat -c %d $f)\" = \"$(stat -c %d /dev/null)\" ] && echo \"shared with /dev: $f\"
  umount $f 2>/dev/null && echo \"unmounted: $f\"
done
for d in /proc/acpi /proc/asound /proc/scsi /sys/firmware /sys/devices/virtual/powercap; do
  [ -d $d ] || continue
  [ -z \"$(ls -A $d)\" ] || echo \"listed: $d\"
  touch $d/file 2>/dev/null && echo \"written: $d\"
done
for w in {SETTING} /proc/sysrq-trigger /proc/irq/default_smp_affinity; do
  (echo 1 >$w) 2>/dev/null && echo \"written: $w\"
done
rm -f /dev/null; ln -s {SETTING} /dev/null
[ -z \"$(cat /proc/interrupts)\" ] || echo 'readable through /dev/null'
echo done"
    );
    assert_eq!(run(&node, &Attack::new("inside", &script)).unwrap(), "done\n");
    node.finish(&idle).unwrap();
}

#[test]
fn a_link_in_a_volume_never_moves_the_next_containers_mount_onto_proc() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    // The first run swaps the directory that holds a mount point for a link.
    let script = "if grep -q ' /proc/sys/kernel ' /proc/self/mountinfo; then echo moved; exit 0; fi
[ -L /shared/a ] && exit 0
mv /shared/a /shared/b && ln -s /proc/sys /shared/a; exit 1";
    let yaml = Attack::new("swapper", script)
        .with_pod_fields("volumes: [{name: shared, emptyDir: {}}, {name: nested, emptyDir: {}}]")
        .with_container_fields(
            "volumeMounts: [{name: shared, mountPath: /shared}, {name: nested, mountPath: /shared/a/kernel}]",
        )
        .yaml()
        .replace("restartPolicy: Never", "restartPolicy: OnFailure");
    node.put_manifest("swapper.yaml", &yaml).unwrap();
    wait_for_refusal(&node, "swapper", "find mount point /shared/a/kernel: link ");
    node.finish(&idle).unwrap();
}
