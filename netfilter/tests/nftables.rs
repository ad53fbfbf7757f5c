//! nf_tables against the kernel: every test has a network namespace of its own.
#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::net::IpAddr;

use linux::netns::{self, NetNs};
use netfilter::nftables::{
    BaseChain, Batch, ChainKind, Expression, Family, Hook, Is, NfTables, Policy, Protocol, Rule, RuleBody,
    is_unsupported, is_wrong_hook,
};
use nix::errno::Errno;

const TABLE: &str = "t";
const CHAIN: &str = "c";

struct Namespace {
    dir: tempfile::TempDir,
    netns: NetNs,
}

impl Namespace {
    fn new() -> Self {
        assert!(nix::unistd::geteuid().is_root(), "this test makes network namespaces: run it as root");
        let dir = tempfile::tempdir().unwrap();
        let netns = netns::create_persistent(&dir.path().join("ns")).unwrap();
        Self { dir, netns }
    }

    fn open(&self) -> NfTables {
        self.netns.run(NfTables::open).unwrap().unwrap()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        netns::remove_persistent(&self.dir.path().join("ns")).unwrap();
    }
}

fn commit(nf: &mut NfTables, batch: &Batch) -> linux::Result<()> {
    nf.update(|_| Ok((batch.clone(), ())))
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

const POSTROUTING: BaseChain =
    BaseChain { kind: ChainKind::Nat, hook: Hook::Postrouting, priority: 100, policy: Policy::Accept };

fn with_chain(family: Family) -> Batch {
    let mut batch = Batch::new();
    batch.add_table(family, TABLE, None).add_chain(family, TABLE, CHAIN, None, None);
    batch
}

fn rules(nf: &mut NfTables, family: Family) -> Vec<Rule> {
    nf.rules(family, TABLE, Some(CHAIN)).unwrap()
}

#[test]
fn tables_and_chains_are_read_back_as_written_and_adding_them_again_changes_nothing() {
    let namespace = Namespace::new();
    let mut nf = namespace.open();
    let spoof =
        BaseChain { kind: ChainKind::Filter, hook: Hook::Prerouting, priority: -300, policy: Policy::Accept };
    let mut batch = Batch::new();
    batch
        .add_table(Family::Inet, TABLE, Some("of this test"))
        .add_chain(Family::Inet, TABLE, "post", Some(&POSTROUTING), None)
        .add_chain(Family::Inet, TABLE, CHAIN, None, Some("plain"))
        .add_table(Family::Bridge, "nat", None)
        .add_chain(Family::Bridge, "nat", "PREROUTING", Some(&spoof), None);
    for _ in 0..2 {
        commit(&mut nf, &batch).unwrap();
        assert_eq!(
            nf.tables().unwrap(),
            [(Family::Inet, TABLE.to_owned()), (Family::Bridge, "nat".to_owned())]
        );
        let chains = nf.chains(Family::Inet, TABLE).unwrap();
        assert_eq!(chains.iter().map(|c| c.name.as_str()).collect::<Vec<_>>(), ["post", CHAIN]);
        assert_eq!(chains[0].base, Some(POSTROUTING));
        assert_eq!(chains[1].base, None);
        assert_eq!(chains[1].comment.as_deref(), Some("plain"));
        let bridge = nf.chain(Family::Bridge, "nat", "PREROUTING").unwrap().unwrap();
        assert_eq!(bridge.base, Some(spoof));
    }
    assert!(nf.has_table(Family::Bridge, "nat").unwrap());
    assert!(!nf.has_table(Family::Ipv4, "nat").unwrap());
}

#[test]
fn what_is_missing_reads_as_empty() {
    let namespace = Namespace::new();
    let mut nf = namespace.open();
    assert_eq!(nf.tables().unwrap(), []);
    assert_eq!(nf.chains(Family::Inet, TABLE).unwrap(), []);
    assert_eq!(nf.chain(Family::Inet, TABLE, CHAIN).unwrap(), None);
    assert_eq!(nf.rules(Family::Inet, TABLE, None).unwrap(), []);
    assert_eq!(nf.rules(Family::Inet, TABLE, Some(CHAIN)).unwrap(), []);
    commit(&mut nf, &with_chain(Family::Inet)).unwrap();
    assert_eq!(nf.rules(Family::Inet, TABLE, Some("other")).unwrap(), []);
    assert_eq!(nf.chain(Family::Inet, TABLE, "other").unwrap(), None);
}

fn dnat_targets(family: Family) -> &'static str {
    match family {
        Family::Ipv4 => "10.7.2.4:80",
        Family::Ipv6 => "[fd00::4]:53",
        Family::Inet | Family::Bridge => "",
    }
}

