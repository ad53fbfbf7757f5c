//! The flags of the HTTP endpoints on a network address.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

/// Where kubelet's endpoints are served besides the unix socket. Either none of them is given, or all.
#[derive(Debug, Clone, Default, Args)]
pub struct EndpointArgs {
    /// Also serve kubelet's endpoints (/metrics, /pods, /exec, ...) on this address, over TLS
    #[arg(
        long = "listen",
        value_name = "IP:PORT",
        requires = "tls_cert_file",
        requires = "tls_private_key_file",
        requires = "token_file"
    )]
    pub address: Option<SocketAddr>,
    /// Certificate of --listen, with those of its issuers, in PEM
    #[arg(long, value_name = "FILE", requires = "address")]
    pub tls_cert_file: Option<PathBuf>,
    /// Private key of --tls-cert-file, in PEM; readable by its owner alone
    #[arg(long, value_name = "FILE", requires = "address")]
    pub tls_private_key_file: Option<PathBuf>,
    /// The bearer token that clients of --listen must send; readable by its owner alone
    #[arg(long, value_name = "FILE", requires = "address")]
    pub token_file: Option<PathBuf>,
}

/// The checked flags: all files are named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsListener {
    pub address: SocketAddr,
    pub certificate: PathBuf,
    pub key: PathBuf,
    pub token: PathBuf,
}

impl EndpointArgs {
    /// `None`: only the unix socket is served. The command line has refused an incomplete set.
    pub fn listener(&self) -> Option<TlsListener> {
        Some(TlsListener {
            address: self.address?,
            certificate: self.tls_cert_file.clone()?,
            key: self.tls_private_key_file.clone()?,
            token: self.token_file.clone()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        endpoints: EndpointArgs,
    }

    #[test]
    fn an_address_without_certificate_key_or_token_is_refused_with_the_missing_flag() {
        let all =
            [("--tls-cert-file", "c.pem"), ("--tls-private-key-file", "k.pem"), ("--token-file", "token")];
        for (missing, _) in all {
            let given = all.iter().filter(|(flag, _)| *flag != missing);
            let words = given.flat_map(|(flag, file)| [*flag, *file]);
            let words = ["kubelet", "--listen", "127.0.0.1:10250"].into_iter().chain(words);
            let refused = Flags::try_parse_from(words).unwrap_err().to_string();
            assert!(refused.contains("were not provided") && refused.contains(missing), "{refused}");
        }
        let alone = Flags::try_parse_from(["kubelet", "--token-file", "token"]).unwrap_err().to_string();
        assert!(alone.contains("--listen"), "{alone}");
        let words = all.iter().flat_map(|(flag, file)| [*flag, *file]);
        let whole = ["kubelet", "--listen", "127.0.0.1:10250"].into_iter().chain(words);
        assert!(Flags::parse_from(whole).endpoints.listener().is_some());
        assert!(Flags::parse_from(["kubelet"]).endpoints.listener().is_none());
    }
}
