//! Images that say who the users of a manifest are.

use serde_json::json;
use sha2::{Digest, Sha256};
use tests::attacker::{self, Attack};
use tests::image::{Program, layer_of, write_archive_of};
use tests::{Node, Sandbox};

use crate::node;

const IMAGE: &str = "hawser.dev/users:test";
const PASSWD: &str = "2345:x:0:0::/root:/bin/sh\n2345:x:2345:0::/:/bin/sh\nweb:x:0:0::/root:/bin/sh\nminus:x:4294967295:5::/:/bin/sh\n";

/// The attacker's tools, and users who are all root.
fn put_image(node: &Node<'_>, user: &str) {
    let program = Program {
        image: IMAGE,
        binary: &attacker::busybox().expect("busybox"),
        path: "busybox",
        directories: &["tmp", "proc", "dev", "sys", "etc"],
    };
    let files = [("etc/passwd", PASSWD), ("etc/group", "disk:x:6:2345\n")];
    let layer = layer_of(&program, &files).expect("a layer");
    let digest = base16ct::lower::encode_string(&Sha256::digest(&layer));
    let config = json!({
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/"], "User": user},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{digest}")]},
    });
    write_archive_of(IMAGE, &config, &layer, &node.sandbox().path("i/users.tar")).expect("write the image");
}

/// A pod that says who it is.
fn pod(name: &str, context: &str) -> String {
    let context = format!("securityContext: {{{context}}}");
    Attack::new(name, "/busybox id").with_image(IMAGE).with_pod_fields(&context).yaml()
}

#[test]
fn an_image_does_not_make_root_of_the_user_that_the_manifest_names() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    put_image(&node, "");
    let context = "runAsNonRoot: true, runAsUser: 2345, runAsGroup: 2345";
    node.put_manifest("number.yaml", &pod("number", context)).unwrap();
    node.wait_for_phase("number", "Succeeded").unwrap();
    let said = node.logs("number").unwrap();
    assert!(said.starts_with("uid=2345") && said.contains("gid=2345"), "{said}");
    node.finish(&idle).unwrap();
}

#[test]
fn an_image_gives_groups_to_a_user_unless_the_policy_is_strict() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    put_image(&node, "");
    for (policy, groups) in [("Merge", "groups=6(disk),2345"), ("Strict", "groups=2345")] {
        let name = policy.to_lowercase();
        let context = format!("runAsUser: 2345, runAsGroup: 2345, supplementalGroupsPolicy: {policy}");
        node.put_manifest(&format!("{name}.yaml"), &pod(&name, &context)).unwrap();
        node.wait_for_phase(&name, "Succeeded").unwrap();
        let said = node.logs(&name).unwrap();
        assert!(said.trim_end().ends_with(groups), "{policy}: {said}");
    }
    node.finish(&idle).unwrap();
}

#[test]
fn an_image_whose_user_is_a_name_does_not_run_where_root_is_refused() {
    for user in ["web", "minus", "+0", "-5", "4294967295"] {
        let sandbox = Sandbox::new();
        let (node, idle) = node(&sandbox);
        put_image(&node, user);
        node.put_manifest("named.yaml", &pod("named", "runAsNonRoot: true")).unwrap();
        let waiting = tests::eventually("the container is refused", tests::node::TIMEOUT, || {
            let pod = node.get("pod", "named")?;
            let state = pod["status"]["containerStatuses"][0]["state"]["waiting"].clone();
            anyhow::ensure!(state["reason"] == "CreateContainerConfigError", "{pod}");
            Ok(state)
        })
        .unwrap();
        assert_eq!(
            waiting["message"],
            format!(
                "container has runAsNonRoot and image has non-numeric user ({user}), \
                 cannot verify user is non-root: set runAsUser"
            )
        );
        node.finish(&idle).unwrap();
    }
}
