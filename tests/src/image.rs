//! OCI image archives made on the spot from one static program: no registry, no
//! base image, no tool.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// What an image is made of: one program and the directories it expects.
#[derive(Debug, Clone, Copy)]
pub struct Program<'a> {
    /// The name that pods ask for.
    pub image: &'a str,
    pub binary: &'a Path,
    /// Where it stands in the image, without the leading slash.
    pub path: &'a str,
    /// Empty directories, parents first, without leading slashes.
    pub directories: &'a [&'a str],
}

/// Writes an OCI image layout as a tar archive to `archive`, under a dot-name
/// first: a node that watches the directory sees whole archives only.
pub fn write_archive(program: &Program<'_>, archive: &Path) -> Result<()> {
    write_archive_with_arguments(program, &[], archive)
}

/// The same; the image's program is started with `arguments` where its user gives none.
pub fn write_archive_with_arguments(program: &Program<'_>, arguments: &[&str], archive: &Path) -> Result<()> {
    let layer = layer_of(program, &[]).with_context(|| format!("image archive {}", archive.display()))?;
    write_archive_of_layer(program.image, &layer, program.path, arguments, archive)
}

/// [`write_archive`] with a second program, in the image's root directory.
pub fn write_archive_of_two(program: &Program<'_>, second: &Path, archive: &Path) -> Result<()> {
    let layer = || {
        let mut layer = open_layer_of(program, &[])?;
        let name = second.file_name().unwrap_or_default().display().to_string();
        let bytes = std::fs::read(second).with_context(|| second.display().to_string())?;
        append(&mut layer, &name, &bytes, 0o755)?;
        layer.into_inner().context("finish the layer")
    };
    let layer = layer().with_context(|| format!("image archive {}", archive.display()))?;
    write_archive_of_layer(program.image, &layer, program.path, &[], archive)
}

/// The archive of an image of one layer, which starts the program at `path` there.
pub fn write_archive_of_layer(
    image: &str,
    layer: &[u8],
    path: &str,
    arguments: &[&str],
    archive: &Path,
) -> Result<()> {
    let config = json!({
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Entrypoint": [format!("/{path}")],
            "Cmd": arguments,
            "WorkingDir": "/",
            "Env": ["PATH=/"],
        },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", digest(layer))] },
        "history": [{ "created_by": "cargo xtask" }],
    });
    write_archive_of(image, &config, layer, archive)
}

/// The archive of an image of one layer with any configuration, which need not name the layer.
pub fn write_archive_of(image: &str, config: &Value, layer: &[u8], archive: &Path) -> Result<()> {
    let unfinished =
        archive.with_file_name(format!(".{}", archive.file_name().unwrap_or_default().display()));
    let file = File::create(&unfinished).with_context(|| unfinished.display().to_string())?;
    assemble(image, config, layer, file).with_context(|| format!("image archive {}", archive.display()))?;
    std::fs::rename(&unfinished, archive).with_context(|| archive.display().to_string())
}

fn assemble(image: &str, config: &Value, layer: &[u8], file: File) -> Result<()> {
    let config = to_bytes(config)?;
    let manifest = to_bytes(&json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
        "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", layer)],
    }))?;
    let mut entry = descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
    entry["annotations"] = json!({
        "org.opencontainers.image.ref.name": image,
        "io.containerd.image.name": image,
    });
    let index = to_bytes(&json!({ "schemaVersion": 2, "manifests": [entry] }))?;

    let mut archive = tar::Builder::new(file);
    append(&mut archive, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#, 0o644)?;
    append(&mut archive, "index.json", &index, 0o644)?;
    for blob in [layer, &config, &manifest] {
        append(&mut archive, &format!("blobs/sha256/{}", digest(blob)), blob, 0o644)?;
    }
    archive.into_inner().context("finish the archive")?.flush().context("flush the archive")
}

/// The layer of `program`, and `files` beside it: paths without leading slashes, and contents.
pub fn layer_of(program: &Program<'_>, files: &[(&str, &str)]) -> Result<Vec<u8>> {
    open_layer_of(program, files)?.into_inner().context("finish the layer")
}

