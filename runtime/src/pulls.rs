//! One import at a time of each image.
//!
//! An import holds a thread, for minutes where the image is large or its disk slow. Without turns,
//! every pod that names the image would hold one more, until no call of any pod gets a thread.

use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::locks::Locks;

/// By image.
#[derive(Debug, Default)]
pub(crate) struct Pulls(Locks<String, Mutex<()>>);

impl Pulls {
    /// Waits until no other import of `image` is under way. The turn ends with the value.
    pub(crate) async fn turn(&self, image: &str) -> OwnedMutexGuard<()> {
        self.0.of(image).lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_image_is_imported_once_at_a_time_and_another_beside_it() {
        let pulls = Pulls::default();
        let first = pulls.turn("a").await;
        let second = tokio::time::timeout(std::time::Duration::from_millis(20), pulls.turn("a"));
        second.await.unwrap_err();
        let _other = pulls.turn("b").await;
        drop(first);
        let _again = pulls.turn("a").await;
    }
}
