//! Differences that several scenarios have in common.

use super::super::differences::Difference;

/// A call that fails at the reference and succeeds with ours, with nothing on stdout.
pub(super) fn succeeds(id: &'static str, at: &str, reference: &str) -> Difference {
    Difference::new(id, format!("{at}/answer"))
        .reference(format!("exit status: 1, error {reference}"))
        .ours("exit status: 0, nothing")
}

/// A call that fails on both sides with other words.
pub(super) fn says(id: &'static str, at: &str, reference: &str, ours: &str) -> Difference {
    Difference::new(id, format!("{at}/answer"))
        .reference(format!("exit status: 1, error {reference}"))
        .ours(format!("exit status: 1, error {ours}"))
}

/// What a failed ADD of the reference leaves in the container and on the host.
pub(super) fn leaves_veth(container: &str) -> Vec<Difference> {
    vec![
        Difference::new("atomic-add", format!("* {container}/{container}/link/eth0")).reference("veth"),
        Difference::new("atomic-add", format!("* {container}/host/link/<veth {container}.eth0>"))
            .reference("veth"),
    ]
}

/// Where sources are checked, our bridge learns none from link-local frames.
pub(super) fn learns_no_link_local() -> Difference {
    Difference::new("macspoofchk-link-local", "*/host/link/cni0/of-kind")
        .reference("*no_linklocal_learn=0*")
        .ours("*no_linklocal_learn=1*")
}

/// A failed ADD of the reference leaves the bridge that it made.
pub(super) fn leaves_bridge(name: &str) -> Difference {
    Difference::new("atomic-add", format!("*/host/link/{name}")).reference("bridge")
}

/// A failed ADD of the reference leaves the bridge and the container's link.
pub(super) fn leaves_links() -> Vec<Difference> {
    let mut left = leaves_veth("c1");
    left.push(leaves_bridge("cni0"));
    left
}

/// ADD asked ipam before it failed, and gave the address back: what stays says
/// where the next search begins.
pub(super) fn asked_ipam() -> Vec<Difference> {
    vec![
        Difference::new("ipam-first", "*/file/var/lib/cni/").ours("0755"),
        Difference::new("ipam-first", "*/file/var/lib/cni/networks/").ours("0755"),
        Difference::new("ipam-first", "*/file/var/lib/cni/networks/net/").ours("0755"),
        Difference::new("ipam-first", "*/file/var/lib/cni/networks/net/lock").ours(r#"0750 """#),
        Difference::new("ipam-first", "*/file/var/lib/cni/networks/net/last_reserved_ip.0")
            .ours(r#"0600 "10.1.0.2""#),
    ]
}

/// The reference asked ipam before it looked at its own configuration.
pub(super) fn asked_ipam_in_vain() -> Difference {
    Difference::new("config-first", "*/file/var/lib/cni/networks/net/last_reserved_ip.0")
        .reference(r#"0600 "10.1.0.2""#)
}

/// DEL of the reference leaves both ends of the container's link.
pub(super) fn del_leaves_veth(step: &str) -> Vec<Difference> {
    vec![
        Difference::new("del-cleans-up", format!("{step}/c1/link/eth0")).reference("veth"),
        Difference::new("del-cleans-up", format!("{step}/host/link/<veth c1.eth0>")).reference("veth"),
    ]
}

/// Only the reference has this, whatever exactly is in it.
pub(super) fn reference_has(id: &'static str, at: &str) -> Difference {
    Difference::new(id, at).reference("*")
}

/// Only ours has this, whatever exactly is in it.
pub(super) fn ours_has(id: &'static str, at: &str) -> Difference {
    Difference::new(id, at).ours("*")
}

/// A call that fails at the reference and ends with a result of ours.
pub(super) fn answers(id: &'static str, at: &str, reference: &str) -> Difference {
    Difference::new(id, format!("{at}/answer"))
        .reference(format!("exit status: 1, error {reference}"))
        .ours("exit status: 0, a result")
}

/// After an ADD of `portmap` that fails at the reference there is no result for
/// CHECK, and each of `dels` stops at `portmap`, which fails again: all stays.
pub(super) fn never_attached<const N: usize>(
    id: &'static str,
    check: &str,
    dels: [&str; N],
) -> Vec<Difference> {
    let mut differences = vec![
        succeeds(id, &format!("{check}/bridge"), "999: Required prevResult missing"),
        Difference::new(id, format!("{check}/portmap/answer")).ours("exit status: 0, nothing"),
        Difference::new(id, "*/host/sysctl/ipv4/conf/cni0/route_localnet").ours("1"),
    ];
    for del in dels {
        differences.extend([
            Difference::new(id, format!("{del}/bridge/answer")).ours("exit status: 0, nothing"),
            Difference::new(id, format!("{del}/c1/link/eth0")).reference("veth"),
            Difference::new(id, format!("{del}/host/link/<veth c1.eth0>")).reference("veth"),
            Difference::new(id, format!("{del}/file/var/lib/cni/networks/net/10.1.0.2"))
                .reference(r#"0600 "c1\r\neth0""#),
        ]);
    }
    differences
}
