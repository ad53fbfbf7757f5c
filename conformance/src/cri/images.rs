//! The images that critest pulls, in one OCI layout: what its specs need of the published images, made of Debian's
//! busybox.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ::tests::binaries;
use ::tests::layout::{Layer, Layout};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use xtask::foreign::{debian_file, debian_program, libraries};

/// For the pods' own container, where a runtime has one.
pub(super) const PAUSE: &str = "registry.k8s.io/pause:3.9";
/// A copy of it in another registry.
const OTHER_PAUSE: &str = "k8s.gcr.io/pause:3.9";

const E2E: &str = "registry.k8s.io/e2e-test-images";
const CRI_TOOLS: &str = "gcr.io/k8s-staging-cri-tools";

/// Of the published image `test-image-digest`, in critest. No other image can have it.
const PUBLISHED_DIGEST: &str = "9700f9a2f5bf2c45f2f605a0bd3bce7cf37420ec9d3ed50ac2758413308766bf";

/// Users of the images. critest starts programs as user 33 and as user 65534.
const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh
www-data:x:33:33:www-data:/var/www:/bin/sh
nobody:x:65534:65534:nobody:/:/bin/sh
";
const GROUP: &str = "root:x:0:
www-data:x:33:
nogroup:x:65534:
";

/// In nginx's place: its master process, whose number is in its pid file, and a server.
const NGINX: &str = r#"#!/bin/sh
echo $$ > /var/run/nginx.pid
httpd -f -p "$2" -h /www &
trap 'kill $!; exit' TERM QUIT
while true; do wait; done
"#;

/// In the place of Apache: its log names it.
const APACHE: &str = "#!/bin/sh
echo httpd serves
exec httpd -f -p 80 -h /www
";

/// Prints the effective user, which a set-user-ID program finds.
const NO_NEW_PRIVS: &str = "#!/bin/sh
echo \"Effective uid: $(/bin/set-user-id -u)\"
";

/// The images, and the copy of critest that asks for them.
#[derive(Debug)]
pub(super) struct Images {
    pub(super) layout: PathBuf,
    pub(super) critest: PathBuf,
}

/// Programs of this machine that become files of images.
struct Programs {
    /// Of the package without `-static`: that one's shell runs `ls` without looking at `/bin/ls`, which a spec masks.
    busybox: PathBuf,
    pgrep: PathBuf,
    ipcs: PathBuf,
    id: PathBuf,
}

impl Programs {
    fn find() -> Result<Self> {
        Ok(Self {
            busybox: debian_file("busybox", "bin/busybox")?,
            pgrep: debian_program("pgrep", "procps")?,
            ipcs: debian_program("ipcs", "util-linux")?,
            id: debian_program("id", "coreutils")?,
        })
    }
}

/// Writes the layout and the copy of critest into `dir`.
pub(super) fn make(dir: &Path, critest: &Path) -> Result<Images> {
    let programs = Programs::find()?;
    let base = base(&programs)?;
    let layout_dir = dir.join("images");
    let mut layout = Layout::create(&layout_dir)?;
    let shell = json!({ "Cmd": ["sh"], "Env": [STANDARD_PATH] });

    layout.add(&[&format!("{E2E}/busybox:1.29-2")], &shell, &[&base])?;
    add_servers(&mut layout, &base)?;
    let process = json!({ "Entrypoint": ["/bin/nnp"], "Env": [STANDARD_PATH] });
    layout.add(&[&format!("{E2E}/nonewprivs:1.3")], &process, &[&base, &set_user_id(&programs)?])?;
    add_pause(&mut layout)?;
    for name in ["1:latest", "2:latest", "3:latest", "latest:latest", "tag:test", "tag:all"] {
        let name = format!("{CRI_TOOLS}/test-image-{name}");
        layout.add(&[&name], &shell, &[&base, &one_file(&name)?])?;
    }
    let tags = ["1", "2", "3"].map(|tag| format!("{CRI_TOOLS}/test-image-tags:{tag}"));
    layout.add(&tags.each_ref().map(String::as_str), &shell, &[&base, &one_file("same-image")?])?;
    for (name, user) in [
        ("uid", "1002"),
        ("username", "www-data"),
        ("uid-group", "1003:1004"),
        ("username-group", "www-data:1004"),
    ] {
        let process = json!({ "Cmd": ["sh"], "Env": [STANDARD_PATH], "User": user });
        layout.add(&[&format!("{CRI_TOOLS}/test-image-user-{name}:latest")], &process, &[&base])?;
    }
    let process = json!({ "Cmd": ["sh"], "Env": [STANDARD_PATH], "User": "1000" });
    let name = format!("{CRI_TOOLS}/test-image-predefined-group:latest");
    layout.add(&[&name], &process, &[&base, &predefined_group()?])?;
    let name = format!("{CRI_TOOLS}/test-image-digest:latest");
    let digest = layout.add(&[&name], &shell, &[&base, &one_file(&name)?])?;
    layout.finish()?;
    Ok(Images { layout: layout_dir, critest: with_digest(critest, &digest, dir)? })
}

const STANDARD_PATH: &str = "PATH=/bin:/usr/bin:/sbin:/usr/sbin";

