//! Finds the files of an image layout in a tar archive.
//!
//! Invariant: a listing holds only the names that an image layout uses, so that other entries of an
//! archive take no memory.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::{ImageError, Result};
use super::limits::{Allowance, ImageLimits, Limited, Used};
use super::reference::is_hex_digest;
use super::{READERS, files};

/// More than any real image has.
const MAX_BLOBS: usize = 10_000;
/// Limit of all headers of one archive together: in a sparse file they take no disk space, and long
/// names take 4 ms for each megabyte while other pulls wait.
const MAX_HEADER_BYTES: u64 = 64 << 20;
/// Limit of all cached listings together, which take about 20 MB then.
const MAX_CACHED_BLOBS: usize = 100_000;

/// Offset and size of each file of the layout, by its name.
pub(crate) type Listing = HashMap<PathBuf, (u64, u64)>;
/// A refusal is cached, too: reading the archive again would repeat it.
type Cached = std::result::Result<Arc<Listing>, Arc<ImageError>>;

/// Shared by all pulls, since every pull looks into every archive.
static LISTINGS: Listings = Listings(Mutex::new(BTreeMap::new()));

#[derive(Debug)]
struct Listings(Mutex<BTreeMap<Version, Cached>>);

/// Differs whenever the file or the limits have changed.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    limits: (u64, u64),
}

impl Version {
    fn of(file: &File, limits: &ImageLimits) -> std::io::Result<Self> {
        let stat = file.metadata()?;
        Ok(Self {
            device: stat.dev(),
            inode: stat.ino(),
            size: stat.size(),
            modified: (stat.mtime(), stat.mtime_nsec()),
            changed: (stat.ctime(), stat.ctime_nsec()),
            limits: (limits.header_bytes, limits.entries),
        })
    }
}

/// Reads the archive only if it has changed since the last listing.
pub(crate) fn listing(path: &Path, limits: &ImageLimits) -> Result<Arc<Listing>> {
    LISTINGS.get_or_list(path, limits)
}

impl Listings {
    fn get_or_list(&self, path: &Path, limits: &ImageLimits) -> Result<Arc<Listing>> {
        let file = files::open(path)?;
        let version_of = |file| Version::of(file, limits).map_err(ImageError::io("stat"));
        let version = version_of(&file)?;
        if let Some(cached) = self.find(&version) {
            return cached.map_err(ImageError::Known);
        }
        let _permit = READERS.acquire();
        // Another thread may have listed it meanwhile.
        if let Some(cached) = self.find(&version) {
            return cached.map_err(ImageError::Known);
        }
        let listed = match list(&file, limits) {
            Ok(listing) => Ok(Arc::new(listing)),
            Err(Problem::OfContent(problem)) => Err(Arc::new(problem)),
            Err(Problem::OfReading(problem)) => return Err(problem),
        };
        // A file that changed while it was read is listed again.
        if version_of(&file)? == version {
            self.remember(version, listed.clone());
        }
        listed.map_err(ImageError::Known)
    }

    fn find(&self, version: &Version) -> Option<Cached> {
        self.locked().get(version).cloned()
    }