#[test]
fn every_statement_is_read_back_as_written() {
    let namespace = Namespace::new();
    let mut nf = namespace.open();
    let addresses = |family, is| {
        RuleBody::new(family)
            .saddr(Is::Equal, ip("10.7.2.2"), 32)
            .daddr(is, ip("10.7.2.0"), 24)
            .daddr(is, ip("10.7.0.0"), 20)
            .daddr(is, ip("0.0.0.0"), 0)
    };
    let addresses6 = |family| {
        RuleBody::new(family).saddr(Is::Equal, ip("fd00::2"), 128).daddr(Is::Not, ip("fd00::"), 62).daddr(
            Is::Not,
            ip("fd00::"),
            64,
        )
    };
    let bodies = [
        (Family::Inet, addresses(Family::Inet, Is::Not).masquerade()),
        (Family::Inet, addresses6(Family::Inet).masquerade()),
        (Family::Inet, RuleBody::new(Family::Inet).mark(Is::Equal, 0x2000, 0x2000).counter().masquerade()),
        (Family::Inet, RuleBody::new(Family::Inet).set_mark_bits(0x2000).ret()),
        (Family::Ipv4, addresses(Family::Ipv4, Is::Equal).ret()),
        (
            Family::Ipv4,
            RuleBody::new(Family::Ipv4)
                .dport(Protocol::Tcp, Is::Equal, 8080)
                .dnat("10.7.2.4:80".parse().unwrap()),
        ),
        (Family::Ipv4, RuleBody::new(Family::Ipv4).sport(Protocol::Sctp, Is::Not, 53).accept()),
        (Family::Ipv6, addresses6(Family::Ipv6).ret()),
        (
            Family::Ipv6,
            RuleBody::new(Family::Ipv6)
                .fib_daddr_type_local()
                .dport(Protocol::Udp, Is::Equal, 53)
                .dnat("[fd00::4]:53".parse().unwrap()),
        ),
        (
            Family::Bridge,
            RuleBody::new(Family::Bridge)
                .iifname(Is::Equal, "veth0")
                .ether_saddr(Is::Equal, [2, 0, 0, 0, 0, 1])
                .saddr(Is::Not, ip("10.0.0.1"), 32)
                .oifname(Is::Not, "eth*")
                .drop(),
        ),
    ];
    for family in [Family::Inet, Family::Ipv4, Family::Ipv6, Family::Bridge] {
        let of_family = |(f, body): &(Family, RuleBody)| (*f == family).then(|| body.clone().build());
        let written: Vec<Vec<Expression>> = bodies.iter().filter_map(of_family).collect();
        let mut batch = with_chain(family);
        for body in &written {
            batch.append_rule(family, TABLE, CHAIN, body, Some("of \"it\""));
        }
        commit(&mut nf, &batch).unwrap();
        let read = rules(&mut nf, family);
        let targets: Vec<String> =
            read.iter().filter_map(Rule::dnat_target).map(|to| to.to_string()).collect();
        assert_eq!(targets.join(" "), dnat_targets(family));
        let bodies_read: Vec<&Vec<Expression>> = read.iter().map(|rule| &rule.expressions).collect();
        assert_eq!(bodies_read, written.iter().collect::<Vec<_>>());
        assert!(read.iter().all(|rule| rule.comment.as_deref() == Some("of \"it\"")));
    }
}

#[test]
fn rules_stand_in_their_order_and_go_by_handle() {
    let namespace = Namespace::new();
    let mut nf = namespace.open();
    let family = Family::Inet;
    let body = RuleBody::new(family).jump("other").build();
    let mut batch = with_chain(family);
    batch
        .add_chain(family, TABLE, "other", None, None)
        .append_rule(family, TABLE, CHAIN, &body, Some("second"))
        .append_rule(family, TABLE, CHAIN, &body, Some("third"))
        .insert_rule(family, TABLE, CHAIN, &body, Some("first"));
    commit(&mut nf, &batch).unwrap();
    let all = rules(&mut nf, family);
    let comments: Vec<_> = all.iter().filter_map(|rule| rule.comment.as_deref()).collect();
    assert_eq!(comments, ["first", "second", "third"]);
    assert_eq!(all[0].target_chain(), Some("other"));
    assert_eq!(nf.chain(family, TABLE, "other").unwrap().unwrap().uses, 3);
    assert_eq!(all[0].dnat_target(), None);
    let third = nf.rules_where(family, TABLE, None, |rule| rule.comment.as_deref() == Some("third")).unwrap();
    assert_eq!(third, all[2..]);

    let mut batch = Batch::new();
    batch.delete_rule(family, TABLE, CHAIN, all[1].handle);
    commit(&mut nf, &batch).unwrap();
    assert_eq!(rules(&mut nf, family).len(), 2);

    let mut batch = Batch::new();
    batch
        .flush_chain(family, TABLE, CHAIN)
        .delete_chain(family, TABLE, CHAIN)
        .delete_chain(family, TABLE, "other")
        .delete_table(family, TABLE);
    commit(&mut nf, &batch).unwrap();
    assert_eq!(nf.tables().unwrap(), []);
}

