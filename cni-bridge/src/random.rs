//! Random names and addresses, from the kernel's generator.

use linux::netlink::Mac;

/// The reference's name for the host's veth: `veth` and eight random hexadecimal digits.
pub(crate) fn veth_name() -> Result<String, linux::Error> {
    Ok(format!("veth{:08x}", u32::from_be_bytes(linux::random::bytes()?)))
}

/// A locally administered unicast address, as the kernel would choose one.
pub(crate) fn mac() -> Result<Mac, linux::Error> {
    let mut mac: Mac = linux::random::bytes()?;
    mac[0] = (mac[0] & 0xfc) | 0x02;
    Ok(mac)
}
