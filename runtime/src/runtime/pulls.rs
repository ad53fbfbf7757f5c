//! One import at a time for each image.
//!
//! An import occupies a thread, for minutes if the image is large or its disk slow. Without turns,
//! each pod that names the image would occupy one more, until no call of any pod finds a thread.

use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::locks::Locks;

/// An image's turn, until it is dropped.
pub(crate) type Turn = OwnedMutexGuard<()>;

/// By image.
#[derive(Debug, Default)]
pub(crate) struct Pulls(Locks<String, Mutex<()>>);

impl Pulls {
    /// Waits until no other import of `image` is under way. Dropping the result ends the turn.
    pub(crate) async fn turn(&self, image: &str) -> Turn {
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
