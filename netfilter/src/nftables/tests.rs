//! Tests of the internals: commits that ignore the lock, like those of other programs.

use std::cell::Cell;

use super::*;
use linux::netns;

/// Like `nft add table`: no lock, whatever the generation.
fn interfere(nf: &NfTables, name: &str) {
    let mut batch = Batch::new();
    batch.add_table(Family::Ipv4, name, None);
    nf.socket.transact(SUBSYSTEM, nf.generation().unwrap(), &batch.messages).unwrap();
}

fn in_a_namespace(test: impl FnOnce(NfTables, NfTables)) {
    assert!(nix::unistd::geteuid().is_root(), "this test makes network namespaces: run it as root");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ns");
    let netns = netns::create_persistent(&path).unwrap();
    let open = || netns.run(NfTables::open).unwrap().unwrap();
    test(open(), open());
    netns::remove_persistent(&path).unwrap();
}

#[test]
fn a_commit_in_between_makes_the_plan_start_over() {
    in_a_namespace(|mut nf, other| {
        let rounds = Cell::new(0);
        let seen = nf
            .update(|nf| {
                let seen = nf.tables()?.len();
                if rounds.replace(rounds.get() + 1) == 0 {
                    interfere(&other, "theirs");
                }
                let mut batch = Batch::new();
                batch.add_table(Family::Inet, "ours", None);
                Result::Ok((batch, seen))
            })
            .unwrap();
        assert_eq!((rounds.get(), seen), (2, 1), "the second round saw the other's table");
        assert_eq!(nf.tables().unwrap().len(), 2);
    });
}

#[test]
fn an_empty_batch_too_was_read_in_one_state() {
    in_a_namespace(|mut nf, other| {
        let rounds = Cell::new(0);
        let seen = nf.update(|nf| {
            let seen = nf.tables()?.len();
            if rounds.replace(rounds.get() + 1) == 0 {
                interfere(&other, "theirs");
            }
            Result::Ok((Batch::new(), seen))
        });
        assert_eq!((rounds.get(), seen.unwrap()), (2, 1));
    });
}

#[test]
fn who_is_always_too_late_gives_up_and_says_how_often_it_tried() {
    in_a_namespace(|mut nf, other| {
        let rounds = Cell::new(0);
        nf.attempts = 50;
        let error = nf
            .update(|_| {
                rounds.set(rounds.get() + 1);
                // Another name each time: adding what is there is no change.
                interfere(&other, &rounds.get().to_string());
                let mut batch = Batch::new();
                batch.add_table(Family::Inet, "ours", None);
                Result::Ok((batch, ()))
            })
            .unwrap_err();
        assert_eq!(rounds.get(), 50);
        assert_eq!(error.errno(), Errno::ERESTART);
        assert_eq!(error.to_string(), "commit nf_tables batch 50 times another change came first");
    });
}

#[test]
fn chains_that_are_there_are_no_change() {
    in_a_namespace(|mut nf, _| {
        let base =
            BaseChain { kind: ChainKind::Nat, hook: Hook::Output, priority: 0, policy: Policy::Accept };
        let mut batch = Batch::new();
        batch.add_table(Family::Inet, "t", None).add_chain(Family::Inet, "t", "c", None, None).add_chain(
            Family::Inet,
            "t",
            "b",
            Some(&base),
            None,
        );
        let mut commit = |batch: &Batch| {
            let before = nf.generation().unwrap();
            nf.update(|_| Result::Ok((batch.clone(), ()))).map(|()| nf.generation().unwrap() != before)
        };
        assert!(commit(&batch).unwrap());
        assert!(!commit(&batch).unwrap());

        let mut other = Batch::new();
        other.add_chain(Family::Inet, "t", "b", Some(&BaseChain { priority: 1, ..base }), None);
        assert!(is_wrong_hook(&commit(&other).unwrap_err()));

        let mut regular = Batch::new();
        regular.add_chain(Family::Inet, "t", "b", None, None);
        let error = commit(&regular).unwrap_err();
        assert!(is_wrong_hook(&error));
        assert_eq!(
            error.source.to_string(),
            "chain inet t b is \"type nat hook output priority 0\" and must be in no hook"
        );

        let mut again = Batch::new();
        again.delete_chain(Family::Inet, "t", "c").add_chain(Family::Inet, "t", "c", None, Some("new"));
        assert!(commit(&again).unwrap());
        let chain = nf.chain(Family::Inet, "t", "c").unwrap().unwrap();
        assert_eq!(chain.comment.as_deref(), Some("new"));
    });
}

#[test]
fn what_cannot_have_its_name_is_absent() {
    in_a_namespace(|mut nf, _| {
        let (longest, longer) = ("n".repeat(NAME_MAX), "n".repeat(NAME_MAX + 1));
        let mut batch = Batch::new();
        batch.add_table(Family::Bridge, "t", None).add_chain(Family::Bridge, "t", &longest, None, None);
        nf.update(|_| Result::Ok((batch.clone(), ()))).unwrap();
        assert!(nf.chain(Family::Bridge, "t", &longest).unwrap().is_some());
        assert_eq!(nf.chain(Family::Bridge, "t", &longer).unwrap(), None);
        assert_eq!(nf.rules(Family::Bridge, "t", Some(&longer)).unwrap(), []);
        assert_eq!(nf.rules(Family::Bridge, &longer, None).unwrap(), []);
        assert!(!nf.has_table(Family::Bridge, &longer).unwrap());
    });
}