fn open_layer_of(program: &Program<'_>, files: &[(&str, &str)]) -> Result<tar::Builder<Vec<u8>>> {
    let binary = std::fs::read(program.binary).with_context(|| program.binary.display().to_string())?;
    let mut layer = tar::Builder::new(Vec::new());
    for directory in program.directories {
        let mut header = header(0, 0o755);
        header.set_entry_type(tar::EntryType::Directory);
        layer
            .append_data(&mut header, format!("{directory}/"), std::io::empty())
            .context("add a directory")?;
    }
    append(&mut layer, program.path, &binary, 0o755)?;
    for (path, content) in files {
        append(&mut layer, path, content.as_bytes(), 0o644)?;
    }
    Ok(layer)
}

/// The layer of programs of this machine, each with where it stands in the image, and of the files that
/// they load, which stand where they are on this machine.
pub fn layer_of_host_programs(programs: &[(&Path, &str)], loaded: &[PathBuf]) -> Result<Vec<u8>> {
    let mut layer = tar::Builder::new(Vec::new());
    let programs = programs.iter().map(|(file, path)| (*file, *path));
    let loaded = loaded.iter().map(|file| (file.as_path(), file.to_str().unwrap_or_default()));
    for (file, path) in programs.chain(loaded) {
        let bytes = std::fs::read(file).with_context(|| file.display().to_string())?;
        append(&mut layer, path.trim_start_matches('/'), &bytes, 0o755)?;
    }
    layer.into_inner().context("finish the layer")
}

pub(crate) fn append<W: Write>(
    archive: &mut tar::Builder<W>,
    path: &str,
    bytes: &[u8],
    mode: u32,
) -> Result<()> {
    let size = u64::try_from(bytes.len()).context("size")?;
    archive.append_data(&mut header(size, mode), path, bytes).with_context(|| format!("add {path}"))
}

/// Times are 0, so that the same program gives the same digest.
pub(crate) fn header(size: u64, mode: u32) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_size(size);
    header.set_mode(mode);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}

pub(crate) fn descriptor(media_type: &str, blob: &[u8]) -> Value {
    json!({ "mediaType": media_type, "digest": format!("sha256:{}", digest(blob)), "size": blob.len() })
}

pub(crate) fn digest(bytes: &[u8]) -> String {
    base16ct::lower::encode_string(&Sha256::digest(bytes))
}

pub(crate) fn to_bytes(value: &Value) -> Result<Vec<u8>> {
    serde_json::to_vec(value).context("write JSON")
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::io::Read;

    use super::*;

    fn members(bytes: &[u8]) -> HashMap<String, Vec<u8>> {
        let mut archive = tar::Archive::new(bytes);
        let entries = archive.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            (entry.path().unwrap().display().to_string(), content)
        });
        entries.collect()
    }

    #[test]
    fn an_archive_is_an_image_layout_whose_digests_hold() {
        let dir = tempfile::tempdir().unwrap();
        let (binary, archive) = (dir.path().join("program"), dir.path().join("image.tar"));
        std::fs::write(&binary, b"\x7fELF").unwrap();
        let program = Program {
            image: "hawser.dev/p:1",
            binary: &binary,
            path: "program",
            directories: &["run", "run/x"],
        };
        write_archive(&program, &archive).unwrap();

        let members = members(&std::fs::read(&archive).unwrap());
        let read = |path: &str| -> Value { serde_json::from_slice(&members[path]).unwrap() };
        let blob = |descriptor: &Value| {
            let hash = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap().to_owned();
            let blob = &members[&format!("blobs/sha256/{hash}")];
            assert_eq!((digest(blob), Some(blob.len() as u64)), (hash, descriptor["size"].as_u64()));
            blob.clone()
        };
        let entry = &read("index.json")["manifests"][0];
        assert_eq!(entry["annotations"]["org.opencontainers.image.ref.name"], "hawser.dev/p:1");
        let manifest: Value = serde_json::from_slice(&blob(entry)).unwrap();
        let config: Value = serde_json::from_slice(&blob(&manifest["config"])).unwrap();
        assert_eq!(config["rootfs"]["diff_ids"][0], manifest["layers"][0]["digest"]);
        let layer = self::members(&blob(&manifest["layers"][0]));
        assert_eq!(layer["program"], b"\x7fELF");
        assert!(layer.contains_key("run/x/") || layer.contains_key("run/x"), "{:?}", layer.keys());
    }
}
