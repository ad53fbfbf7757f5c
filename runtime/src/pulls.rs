//! Pulls: an image comes from the images directory, else from its registry. One at a time for each
//! image.
//!
//! An import occupies a thread, for minutes if the image is large or its disk slow. Without turns,
//! each pod that names the image would occupy one more, until no call of any pod finds a thread.

use std::sync::Arc;

use proto::cri::AuthConfig;
use tokio::sync::{Mutex, OwnedMutexGuard, watch};

use crate::blocking::blocking;
use crate::error::{Error, Result};
use crate::images::Image;
use crate::images::reference::Reference;
use crate::locks::Locks;
use crate::registry::Credentials;
use crate::runtime::Runtime;

/// By image.
#[derive(Debug, Default)]
pub(crate) struct Pulls(Locks<String, Mutex<()>>);

impl Pulls {
    /// Waits until no other import of `image` is under way. Dropping the result ends the turn.
    pub(crate) async fn turn(&self, image: &str) -> OwnedMutexGuard<()> {
        self.0.of(image).lock_owned().await
    }
}

/// Pulls `name`. A download ends when `ending` becomes true.
pub(crate) async fn pull(
    runtime: Arc<Runtime>,
    name: String,
    auth: Option<AuthConfig>,
    ending: watch::Receiver<bool>,
) -> Result<Image> {
    let (store, local) = (Arc::clone(&runtime), name.clone());
    match blocking("import image", move || store.images.pull(&local)).await {
        Err(Error::ImageMissing { image, images_dir, broken }) => {
            let pulled = from_registry(&runtime, &name, auth, ending).await;
            pulled.map_err(|error| match error {
                Error::Pull { source } => Error::ImageNotPulled { image, images_dir, broken, source },
                other => other,
            })
        }
        local => local,
    }
}

async fn from_registry(
    runtime: &Arc<Runtime>,
    name: &str,
    auth: Option<AuthConfig>,
    mut ending: watch::Receiver<bool>,
) -> Result<Image> {
    let wanted = Reference::parse(name)?;
    let domain = wanted.repository.split('/').next().unwrap_or_default();
    let credentials = Credentials::of(auth.unwrap_or_default(), domain)?;
    tracing::info!(image = %wanted, "pulling");
    let fetched = tokio::select! {
        fetched = runtime.registries.fetch(&wanted, credentials.as_ref(), &runtime.images) => fetched,
        // An end of the runtime waits for its calls.
        _ending = ending.wait_for(|ending| *ending) => return Err(Error::Ending),
    };
    let (fetched, pins) = fetched.map_err(|source| Error::Pull { source: Box::new(source) })?;
    let store = Arc::clone(runtime);
    let imported = blocking("import image", move || {
        // The files go when it is done.
        let (image, _files) = fetched.into_parts();
        store.images.import_pulled(&wanted, image)
    });
    let image = imported.await?;
    drop(pins);
    tracing::info!(image = name, id = image.id, "pulled");
    Ok(image)
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
