//! STATUS: whether ADD can be served now.

use cni_plugin::delegate::Delegate;
use cni_plugin::{CniError, Invocation, code};
use netfilter::iptables::{IpTables, IpVersion};
use netfilter::nftables;

use crate::config::{Config, MasqueradeBackend};
use crate::error::Error;

pub(crate) fn status(call: &Invocation) -> Result<(), Error> {
    let config = Config::read(call)?;
    if let Some(ipam) = config.ipam() {
        Delegate::find(ipam, &call.path)?.status(call)?;
    }
    match config.masquerade {
        None => {}
        Some(MasqueradeBackend::NfTables) => need_nf_tables("ipMasq")?,
        // Either backend is enough.
        Some(MasqueradeBackend::Unset) if nftables::is_available()? => {}
        Some(MasqueradeBackend::Unset | MasqueradeBackend::Iptables) => {
            // Only the IPAM plugin knows the family of the addresses.
            IpTables::find(IpVersion::V4).map_err(|e| unavailable("ipMasq", &e))?;
        }
    }
    if config.spoof_check { need_nf_tables("macspoofchk") } else { Ok(()) }
}

fn need_nf_tables(key: &str) -> Result<(), Error> {
    if nftables::is_available()? {
        return Ok(());
    }
    Err(unavailable(key, &"the kernel has no nf_tables"))
}

fn unavailable(key: &str, why: &dyn std::fmt::Display) -> Error {
    CniError::new(code::PLUGIN_NOT_AVAILABLE, format_args!("{key} cannot be served: {why}")).into()
}
