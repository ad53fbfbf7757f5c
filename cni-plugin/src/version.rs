//! Versions of the CNI specification.

use std::fmt;

/// A released version of the specification, oldest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    V0_1_0,
    V0_2_0,
    V0_3_0,
    V0_3_1,
    V0_4_0,
    V1_0_0,
    V1_1_0,
}

impl Version {
    /// Every version, each with a form of [`crate::CniResult`].
    pub const ALL: [Self; 7] =
        [Self::V0_1_0, Self::V0_2_0, Self::V0_3_0, Self::V0_3_1, Self::V0_4_0, Self::V1_0_0, Self::V1_1_0];

    pub const LATEST: Self = Self::V1_1_0;

    /// Parses a version's exact text; the specification has no ranges.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|version| version.as_str() == text)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::V0_1_0 => "0.1.0",
            Self::V0_2_0 => "0.2.0",
            Self::V0_3_0 => "0.3.0",
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
