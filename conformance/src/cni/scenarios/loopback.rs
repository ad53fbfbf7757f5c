//! `loopback`: `lo` up, `lo` down.

use serde_json::json;

use super::super::differences::Difference;
use super::super::scenario::{PrevResult, Scenario, Step, add, check, del, network};
use super::expected::{reference_has, succeeds};

pub(super) fn scenarios() -> Vec<Scenario> {
    let lo = |name: &str| Scenario::new(format!("loopback: {name}"), network(json!({ "type": "loopback" })));
    let prev_result = json!({ "cniVersion": "1.0.0", "interfaces": [{ "name": "eth0", "mac": "c2:11:22:33:44:01" }],
                              "ips": [{ "address": "10.1.0.2/24" }], "dns": { "search": ["s"] } });
    vec![
        lo("a life").add("c1").check("c1").del("c1").del("c1"),
        lo("lo as the interface")
            .call(add("c1").ifname("lo"))
            .call(check("c1").ifname("lo"))
            .call(del("c1").ifname("lo")),
        lo("CNI_ARGS that are none").call(add("c1").args("none")).call(del("c1").args("none")),
        lo("behind another plugin").call(add("c1").prev_result(PrevResult::Given(prev_result))).del("c1"),
        lo("CHECK with lo down").add("c1").ip("c1", "link set lo down").check("c1").del("c1"),
        lo("CHECK without a result").add("c1").call(check("c1").prev_result(PrevResult::Missing)),
        lo("an address on lo")
            .ip("c1", "addr add 10.1.0.2/32 dev lo")
            .add("c1")
            .check("c1")
            .del("c1")
            .differs([
                Difference::new("atomic-add", "*/c1/link/lo/flags").reference("LOOPBACK,UP").ours("LOOPBACK"),
                reference_has("atomic-add", "*/c1/address/lo ::1/128"),
                reference_has("atomic-add", "*/c1/route/local * dev lo"),
                Difference::new("atomic-add", "3 CHECK c1/loopback/answer")
                    .reference("exit status: 0, nothing")
                    .ours("exit status: 1, error 999: loopback interface is down"),
            ]),
        lo("a second address of 127/8").ip("c1", "addr add 127.0.0.2/8 dev lo").add("c1").del("c1"),
        lo("a v6 address on lo")
            .ip("c1", "link set lo up\naddr add fd00:1::1/128 dev lo")
            .add("c1")
            .check("c1")
            .del("c1"),
        lo("without IPv6")
            .step(Step::Container("c1"))
            .step(Step::Sysctl { netns: "c1", name: "net/ipv6/conf/all/disable_ipv6", value: "1" })
            .add("c1")
            .check("c1")
            .del("c1"),
        lo("DEL without a namespace").call(del("c1").netns("")),
        lo("DEL of a vanished namespace").add("c1").step(Step::Vanish("c1")).del("c1"),
        lo("ADD to a namespace that is not there").call(add("c1").netns("/run/netns/absent")),
        lo("ADD to a file")
            .step(Step::File("/run/file".to_owned(), String::new()))
            .call(add("c1").netns("/run/file"))
            .call(del("c1").netns("/run/file"))
            .differs([succeeds(
                "del-cleans-up",
                "3 DEL c1/loopback",
                "999: unknown FS magic on \"/run/file\": 1021994",
            )]),
    ]
}
