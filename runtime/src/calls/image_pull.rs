//! PullImage: an image comes from the images directory, else from its registry.

use std::sync::Arc;

use proto::cri::AuthConfig;
use tokio::sync::watch;

use crate::blocking::blocking;
use crate::error::{Error, Result};
use crate::images::Image;
use crate::images::reference::Reference;
use crate::registry::Credentials;
use crate::runtime::Runtime;
use crate::runtime::pulls::Turn;

/// Pulls `name`. A download ends with its caller, or when `ending` becomes true. An import does not:
/// it runs to its end, and so long keeps the turn.
pub(crate) async fn pull(
    runtime: Arc<Runtime>,
    name: String,
    auth: Option<AuthConfig>,
    ending: watch::Receiver<bool>,
    turn: Turn,
) -> Result<Image> {
    let (store, local) = (Arc::clone(&runtime), name.clone());
    let import = move || Ok((store.images.pull(&local), turn));
    match blocking("import image", import).await? {
        (Err(Error::ImageMissing { image, images_dir, broken }), turn) => {
            let pulled = from_registry(&runtime, &name, auth, ending, turn).await;
            pulled.map_err(|error| match error {
                Error::Pull { source } => Error::ImageNotPulled { image, images_dir, broken, source },
                other => other,
            })
        }
        (local, _turn) => local,
    }
}

async fn from_registry(
    runtime: &Arc<Runtime>,
    name: &str,
    auth: Option<AuthConfig>,
    mut ending: watch::Receiver<bool>,
    turn: Turn,
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
    // The pins stay until the import has pins of its own, or has failed.
    let (fetched, pins) = fetched?;
    let store = Arc::clone(runtime);
    let imported = blocking("import image", move || {
        let _until_imported = turn;
        let (image, _files) = fetched.into_parts();
        store.images.import_pulled(&wanted, image)
    });
    let image = imported.await?;
    drop(pins);
    tracing::info!(image = name, id = image.id, "pulled");
    Ok(image)
}
