//! Which tests are not run, and which are expected to fail, with the reasons.

use crate::posix::exception::Exception;

/// Not run anywhere: they change the machine, or need what no ground has.
pub(super) const OMITTED: &[(&str, &str)] = &[
    ("generic/394", "it raises a resource limit at its end, and fails for want of CAP_SYS_RESOURCE"),
    ("generic/460", "it sets vm.dirty_ratio of the machine"),
    ("generic/504", "/proc/locks has no lock of a process that has ended, in a namespace of process numbers"),
    ("generic/564", "it makes a loop device of a file, which would stay if the test were killed"),
    ("generic/597", "it sets fs.protected_symlinks and fs.protected_hardlinks of the machine"),
    ("generic/598", "it sets fs.protected_regular and fs.protected_fifos of the machine"),
    ("generic/604", "it mounts a volume while it unmounts it: no kubelet stages during an unstage"),
];

/// docs/SEMANTICS.md promises none of what these tests want.
pub(super) const EXCEPTIONS: &[Exception] = &[
    exception(
        "generic/003",
        "strictatime is no mount option of a volume: cached reads change no access time",
    ),
    exception("generic/020", "extended attributes of a file have at most 4 KiB together"),
    exception("generic/097", TRUSTED),
    exception(
        "generic/375",
        "a directory keeps its sgid bit when a process that is not in its group sets an ACL",
    ),
    exception("generic/403", TRUSTED),
    exception("generic/426", FILE_HANDLE),
    exception("generic/467", FILE_HANDLE),
    exception("generic/477", FILE_HANDLE),
    exception("generic/633", DEVICE_NODE),
    exception("generic/688", "file capabilities are refused"),
    exception("generic/696", DEVICE_NODE),
    exception("generic/697", DEVICE_NODE),
    exception("generic/732", "it mounts a volume in two places inside another volume"),
    exception("generic/756", FILE_HANDLE),
    exception("generic/777", FILE_HANDLE),
    passing("generic/080", MAPPED_TIMES),
    passing("generic/215", MAPPED_TIMES),
];

const TRUSTED: &str = "trusted.* attributes are refused";
const FILE_HANDLE: &str = "a file handle is stale once the kernel has forgotten the file";
const DEVICE_NODE: &str = "it makes a device node";
const MAPPED_TIMES: &str = "stat(2) shows the times of a mapped store up to two seconds late";

/// On each ground.
const fn exception(name: &'static str, reason: &'static str) -> Exception {
    Exception { name, ground: "", reason }
}

/// Where data passes the daemon by.
const fn passing(name: &'static str, reason: &'static str) -> Exception {
    Exception { name, ground: "passing through", reason }
}
