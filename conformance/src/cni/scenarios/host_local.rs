//! `host-local`: every key, called alone.

use serde_json::{Value, json};

use super::super::differences::Difference;
use super::super::scenario::{Call, Scenario, Step, add, check, del, list};
use super::expected::{says, succeeds};
use super::networks::{at_version, host_local, v4, with};

const LEASES: &str = "/var/lib/cni/networks/net";

pub(super) fn scenarios() -> Vec<Scenario> {
    [ranges(), requests(), directory(), refused()].concat()
}

fn life(name: &str, ipam: &Value) -> Scenario {
    Scenario::new(format!("host-local: {name}"), host_local(ipam))
        .add("c1")
        .check("c1")
        .add("c2")
        .del("c1")
        .del("c1")
        .add("c3")
        .del("c2")
        .del("c3")
}

fn ranges() -> Vec<Scenario> {
    let resolv_conf = "# a comment\nnameserver 192.0.2.1\n nameserver  2001:db8::1\ndomain d.example\n\
                       search a.example b.example\nsearch c.example\noptions ndots:2 timeout:1\n; no\nbad line\n";
    vec![
        life("subnet", &json!({ "subnet": "10.1.0.0/24" })),
        life("subnet v6", &json!({ "subnet": "fd00:1::/64" })),
        life("rangeStart and rangeEnd", &json!({ "subnet": "10.1.0.0/24", "rangeStart": "10.1.0.40", "rangeEnd": "10.1.0.41" })),
        life("rangeStart and rangeEnd v6", &json!({ "subnet": "fd00:1::/64", "rangeStart": "fd00:1::1:0", "rangeEnd": "fd00:1::1:3" })),
        life("gateway", &json!({ "subnet": "10.1.0.0/24", "gateway": "10.1.0.3" })),
        life("gateway elsewhere", &json!({ "subnet": "10.1.0.0/24", "gateway": "10.9.0.1" })),
        life("the gateway is rangeStart", &json!({ "subnet": "10.1.0.0/24", "rangeStart": "10.1.0.1", "rangeEnd": "10.1.0.4" })),
        life("two ranges in one set", &json!({ "ranges": [[
            { "subnet": "10.1.0.0/24", "rangeStart": "10.1.0.9", "rangeEnd": "10.1.0.9" },
            { "subnet": "10.2.0.0/24", "rangeStart": "10.2.0.8", "rangeEnd": "10.2.0.9", "gateway": "10.2.0.3" }
        ]] })),
        life("two sets", &json!({ "ranges": [[{ "subnet": "10.1.0.0/24" }], [{ "subnet": "fd00:1::/64" }]] })),
        life("subnet and ranges", &json!({ "subnet": "10.1.0.0/24", "ranges": [[{ "subnet": "fd00:1::/64" }], [{ "subnet": "10.2.0.0/24" }]] })),
        life("a subnet of two addresses", &json!({ "subnet": "10.1.0.0/30" })),
        life("a range of the whole subnet", &json!({ "subnet": "10.1.0.0/29", "rangeStart": "10.1.0.1", "rangeEnd": "10.1.0.6" })),
        life("IPv4 mapped into IPv6", &json!({ "subnet": "::ffff:10.1.0.0/120" })),
        life("routes", &json!({ "subnet": "10.1.0.0/24", "routes": [
            { "dst": "0.0.0.0/0" }, { "dst": "192.0.2.0/24", "gw": "10.1.0.9" },
            { "dst": "198.51.100.7/24", "mtu": 1300, "advmss": 1200, "priority": 5, "table": 7, "scope": 0 }
        ] })),
        life("dataDir", &json!({ "subnet": "10.1.0.0/24", "dataDir": "/run/leases/deep" })),
        life("resolvConf", &json!({ "subnet": "10.1.0.0/24", "resolvConf": "/run/suite/resolv.conf" }))
            .first(Step::File("/run/suite/resolv.conf".to_owned(), resolv_conf.to_owned())),
        life("resolvConf that is not there", &json!({ "subnet": "10.1.0.0/24", "resolvConf": "/run/suite/absent" })),
        Scenario::new("host-local: the runtime's ipRanges", capable(json!({ "subnet": "10.1.0.0/24" }), "ipRanges"))
            .call(add("c1").runtime(json!({ "ipRanges": [[{ "subnet": "10.5.0.0/24", "rangeStart": "10.5.0.7" }], [{ "subnet": "fd00:5::/64" }]] })))
            .call(check("c1").runtime(json!({ "ipRanges": [[{ "subnet": "10.5.0.0/24", "rangeStart": "10.5.0.7" }], [{ "subnet": "fd00:5::/64" }]] })))
            .call(del("c1").runtime(json!({ "ipRanges": [[{ "subnet": "10.5.0.0/24", "rangeStart": "10.5.0.7" }], [{ "subnet": "fd00:5::/64" }]] }))),
        Scenario::new("host-local: the runtime's ipRanges alone", capable(json!({}), "ipRanges"))
            .call(add("c1").runtime(json!({ "ipRanges": [[{ "subnet": "10.5.0.0/24" }]] })))
            .del("c1"),
    ]
}

