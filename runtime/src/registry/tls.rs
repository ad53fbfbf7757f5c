//! TLS by rustls, with the certificate authorities of the system and of `hosts.toml`.

use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use super::error::{HostsProblem, HostsReason};
use super::hosts::TlsFiles;

type Result<T> = std::result::Result<T, HostsProblem>;

/// Reads the files, also those of the system: some milliseconds.
pub(super) fn config(files: &TlsFiles) -> Result<Arc<ClientConfig>> {
    let provider = Arc::new(ring::default_provider());
    let unusable = |path: &Path| {
        let path = path.to_owned();
        move |source| HostsProblem::of(&path, HostsReason::Tls { source })
    };
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .expect("ring has the ciphers of TLS 1.2 and 1.3");
    let builder = if files.skip_verify {
        builder.dangerous().with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
    } else {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        for path in &files.authorities {
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(unusable(path))?;
            }
        }
        if roots.is_empty() {
            tracing::warn!("this node has no certificate authorities: install ca-certificates");
        }
        builder.with_root_certificates(roots)
    };
    let Some((certificate, key)) = &files.client else { return Ok(Arc::new(builder.with_no_client_auth())) };
    let chain = certificates(certificate)?;
    let key = PrivateKeyDer::from_pem_file(key)
        .map_err(|source| HostsProblem::of(key, pem_reason(source, HostsReason::NoKey)))?;
    Ok(Arc::new(builder.with_client_auth_cert(chain, key).map_err(unusable(certificate))?))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let failed = |source| HostsProblem::of(path, pem_reason(source, HostsReason::NoCertificate));
    let all: Vec<_> = CertificateDer::pem_file_iter(path)
        .map_err(failed)?
        .collect::<std::result::Result<_, _>>()
        .map_err(failed)?;
    if all.is_empty() { Err(HostsProblem::of(path, HostsReason::NoCertificate)) } else { Ok(all) }
}

fn pem_reason(source: rustls::pki_types::pem::Error, otherwise: HostsReason) -> HostsReason {
    match source {
        rustls::pki_types::pem::Error::Io(source) => HostsReason::Read { source },
        _ => otherwise,
    }
}

/// `skip_verify`: takes every certificate, but only from the owner of its key.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