#[test]
fn a_refused_batch_changes_nothing_and_names_the_message_at_fault() {
    let namespace = Namespace::new();
    let mut nf = namespace.open();
    let family = Family::Inet;
    let mut batch = with_chain(family);
    batch
        .append_rule(family, TABLE, CHAIN, &RuleBody::new(family).goto("nowhere").build(), Some("astray"))
        .delete_rule(family, TABLE, CHAIN, 4711);
    let error = commit(&mut nf, &batch).unwrap_err();
    assert_eq!((error.op, error.object.as_str()), ("add nf_tables rule", "inet t c comment \"astray\""));
    assert_eq!(error.errno(), Errno::ENOENT);
    assert_eq!(nf.tables().unwrap(), []);

    let mut batch = with_chain(family);
    batch.delete_rule(family, TABLE, CHAIN, 4711);
    let error = commit(&mut nf, &batch).unwrap_err();
    assert_eq!((error.op, error.object.as_str()), ("delete nf_tables rule", "inet t c handle 4711"));

    let long = "x".repeat(300);
    let mut batch = with_chain(family);
    batch.add_chain(family, TABLE, &long, None, None);
    assert_eq!(commit(&mut nf, &batch).unwrap_err().errno(), Errno::ENAMETOOLONG);
    assert_eq!(nf.tables().unwrap(), []);
}

#[test]
fn a_chain_that_hooks_in_elsewhere_stops_the_commit_and_is_named() {
    let namespace = Namespace::new();
    let mut nf = namespace.open();
    let family = Family::Inet;
    let filter = BaseChain { kind: ChainKind::Filter, ..POSTROUTING };
    for (there, words) in [
        (None, "in no hook"),
        (Some(filter), "\"type filter hook postrouting priority 100\""),
        (Some(BaseChain { hook: Hook::Input, ..POSTROUTING }), "\"type nat hook input priority 100\""),
        (Some(BaseChain { priority: -5, ..POSTROUTING }), "\"type nat hook postrouting priority -5\""),
    ] {
        let mut batch = Batch::new();
        batch.add_table(family, TABLE, None).add_chain(family, TABLE, CHAIN, there.as_ref(), None);
        commit(&mut nf, &batch).unwrap();
        let before = nf.chain(family, TABLE, CHAIN).unwrap();
        let (mut adding, mut relying) = (Batch::new(), Batch::new());
        adding.add_chain(family, TABLE, "other", None, None).add_chain(
            family,
            TABLE,
            CHAIN,
            Some(&POSTROUTING),
            None,
        );
        relying.add_chain(family, TABLE, "other", None, None).expect_base(family, TABLE, CHAIN, &POSTROUTING);
        let sentence =
            format!("chain inet t c is {words} and must be \"type nat hook postrouting priority 100\"");
        for batch in [adding, relying] {
            let error = commit(&mut nf, &batch).unwrap_err();
            assert!(is_wrong_hook(&error), "{error}");
            assert_eq!(error.source.to_string(), sentence);
            assert_eq!(nf.chain(family, TABLE, "other").unwrap(), None);
            assert_eq!(nf.chain(family, TABLE, CHAIN).unwrap(), before);
        }
        let wrong = nf.unreached(family, TABLE, CHAIN, &POSTROUTING).unwrap().unwrap();
        assert_eq!(wrong.to_string(), sentence);
        let mut batch = Batch::new();
        batch.delete_table(family, TABLE);
        commit(&mut nf, &batch).unwrap();
    }
    assert_eq!(
        nf.unreached(family, TABLE, CHAIN, &POSTROUTING).unwrap(),
        None,
        "no chain is none in the way"
    );
}

