//! The error of every refused system call: which operation, on what, why.

use std::fmt::Display;
use std::io;
use std::path::Path;

use nix::errno::Errno;

pub type Result<T> = std::result::Result<T, Error>;

/// A refused system call. `Display` shows no reason; [`chain`] shows
/// `bind mount /a -> /b: Device or resource busy (os error 16)`.
#[derive(Debug, thiserror::Error)]
#[error("{op} {object}")]
pub struct Error {
    /// The operation: `bind mount`.
    pub op: &'static str,
    /// Its object: a path, a name, `source -> target`.
    pub object: String,
    #[source]
    pub source: io::Error,
}

impl Error {
    pub fn new(op: &'static str, object: impl Display, source: impl Into<io::Error>) -> Self {
        Self { op, object: object.to_string(), source: source.into() }
    }

    /// [`Self::new`] for the most common object, a path.
    pub fn at(op: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        Self::new(op, path.display(), source)
    }

    /// The cause without the operation: see [`reason`].
    pub fn reason(&self) -> String {
        reason(&self.source)
    }

    /// The errno of the cause; `EIO` if it is not from a system call.
    pub fn errno(&self) -> Errno {
        self.source.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
    }
}

/// An error and its causes on one line, outermost first: `add container: create bridge x:
/// Operation not permitted (os error 1)`. `Display` alone shows only the outermost.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}

/// Why a system call was refused, in the words of Go's runtime: glibc's messages in lower case,
/// whatever C library this program uses. Another error describes itself.
pub fn reason(error: &io::Error) -> String {
    let Some(number) = error.raw_os_error() else { return error.to_string() };
    let errno = Errno::from_raw(number);
    if errno == Errno::UnknownErrno {
        return format!("errno {number}");
    }
    let listed = OTHER_WORDS.iter().find(|(of, _)| *of == errno);
    listed.map_or_else(|| uncapitalized(errno.desc()), |(_, words)| (*words).to_owned())
}

/// The messages that differ from [`Errno::desc`].
const OTHER_WORDS: &[(Errno, &str)] = &[
    (Errno::EIO, "input/output error"),
    (Errno::EBADF, "bad file descriptor"),
    (Errno::EAGAIN, "resource temporarily unavailable"),
    (Errno::ENOMEM, "cannot allocate memory"),
    (Errno::EXDEV, "invalid cross-device link"),
    (Errno::ENFILE, "too many open files in system"),
    (Errno::ENOTTY, "inappropriate ioctl for device"),
    (Errno::EDOM, "numerical argument out of domain"),
    (Errno::ERANGE, "numerical result out of range"),
    (Errno::EDEADLK, "resource deadlock avoided"),
    (Errno::ENOLCK, "no locks available"),
    (Errno::ELOOP, "too many levels of symbolic links"),
    (Errno::ENOSTR, "device not a stream"),
    (Errno::ENODATA, "no data available"),
    (Errno::ETIME, "timer expired"),
    (Errno::ENOSR, "out of streams resources"),
    (Errno::EREMOTE, "object is remote"),
    (Errno::ENOLINK, "link has been severed"),
    (Errno::EMULTIHOP, "multihop attempted"),
    (Errno::EBADMSG, "bad message"),
    (Errno::EOVERFLOW, "value too large for defined data type"),
    (Errno::EILSEQ, "invalid or incomplete multibyte or wide character"),
    (Errno::EOPNOTSUPP, "operation not supported"),
    (Errno::ENETRESET, "network dropped connection on reset"),
    (Errno::ESTALE, "stale file handle"),
    (Errno::EDQUOT, "disk quota exceeded"),
    (Errno::EOWNERDEAD, "owner died"),
];

/// Keeps acronyms: `RFS specific error`.
fn uncapitalized(words: &str) -> String {
    let mut letters = words.chars();
    match (letters.next(), words.chars().nth(1)) {
        (Some(first), Some(second)) if !second.is_uppercase() => {
            first.to_lowercase().chain(letters).collect()
        }
        _ => words.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_has_the_errno_at_its_end() {
        let error = Error::at("bind mount", Path::new("/a"), Errno::EBUSY);
        assert_eq!(error.to_string(), "bind mount /a");
        assert_eq!(chain(&error), format!("bind mount /a: {}", io::Error::from(Errno::EBUSY)));
    }

    #[test]
    fn reasons_are_in_words_that_no_c_library_chooses() {
        for (errno, words) in [
            (Errno::ENOENT, "no such file or directory"),
            (Errno::ELOOP, "too many levels of symbolic links"),
            (Errno::ENAMETOOLONG, "file name too long"),
            (Errno::EOPNOTSUPP, "operation not supported"),
            (Errno::EADDRNOTAVAIL, "cannot assign requested address"),
            (Errno::EISDIR, "is a directory"),
        ] {
            assert_eq!(reason(&errno.into()), words);
        }
        assert_eq!(reason(&io::Error::from_raw_os_error(524)), "errno 524");
        assert_eq!(reason(&io::Error::other("process 7 holds it")), "process 7 holds it");
    }

    /// Here the standard library asks glibc itself.
    #[cfg(target_env = "gnu")]
    #[test]
    fn every_reason_is_glibcs() {
        for number in (1..=133).filter(|number| Errno::from_raw(*number) != Errno::UnknownErrno) {
            let error = io::Error::from_raw_os_error(number);
            let theirs = error.to_string().replace(&format!(" (os error {number})"), "");
            assert_eq!(reason(&error), uncapitalized(&theirs), "errno {number}");
        }
    }
}
