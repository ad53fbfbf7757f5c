//! STATUS: whether ADD could make rules. Runs no program.

use cni_plugin::Invocation;

use crate::config::{Backend, Config, Purpose};
use crate::error::Error;
use crate::iptables;

pub(crate) fn status(call: &Invocation) -> Result<(), Error> {
    let config = Config::read(call, Purpose::Remove)?;
    let by_iptables = || iptables::status();
    match config.backend {
        Backend::Iptables => by_iptables(),
        Backend::Nftables | Backend::Unset => match netfilter::nftables::is_available() {
            Ok(true) => Ok(()),
            Ok(false) if config.backend == Backend::Unset => by_iptables(),
            Ok(false) => Err(Error::NoBackend { details: "the kernel has no nf_tables".to_owned() }),
            Err(e) => Err(Error::NoBackend { details: cni_plugin::CniError::chain(&e).msg }),
        },
    }
}
