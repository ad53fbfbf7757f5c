//! The user that a container runs as: numbers from the request, or names from the image's
//! /etc/passwd and /etc/group.
//!
//! Invariant: a number always means that user or group, even if the image's files use it as a name
//! (`2345:x:0:0`): the manifest decides, not the image.

use std::collections::HashSet;
use std::fmt::Display;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use linux::rootfs;
use nix::errno::Errno;
use proto::cri::{LinuxContainerSecurityContext, SupplementalGroupsPolicy};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

const PASSWD: &str = "etc/passwd";
const GROUP: &str = "etc/group";
/// Limit of /etc/passwd and /etc/group; a larger file counts as missing.
const MAX_ACCOUNTS_BYTES: u64 = 4 << 20;
/// The most groups that setgroups(2) accepts (include/uapi/linux/limits.h, NGROUPS_MAX).
const MAX_GROUPS: usize = 65_536;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
    pub(crate) home: String,
}

/// One line of /etc/passwd.
struct Account<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

/// `lower_dirs` are the image's layers, topmost first; `image_user` is the
/// image's `User`.
pub(crate) fn resolve(
    context: &LinuxContainerSecurityContext,
    image_user: &str,
    lower_dirs: &[PathBuf],
) -> Result<User> {
    let (passwd, group) = read_accounts(lower_dirs)?;
    let wanted = if let Some(uid) = &context.run_as_user {
        uid.value.to_string()
    } else if context.run_as_username.is_empty() {
        image_user.to_owned()
    } else {
        context.run_as_username.clone()
    };
    if let Some(group) = &context.run_as_group
        && context.run_as_user.is_none()
        && context.run_as_username.is_empty()
    {
        // A rule of the CRI (api.proto, LinuxContainerSecurityContext).
        let problem = format!("{} without run_as_user or run_as_username", group.value);
        return Err(Error::invalid("run_as_group", problem));
    }
    let (user_text, group_text) = wanted.split_once(':').unwrap_or((&wanted, ""));
    // An image without a user runs as root, whose home is in its passwd.
    let user_text = if user_text.is_empty() { "0" } else { user_text };
    let (uid, account) = if is_number(user_text) {
        let uid = id(user_text)
            .ok_or_else(|| Error::invalid("run_as_user", format!("{user_text} is not a user id")))?;
        (uid, accounts(&passwd).find(|a| a.uid == uid))
    } else {
        let account = accounts(&passwd).find(|a| a.name == user_text).ok_or_else(|| {
            Error::invalid("run_as_user", format!("the image has no user {user_text:?} in its /etc/passwd"))
        })?;
        (account.uid, Some(account))
    };
    let not_a_group =
        |text: &dyn Display| Error::invalid("run_as_group", format!("{text} is not a group id"));
    let gid = match (&context.run_as_group, group_text) {
        (Some(gid), _) => group_id(gid.value).ok_or_else(|| not_a_group(&gid.value))?,
        (None, "") => account.as_ref().map_or(0, |a| a.gid),
        (None, text) if is_number(text) => id(text).ok_or_else(|| not_a_group(&text))?,
        (None, text) => groups(&group).find(|g| g.0 == text).map(|g| g.1).ok_or_else(|| {
            Error::invalid("run_as_group", format!("the image has no group {text:?} in its /etc/group"))
        })?,
    };
    let mut all = vec![gid];
    if context.supplemental_groups_policy() == SupplementalGroupsPolicy::Merge
        && let Some(account) = &account
    {
        all.extend(groups(&group).filter(|g| g.2.split(',').any(|m| m == account.name)).map(|g| g.1));
    }
    for wanted in &context.supplemental_groups {
        let not_a_group = || Error::invalid("supplemental_groups", format!("{wanted} is not a group id"));
        all.push(group_id(*wanted).ok_or_else(not_a_group)?);
    }
    let mut seen = HashSet::new();
    let groups: Vec<u32> = all.into_iter().filter(|group| seen.insert(*group)).collect();
    if groups.len() > MAX_GROUPS {
        let problem = format!("user {user_text:?} has more than {MAX_GROUPS} groups (NGROUPS_MAX)");
        return Err(Error::invalid("supplemental_groups", problem));
    }
    let home = account.map_or("/", |a| if a.home.is_empty() { "/" } else { a.home }).to_owned();
    Ok(User { uid, gid, groups, home })
}

/// An image's `User` without its files: a number or a name.
pub(crate) fn of_image(image_user: &str) -> (Option<u32>, &str) {
    let user = image_user.split(':').next().unwrap_or_default();
    let user = if user.is_empty() { "0" } else { user };
    match id(user).filter(|_| is_number(user)) {
        Some(uid) => (Some(uid), ""),
        None => (None, user),
    }
}

