//! Names and addresses by chance, from the kernel's generator.

use linux::netlink::Mac;

/// As the reference calls the host's end: `veth` and eight hexadecimal digits by chance.
pub(crate) fn veth_name() -> Result<String, linux::Error> {
    let bytes: [u8; 4] = bytes()?;
    Ok(format!("veth{:08x}", u32::from_be_bytes(bytes)))
}

/// A locally administered unicast address, as the kernel would choose one.
pub(crate) fn mac() -> Result<Mac, linux::Error> {
    let mut mac: Mac = bytes()?;
    mac[0] = (mac[0] & 0xfc) | 0x02;
    Ok(mac)
}

/// So few bytes come whole (random(7)).
fn bytes<const N: usize>() -> Result<[u8; N], linux::Error> {
    let mut bytes = [0; N];
    let filled = rustix::rand::getrandom(bytes.as_mut_slice(), rustix::rand::GetRandomFlags::empty());
    filled.map_err(|errno| linux::Error::new("getrandom", format_args!("{N} bytes"), errno))?;
    Ok(bytes)
}