#[test]
fn another_policy_is_another_ones_decision() {
    let namespace = Namespace::new();
    let mut nf = namespace.open();
    let family = Family::Inet;
    let drops = BaseChain { kind: ChainKind::Filter, hook: Hook::Forward, priority: 0, policy: Policy::Drop };
    let mut batch = Batch::new();
    batch.add_table(family, TABLE, None).add_chain(family, TABLE, CHAIN, Some(&drops), None);
    commit(&mut nf, &batch).unwrap();
    let accepts = BaseChain { policy: Policy::Accept, ..drops };
    let mut batch = Batch::new();
    batch.add_chain(family, TABLE, CHAIN, Some(&accepts), None).expect_base(family, TABLE, CHAIN, &accepts);
    commit(&mut nf, &batch).unwrap();
    assert_eq!(nf.chain(family, TABLE, CHAIN).unwrap().unwrap().base, Some(drops));
}

/// The family `bridge` has neither NAT nor a look at the routing table, in any kernel.
#[test]
fn what_the_kernel_lacks_is_named() {
    let namespace = Namespace::new();
    let mut nf = namespace.open();
    let family = Family::Bridge;
    let body = || RuleBody::new(family);
    let mut nat = Batch::new();
    nat.add_table(family, TABLE, None).add_chain(family, TABLE, CHAIN, Some(&POSTROUTING), None);
    let (mut masquerade, mut local) = (with_chain(family), with_chain(family));
    masquerade.append_rule(family, TABLE, CHAIN, &body().masquerade().build(), None);
    local.append_rule(family, TABLE, CHAIN, &body().fib_daddr_type_local().ret().build(), None);
    for (batch, lacking) in [
        (nat, "chains of type nat in family bridge"),
        (masquerade, "expression masq in family bridge"),
        (local, "expression fib in family bridge"),
    ] {
        let error = commit(&mut nf, &batch).unwrap_err();
        assert!(is_unsupported(&error), "{error}: {}", error.source);
        assert_eq!(error.source.to_string(), format!("this kernel's nf_tables lacks {lacking}"));
        assert_eq!(nf.tables().unwrap(), []);
    }
    let mut astray = with_chain(family);
    astray.append_rule(family, TABLE, CHAIN, &body().goto("nowhere").build(), None);
    assert!(!is_unsupported(&commit(&mut nf, &astray).unwrap_err()), "a missing chain is no missing part");
}

#[test]
fn fifty_at_once_all_succeed() {
    let namespace = Namespace::new();
    let mut nf = namespace.open();
    let family = Family::Inet;
    std::thread::scope(|scope| {
        for number in 0..50 {
            let mut own = namespace.open();
            scope.spawn(move || {
                let comment = format!("{number}");
                own.update(|nf| {
                    let before = nf.rules(family, TABLE, Some(CHAIN))?;
                    let mut batch = with_chain(family);
                    let body = RuleBody::new(family).mark(Is::Equal, number, u32::MAX).ret().build();
                    if before.iter().all(|rule| rule.comment.as_deref() != Some(&comment)) {
                        batch.append_rule(family, TABLE, CHAIN, &body, Some(&comment));
                    }
                    linux::Result::Ok((batch, ()))
                })
                .unwrap();
            });
        }
    });
    assert_eq!(rules(&mut nf, family).len(), 50);
}

#[test]
fn twenty_thousand_rules_are_one_commit_and_one_dump() {
    const COUNT: u32 = 20_000;
    let namespace = Namespace::new();
    let mut nf = namespace.open();
    let family = Family::Inet;
    let body = RuleBody::new(family)
        .saddr(Is::Equal, ip("10.7.2.2"), 32)
        .daddr(Is::Not, ip("10.7.2.0"), 24)
        .ret()
        .build();
    let mut batch = with_chain(family);
    for number in 0..COUNT {
        batch.append_rule(family, TABLE, CHAIN, &body, Some(&format!("{number:0128}")));
    }
    commit(&mut nf, &batch).unwrap();
    let all = rules(&mut nf, family);
    assert_eq!(all.len(), COUNT as usize);
    assert!(all.iter().all(|rule| rule.expressions == body));
    // The kernel looks for each handle from the chain's head on: not all of them.
    let mut batch = Batch::new();
    for rule in &all[..5_000] {
        batch.delete_rule(family, TABLE, CHAIN, rule.handle);
    }
    commit(&mut nf, &batch).unwrap();
    assert_eq!(rules(&mut nf, family).len(), 15_000);
}
