//! Versions of a protocol that a part speaks.

use std::fmt;

/// From `oldest` to `newest`, both included. Versions count from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Versions {
    pub oldest: u32,
    pub newest: u32,
}

impl Versions {
    /// As a message gives them: `oldest` 0 is `newest` alone.
    pub fn said(oldest: u32, newest: u32) -> Self {
        Self { oldest: if oldest == 0 { newest } else { oldest }, newest }
    }

    /// The newest version that both speak.
    pub fn common(self, other: Self) -> Option<u32> {
        let (oldest, newest) = (self.oldest.max(other.oldest), self.newest.min(other.newest));
        (oldest <= newest).then_some(newest)
    }
}

/// `3`, or `2 to 3`.
impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.oldest == self.newest {
            true => write!(f, "{}", self.newest),
            false => write!(f, "{} to {}", self.oldest, self.newest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_that_both_speak_is_taken() {
        let of = |oldest, newest| Versions { oldest, newest };
        assert_eq!(of(1, 3).common(of(2, 4)), Some(3));
        assert_eq!(of(2, 4).common(of(1, 3)), Some(3));
        assert_eq!(of(3, 3).common(of(3, 3)), Some(3));
        assert_eq!(of(1, 2).common(of(3, 4)), None);
        assert_eq!(of(3, 4).common(of(1, 2)), None);
        // Of a peer that says what cannot be.
        assert_eq!(of(3, 3).common(of(4, 2)), None);
        assert_eq!(Versions::said(0, 2), of(2, 2));
        assert_eq!((of(2, 2).to_string(), of(2, 3).to_string()), ("2".to_owned(), "2 to 3".to_owned()));
    }
}
