//! The order in which images are removed: unused ones, least recently used first (kubernetes,
//! image_gc_manager.go). No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proto::cri;
use tokio::time::Instant;

/// When this kubelet saw each image, by id.
#[derive(Debug, Default)]
pub(super) struct Images(BTreeMap<String, Seen>);

#[derive(Debug, Clone, Copy)]
struct Seen {
    first: Instant,
    /// `None`: unused since this kubelet started.
    last_used: Option<Instant>,
}

impl Images {
    /// Records the images in use now. A dead container counts as a user.
    pub(super) fn record_use(&mut self, images: &[cri::Image], containers: &[cri::Container], now: Instant) {
        let used = used(containers);
        self.0.retain(|id, _| images.iter().any(|image| image.id == *id));
        for image in images {
            let seen = self.0.entry(image.id.clone()).or_insert(Seen { first: now, last_used: None });
            if is_used(image, &used) {
                seen.last_used = Some(now);
            }
        }
    }

    /// Images to remove, in order; none that is in use, pinned or younger than `min_age`.
    pub(super) fn candidates<'a>(
        &self,
        images: &'a [cri::Image],
        containers: &[cri::Container],
        min_age: Duration,
        now: Instant,
    ) -> Vec<&'a cri::Image> {
        let used = used(containers);
        let mut candidates: Vec<(&Seen, &cri::Image)> = images
            .iter()
            .filter(|image| !image.pinned && !is_used(image, &used))
            .filter_map(|image| Some((self.0.get(&image.id)?, image)))
            .filter(|(seen, _)| now.duration_since(seen.last_used.unwrap_or(seen.first)) >= min_age)
            .collect();
        candidates.sort_by_key(|(seen, _)| (seen.last_used, seen.first));
        candidates.into_iter().map(|(_, image)| image).collect()
    }
}

/// A container names its image by id, by reference, or as the pod's spec does.
fn used(containers: &[cri::Container]) -> BTreeSet<&str> {
    let names = containers.iter().flat_map(|container| {
        let image = container.image.as_ref().map(|image| image.image.as_str());
        [Some(container.image_id.as_str()), Some(container.image_ref.as_str()), image]
    });
    names.flatten().filter(|name| !name.is_empty()).collect()
}

fn is_used(image: &cri::Image, used: &BTreeSet<&str>) -> bool {
    let names = std::iter::once(&image.id).chain(&image.repo_tags).chain(&image.repo_digests);
    names.into_iter().any(|name| used.contains(name.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn image(id: &str) -> cri::Image {
        cri::Image { id: id.to_owned(), ..cri::Image::default() }
    }

    fn user_of(id: &str) -> cri::Container {
        cri::Container { image_id: id.to_owned(), ..cri::Container::default() }
    }

    #[test]
    fn the_longest_unused_goes_first_and_what_is_used_pinned_or_young_stays() {
        let all = [
            image("used"),
            image("late"),
            image("early"),
            image("never"),
            cri::Image { pinned: true, ..image("pinned") },
        ];
        let start = Instant::now();
        let mut images = Images::default();
        images.record_use(&all, &[user_of("used"), user_of("late"), user_of("early")], start);
        images.record_use(&all, &[user_of("used"), user_of("late")], start + MINUTE);
        let containers = [user_of("used")];
        let candidates = |after: Duration| {
            let found = images.candidates(&all, &containers, 2 * MINUTE, start + after);
            found.iter().map(|image| image.id.clone()).collect::<Vec<_>>()
        };
        assert_eq!(candidates(MINUTE), [] as [&str; 0]);
        assert_eq!(candidates(2 * MINUTE), ["never", "early"]);
        assert_eq!(candidates(3 * MINUTE), ["never", "early", "late"]);
    }
}
