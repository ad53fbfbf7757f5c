//! The release of the running kernel.

/// FUSE_NOTIFY_RESEND: another daemon can continue a connection.
pub(crate) const FIRST_WITH_RESEND: (u32, u32) = (6, 9);

/// Whether this kernel is of the release `wanted`, major and minor, or newer.
pub(crate) fn is_at_least(wanted: (u32, u32)) -> bool {
    is_release_at_least(&running(), wanted)
}

/// As uname(1) shows it; empty if it cannot be read.
pub(crate) fn running() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim_end().to_owned()
}

fn is_release_at_least(release: &str, wanted: (u32, u32)) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|digits| digits.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_told_apart_by_their_release() {
        for (release, new) in [
            ("6.1.0-37-amd64", false),
            ("6.12.48+deb13-amd64", false),
            ("6.18.0", true),
            ("6.18", true),
            ("7.0-rc1", true),
            ("5.19.17", false),
            ("odd", false),
        ] {
            assert_eq!(is_release_at_least(release, (6, 18)), new, "{release}");
        }
    }
}