/// host-local with a capability of the runtime.
pub(super) fn capable(ipam: Value, capability: &str) -> Value {
    let ipam = with(&json!({ "type": "host-local" }), &ipam);
    list("1.0.0", [json!({ "type": "host-local", "ipam": ipam, "capabilities": { capability: true } })])
}

fn requests() -> Vec<Scenario> {
    let ips = |ips: Value| add("c1").runtime(json!({ "ips": ips }));
    let requesting = |name: &str, args: &'static str| {
        Scenario::new(format!("host-local: {name}"), host_local(&json!({ "subnet": "10.1.0.0/24" })))
            .add("c0")
            .call(add("c1").args(args))
            .add("c2")
            .call(del("c1").args(args))
    };
    let of_args = |ips: Value| {
        let ipam = json!({ "type": "host-local", "ranges": [[{ "subnet": "10.1.0.0/24" }], [{ "subnet": "fd00:1::/64" }]] });
        list("1.0.0", [json!({ "type": "host-local", "ipam": ipam, "args": { "cni": { "ips": ips } } })])
    };
    vec![
        requesting("IP of CNI_ARGS", "IP=10.1.0.9"),
        requesting("IP of CNI_ARGS with a prefix", "IP=10.1.0.9/24"),
        requesting("IP of CNI_ARGS with another prefix", "IP=10.1.0.9/32"),
        requesting("a requested address that is taken", "IP=10.1.0.2"),
        requesting("the gateway is requested", "IP=10.1.0.1"),
        requesting("a requested address of elsewhere", "IP=10.2.0.9"),
        requesting("a requested address that is none", "IP=ten"),
        requesting("unknown CNI_ARGS", "FOO=BAR"),
        requesting("unknown CNI_ARGS ignored", "FOO=BAR;IgnoreUnknown=1"),
        requesting("CNI_ARGS that are none", "IP"),
        requesting("CNI_ARGS with the name of their own kind", "IgnoreUnknown=1;CommonArgs=x"),
        requesting("a wrong request before a right one", "IP=ten;IP=10.1.0.9"),
        requesting("a wrong request before what is no pair", "IP=ten;FOO"),
        Scenario::new("host-local: args.cni.ips", of_args(json!(["10.1.0.9", "fd00:1::9/64"])))
            .add("c1")
            .check("c1")
            .del("c1"),
        Scenario::new(
            "host-local: args.cni.ips, one of them elsewhere",
            of_args(json!(["10.1.0.9", "10.3.0.9"])),
        )
        .add("c1")
        .del("c1"),
        Scenario::new("host-local: args.cni.ips that are none", of_args(json!(["nine"]))).add("c1").del("c1"),
        Scenario::new("host-local: the runtime's ips", capable(json!({ "subnet": "10.1.0.0/24" }), "ips"))
            .call(ips(json!(["10.1.0.9/24"])))
            .check("c1")
            .del("c1"),
        Scenario::new(
            "host-local: the runtime's ips without a prefix",
            capable(json!({ "subnet": "10.1.0.0/24" }), "ips"),
        )
        .call(ips(json!(["10.1.0.9"])))
        .del("c1"),
        Scenario::new(
            "host-local: requests of all three kinds",
            capable(
                json!({ "ranges": [[{ "subnet": "10.1.0.0/24" }], [{ "subnet": "10.2.0.0/24" }]] }),
                "ips",
            ),
        )
        .call(ips(json!(["10.2.0.9"])).args("IP=10.1.0.9"))
        .del("c1"),
    ]
}

