//! One import at a time of each image.
//!
//! An import holds a thread, for minutes where the image is large or its disk slow. Without turns,
//! every pod that names the image would hold one more, until no call of any pod gets a thread.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{Mutex as Turn, OwnedMutexGuard};

#[derive(Debug, Default)]
pub(crate) struct Pulls(Mutex<HashMap<String, Weak<Turn<()>>>>);

impl Pulls {
    /// Waits until no other import of `image` is under way. The turn ends with the value.
    pub(crate) async fn turn(&self, image: &str) -> OwnedMutexGuard<()> {
        self.of(image).lock_owned().await
    }

    fn of(&self, image: &str) -> Arc<Turn<()>> {
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|_, turn| turn.strong_count() > 0);
        if let Some(turn) = turns.get(image).and_then(Weak::upgrade) {
            return turn;
        }
        let turn = Arc::default();
        turns.insert(image.to_owned(), Arc::downgrade(&turn));
        turn
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
        assert_eq!(pulls.0.lock().unwrap().len(), 2);
    }
}
