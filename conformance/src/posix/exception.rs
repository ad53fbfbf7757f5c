//! What is expected to fail, with the reason.

#[derive(Debug)]
pub(super) struct Exception {
    /// The test's.
    pub(super) name: &'static str,
    /// On grounds whose title contains this.
    pub(super) ground: &'static str,
    pub(super) reason: &'static str,
}

impl Exception {
    pub(super) fn is_of(&self, ground: &str) -> bool {
        ground.contains(self.ground)
    }
}

/// The first of `list` for a test on a ground.
pub(super) fn find<'a>(list: &'a [Exception], name: &str, ground: &str) -> Option<&'a Exception> {
    list.iter().find(|exception| exception.name == name && exception.is_of(ground))
}
