//! Imports all images in the images directory, at the start and whenever the directory changes: a
//! kubelet with `imagePullPolicy: Never` asks for images and never pulls them.
//!
//! A removed image stays removed until its directory changes or it is pulled.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::error::chain;
use crate::images;
use crate::images::watch::ImagesWatch;
use crate::runtime::Runtime;

/// Pause before a failed watch is tried again.
const PAUSE: Duration = Duration::from_secs(10);

/// Never returns.
pub(crate) async fn follow(runtime: Arc<Runtime>, images_dir: std::path::PathBuf) {
    loop {
        if let Err(error) = follow_once(&runtime, &images_dir).await {
            tracing::warn!(dir = %images_dir.display(), %error, "cannot watch the images directory");
            // Imports anyway: a pod's root user may have used up all inotify instances.
            if let Err(error) = import_beside(&runtime, &images_dir).await {
                tracing::warn!(dir = %images_dir.display(), %error, "cannot look at the images directory");
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Returns only with an error.
async fn follow_once(runtime: &Arc<Runtime>, images_dir: &Path) -> io::Result<()> {
    let mut watch = ImagesWatch::new(images_dir)?;
    loop {
        import_beside(runtime, images_dir).await?;
        watch.changed().await?;
    }
}

/// [`import_missing`] on a thread that may block.
async fn import_beside(runtime: &Arc<Runtime>, images_dir: &Path) -> io::Result<()> {
    let (runtime, dir) = (Arc::clone(runtime), images_dir.to_owned());
    tokio::task::spawn_blocking(move || import_missing(&runtime, &dir)).await.map_err(io::Error::other)?
}

fn import_missing(runtime: &Runtime, images_dir: &Path) -> io::Result<()> {
    for image in images::offered(images_dir, runtime.images.limits())? {
        if matches!(runtime.images.find(&image), Ok(Some(_))) {
            continue;
        }
        match runtime.images.pull(&image) {
            Ok(_) => tracing::info!(image, "image imported"),
            Err(error) => tracing::warn!(image, error = %chain(&error), "image not imported"),
        }
    }
    Ok(())
}
