//! Finds or pulls a container's image by its pull policy.

use std::fmt;
use std::time::{Duration, Instant};

use proto::cri;
use tonic::Code;

use super::Worker;
use crate::clients::cri::Cri;
use crate::objects::{Container, ContainerStateWaiting, EventType, LocalObjectReference, PullPolicy, Time};
use crate::worker::pull_secrets::{Keyring, Problem};

/// Why a container cannot be started yet.
#[derive(Debug)]
pub(super) struct NotYet {
    pub(super) why: ContainerStateWaiting,
    /// `None` means the worker's own back-off.
    pub(super) retry: Option<Duration>,
}

impl NotYet {
    pub(super) fn new(reason: &str, message: String) -> Self {
        Self { why: ContainerStateWaiting { reason: reason.to_owned(), message }, retry: None }
    }

    fn within(self, retry: Duration) -> Self {
        Self { retry: Some(retry), ..self }
    }
}

impl Worker {
    pub(super) async fn ensure_image(
        &mut self,
        container: &Container,
        sandbox: &cri::PodSandboxConfig,
    ) -> Result<cri::Image, NotYet> {
        let image = &container.image;
        if image.is_empty() {
            let message = "spec.containers[].image is empty: name an image".to_owned();
            return Err(NotYet::new("InvalidImageName", message));
        }
        let present = self.inspect(image).await?;
        if present.is_none()
            && container.pull_policy() == PullPolicy::Never
            && self.is_in_images_dir(image).await
        {
            // The image came with the node. It is not imported yet, or was removed from a full
            // disk.
            return self.pull(image, sandbox).await;
        }
        match (present, container.pull_policy()) {
            (Some(found), PullPolicy::IfNotPresent | PullPolicy::Never) => {
                let message = format!("Container image \"{image}\" already present on machine");
                self.record(EventType::Normal, "Pulled", &message);
                Ok(found)
            }
            (None, PullPolicy::Never) => {
                let message = format!(
                    "Container image \"{image}\" is not present with pull policy of Never: import it, or choose another imagePullPolicy"
                );
                self.record(EventType::Warning, "ErrImageNeverPull", &message);
                Err(NotYet::new("ErrImageNeverPull", message))
            }
            (_, PullPolicy::Always | PullPolicy::IfNotPresent) => self.pull(image, sandbox).await,
        }
    }

    /// Whether the image is in the embedded runtime's images directory; such an image counts as
    /// present.
    async fn is_in_images_dir(&self, image: &str) -> bool {
        let Some((images_dir, limits)) = self.tools.images.clone() else { return false };
        let offered =
            tokio::task::spawn_blocking(move || runtime::offered_images(&images_dir, &limits)).await;
        offered.is_ok_and(|names| names.is_ok_and(|names| names.iter().any(|name| name == image)))
    }

    async fn pull(&mut self, image: &str, sandbox: &cri::PodSandboxConfig) -> Result<cri::Image, NotYet> {
        if let Some(left) = self.pulls.remaining_since_step(image, Time::now()) {
            let message = format!("Back-off pulling image \"{image}\"");
            self.record(EventType::Normal, "BackOff", &message);
            return Err(NotYet::new("ImagePullBackOff", message).within(left));
        }
        self.record(EventType::Normal, "Pulling", &format!("Pulling image \"{image}\""));
        let (cri, logins) = (self.tools.cri.clone(), self.logins(image));
        let begun = Instant::now();
        let pull = async { pull_with_any(&cri, image, logins?, sandbox).await };
        // The pull ends with the pod.
        let Some(pulled) = self.unless_ended(pull).await else {
            return Err(NotYet::new("ContainerCreating", "the pod must end".to_owned()));
        };
        if let Err(problem) = pulled {
            let now = Time::now();
            let left = self.pulls.step(image, now, now);
            let message = format!("Failed to pull image \"{image}\": {problem}");
            self.record(EventType::Warning, "Failed", &message);
            self.record(EventType::Warning, "Failed", "Error: ErrImagePull");
            return Err(NotYet::new("ErrImagePull", message).within(left));
        }
        let took = Took(begun.elapsed());
        let found = self.inspect(image).await?.ok_or_else(|| {
            let message = format!("image \"{image}\" is not present after a successful pull");
            NotYet::new("ImageInspectError", message)
        })?;
        // Both times are the same: no pull waits for another one here.
        let message = format!(
            "Successfully pulled image \"{image}\" in {took} ({took} including waiting). Image size: {} bytes.",
            found.size
        );
        self.record(EventType::Normal, "Pulled", &message);
        Ok(found)
    }

