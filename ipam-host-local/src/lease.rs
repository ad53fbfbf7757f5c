//! What a lease file says. No I/O.
//!
//! The file's name is the address, its content `<container id>\r\n<ifname>`;
//! the reference's oldest format has the container id alone.

use std::net::IpAddr;

/// Who holds an address.
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

/// Whom a lease file names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    Attachment(Owner),
    /// The oldest format: whichever interface of this container.
    Container(String),
    /// Nothing was ever written, or the file system lost it in a power failure
    /// (zeros): under the lock that is what a crash left. The address is free.
    ///
    /// Half a container id, in contrast, looks like the oldest format. It is
    /// taken as that: GC and the reclaiming after a reboot find it dead.
    Nobody,
    /// Something else, by hand perhaps. The address is taken; nobody is asked
    /// to give it back.
    Other,
}

impl Holder {
    pub(crate) fn read(content: &[u8]) -> Self {
        if content.iter().all(|byte| *byte == 0) {
            return Self::Nobody;
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
            Self::Nobody | Self::Other => None,
        }
    }
}

/// The address that a lease file of this name is for. Only its one spelling
/// counts: that is the name which a second lease would have to have.
pub(crate) fn address(file_name: &str) -> Option<IpAddr> {
    let ip: IpAddr = file_name.parse().ok()?;
    (ip.to_canonical() == ip && ip.to_string() == file_name).then_some(ip)
}

/// As the protocol has them (CNI specification, "Parameters").
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
            (b"", Holder::Nobody),
            (b"\0\0\0", Holder::Nobody),
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
            prop_assert_eq!(holder == Holder::Nobody, bytes.iter().all(|byte| *byte == 0));
        }
    }
}