fn is_number(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

/// A user or group id. The highest number is refused: setresuid(2) and setresgid(2) read it as
/// "unchanged".
fn id(text: &str) -> Option<u32> {
    text.parse().ok().filter(|id| *id != u32::MAX)
}

fn group_id(value: i64) -> Option<u32> {
    u32::try_from(value).ok().filter(|id| *id != u32::MAX)
}

fn accounts(passwd: &str) -> impl Iterator<Item = Account<'_>> {
    passwd.lines().filter_map(|line| {
        // Without a list of all fields: an image may have a line of millions, each of 16 bytes in a list.
        let mut fields = line.split(':');
        let (name, uid, gid) = (fields.next()?, fields.nth(1)?, fields.next()?);
        Some(Account { name, uid: id(uid)?, gid: id(gid)?, home: fields.nth(1)? })
    })
}

/// Name, id, members.
fn groups(group: &str) -> impl Iterator<Item = (&str, u32, &str)> {
    group.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let (name, gid) = (fields.next()?, fields.nth(1)?);
        Some((name, id(gid)?, fields.next()?))
    })
}

/// The image's /etc/passwd and /etc/group as the container will see them.
fn read_accounts(lower_dirs: &[PathBuf]) -> Result<(String, String)> {
    if let (Some(passwd), Some(group)) = (layer_of(lower_dirs, PASSWD), layer_of(lower_dirs, GROUP)) {
        return Ok((read(rootfs::open_root(passwd)?, PASSWD)?, read(rootfs::open_root(group)?, GROUP)?));
    }
    if lower_dirs.is_empty() {
        return Ok(Default::default());
    }
    let merged = rootfs::merge_layers(lower_dirs)?;
    Ok((read(&merged, PASSWD)?, read(&merged, GROUP)?))
}

/// The layer that has the file of the merged layers, or lacks it as all do. `None`: only the merged layers show
/// it, because a link, a whiteout or an opaque directory is in the way. Their mount takes far longer.
fn layer_of<'a>(lower_dirs: &'a [PathBuf], file: &str) -> Option<&'a Path> {
    for dir in lower_dirs {
        let (etc, file) = (dir.join("etc"), dir.join(file));
        match etc.symlink_metadata() {
            Ok(found) if found.is_dir() => {}
            Err(e) if e.kind() == ErrorKind::NotFound => continue,
            _ => return None,
        }
        match file.symlink_metadata() {
            Ok(found) if found.is_file() => return Some(dir),
            Err(e) if e.kind() == ErrorKind::NotFound && !is_opaque(&etc) => {}
            _ => return None,
        }
    }
    lower_dirs.last().map(PathBuf::as_path)
}

fn is_opaque(dir: &Path) -> bool {
    let found = rustix::fs::lgetxattr(dir, rootfs::OPAQUE_ATTRIBUTE, &mut [0; 1]);
    !matches!(found, Err(rustix::io::Errno::NODATA | rustix::io::Errno::NOTSUP))
}

/// Empty if `root` has no such file, or no regular file of at most [`MAX_ACCOUNTS_BYTES`]: then the image has
/// no names.
fn read(root: impl AsFd, file: &str) -> Result<String> {
    match rootfs::read_in_root(root, Path::new(file), MAX_ACCOUNTS_BYTES) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(e) => match e.errno() {
            Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::EINVAL | Errno::EFBIG => Ok(String::new()),
            _ => Err(e.into()),
        },
    }
}

#[cfg(test)]
mod tests {
    use proto::cri::Int64Value;

    use super::*;

