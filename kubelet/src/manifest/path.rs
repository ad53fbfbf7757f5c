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

    fn with(&self, segment: Segment) -> Self {
        let mut segments = self.0.clone();
        segments.push(segment);
        Self(segments)
    }
}

impl From<&serde_ignored::Path<'_>> for FieldPath {
    fn from(path: &serde_ignored::Path<'_>) -> Self {
        use serde_ignored::Path;
        match path {
            Path::Root => Self::root(),
            Path::Seq { parent, index } => Self::from(*parent).index(*index),
            Path::Map { parent, key } => Self::from(*parent).key(key),
            Path::Some { parent } | Path::NewtypeStruct { parent } | Path::NewtypeVariant { parent } => {
                Self::from(*parent)
            }
        }
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
