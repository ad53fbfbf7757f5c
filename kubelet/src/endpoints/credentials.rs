//! What a client on the network must show, and what the kubelet shows it: a token, a certificate.
//!
//! Invariant: the time of a comparison does not depend on how much of a token is right.

use std::fs::File;
use std::hint::black_box;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hyper::header::{AUTHORIZATION, HeaderMap};
use rustix::fs::OFlags;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use sha2::{Digest, Sha256};

use crate::config::TlsListener;

const MOST_TOKEN_BYTES: u64 = 4096;
/// A key of RSA with 16384 bits has less than 16 KiB in PEM.
const MOST_KEY_BYTES: u64 = 64 << 10;
/// 128 bits in hexadecimal digits are 32; shorter ones may be guessed.
const LEAST_TOKEN_BYTES: usize = 16;
/// Permission bits of the group and of others.
const OF_OTHERS: u32 = 0o077;

/// Why clients on the network cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("--{flag} {}", path.display())]
    File {
        flag: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "--{flag} {} has mode {mode:04o} and owner {owner}: only its owner, root, may be able to read it: \
         chown root and chmod 0600",
        path.display()
    )]
    Permissions { flag: &'static str, path: PathBuf, mode: u32, owner: u32 },
    #[error("--{flag} {}: {problem}", path.display())]
    Content { flag: &'static str, path: PathBuf, problem: String },
    #[error("--{flag} {}: {problem}", path.display())]
    Pem { flag: &'static str, path: PathBuf, problem: String },
    #[error("--tls-cert-file {} and --tls-private-key-file {}", certificate.display(), key.display())]
    Pair {
        certificate: PathBuf,
        key: PathBuf,
        #[source]
        source: rustls::Error,
    },
}

/// The digest of the token that clients must send.
#[derive(Clone)]
pub(super) struct Token([u8; 32]);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    /// Reads the file, which only root may be able to read.
    pub(super) fn read(path: &Path) -> Result<Self, Error> {
        let wrong = |problem: String| Error::Content { flag: "token-file", path: path.to_owned(), problem };
        let text = read_secret("token-file", path, MOST_TOKEN_BYTES)?;
        let token = text.trim();
        if token.len() < LEAST_TOKEN_BYTES {
            return Err(wrong(format!("the token has fewer than {LEAST_TOKEN_BYTES} characters")));
        }
        if token.chars().any(|c| c.is_whitespace() || c.is_control()) {
            return Err(wrong("there is more than one word in it".to_owned()));
        }
        Ok(Self(digest(token.as_bytes())))
    }

    /// Whether the request has the token. One that is missing takes as long as one that is wrong.
    pub(super) fn is_in(&self, headers: &HeaderMap) -> bool {
        let value = headers.get(AUTHORIZATION).map(|value| value.as_bytes()).unwrap_or_default();
        let sent = value.split_at_checked(7).filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"bearer "));
        let sent = digest(sent.map_or(&[][..], |(_, token)| token));
        let difference = sent.iter().zip(&self.0).fold(0, |all, (a, b)| black_box(all | (a ^ b)));
        black_box(difference) == 0
    }
}

/// The content of a file that only root can read.
fn read_secret(flag: &'static str, path: &Path, most_bytes: u64) -> Result<String, Error> {
    let failed = |source| Error::File { flag, path: path.to_owned(), source };
    let wrong = |problem: String| Error::Content { flag, path: path.to_owned(), problem };
    let mut options = File::options();
    // A FIFO must not hold the start up.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = options.read(true).custom_flags(flags).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(wrong("not a regular file".to_owned()));
    }
    if metadata.mode() & OF_OTHERS != 0 || metadata.uid() != 0 {
        let mode = metadata.mode() & 0o7777;
        return Err(Error::Permissions { flag, path: path.to_owned(), mode, owner: metadata.uid() });
    }
    let mut text = String::new();
    file.take(most_bytes + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > most_bytes {
        return Err(wrong(format!("longer than {most_bytes} bytes")));
    }
    Ok(text)
}

/// Of equal length, for any token.
fn digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// The TLS side of the listener.
pub(super) fn tls(listener: &TlsListener) -> Result<Arc<ServerConfig>, Error> {
    let TlsListener { certificate, key, .. } = listener;
    let chain = CertificateDer::pem_file_iter(certificate).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let chain = chain.map_err(|error| pem("tls-cert-file", certificate, &error))?;
    if chain.is_empty() {
        let problem = "it has no certificate in PEM".to_owned();
        return Err(Error::Pem { flag: "tls-cert-file", path: certificate.clone(), problem });
    }
    let secret = read_secret("tls-private-key-file", key, MOST_KEY_BYTES)?;
    let secret = PrivateKeyDer::from_pem_slice(secret.as_bytes());
    let secret = secret.map_err(|error| pem("tls-private-key-file", key, &error))?;
    let pair = |source| Error::Pair { certificate: certificate.clone(), key: key.clone(), source };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(pair)?.with_no_client_auth().with_single_cert(chain, secret);
    config.map(Arc::new).map_err(pair)
}

fn pem(flag: &'static str, path: &Path, error: &rustls::pki_types::pem::Error) -> Error {
    Error::Pem { flag, path: path.to_owned(), problem: error.to_string() }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const TOKEN: &str = "0123456789abcdef0123456789abcdef";

    fn read(text: &str, mode: u32) -> Result<Token, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        Token::read(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn a_token_that_others_can_read_is_refused() {
        for mode in [0o640, 0o604, 0o660, 0o644] {
            let refused = read(TOKEN, mode).unwrap_err();
            assert!(
                refused.contains(&format!("mode {mode:04o}")) && refused.contains("chmod 0600"),
                "{refused}"
            );
        }
        read(TOKEN, 0o600).unwrap();
        read(TOKEN, 0o400).unwrap();
    }

    #[test]
    fn a_key_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key.pem");
        fs::write(&path, "key").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let read = || read_secret("tls-private-key-file", &path, MOST_KEY_BYTES);
        let refused = read().unwrap_err().to_string();
        let wanted = format!("--tls-private-key-file {} has mode 0644", path.display());
        assert!(refused.starts_with(&wanted) && refused.contains("chmod 0600"), "{refused}");
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert_eq!(read().unwrap(), "key");
    }

    #[test]
    fn a_token_that_can_be_guessed_is_refused() {
        for (text, problem) in [
            ("", "fewer than 16"),
            ("short\n", "fewer than 16"),
            ("two words of a token", "more than one word"),
            (&"a".repeat(5000), "longer than 4096"),
        ] {
            let refused = read(text, 0o600).unwrap_err();
            assert!(refused.contains(problem), "{refused}");
        }
        assert!(Token::read(Path::new("/dev")).unwrap_err().to_string().contains("not a regular file"));
    }

    #[test]
    fn only_the_whole_token_is_right() {
        let token = read(&format!("{TOKEN}\n"), 0o600).unwrap();
        let is_right = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, value.parse().unwrap());
            token.is_in(&headers)
        };
        assert!(is_right(&format!("Bearer {TOKEN}")) && is_right(&format!("bearer {TOKEN}")));
        for wrong in ["", "Bearer", "Bearer ", "Basic 0123", TOKEN, "Bearer 0123456789abcdef", "Bearer x"] {
            assert!(!is_right(wrong), "{wrong}");
        }
        assert!(!is_right(&format!("Bearer {TOKEN}0")) && !is_right(&format!("Bearer  {TOKEN}")));
        assert!(!token.is_in(&HeaderMap::new()));
        assert_eq!(format!("{token:?}"), "Token");
    }
}