    fn image() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        std::fs::write(
            dir.path().join("etc/passwd"),
            "root:x:0:0::/root:/bin/sh\nweb:x:33:34::/srv:/bin/sh\n",
        )
        .unwrap();
        std::fs::write(dir.path().join("etc/group"), "web:x:34:\ntape:x:26:web,other\n").unwrap();
        dir
    }

    #[test]
    fn a_name_brings_its_group_its_memberships_and_its_home() {
        let dir = image();
        let layers = [dir.path().to_owned()];
        let user = resolve(&LinuxContainerSecurityContext::default(), "web", &layers).unwrap();
        assert_eq!(user, User { uid: 33, gid: 34, groups: vec![34, 26], home: "/srv".to_owned() });
    }

    #[test]
    fn a_user_of_more_groups_than_the_kernel_takes_is_refused() {
        let dir = image();
        let groups_of = |count: usize| {
            let lines: String = (0..count).map(|id| format!("::{id}:web\n")).collect();
            std::fs::write(dir.path().join("etc/group"), lines).unwrap();
            resolve(&LinuxContainerSecurityContext::default(), "web", &[dir.path().to_owned()])
        };
        assert_eq!(groups_of(MAX_GROUPS).unwrap().groups.len(), MAX_GROUPS);
        // Nearly as many as the file may have. A linear search for each would take minutes.
        let error = groups_of(290_000).unwrap_err();
        assert_eq!(
            error.to_string(),
            "supplemental_groups: user \"web\" has more than 65536 groups (NGROUPS_MAX)"
        );
    }

    #[test]
    fn numbers_of_the_request_win_over_the_image() {
        let dir = image();
        let context = LinuxContainerSecurityContext {
            run_as_user: Some(Int64Value { value: 1000 }),
            run_as_group: Some(Int64Value { value: 5 }),
            supplemental_groups: vec![7, 5],
            ..Default::default()
        };
        let user = resolve(&context, "web", &[dir.path().to_owned()]).unwrap();
        assert_eq!(user, User { uid: 1000, gid: 5, groups: vec![5, 7], home: "/".to_owned() });
    }

    #[test]
    fn an_image_does_not_say_who_a_number_is() {
        let dir = image();
        let passwd = "2345:x:0:0::/root:\nminus:x:4294967295:0::/:\ngroups:x:7:4294967295::/:\n";
        std::fs::write(dir.path().join("etc/passwd"), passwd).unwrap();
        std::fs::write(dir.path().join("etc/group"), "55:x:0:\nminus:x:4294967295:\n").unwrap();
        let layers = [dir.path().to_owned()];
        let context = LinuxContainerSecurityContext {
            run_as_user: Some(Int64Value { value: 2345 }),
            run_as_group: Some(Int64Value { value: 55 }),
            ..Default::default()
        };
        let user = resolve(&context, "", &layers).unwrap();
        assert_eq!((user.uid, user.gid), (2345, 55));
        let of_image = |user| resolve(&LinuxContainerSecurityContext::default(), user, &layers);
        let user = of_image("2345:55").unwrap();
        assert_eq!((user.uid, user.gid), (2345, 55));
        // setresuid(-1) would change nothing.
        for user in ["minus", "groups", "4294967295", "99999999999", "7:minus", "7:4294967295"] {
            let error = of_image(user).unwrap_err();
            assert!(error.to_string().starts_with("run_as_"), "{user}: {error}");
        }
        assert_eq!(super::of_image(""), (Some(0), ""));
        assert_eq!(super::of_image("7:minus"), (Some(7), ""));
        for name in ["web", "-7", "+0", "4294967295"] {
            assert_eq!(super::of_image(name), (None, name));
        }
        for value in [-1, i64::from(u32::MAX)] {
            let value = Some(Int64Value { value });
            for context in [
                LinuxContainerSecurityContext { run_as_user: value, ..Default::default() },
                LinuxContainerSecurityContext { run_as_group: value, ..context.clone() },
            ] {
                assert!(resolve(&context, "", &layers).is_err(), "{context:?}");
            }
        }
    }

    #[test]
    fn an_image_without_a_user_runs_as_root_with_roots_home() {
        let dir = image();
        let context = LinuxContainerSecurityContext::default();
        let user = resolve(&context, "", &[dir.path().to_owned()]).unwrap();
        assert_eq!(user, User { uid: 0, gid: 0, groups: vec![0], home: "/root".to_owned() });
        // Without a passwd file no user has a home.
        assert_eq!(resolve(&context, "", &[]).unwrap().home, "/");
    }

    #[test]
    fn a_group_without_a_user_is_refused() {
        let context = LinuxContainerSecurityContext {
            run_as_group: Some(Int64Value { value: 5 }),
            ..Default::default()
        };
        let err = resolve(&context, "web", &[]).unwrap_err();
        assert_eq!(err.to_string(), "run_as_group: 5 without run_as_user or run_as_username");
    }

    #[test]
    fn a_name_that_the_image_lacks_is_named() {
        let err = resolve(&LinuxContainerSecurityContext::default(), "nobody", &[]).unwrap_err();
        assert_eq!(err.to_string(), "run_as_user: the image has no user \"nobody\" in its /etc/passwd");
    }

    /// Two layers below `dir`, topmost first: the lower one has the user `app`, the upper one an empty /etc.
    fn two_layers(dir: &Path) -> [PathBuf; 2] {
        let [upper, lower] = ["upper", "lower"].map(|name| dir.join(name));
        std::fs::create_dir_all(upper.join("etc")).unwrap();
        std::fs::create_dir_all(lower.join("etc")).unwrap();
        std::fs::write(lower.join(PASSWD), "app:x:1000:1000::/srv:/bin/sh\n").unwrap();
        std::fs::write(lower.join(GROUP), "app:x:1000:\nextra:x:7:app\n").unwrap();
        [upper, lower]
    }

    fn app() -> User {
        User { uid: 1000, gid: 1000, groups: vec![1000, 7], home: "/srv".to_owned() }
    }

    /// `app` and `1000` both are [`app`].
    fn assert_app(layers: &[PathBuf]) {
        for user in ["app", "1000"] {
            let found = resolve(&LinuxContainerSecurityContext::default(), user, layers).unwrap();
            assert_eq!(found, app(), "{user}");
        }
    }

    /// `app` is refused, and `1000` is a user without an account.
    fn assert_no_app(layers: &[PathBuf]) {
        let context = LinuxContainerSecurityContext::default();
        let error = resolve(&context, "app", layers).unwrap_err();
        assert_eq!(error.to_string(), "run_as_user: the image has no user \"app\" in its /etc/passwd");
        let found = resolve(&context, "1000", layers).unwrap();
        assert_eq!(found, User { uid: 1000, gid: 0, groups: vec![0], home: "/".to_owned() });
    }

    #[test]
    fn accounts_of_a_lower_layer_count_below_layers_without_them() {
        let dir = tempfile::tempdir().unwrap();
        let [upper, lower] = two_layers(dir.path());
        let bare = dir.path().join("bare");
        std::fs::create_dir(&bare).unwrap();
        let layers = [bare.clone(), upper.clone(), lower.clone()];
        assert_eq!([PASSWD, GROUP].map(|file| layer_of(&layers, file)), [Some(&*lower); 2], "no mount");
        assert_app(&layers);
        let without = [bare, upper];
        assert_eq!(layer_of(&without, PASSWD), Some(&*without[1]), "no mount");
        assert_no_app(&without);
    }

    #[test]
    fn links_to_accounts_lead_into_other_layers() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let [upper, lower] = two_layers(dir.path());
        std::fs::rename(lower.join("etc"), lower.join("store")).unwrap();
        symlink("/store/passwd", upper.join(PASSWD)).unwrap();
        symlink("../store/group", upper.join(GROUP)).unwrap();
        assert_app(&[upper.clone(), lower.clone()]);
        // From a lower layer into an upper one.
        assert_app(&[lower.clone(), upper.clone()]);
        std::fs::remove_dir_all(upper.join("etc")).unwrap();
        symlink("store", upper.join("etc")).unwrap();
        assert_app(&[upper, lower]);
    }

    #[test]
    fn links_to_accounts_stay_in_an_image_of_one_layer() {
        let dir = tempfile::tempdir().unwrap();
        let [_, lower] = two_layers(dir.path());
        std::fs::rename(lower.join("etc"), lower.join("store")).unwrap();
        std::os::unix::fs::symlink("/store", lower.join("etc")).unwrap();
        assert_app(std::slice::from_ref(&lower));
        std::fs::rename(lower.join("store"), dir.path().join("store")).unwrap();
        assert_no_app(&[lower]);
    }

    #[test]
    fn accounts_that_an_upper_layer_deletes_do_not_count() {
        use nix::sys::stat::{Mode, SFlag, mknod};
        let whiteout = |place: &Path| mknod(place, SFlag::S_IFCHR, Mode::empty(), 0).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let layers = two_layers(dir.path());
        whiteout(&layers[0].join(PASSWD));
        assert_no_app(&layers);

        let dir = tempfile::tempdir().unwrap();
        let layers = two_layers(dir.path());
        std::fs::remove_dir(layers[0].join("etc")).unwrap();
        whiteout(&layers[0].join("etc"));
        assert_no_app(&layers);

        let dir = tempfile::tempdir().unwrap();
        let layers = two_layers(dir.path());
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(layers[0].join("etc"), rootfs::OPAQUE_ATTRIBUTE, b"y", flags).unwrap();
        assert_no_app(&layers);
        for file in [PASSWD, GROUP] {
            std::fs::copy(layers[1].join(file), layers[0].join(file)).unwrap();
        }
        assert_app(&layers);
    }

    #[test]
    fn accounts_that_are_too_large_or_no_file_hide_those_of_lower_layers() {
        let dir = tempfile::tempdir().unwrap();
        let layers = two_layers(dir.path());
        let passwd = std::fs::File::create(layers[0].join(PASSWD)).unwrap();
        passwd.set_len(MAX_ACCOUNTS_BYTES + 1).unwrap();
        assert_no_app(&layers);
        std::fs::remove_file(layers[0].join(PASSWD)).unwrap();
        std::fs::create_dir(layers[0].join(PASSWD)).unwrap();
        assert_no_app(&layers);
    }
}
