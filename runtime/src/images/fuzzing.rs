//! Fuzz targets: the parts of an image that the runtime parses.

use std::fs;
use std::path::{Path, PathBuf};

use super::job::Job;
use super::limits::{ImageLimits, Used};
use super::reference::Reference;
use super::source::Blob;
use super::unpack::unpack;

/// What is read as a reference is the same when it is written and read again.
pub fn image_reference(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let Ok(reference) = Reference::parse(text) else { return };
    let again = Reference::parse(&reference.to_string());
    assert_eq!(again.ok(), Some(reference));
}

/// A layer, unpacked below `scratch`: nothing changes but in its own directory, and the limits hold.
pub fn image_layer(layer: &[u8], scratch: &Path) {
    let root = scratch.join("unpacked");
    let target = root.join("layer");
    let outside = root.join("outside");
    fs::create_dir_all(&target).expect("a scratch directory takes a directory");
    fs::write(&outside, "as it was").expect("a scratch directory takes a file");
    let limits = ImageLimits { unpacked_bytes: 1 << 20, entries: 1000, depth: 20, ..ImageLimits::default() };
    let job = Job {
        is_checked: false,
        blob: Blob { place: PathBuf::new(), inner: None, offset: 0, size: layer.len() as u64 },
        digest: String::new(),
        diff_id: String::new(),
        target,
        is_unpacked: false,
        limits,
        used: Used::default(),
    };
    let _refused = unpack(layer, &job).expect_err("no layer has an empty digest");
    let names: Vec<_> = fs::read_dir(&root)
        .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.file_name())).collect())
        .expect("the scratch directory is listed");
    assert_eq!(names.len(), 2, "{names:?}");
    assert_eq!(fs::read(&outside).ok().as_deref(), Some(&b"as it was"[..]));
    linux::tree::remove(&root).expect("what was unpacked can be removed");
}
