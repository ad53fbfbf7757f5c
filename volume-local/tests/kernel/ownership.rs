//! Who owns what is created, and who may do what.

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::fixture::{ALICE, BOB, ROOT, User, Volume, open_to_all};

fn owner(path: &std::path::Path) -> (u32, u32) {
    let metadata = fs::symlink_metadata(path).unwrap();
    (metadata.uid(), metadata.gid())
}

#[test]
fn files_of_every_kind_belong_to_their_creator() {
    let volume = Volume::new();
    volume.shell(ALICE, "echo > file; mkdir directory; ln -s file link; mkfifo pipe; ln file second");
    for name in ["file", "directory", "link", "pipe", "second"] {
        assert_eq!(owner(&volume.path(name)), (ALICE.uid, ALICE.gid), "{name}");
        assert_eq!(owner(&volume.backing.join(name)), (ALICE.uid, ALICE.gid), "{name}");
    }
    volume.shell(ROOT, "echo > roots");
    assert_eq!(owner(&volume.path("roots")), (0, 0));
}

#[test]
fn two_users_at_once_never_get_each_others_files() {
    let volume = Volume::new();
    std::thread::scope(|scope| {
        for user in [ALICE, BOB] {
            let volume = &volume;
            scope.spawn(move || {
                let create = "i=0; while [ $i -lt 200 ]; do : > $(id -u).$i; i=$((i+1)); done";
                volume.shell(user, create);
            });
        }
    });
    for entry in fs::read_dir(&volume.path).unwrap() {
        let entry = entry.unwrap();
        let uid = entry.metadata().unwrap().uid();
        assert!(entry.file_name().to_string_lossy().starts_with(&uid.to_string()), "{entry:?} of {uid}");
    }
}

#[test]
fn a_private_file_is_closed_to_others_and_open_to_root() {
    let volume = Volume::new();
    volume.shell(ALICE, "umask 077; echo secret > f; mkdir d; echo > d/f");
    for attempt in ["cat f", "echo > f", "ls d", "chmod 777 f", "chown 1002 f", "touch d/new"] {
        let output = volume.try_shell(BOB, attempt);
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(message.contains("denied") || message.contains("not permitted"), "{attempt}: {message}");
    }
    assert_eq!(volume.shell(ROOT, "cat f"), "secret");
}

#[test]
fn a_sticky_directory_protects_files_of_others() {
    let volume = Volume::new();
    volume.shell(ROOT, "mkdir tmp; chmod 1777 tmp");
    volume.shell(ALICE, "echo > tmp/hers");
    assert!(!volume.try_shell(BOB, "rm -f tmp/hers").status.success());
    volume.shell(ALICE, "rm tmp/hers");
}

#[test]
fn a_setgid_directory_gives_its_group_and_its_bit() {
    let volume = Volume::new();
    volume.shell(ROOT, "mkdir shared; chgrp 3000 shared; chmod 2777 shared");
    volume.shell(ALICE, "echo > shared/f; mkdir shared/d");
    assert_eq!(owner(&volume.path("shared/f")), (ALICE.uid, 3000));
    assert_eq!(owner(&volume.path("shared/d")), (ALICE.uid, 3000));
    assert_eq!(fs::metadata(volume.path("shared/d")).unwrap().mode() & 0o2000, 0o2000);
}

#[test]
fn a_supplementary_group_opens_a_directory_of_the_group() {
    let volume = Volume::new();
    volume.shell(ROOT, "mkdir team; chgrp 3000 team; chmod 0770 team");
    let member = User { group: Some(3000), ..ALICE };
    volume.shell(member, "echo > team/f; mkdir team/d; mv team/f team/d/f; rm -r team/d; echo > team/kept");
    assert_eq!(owner(&volume.path("team/kept")), (ALICE.uid, ALICE.gid));
    assert!(!volume.try_shell(ALICE, "echo > team/g").status.success());
}

#[test]
fn the_umask_of_the_creator_applies() {
    let volume = Volume::new();
    for (umask, file, directory) in [("022", 0o644, 0o755), ("077", 0o600, 0o700), ("000", 0o666, 0o777)] {
        volume.shell(ALICE, &format!("umask {umask}; echo > f{umask}; mkdir d{umask}; mkfifo p{umask}"));
        let mode = |name| fs::metadata(volume.path(&format!("{name}{umask}"))).unwrap().mode() & 0o777;
        assert_eq!((mode("f"), mode("d"), mode("p")), (file, directory, file), "{umask}");
    }
}

#[test]
fn root_changes_owners_and_an_owner_gives_to_a_group_of_its_own() {
    let volume = Volume::new();
    open_to_all(&volume.path);
    volume.shell(ROOT, "echo > f; ln -s f l; chown 1001:2001 f; chown -h 1002:2002 l");
    assert_eq!(owner(&volume.path("f")), (1001, 2001));
    assert_eq!(owner(&volume.path("l")), (1002, 2002));
    let member = User { group: Some(3000), ..ALICE };
    volume.shell(member, "chgrp 3000 f");
    assert_eq!(owner(&volume.path("f")), (1001, 3000));
    assert!(!volume.try_shell(member, "chgrp 3001 f").status.success());
}

/// The daemon remembers which directories have none.
#[test]
fn a_default_acl_counts_from_the_moment_it_is_set_until_it_is_removed() {
    let volume = Volume::new();
    fs::create_dir(volume.path("d")).unwrap();
    let mode_of_new = |name: &str| {
        volume.shell(ROOT, &format!("umask 077; mkdir d/{name}; touch d/{name}.f"));
        let mode = |name: String| fs::metadata(volume.path(&name)).unwrap().mode() & 0o777;
        (mode(format!("d/{name}")), mode(format!("d/{name}.f")))
    };
    assert_eq!(mode_of_new("a"), (0o700, 0o600));
    volume.shell(ROOT, "setfacl -d -m u::rwx,g::rx,o::rx d");
    assert_eq!(mode_of_new("b"), (0o755, 0o644));
    volume.shell(ROOT, "setfacl -k d");
    assert_eq!(mode_of_new("c"), (0o700, 0o600));
}
