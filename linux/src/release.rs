//! The release of the running kernel.

use std::fmt;

/// As `6.12.64`; what follows the three numbers is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl Release {
    #[must_use]
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }

    /// Of this kernel (uname(2)).
    #[must_use]
    pub fn running() -> Self {
        let release = nix::sys::utsname::uname().map(|names| names.release().to_string_lossy().into_owned());
        Self::parse(&release.unwrap_or_default())
    }

    /// A number that is missing or too large is 0.
    fn parse(text: &str) -> Self {
        let numbers = text.split(['-', '+']).next().unwrap_or_default();
        let mut numbers = numbers.split('.').map(|digits| digits.parse().unwrap_or(0));
        let mut next = || numbers.next().unwrap_or(0);
        Self { major: next(), minor: next(), patch: next() }
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_numbers_are_read_of_what_distributions_write() {
        for (text, numbers) in [
            ("6.1.0-37-amd64", (6, 1, 0)),
            ("6.12.48+deb13-amd64", (6, 12, 48)),
            ("6.18", (6, 18, 0)),
            ("7.0-rc1", (7, 0, 0)),
            ("5.14.0-503.11.1.el9_5.x86_64", (5, 14, 0)),
            ("odd", (0, 0, 0)),
            ("99999999999.1", (0, 1, 0)),
        ] {
            let (major, minor, patch) = numbers;
            assert_eq!(Release::parse(text), Release { major, minor, patch }, "{text}");
        }
    }

    #[test]
    fn later_releases_are_greater() {
        let releases = ["5.19.17", "6.1.0", "6.9.0", "6.12.63", "6.12.64", "6.18.0", "7.0.0"];
        assert!(releases.map(Release::parse).is_sorted());
        assert!(Release::running() > Release::new(5, 0, 0), "{}", Release::running());
    }
}