    fn remember(&self, version: Version, listed: Cached) {
        let weight = |listed: &Cached| 1 + listed.as_ref().map_or(0, |listing| listing.len());
        let mut listings = self.locked();
        if listings.values().map(weight).sum::<usize>() + weight(&listed) > MAX_CACHED_BLOBS {
            listings.clear();
        }
        listings.insert(version, listed);
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<Version, Cached>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Problem {
    /// The archive is invalid.
    OfContent(ImageError),
    /// Reading failed: the next attempt may succeed.
    OfReading(ImageError),
}

fn list(file: &File, limits: &ImageLimits) -> std::result::Result<Listing, Problem> {
    let (header, all_headers) = (Allowance::unlimited(), Allowance::unlimited());
    all_headers.set(MAX_HEADER_BYTES);
    let unreadable = |e: std::io::Error| match e.raw_os_error() {
        Some(_) => Problem::OfReading(ImageError::reading("tar")(e)),
        None if header.is_used_up() => Problem::OfContent(limits.header_too_large()),
        None if all_headers.is_used_up() => {
            Problem::OfContent(ImageError::HeadersTooLarge { most: MAX_HEADER_BYTES })
        }
        None => Problem::OfContent(ImageError::reading("tar")(e)),
    };
    let limited = Limited::new(Limited::new(file, all_headers.clone()), header.clone());
    let mut archive = tar::Archive::new(limited);
    let mut found = Listing::new();
    let mut entries = archive.entries_with_seek().map_err(unreadable)?;
    for count in 0.. {
        // Content is skipped, so that only headers are read.
        header.set(limits.header_bytes.saturating_add(1024));
        let Some(entry) = entries.next() else { break };
        let entry = entry.map_err(unreadable)?;
        Used { unpacked_bytes: 0, entries: count }.check(limits).map_err(Problem::OfContent)?;
        let name = entry.path().map_err(|e| Problem::OfContent(ImageError::io("tar entry name")(e)))?;
        let name = name.strip_prefix("./").unwrap_or(&name);
        if is_of_layout(name) {
            found.insert(name.to_owned(), (entry.raw_file_position(), entry.size()));
        }
        if found.len() > MAX_BLOBS {
            return Err(Problem::OfContent(ImageError::TooManyBlobs { most: MAX_BLOBS }));
        }
    }
    Ok(found)
}

fn is_of_layout(name: &Path) -> bool {
    let hex = name.strip_prefix("blobs/sha256").ok().and_then(Path::to_str);
    name == Path::new("index.json") || hex.is_some_and(is_hex_digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With entries of these names.
    fn archive(dir: &tempfile::TempDir, names: &[&str]) -> PathBuf {
        let path = dir.path().join("images.tar");
        let mut tar = tar::Builder::new(File::create(&path).unwrap());
        for name in names {
            let mut header = tar::Header::new_gnu();
            header.set_size(1);
            tar.append_data(&mut header, name, &b"x"[..]).unwrap();
        }
        tar.finish().unwrap();
        path
    }

    #[test]
    fn a_listing_holds_the_names_of_an_image_layout_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let blob = format!("blobs/sha256/{}", "a".repeat(64));
        let long = format!("blobs/sha256/{}", "b".repeat(100_000));
        let names = ["./index.json", &blob, &long, "blobs/x", "oci-layout", "index.json/x"];
        let listing = listing(&archive(&dir, &names), &ImageLimits::default()).unwrap();
        let mut names: Vec<&str> = listing.keys().map(|name| name.to_str().unwrap()).collect();
        names.sort_unstable();
        assert_eq!(names, [blob.as_str(), "index.json"]);
    }

    #[test]
    fn an_archive_is_read_again_only_when_it_has_changed() {
        let dir = tempfile::tempdir().unwrap();
        let limits = ImageLimits::default();
        let listings = Listings(Mutex::default());
        let path = archive(&dir, &["index.json"]);
        let first = listings.get_or_list(&path, &limits).unwrap();
        assert!(Arc::ptr_eq(&first, &listings.get_or_list(&path, &limits).unwrap()));
        let blob = format!("blobs/sha256/{}", "a".repeat(64));
        archive(&dir, &["index.json", &blob, "x", "y"]);
        assert_eq!(listings.get_or_list(&path, &limits).unwrap().len(), 2);
        let fewer = ImageLimits { entries: 1, ..ImageLimits::default() };
        let problem = listings.get_or_list(&path, &fewer).unwrap_err();
        assert_eq!(problem.to_string(), "the image has more than 1 entries (--image-max-entries)");
    }

    #[test]
    fn long_names_as_holes_are_not_read_for_ever() {
        use std::os::unix::fs::FileExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("images.tar");
        let file = File::create(&path).unwrap();
        let name_bytes: u64 = 1_000_000;
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::GNULongName);
        header.set_size(name_bytes);
        header.set_cksum();
        let mut entry = tar::Header::new_gnu();
        entry.set_path("x").unwrap();
        entry.set_size(0);
        entry.set_cksum();
        let each = 512 + name_bytes.next_multiple_of(512) + 512;
        for n in 0..10_000 {
            file.write_all_at(header.as_bytes(), n * each).unwrap();
            file.write_all_at(entry.as_bytes(), (n + 1) * each - 512).unwrap();
        }
        let problem = listing(&path, &ImageLimits::default()).unwrap_err();
        assert_eq!(problem.to_string(), "the archive's headers have more than 67108864 bytes together");
    }

    #[test]
    fn cached_listings_have_a_bound() {
        let dir = tempfile::tempdir().unwrap();
        let file = File::open(archive(&dir, &[])).unwrap();
        let large: Listing = (0..MAX_BLOBS as u64).map(|n| (n.to_string().into(), (0, 0))).collect();
        let large = Arc::new(large);
        let listings = Listings(Mutex::default());
        for inode in 0..100 {
            let version = Version { inode, ..Version::of(&file, &ImageLimits::default()).unwrap() };
            listings.remember(version, Ok(Arc::clone(&large)));
        }
        let cached = listings.locked().values().flatten().map(|listing| listing.len()).sum::<usize>();
        assert!(cached <= MAX_CACHED_BLOBS, "{cached}");
    }
}
