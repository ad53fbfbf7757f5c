//! Manifests of tests and benches, as a user would write them; what matters to
//! a test is an argument, the rest is the least that makes a valid object.

use crate::examples::DEMO_IMAGE;

/// A pod with one container `business`, in namespace `default`.
#[derive(Debug, Clone, Copy)]
pub struct Pod<'a> {
    pub name: &'a str,
    /// Words of demo-app.
    pub args: &'a [&'a str],
    /// Mounted at /data.
    pub claim: Option<&'a str>,
    pub image: &'a str,
    pub command: &'a str,
    /// `Always`, `OnFailure` or `Never`.
    pub restart_policy: &'a str,
}

impl<'a> Pod<'a> {
    pub fn new(name: &'a str, args: &'a [&'a str]) -> Self {
        Self { name, args, claim: None, image: DEMO_IMAGE, command: "/demo-app", restart_policy: "Never" }
    }

    #[must_use]
    pub fn with_claim(self, claim: &'a str) -> Self {
        Self { claim: Some(claim), ..self }
    }

    pub fn yaml(&self) -> String {
        let args: Vec<String> = self.args.iter().map(|word| format!("{word:?}")).collect();
        let (mounts, volumes) = self.claim.map_or((String::new(), String::new()), |claim| {
            (
                "      volumeMounts: [{name: data, mountPath: /data}]\n".to_owned(),
                format!("  volumes: [{{name: data, persistentVolumeClaim: {{claimName: {claim}}}}}]\n"),
            )
        });
        format!(
            "apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: default}}
spec:
  restartPolicy: {restart}
  terminationGracePeriodSeconds: 2
  containers:
    - name: business
      image: {image}
      imagePullPolicy: IfNotPresent
      command: [{command}]
      args: [{args}]
{mounts}{volumes}",
            name = self.name,
            restart = self.restart_policy,
            image = self.image,
            command = self.command,
            args = args.join(", "),
        )
    }
}

/// A claim on class `hawser`, in namespace `default`.
pub fn claim(name: &str, storage: &str) -> String {
    claim_of_class(name, storage, "hawser")
}

pub fn claim_of_class(name: &str, storage: &str, class: &str) -> String {
    format!(
        "apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {name}, namespace: default}}
spec:
  storageClassName: {class}
  accessModes: [ReadWriteMany]
  resources: {{requests: {{storage: {storage}}}}}
"
    )
}

pub fn class(name: &str, provisioner: &str) -> String {
    format!(
        "apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {{name: {name}}}
provisioner: {provisioner}
"
    )
}
