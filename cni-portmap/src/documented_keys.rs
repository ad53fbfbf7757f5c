//! The keys of portmap are listed in docs/CNI.md, and are read.

use cni_plugin::{Command, Invocation, NetConf};
use serde_json::json;
use tests::cni_keys::{assert_documented, assert_read};

use crate::config::{Config, KEYS, Purpose};

#[test]
fn the_document_has_the_keys_of_portmap_and_each_is_read() {
    assert_documented("portmap", KEYS);
    let base = json!({
        "name": "n",
        "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}
    });
    assert_read(KEYS, &base, |configuration| {
        let call = Invocation {
            command: Command::Add,
            container_id: "c".to_owned(),
            netns: Some("/run/netns/c".into()),
            ifname: "eth0".to_owned(),
            args: String::new(),
            path: Vec::new(),
            conf: NetConf::parse(configuration.to_string().into_bytes()).unwrap(),
        };
        Config::read(&call, Purpose::Keep).map(drop).map_err(|e| e.to_string())
    });
}
