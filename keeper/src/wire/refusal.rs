//! Why the keeper refuses a packet or a descriptor.

/// Numbers are part of the wire format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    Size = 16,
    Version = 17,
    Operation = 18,
    Role = 19,
    Volume = 20,
    Unused = 21,
    NoDescriptor = 22,
    Descriptors = 23,
    NotHeld = 24,
    Full = 25,
    System = 26,
    /// Restart the listing.
    Interrupted = 27,
    NotAttending = 28,
    NotInspected = 32,
    WouldWait = 33,
    PathOnly = 34,
    NotPathOnly = 35,
    NotReadWrite = 36,
    NotFuseDevice = 37,
    NotDirectory = 38,
    NotDetached = 39,
    NotRegular = 40,
    NotMemfd = 41,
    NotSealed = 42,
    TooLarge = 43,
    Device = 44,
    OtherMount = 45,
    NotListener = 46,
    NotPidfd = 47,
    NotAssignment = 48,
    NotSpare = 49,
    NotPassthrough = 50,
}

impl Refusal {
    const ALL: [Self; 32] = [
        Self::Size,
        Self::Version,
        Self::Operation,
        Self::Role,
        Self::Volume,
        Self::Unused,
        Self::NoDescriptor,
        Self::Descriptors,
        Self::NotHeld,
        Self::Full,
        Self::System,
        Self::Interrupted,
        Self::NotInspected,
        Self::WouldWait,
        Self::PathOnly,
        Self::NotPathOnly,
        Self::NotReadWrite,
        Self::NotFuseDevice,
        Self::NotDirectory,
        Self::NotDetached,
        Self::NotRegular,
        Self::NotMemfd,
        Self::NotSealed,
        Self::TooLarge,
        Self::Device,
        Self::OtherMount,
        Self::NotAttending,
        Self::NotListener,
        Self::NotPidfd,
        Self::NotAssignment,
        Self::NotSpare,
        Self::NotPassthrough,
    ];

    pub(super) fn from_number(number: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|refusal| *refusal as u16 == number)
    }

    pub fn text(self) -> &'static str {
        match self {
            Self::Size => "a packet of the wrong size",
            Self::Version => "a packet of another version of the protocol",
            Self::Operation => "an unknown operation",
            Self::Role => "an unknown role",
            Self::Volume => "a volume that is not 32 lower-case hexadecimal digits",
            Self::Unused => "an unused field that is not zero",
            Self::NoDescriptor => "no descriptor beside the packet",
            Self::Descriptors => "too many descriptors beside the packet",
            Self::NotHeld => "not held",
            Self::Full => "no room for another descriptor",
            Self::System => "a system call of the keeper failed: see its log",
            Self::Interrupted => "the listing was interrupted: restart it",
            Self::NotAttending => "only for the driver: it must attend first",
            Self::NotInspected => "a descriptor whose file cannot be inspected",
            Self::WouldWait => "a descriptor whose file cannot be inspected without waiting",
            Self::PathOnly => "a descriptor opened with O_PATH",
            Self::NotPathOnly => "a descriptor opened without O_PATH",
            Self::NotReadWrite => "a descriptor that is not open for reading and writing",
            Self::NotFuseDevice => "not a character device 10:229 (/dev/fuse)",
            Self::NotDirectory => "not a directory",
            Self::NotDetached => "not the root of a detached mount: .. leads out of it",
            Self::NotRegular => "not a regular file",
            Self::NotMemfd => "not a memfd that allows seals",
            Self::NotSealed => "a memfd that may shrink (no F_SEAL_SHRINK)",
            Self::TooLarge => "more than 4 GiB",
            Self::Device => "a device",
            Self::OtherMount => "on another mount than the volume's directory",
            Self::NotListener => "not a listening unix socket of the right type",
            Self::NotPidfd => "not a pidfd of a whole process",
            Self::NotAssignment => "not a sealed memfd with an assignment",
            Self::NotPassthrough => "a connection or a file without passthrough",
            Self::NotSpare => "not a connected SOCK_SEQPACKET socket of a process with uid 0 that lives",
        }
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_has_its_own_number() {
        for refusal in Refusal::ALL {
            assert_eq!(Refusal::from_number(refusal as u16), Some(refusal));
        }
        assert_eq!(Refusal::from_number(0), None);
    }
}
