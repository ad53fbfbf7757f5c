//! Masquerading and the spoof check of one attachment, made and removed.

use cni_plugin::{Invocation, IpConfig};

use crate::attach::Connection;
use crate::config::Config;
use crate::error::Error;
use crate::undo::Undo;

pub(crate) fn ensure(
    _config: &Config,
    _call: &Invocation,
    _connection: &Connection,
    _ips: &[IpConfig],
    _undo: &mut Undo,
) -> Result<(), Error> {
    Ok(())
}

pub(crate) fn remove(_call: &Invocation) -> Result<(), Error> {
    Ok(())
}