/// A root file system with busybox under the names of its applets, pgrep and ipcs.
fn base(programs: &Programs) -> Result<Vec<u8>> {
    let mut layer = Layer::default();
    for dir in ["bin", "dev", "etc", "proc", "root", "sys", "usr", "usr/bin", "var", "var/run", "www"] {
        layer.directory(dir, 0o755)?;
    }
    layer.directory("tmp", 0o1777)?;
    layer.file("etc/passwd", PASSWD.as_bytes(), 0o644)?;
    layer.file("etc/group", GROUP.as_bytes(), 0o644)?;
    layer.file("www/index.html", b"served\n", 0o644)?;
    layer.host_file(&programs.busybox, "bin/busybox", 0o755)?;
    for applet in applets(&programs.busybox)? {
        layer.hard_link(&format!("bin/{applet}"), "bin/busybox")?;
    }
    let mut loaded = libraries(&programs.busybox)?;
    for program in [&programs.pgrep, &programs.ipcs] {
        let name = program.file_name().context("a program without a name")?.display().to_string();
        layer.host_file(program, &format!("usr/bin/{name}"), 0o755)?;
        loaded.extend(libraries(program)?);
    }
    add_libraries(&mut layer, loaded)?;
    layer.finish()
}

fn applets(busybox: &Path) -> Result<Vec<String>> {
    let output =
        Command::new(busybox).arg("--list").output().with_context(|| busybox.display().to_string())?;
    ensure!(output.status.success(), "{} --list: {}", busybox.display(), output.status);
    let names = String::from_utf8(output.stdout).context("the names of busybox's applets")?;
    Ok(names.lines().filter(|name| *name != "busybox").map(str::to_owned).collect())
}

/// Where the programs look for them.
fn add_libraries(layer: &mut Layer, mut libraries: Vec<PathBuf>) -> Result<()> {
    libraries.sort();
    libraries.dedup();
    for library in libraries {
        let path = library.to_str().context("the path of a library")?;
        layer.host_file(&library, path.trim_start_matches('/'), 0o755)?;
    }
    Ok(())
}

fn add_servers(layout: &mut Layout, base: &[u8]) -> Result<()> {
    let mut layer = Layer::default();
    layer.file("bin/nginx", NGINX.as_bytes(), 0o755)?;
    layer.file("bin/apache", APACHE.as_bytes(), 0o755)?;
    let layers = [base, &layer.finish()?];
    let host_network = format!("{CRI_TOOLS}/hostnet-nginx-amd64:latest");
    for (name, port) in [(format!("{E2E}/nginx:1.14-2"), "80"), (host_network, "12003")] {
        let process = json!({ "Entrypoint": ["/bin/nginx", "master process", port], "Env": [STANDARD_PATH] });
        layout.add(&[&name], &process, &layers)?;
    }
    let process = json!({ "Entrypoint": ["/bin/apache"], "Env": [STANDARD_PATH] });
    layout.add(&[&format!("{E2E}/httpd:2.4.39-4")], &process, &layers).map(drop)
}

/// coreutils' id, since busybox gives up the privileges of a set-user-ID program.
fn set_user_id(programs: &Programs) -> Result<Vec<u8>> {
    let mut layer = Layer::default();
    layer.host_file(&programs.id, "bin/set-user-id", 0o4755)?;
    layer.file("bin/nnp", NO_NEW_PRIVS.as_bytes(), 0o755)?;
    add_libraries(&mut layer, libraries(&programs.id)?)?;
    layer.finish()
}

fn add_pause(layout: &mut Layout) -> Result<()> {
    let mut layer = Layer::default();
    layer.host_file(&binaries::find("demo-app")?, "pause", 0o755)?;
    let process = json!({ "Entrypoint": ["/pause", "sleep", "forever"] });
    layout.add(&[PAUSE, OTHER_PAUSE], &process, &[&layer.finish()?]).map(drop)
}

/// What makes an image another one.
fn one_file(content: &str) -> Result<Vec<u8>> {
    let mut layer = Layer::default();
    layer.file("name", content.as_bytes(), 0o644)?;
    layer.finish()
}

fn predefined_group() -> Result<Vec<u8>> {
    let mut layer = Layer::default();
    let users = format!("{PASSWD}default-user:x:1000:1000::/:/bin/sh\n");
    let groups = format!("{GROUP}default-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\n");
    layer.file("etc/passwd", users.as_bytes(), 0o644)?;
    layer.file("etc/group", groups.as_bytes(), 0o644)?;
    layer.finish()
}

/// A copy of critest that pulls our image by digest, since the published one is not here.
fn with_digest(critest: &Path, digest: &str, dir: &Path) -> Result<PathBuf> {
    let mut program = fs::read(critest).with_context(|| critest.display().to_string())?;
    let hex = digest.trim_start_matches("sha256:").as_bytes();
    ensure!(hex.len() == PUBLISHED_DIGEST.len(), "digest {digest}");
    let is_there = |at: &usize| program[*at..].starts_with(PUBLISHED_DIGEST.as_bytes());
    let places: Vec<usize> = (0..program.len()).filter(is_there).collect();
    ensure!(!places.is_empty(), "{} does not contain {PUBLISHED_DIGEST}", critest.display());
    for at in places {
        program[at..at + hex.len()].copy_from_slice(hex);
    }
    let copy = dir.join("critest");
    fs::write(&copy, &program).with_context(|| copy.display().to_string())?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&copy, mode).with_context(|| copy.display().to_string())?;
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_copy_of_critest_has_our_digest_in_place_of_the_published_one() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("program");
        fs::write(&program, format!("a image@sha256:{PUBLISHED_DIGEST} b")).unwrap();
        let ours = "0".repeat(64);
        let copy = with_digest(&program, &format!("sha256:{ours}"), dir.path()).unwrap();
        assert_eq!(fs::read_to_string(copy).unwrap(), format!("a image@sha256:{ours} b"));

        fs::write(&program, "another release").unwrap();
        let error = with_digest(&program, &format!("sha256:{ours}"), dir.path()).unwrap_err().to_string();
        assert!(error.contains("does not contain"), "{error}");
    }
}