    /// The logins for an image in the Secrets of the pod's `imagePullSecrets`; or what is wrong with a Secret.
    fn logins(&self, image: &str) -> Result<Vec<cri::AuthConfig>, String> {
        let (mut keyring, mut missing) = (Keyring::default(), Vec::new());
        for LocalObjectReference { name } in &self.pod.spec.image_pull_secrets {
            match self.tools.store.secret(&self.pod.metadata.namespace, name) {
                Some(secret) => match keyring.add(&secret.secret_type, secret.entries()) {
                    Ok(()) => {}
                    // As with kubelet, the pull goes on without it.
                    Err(problem @ (Problem::Type { .. } | Problem::NoKey { .. })) => {
                        let message = format!("Secret \"{name}\" of imagePullSecrets: {problem}");
                        self.record(EventType::Warning, "FailedToRetrieveImagePullSecret", &message);
                    }
                    Err(problem) => return Err(format!("Secret \"{name}\" of imagePullSecrets: {problem}")),
                },
                None => missing.push(name.as_str()),
            }
        }
        if !missing.is_empty() {
            let message = format!(
                "Unable to retrieve some image pull secrets ({}); attempting to pull the image may not succeed.",
                missing.join(", ")
            );
            self.record(EventType::Warning, "FailedToRetrieveImagePullSecret", &message);
        }
        Ok(keyring.lookup(image))
    }

    async fn inspect(&self, image: &str) -> Result<Option<cri::Image>, NotYet> {
        self.tools.cri.image(image).await.map_err(|error| {
            let message = format!("Failed to inspect image \"{image}\": {}", error.message);
            self.record(EventType::Warning, "InspectFailed", &message);
            let is_no_name = error.code == Code::InvalidArgument;
            NotYet::new(if is_no_name { "InvalidImageName" } else { "ImageInspectError" }, message)
        })
    }
}

/// Pulls with one login after the other until the registry takes one. Without logins, without any.
async fn pull_with_any(
    cri: &Cri,
    image: &str,
    logins: Vec<cri::AuthConfig>,
    sandbox: &cri::PodSandboxConfig,
) -> Result<(), String> {
    let mut attempts: Vec<_> = logins.into_iter().map(Some).collect();
    if attempts.is_empty() {
        attempts.push(None);
    }
    let mut problems = Vec::new();
    for auth in attempts {
        match cri.pull_image(image, auth, sandbox.clone()).await {
            Ok(_) => return Ok(()),
            Err(error) if !problems.contains(&error.message) => problems.push(error.message),
            Err(_) => {}
        }
    }
    Err(problems.join("; "))
}

/// A time as kubelet writes it, in milliseconds: `1m2.003s`, `1.5s`, `7ms`.
struct Took(Duration);

impl fmt::Display for Took {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let milliseconds = self.0.as_millis();
        if milliseconds == 0 {
            return f.write_str("0s");
        }
        if milliseconds < 1000 {
            return write!(f, "{milliseconds}ms");
        }
        let (minutes, rest) = (milliseconds / 60_000, milliseconds % 60_000);
        match minutes {
            0 => {}
            1..60 => write!(f, "{minutes}m")?,
            _ => write!(f, "{}h{}m", minutes / 60, minutes % 60)?,
        }
        let seconds = format!("{}.{:03}", rest / 1000, rest % 1000);
        write!(f, "{}s", seconds.trim_end_matches('0').trim_end_matches('.'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_as_kubelet_writes_it() {
        let shown = |milliseconds| Took(Duration::from_millis(milliseconds)).to_string();
        let times = [0, 7, 999, 1000, 1500, 62_003, 60_000, 3_661_010].map(shown);
        assert_eq!(times, ["0s", "7ms", "999ms", "1s", "1.5s", "1m2.003s", "1m0s", "1h1m1.01s"]);
    }
}
