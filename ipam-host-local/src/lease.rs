//! The content of a lease file. No I/O.
//!
//! The file's name is the address, its content `<container id>\r\n<ifname>`. The reference's oldest
//! format has only the container id.

use std::net::IpAddr;

/// The attachment that holds an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    pub container_id: String,
    pub ifname: String,
}

impl Owner {
    pub(crate) fn content(&self) -> String {
        format!("{}\r\n{}", self.container_id, self.ifname)
    }
}

/// The holder named in a lease file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    Attachment(Owner),
    /// The oldest format: all interfaces of this container.
    Container(String),
    /// Nothing was written, or a power failure lost the content (zeros): since the lock is held, a
    /// crash left the file. The address is free.
    ///
    /// A truncated container id looks like the oldest format instead. It is treated as that: GC,
    /// and the reclaiming after a reboot, remove it.
    Empty,
    /// Other content, possibly written by hand. The address is taken and never released.
    Other,
}

impl Holder {
    pub(crate) fn read(content: &[u8]) -> Self {
        if content.iter().all(|byte| *byte == 0) {
            return Self::Empty;
        }
        let Ok(text) = str::from_utf8(content) else { return Self::Other };
        match text.trim().split_once("\r\n") {
            Some((container_id, ifname)) if is_container_id(container_id) && is_ifname(ifname) => {
                Self::Attachment(Owner { container_id: container_id.to_owned(), ifname: ifname.to_owned() })
            }
            None if is_container_id(text.trim()) => Self::Container(text.trim().to_owned()),
            _ => Self::Other,
        }
    }

    pub(crate) fn container_id(&self) -> Option<&str> {
        match self {
            Self::Attachment(owner) => Some(&owner.container_id),
            Self::Container(id) => Some(id),
            Self::Empty | Self::Other => None,
        }
    }
}

/// The address of a lease file's name. Only the canonical form counts, since a second lease would
/// have that name.
pub(crate) fn address(file_name: &str) -> Option<IpAddr> {
    let ip: IpAddr = file_name.parse().ok()?;
    (ip.to_canonical() == ip && ip.to_string() == file_name).then_some(ip)
}

/// By the rules of the protocol (CNI specification, "Parameters").
fn is_container_id(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c))
}

fn is_ifname(text: &str) -> bool {
    !text.is_empty() && !text.contains(|c: char| c.is_whitespace() || c == '/' || c == ':')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_content_names_its_holder() {
        let attachment = Owner { container_id: "a-b.c_1".to_owned(), ifname: "eth0".to_owned() };
        let cases: [(&[u8], Holder); 10] = [
            (b"a-b.c_1\r\neth0", Holder::Attachment(attachment.clone())),
            (b" a-b.c_1\r\neth0\n", Holder::Attachment(attachment.clone())),
            (b"abc\n", Holder::Container("abc".to_owned())),
            (b"abc\r\n", Holder::Container("abc".to_owned())),
            (b"", Holder::Empty),
            (b"\0\0\0", Holder::Empty),
            (b"\n", Holder::Other),
            (b"kept for the printer", Holder::Other),
            (b"abc\neth0", Holder::Other),
            (b"\xff", Holder::Other),
        ];
        for (content, holder) in cases {
            assert_eq!(Holder::read(content), holder, "{}", content.escape_ascii());
        }
        assert_eq!(Holder::read(attachment.content().as_bytes()), Holder::Attachment(attachment));
    }

    #[test]
    fn only_the_spelling_that_we_write_is_a_leases_name() {
        let names = ["10.0.0.1", "fd00::1", "10.0.0.01", "fd00:0::1", "FD00::1", "::ffff:10.0.0.1", "lock"];
        let known: Vec<&str> = names.into_iter().filter(|name| address(name).is_some()).collect();
        assert_eq!(known, ["10.0.0.1", "fd00::1"]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_content(bytes: Vec<u8>) {
            let holder = Holder::read(&bytes);
            prop_assert_eq!(holder == Holder::Empty, bytes.iter().all(|byte| *byte == 0));
        }
    }
}
