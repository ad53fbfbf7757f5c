//! A small tree with one of each kind of file, for copies and deletions.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use anyhow::{Context, Result, ensure};

const ATTRIBUTE: &str = "user.hawser";

/// In an empty directory.
pub(crate) fn make(root: &Path) {
    fs::write(root.join("file"), [7; 5000]).unwrap();
    rustix::fs::setxattr(root.join("file"), ATTRIBUTE, b"kept", rustix::fs::XattrFlags::empty()).unwrap();
    fs::create_dir(root.join("dir")).unwrap();
    fs::write(root.join("dir/other"), "other").unwrap();
    fs::set_permissions(root.join("dir/other"), fs::Permissions::from_mode(0o640)).unwrap();
    symlink("../file", root.join("dir/link")).unwrap();
    fs::hard_link(root.join("file"), root.join("dir/same")).unwrap();
}

/// All of it is there.
pub(crate) fn ensure_whole(root: &Path) -> Result<()> {
    let read = |name: &str| fs::read(root.join(name)).with_context(|| root.join(name).display().to_string());
    ensure!(read("file")? == [7; 5000] && read("dir/same")? == [7; 5000], "the content of file");
    ensure!(read("dir/other")? == b"other", "the content of dir/other");
    ensure!(fs::read_link(root.join("dir/link"))? == Path::new("../file"), "where dir/link leads");
    let mode = fs::metadata(root.join("dir/other"))?.permissions().mode();
    ensure!(mode & 0o777 == 0o640, "the mode of dir/other: {mode:o}");
    let mut value = [0; 8];
    let length = rustix::fs::getxattr(root.join("file"), ATTRIBUTE, &mut value).context("getxattr")?;
    ensure!(&value[..length] == b"kept", "the attribute of file");
    Ok(())
}
