//! The path of a field: `spec.containers[0].image`.

use std::fmt;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Segment {
    Key(String),
    Index(usize),
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct FieldPath(Vec<Segment>);

impl FieldPath {
    pub(super) fn root() -> Self {
        Self::default()
    }

    pub(super) fn key(&self, name: &str) -> Self {
        self.with(Segment::Key(name.to_owned()))
    }

    pub(super) fn index(&self, index: usize) -> Self {
        self.with(Segment::Index(index))
    }

    /// `a.b.c` below this one.
    pub(super) fn below(&self, dotted: &str) -> Self {
        dotted.split('.').fold(self.clone(), |path, name| path.key(name))
    }

    pub(super) fn segments(&self) -> &[Segment] {
        &self.0
    }

    pub(super) fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    fn with(&self, segment: Segment) -> Self {
        let mut segments = self.0.clone();
        segments.push(segment);
        Self(segments)
    }
}

impl From<Vec<Segment>> for FieldPath {
    fn from(segments: Vec<Segment>) -> Self {
        Self(segments)
    }
}

impl fmt::Display for FieldPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, segment) in self.0.iter().enumerate() {
            match segment {
                Segment::Index(index) => write!(f, "[{index}]")?,
                // As Kubernetes prints the keys of maps: annotations[hawser.dev/network].
                Segment::Key(key) if key.contains(['.', '/']) => write!(f, "[{key}]")?,
                Segment::Key(key) if at == 0 => f.write_str(key)?,
                Segment::Key(key) => write!(f, ".{key}")?,
            }
        }
        Ok(())
    }
}
