//! Work that threads take from one queue, so that none is idle while another has much left.

use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::{Result, anyhow};

/// Runs `work` for each item, on as many threads as there are `places`; each thread keeps its place. What was returned,
/// in any order. After an error no thread takes another item.
pub(super) fn spread<P: Send, I: Send, T: Send>(
    places: impl IntoIterator<Item = P>,
    items: impl IntoIterator<Item = I>,
    work: impl Fn(&mut P, I) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let mut items: Vec<I> = items.into_iter().collect();
    items.reverse();
    let (items, work) = (&Mutex::new(items), &work);
    thread::scope(|scope| {
        let take = |mut place: P| {
            let mut done = Vec::new();
            while let Some(item) = next(items) {
                done.push(work(&mut place, item).inspect_err(|_| clear(items))?);
            }
            Ok(done)
        };
        let threads: Vec<_> = places.into_iter().map(|place| scope.spawn(move || take(place))).collect();
        let mut all = Vec::new();
        let mut first_error = None;
        for thread in threads {
            match thread.join().map_err(|_| anyhow!("a thread of the suite panicked")).flatten() {
                Ok(done) => all.extend(done),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        first_error.map_or(Ok(all), Err)
    })
}

/// A statement of its own, so that the lock is free during the work.
fn next<I>(items: &Mutex<Vec<I>>) -> Option<I> {
    items.lock().unwrap_or_else(PoisonError::into_inner).pop()
}

fn clear<I>(items: &Mutex<Vec<I>>) {
    items.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use anyhow::bail;

    use super::*;

    #[test]
    fn each_item_is_done_once() {
        let mut done = spread([(), ()], 0..100, |(), item| Ok(item)).unwrap();
        done.sort_unstable();
        assert_eq!(done, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn as_many_items_are_done_at_once_as_there_are_places() {
        let all = Barrier::new(3);
        spread([(), (), ()], 0..3, |(), _item| {
            all.wait();
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn after_an_error_nothing_more_begins() {
        let error = spread([()], 0..3, |(), item: i32| match item {
            0 => Ok(()),
            1 => bail!("item 1"),
            _ => bail!("it began"),
        });
        assert_eq!(error.unwrap_err().to_string(), "item 1");
    }
}
