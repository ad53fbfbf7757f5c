//! A registry on loopback that gives images of an OCI layout to containerd: GET and HEAD of manifests and blobs, as in
//! the OCI distribution specification, "Pull".

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result};
use serde_json::Value;

/// For a request's line and headers.
const MAX_REQUEST_BYTES: u64 = 16 << 10;

/// Media type of all manifests here.
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Registries that critest names.
const HOSTS: [&str; 3] = ["registry.k8s.io", "k8s.gcr.io", "gcr.io"];

/// Serves `layout` until this process ends, and writes `hosts.toml` for each host into `hosts`.
pub(super) fn serve(layout: &Path, hosts: &Path) -> Result<()> {
    let listener =
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("listen for the registry's clients")?;
    configure(hosts, listener.local_addr().context("the registry's address")?)?;
    let layout = layout.to_owned();
    let accept = move || {
        for client in listener.incoming().flatten() {
            let layout = layout.clone();
            // The client sees an error as a connection that ends.
            thread::spawn(move || answer(client, &layout).ok());
        }
    };
    thread::Builder::new().name("registry".to_owned()).spawn(accept).context("start the registry")?;
    Ok(())
}

fn configure(hosts: &Path, address: SocketAddr) -> Result<()> {
    let text = format!("[host.\"http://{address}\"]\n  capabilities = [\"pull\", \"resolve\"]\n");
    for host in HOSTS {
        let dir = hosts.join(host);
        fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
        let file = dir.join("hosts.toml");
        fs::write(&file, &text).with_context(|| file.display().to_string())?;
    }
    Ok(())
}

/// One request for each connection.
fn answer(mut client: TcpStream, layout: &Path) -> Result<()> {
    let mut lines = BufReader::new((&client).take(MAX_REQUEST_BYTES)).lines();
    let line = lines.next().context("no request")??;
    for header in lines {
        if header?.is_empty() {
            break;
        }
    }
    let mut words = line.split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = target.split('?').next().unwrap_or_default();
    let (status, headers, body) = match find(layout, path) {
        Ok(Some(Found { media_type, digest, bytes })) => {
            let headers = format!("Content-Type: {media_type}\r\nDocker-Content-Digest: {digest}\r\n");
            ("200 OK", headers, bytes)
        }
        Ok(None) => ("404 Not Found", String::new(), Vec::new()),
        Err(_) => ("500 Internal Server Error", String::new(), Vec::new()),
    };
    write!(
        client,
        "HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    )?;
    if method == "GET" {
        client.write_all(&body)?;
    }
    client.flush().context("answer")
}

#[derive(Debug)]
struct Found {
    media_type: String,
    digest: String,
    bytes: Vec<u8>,
}

/// What `/v2/NAME/manifests/REFERENCE` or `/v2/NAME/blobs/DIGEST` names.
fn find(layout: &Path, path: &str) -> Result<Option<Found>> {
    let Some(path) = path.strip_prefix("/v2/") else { return Ok(None) };
    if let Some((_name, digest)) = path.split_once("/blobs/") {
        return blob(layout, digest, "application/octet-stream");
    }
    let Some((name, reference)) = path.split_once("/manifests/") else { return Ok(None) };
    if reference.starts_with("sha256:") {
        return blob(layout, reference, MANIFEST);
    }
    let index: Value = serde_json::from_slice(&fs::read(layout.join("index.json"))?)?;
    let wanted = HOSTS.map(|host| format!("{host}/{name}:{reference}"));
    let is_wanted = |entry: &&Value| {
        let found = entry["annotations"]["io.containerd.image.name"].as_str();
        found.is_some_and(|found| wanted.iter().any(|wanted| wanted == found))
    };
    let entry = index["manifests"].as_array().into_iter().flatten().find(is_wanted);
    match entry.and_then(|entry| entry["digest"].as_str()) {
        Some(digest) => blob(layout, digest, MANIFEST),
        None => Ok(None),
    }
}

fn blob(layout: &Path, digest: &str, media_type: &str) -> Result<Option<Found>> {
    let Some(hex) = digest.strip_prefix("sha256:") else { return Ok(None) };
    if !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(None);
    }
    let path: PathBuf = layout.join("blobs/sha256").join(hex);
    match fs::read(&path) {
        Ok(bytes) => Ok(Some(Found { media_type: media_type.to_owned(), digest: digest.to_owned(), bytes })),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| path.display().to_string()),
    }
}

#[cfg(test)]
mod tests {
    use ::tests::layout::{Layer, Layout};
    use serde_json::json;

    use super::*;

    fn ask(layout: &Path, request: &str) -> String {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        write!(client, "{request} HTTP/1.1\r\nHost: registry\r\n\r\n").unwrap();
        answer(listener.accept().unwrap().0, layout).unwrap();
        let mut text = String::new();
        client.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn an_image_is_found_by_each_of_its_names_and_by_its_digest() {
        let dir = tempfile::tempdir().unwrap();
        let mut layer = Layer::default();
        layer.file("name", b"content", 0o644).unwrap();
        let layer = layer.finish().unwrap();
        let mut layout = Layout::create(dir.path()).unwrap();
        let names = ["registry.k8s.io/a/b:1", "gcr.io/c:2"];
        let digest = layout.add(&names, &json!({"Cmd": ["sh"]}), &[&layer]).unwrap();
        layout.finish().unwrap();

        let by_name = ask(dir.path(), "GET /v2/a/b/manifests/1?ns=registry.k8s.io");
        assert!(by_name.starts_with("HTTP/1.1 200 OK\r\n"), "{by_name}");
        assert!(by_name.contains(&format!("\r\nDocker-Content-Digest: {digest}\r\n")), "{by_name}");
        assert_eq!(ask(dir.path(), "GET /v2/c/manifests/2"), by_name);
        assert_eq!(ask(dir.path(), &format!("GET /v2/c/manifests/{digest}")), by_name);
        let (head, body) = by_name.split_once("\r\n\r\n").unwrap();
        assert_eq!(ask(dir.path(), "HEAD /v2/c/manifests/2"), format!("{head}\r\n\r\n"));

        let manifest: Value = serde_json::from_str(body).unwrap();
        let layer_digest = manifest["layers"][0]["digest"].as_str().unwrap();
        let blob = find(dir.path(), &format!("/v2/c/blobs/{layer_digest}")).unwrap().unwrap();
        assert_eq!(blob.bytes, layer);
        for path in ["/v2/c/manifests/3", "/v2/c/blobs/sha256:../../index.json", "/index.json", "/v2/"] {
            assert!(find(dir.path(), path).unwrap().is_none(), "{path}");
        }
    }
}
