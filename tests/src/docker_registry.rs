//! Debian's `docker-registry` on loopback.

#![expect(clippy::unwrap_used, reason = "what fails here fails the test that uses it")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use sha2::{Digest, Sha256};

use crate::eventually;

/// In a network namespace of the test's own.
pub const ADDRESS: &str = "127.0.0.1:5000";
pub const USER: &str = "anna";
pub const PASSWORD: &str = "U*U";
/// Of [`PASSWORD`], by bcrypt, which is all that the registry takes.
const HASH: &str = "$2a$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW";
const TIMEOUT: Duration = Duration::from_secs(20);

/// Who may read the images, and how.
#[derive(Debug, Clone, Copy, Default)]
pub struct Access<'a> {
    /// Certificate and key, in PEM.
    pub tls: Option<(&'a str, &'a str)>,
    /// Whether [`USER`] and [`PASSWORD`] are needed.
    pub password: bool,
}

/// A running registry; its images lie in its directory.
#[derive(Debug)]
pub struct DockerRegistry {
    process: Child,
    dir: PathBuf,
}

impl DockerRegistry {
    /// `command` starts nothing yet: it gives the process its place. `dir` is made.
    pub fn start(mut command: Command, dir: &Path, access: Access<'_>) -> Self {
        std::fs::create_dir(dir).unwrap();
        let shown = dir.display();
        let mut config = format!(
            "version: 0.1\nlog: {{level: warn}}\nstorage: {{filesystem: {{rootdirectory: {shown}/data}}}}\n\
             http:\n  addr: {ADDRESS}\n  secret: secret\n"
        );
        if let Some((certificate, key)) = access.tls {
            std::fs::write(dir.join("cert.pem"), certificate).unwrap();
            std::fs::write(dir.join("key.pem"), key).unwrap();
            config += &format!("  tls: {{certificate: {shown}/cert.pem, key: {shown}/key.pem}}\n");
        }
        if access.password {
            std::fs::write(dir.join("htpasswd"), format!("{USER}:{HASH}\n")).unwrap();
            config += &format!("auth: {{htpasswd: {{realm: test, path: {shown}/htpasswd}}}}\n");
        }
        std::fs::write(dir.join("config.yml"), config).unwrap();
        let log = std::fs::File::create(dir.join("log")).unwrap();
        command.arg("serve").arg(dir.join("config.yml")).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        let process = command.spawn();
        let process = process.expect("run `apt-get install docker-registry`, or `cargo xtask test`");
        let registry = Self { process, dir: dir.to_owned() };
        let listens = || std::net::TcpStream::connect(ADDRESS).map(drop).context("connect");
        eventually("docker-registry listens", TIMEOUT, listens).unwrap();
        registry
    }

    /// The program, for [`Self::start`].
    pub fn program() -> &'static str {
        "docker-registry"
    }

    /// Stores an image in the registry's own form, as a push would. `tag` names the last of
    /// `documents`, which are manifests and indexes. Returns its digest.
    pub fn put(&self, repository: &str, blobs: &[&[u8]], documents: &[&[u8]], tag: &str) -> String {
        let root = self.dir.join("data/docker/registry/v2");
        let repository = root.join("repositories").join(repository);
        let store = |bytes: &[u8]| {
            let hex = base16ct::lower::encode_string(&Sha256::digest(bytes));
            write(&root.join("blobs/sha256").join(&hex[..2]).join(&hex).join("data"), bytes);
            hex
        };
        let link = |dir: PathBuf, hex: &str| write(&dir.join("link"), format!("sha256:{hex}").as_bytes());
        for blob in blobs {
            let hex = store(blob);
            link(repository.join("_layers/sha256").join(&hex), &hex);
        }
        let mut digest = String::new();
        for document in documents {
            let hex = store(document);
            link(repository.join("_manifests/revisions/sha256").join(&hex), &hex);
            let tag = repository.join("_manifests/tags").join(tag);
            link(tag.join("index/sha256").join(&hex), &hex);
            link(tag.join("current"), &hex);
            digest = format!("sha256:{hex}");
        }
        digest
    }

    /// What it has written, for a failed test.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }
}

impl Drop for DockerRegistry {
    fn drop(&mut self) {
        let _has_ended = self.process.kill();
        let _status = self.process.wait();
    }
}

fn write(path: &Path, bytes: &[u8]) {
    std::fs::create_dir_all(path.parent().unwrap_or(path)).unwrap();
    std::fs::write(path, bytes).unwrap();
}
