//! Imports the images directory into the embedded runtime, at the start and after every change,
//! before a pod asks for an image. No pod waits for this: it imports the image that it needs
//! itself.

use std::io;
use std::path::{Path, PathBuf};

use runtime::{ImageLimits, ImagesWatch};
use tracing::{info, warn};

use crate::backoff::Backoff;
use crate::clients::cri::Cri;

/// Never ends.
pub(super) async fn follow(cri: Cri, images_dir: PathBuf, limits: ImageLimits) {
    let mut backoff = Backoff::operation();
    loop {
        if let Err(error) = follow_once(&cri, &images_dir, &limits).await {
            warn!(dir = %images_dir.display(), %error, "cannot watch the images directory");
            // A pod's root may hold all inotify instances; import the present images without a
            // watch.
            if let Err(error) = import_missing(&cri, &images_dir, &limits).await {
                warn!(dir = %images_dir.display(), %error, "cannot read the images directory");
            }
        }
        tokio::time::sleep(backoff.step()).await;
    }
}

/// Returns only with an error.
async fn follow_once(cri: &Cri, images_dir: &Path, limits: &ImageLimits) -> io::Result<()> {
    let mut watch = ImagesWatch::new(images_dir)?;
    loop {
        import_missing(cri, images_dir, limits).await?;
        watch.changed().await?;
    }
}

async fn import_missing(cri: &Cri, images_dir: &Path, limits: &ImageLimits) -> io::Result<()> {
    let (dir, limits) = (images_dir.to_owned(), limits.clone());
    let offered = tokio::task::spawn_blocking(move || runtime::offered_images(&dir, &limits));
    for image in offered.await.map_err(io::Error::other)?? {
        let present = cri.image(&image).await.is_ok_and(|found| found.is_some());
        if present {
            continue;
        }
        match cri.pull_image(&image, None, proto::cri::PodSandboxConfig::default()).await {
            Ok(_) => info!(image, "image imported"),
            Err(error) => warn!(%error, "image not imported"),
        }
    }
    Ok(())
}
