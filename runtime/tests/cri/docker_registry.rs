//! Debian's `docker-registry` on loopback, with TLS and a password.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tests::cri::{Host, digest_of, eventually};

use crate::registry_server::{Certificate, Image};

pub(crate) const ADDRESS: &str = "127.0.0.1:5000";
pub(crate) const USER: &str = "anna";
pub(crate) const PASSWORD: &str = "U*U";
/// Of [`PASSWORD`], by bcrypt, which is all that the registry takes.
const HASH: &str = "$2a$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW";

pub(crate) struct DockerRegistry {
    process: Child,
    dir: PathBuf,
}

impl DockerRegistry {
    /// In the network namespace of this thread; its images lie below `host`'s directory.
    pub(crate) async fn start(host: &Host, certificate: &Certificate) -> Self {
        let dir = host.path("registry");
        std::fs::create_dir(&dir).unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.join(name), text).unwrap();
        write("cert.pem", &certificate.certificate);
        write("key.pem", &certificate.key);
        write("htpasswd", &format!("{USER}:{HASH}\n"));
        let shown = dir.display();
        let config = format!(
            "version: 0.1\n\
             log: {{level: warn}}\n\
             storage: {{filesystem: {{rootdirectory: {shown}/data}}}}\n\
             http:\n  addr: {ADDRESS}\n  secret: secret\n  \
             tls: {{certificate: {shown}/cert.pem, key: {shown}/key.pem}}\n\
             auth: {{htpasswd: {{realm: test, path: {shown}/htpasswd}}}}\n"
        );
        write("config.yml", &config);
        let log = std::fs::File::create(dir.join("log")).unwrap();
        let process = Command::new("docker-registry")
            .arg("serve")
            .arg(dir.join("config.yml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("run `apt-get install docker-registry`, or `cargo xtask test`, which installs it");
        let registry = Self { process, dir };
        eventually("docker-registry listens", || std::net::TcpStream::connect(ADDRESS).ok()).await;
        registry
    }

    /// Stores an image in the registry's own form, as a push would. `tags` name the last of
    /// `documents`, which are manifests and indexes.
    pub(crate) fn put(&self, repository: &str, images: &[&Image], documents: &[&[u8]], tag: &str) {
        let root = self.dir.join("data/docker/registry/v2");
        let repository = root.join("repositories").join(repository);
        let blob = |bytes: &[u8]| {
            let digest = digest_of(bytes);
            let hex = digest["sha256:".len()..].to_owned();
            write(&root.join("blobs/sha256").join(&hex[..2]).join(&hex).join("data"), bytes);
            (digest, hex)
        };
        let link = |at: PathBuf, digest: &str| write(&at.join("link"), digest.as_bytes());
        for bytes in images.iter().flat_map(|image| image.blobs.values()) {
            let (digest, hex) = blob(bytes);
            link(repository.join("_layers/sha256").join(hex), &digest);
        }
        for document in documents {
            let (digest, hex) = blob(document);
            link(repository.join("_manifests/revisions/sha256").join(&hex), &digest);
            let tag = repository.join("_manifests/tags").join(tag);
            link(tag.join("index/sha256").join(&hex), &digest);
            link(tag.join("current"), &digest);
        }
    }
}

impl Drop for DockerRegistry {
    fn drop(&mut self) {
        let _has_ended = self.process.kill();
        let _status = self.process.wait();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.dir.join("log")).unwrap_or_default();
            println!("docker-registry's log:\n{log}");
        }
    }
}

fn write(path: &Path, bytes: &[u8]) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
}