/// What is on disk, of whomever.
fn directory() -> Vec<Scenario> {
    let subnet = json!({ "subnet": "10.1.0.0/29" });
    let plain = |name: &str| Scenario::new(format!("host-local: {name}"), host_local(&subnet));
    let file = |name: &str, content: &str| Step::File(format!("{LEASES}/{name}"), content.to_owned());
    let long = |call: Call| call.environment("CNI_CONTAINERID", Some(&"c".repeat(1100)));
    vec![
        plain("ADD twice").add("c1").add("c1").del("c1"),
        plain("ADD for a second interface")
            .add("c1")
            .call(add("c1").ifname("net1"))
            .del("c1")
            .call(del("c1").ifname("net1")),
        plain("round robin goes on")
            .add("c1")
            .del("c1")
            .add("c2")
            .add("c3")
            .add("c4")
            .add("c5")
            .del("c3")
            .add("c6")
            .add("c7"),
        plain("a long container id").call(long(add("c1"))).call(long(check("c1"))).call(long(del("c1"))),
        plain("exhausted")
            .add("c1")
            .add("c2")
            .add("c3")
            .add("c4")
            .add("c5")
            .add("c6")
            .add("c7")
            .del("c2")
            .add("c7"),
        plain("leases that name no interface")
            .step(file("10.1.0.2", "c1"))
            .step(file("10.1.0.3", "c2\n"))
            .add("c3")
            .check("c1")
            .del("c1")
            .del("c2"),
        plain("leases with white space").step(file("10.1.0.2", " c1\r\neth0 \n")).check("c1").del("c1"),
        plain("a lease of two formats")
            .step(file("10.1.0.2", "c1"))
            .step(file("10.1.0.3", "c1\r\neth0"))
            .del("c1")
            .del("c1"),
        plain("a lease outside the range").step(file("10.9.0.2", "c1\r\neth0")).add("c1").del("c1"),
        plain("files that are no leases")
            .step(file("notes", "c1\r\neth0"))
            .add("c1")
            .del("c1")
            .differs([Difference::new("only-leases", "3 DEL c1/file/var/lib/cni/networks/net/notes")
                .ours(r#"0644 "c1\r\neth0""#)]),
        plain("last_reserved_ip of elsewhere").step(file("last_reserved_ip.0", "10.9.0.2")).add("c1"),
        plain("last_reserved_ip that is none").step(file("last_reserved_ip.0", "last")).add("c1"),
        plain("last_reserved_ip at the end").step(file("last_reserved_ip.0", "10.1.0.6")).add("c1"),
        plain("an empty lease")
            .step(file("10.1.0.2", ""))
            .add("c1")
            .add("c2")
            .del("c1")
            .differs(empty_lease()),
        plain("CHECK of nothing").check("c1"),
        plain("DEL of nothing").del("c1"),
        plain("CHECK after the lease is gone")
            .add("c1")
            .step(Step::Remove(format!("{LEASES}/10.1.0.2")))
            .check("c1")
            .del("c1"),
        plain("dataDir is a file")
            .step(Step::File("/var/lib/cni".to_owned(), String::new()))
            .add("c1")
            .del("c1")
            .differs([
                says(
                    "own-words",
                    "2 ADD c1/host-local",
                    "999: mkdir /var/lib/cni: not a directory",
                    "999: mkdir /var/lib/cni/networks/net: not a directory",
                ),
                says(
                    "own-words",
                    "3 DEL c1/host-local",
                    "999: mkdir /var/lib/cni: not a directory",
                    "999: open /var/lib/cni/networks/net: not a directory",
                ),
            ]),
    ]
}

fn refused() -> Vec<Scenario> {
    let with_ipam = |name: &str, ipam: &Value| {
        Scenario::new(
            format!("host-local: {name}"),
            list("1.0.0", [json!({ "type": "host-local", "ipam": ipam })]),
        )
        .add("c1")
        .del("c1")
        .check("c1")
    };
    let bad = |name: &str, ipam: &Value| with_ipam(name, &with(&json!({ "type": "host-local" }), ipam));
    let two_per_family = with(&v4(), &json!({ "ranges": [[{ "subnet": "10.2.0.0/24" }]] }));
    vec![
        Scenario::new("host-local: no ipam", list("1.0.0", [json!({ "type": "host-local" })]))
            .add("c1")
            .del("c1"),
        bad("no range", &json!({})),
        bad("an empty set", &json!({ "ranges": [[]] })),
        bad("no sets", &json!({ "ranges": [] })),
        bad("a range without a subnet", &json!({ "ranges": [[{ "rangeStart": "10.1.0.1" }]] })),
        bad("host bits", &json!({ "subnet": "10.1.0.5/24" })),
        bad("host bits v6", &json!({ "subnet": "fd00:1::5/64" })),
        bad("a subnet of one address", &json!({ "subnet": "10.1.0.0/32" })),
        bad("a subnet of two halves", &json!({ "subnet": "10.1.0.0/31" })),
        bad("a v6 subnet of one address", &json!({ "subnet": "fd00::1/128" })),
        bad("a subnet that is none", &json!({ "subnet": "10.1.0.0" })),
        bad("a subnet with a bad prefix", &json!({ "subnet": "10.1.0.0/33" })),
        bad("a subnet of another kind", &json!({ "subnet": 10 }))
            .differs([says(
                "own-words",
                "*/host-local",
                "999: json: cannot unmarshal number into Go struct field IPAMConfig.ipam.Range.subnet of type string",
                "999: ipam.subnet: expected a string, found 10",
            )]),
        bad("rangeStart elsewhere", &json!({ "subnet": "10.1.0.0/24", "rangeStart": "10.2.0.1" })),
        bad("rangeEnd elsewhere", &json!({ "subnet": "10.1.0.0/24", "rangeEnd": "10.2.0.1" })),
        bad(
            "rangeStart after rangeEnd",
            &json!({ "subnet": "10.1.0.0/24", "rangeStart": "10.1.0.9", "rangeEnd": "10.1.0.8" }),
        ),
        bad("rangeStart that is none", &json!({ "subnet": "10.1.0.0/24", "rangeStart": "start" })),
        bad("rangeStart of the other family", &json!({ "subnet": "10.1.0.0/24", "rangeStart": "fd00::1" })),
        bad("a gateway that is none", &json!({ "subnet": "10.1.0.0/24", "gateway": "gw" })),
        bad(
            "families mixed in one set",
            &json!({ "ranges": [[{ "subnet": "10.1.0.0/24" }, { "subnet": "fd00:1::/64" }]] }),
        ),
        bad(
            "subnets overlap in one set",
            &json!({ "ranges": [[{ "subnet": "10.1.0.0/24" }, { "subnet": "10.1.0.0/25" }]] }),
        ),
        bad(
            "sets overlap",
            &json!({ "ranges": [[{ "subnet": "10.1.0.0/24" }], [{ "subnet": "10.1.0.0/16" }]] }),
        ),
        bad("a route without dst", &json!({ "subnet": "10.1.0.0/24", "routes": [{ "gw": "10.1.0.1" }] }))
            .differs([
                Difference::new("route-without-dst", "1 ADD c1/host-local/answer")
                    .reference("exit status: 0, a result")
                    .ours("exit status: 1, error 999: ipam.routes[0].dst: missing"),
                Difference::new("route-without-dst", "1 ADD c1/file/var/lib/cni/networks/net/10.1.0.2")
                    .reference(r#"0600 "c1\r\neth0""#),
                Difference::new("route-without-dst", "*/file/var/lib/cni/networks/net/last_reserved_ip.0")
                    .reference(r#"0600 "10.1.0.2""#),
            ]),
        bad(
            "a route whose dst is none",
            &json!({ "subnet": "10.1.0.0/24", "routes": [{ "dst": "default" }] }),
        )
        // Only ADD uses routes.
        .differs([
            succeeds("route-without-dst", "2 DEL c1/host-local", "999: invalid CIDR address: default"),
            says(
                "route-without-dst",
                "3 CHECK c1/host-local",
                "999: invalid CIDR address: default",
                "999: host-local: Failed to find address added by container c1",
            ),
        ]),
        Scenario::new(
            "host-local: two addresses of a family at 0.2.0",
            at_version(&host_local(&two_per_family), "0.2.0"),
        )
        .add("c1")
        .del("c1"),
        Scenario::new(
            "host-local: two addresses of a family at 0.3.0",
            at_version(&host_local(&two_per_family), "0.3.0"),
        )
        .add("c1")
        .del("c1"),
    ]
}

/// A crash of the reference between creating and writing a lease: it never gives
/// the address again, ours does at once.
fn empty_lease() -> Vec<Difference> {
    let of = |step: &str, name: &str| {
        Difference::new("empty-lease", format!("{step}/file/var/lib/cni/networks/net/{name}"))
    };
    let lease = |id: &str| format!("0600 \"{id}\\r\\neth0\"");
    let address =
        |step: &str| Difference::new("empty-lease", format!("{step}/host-local/stdout.ips[0].address"));
    vec![
        address("2 ADD c1").reference("10.1.0.3/29").ours("10.1.0.2/29"),
        address("3 ADD c2").reference("10.1.0.4/29").ours("10.1.0.3/29"),
        of("* ADD c*", "10.1.0.2").reference("0644 \"\"").ours(lease("c1")),
        of("2 ADD c1", "10.1.0.3").reference(lease("c1")),
        of("3 ADD c2", "10.1.0.3").reference(lease("c1")).ours(lease("c2")),
        of("*", "10.1.0.4").reference(lease("c2")),
        of("4 DEL c1", "10.1.0.2").reference("0644 \"\""),
        of("4 DEL c1", "10.1.0.3").ours(lease("c2")),
        of("2 ADD c1", "last_reserved_ip.0").reference("0600 \"10.1.0.3\"").ours("0600 \"10.1.0.2\""),
        of("*", "last_reserved_ip.0").reference("0600 \"10.1.0.4\"").ours("0600 \"10.1.0.3\""),
    ]
}
