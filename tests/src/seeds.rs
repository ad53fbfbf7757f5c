//! The seeds of the fuzz targets (`fuzz/seeds`), which run as ordinary tests too.

/// Runs the target's entry point on each of its seeds. A seed that fails is named.
#[track_caller]
pub fn run(target: &str, entry_point: impl Fn(&[u8])) {
    let seeds = crate::binaries::workspace_root().join("fuzz/seeds").join(target);
    let files = std::fs::read_dir(&seeds).unwrap_or_else(|e| panic!("{}: {e}", seeds.display()));
    let mut count = 0;
    for file in files {
        let path = file.expect("a directory is listed").path();
        let seed = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let held = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| entry_point(&seed)));
        assert!(held.is_ok(), "{}", path.display());
        count += 1;
    }
    assert!(count > 0, "{} is empty", seeds.display());
}
