//! What a volume uses, kept from one daemon to the next beside the volume's
//! directory: 64 bytes, little endian,
//!
//! | at | bytes | |
//! |---|---|---|
//! | 0 | 8 | `HAWSUSE1` |
//! | 8 | 1 | 1: nothing has changed since |
//! | 16 | 8 | bytes used |
//! | 24 | 8 | inodes used |
//! | 32 | 16 | boot id of the writer |
//! | 56 | 8 | FNV-1a of what precedes |
//!
//! All other bytes are zero. If there are files whose charge is not lasting, 16 bytes for each
//! follow, its node id and its charge, and then 8 bytes, FNV-1a of these.
//!
//! With the kernel as the one who counts, the driver writes the first 64 bytes instead, again and again,
//! with the magic `HAWSKRN1`.
//!
//! Otherwise, the file is empty while a daemon serves, and after it was killed. After a reboot the content is
//! not trusted: a power cut may have lost changes of the tree and not of this file, or the reverse.
//! Within one boot, all processes see the same page cache, so nothing is flushed.

use std::os::fd::OwnedFd;

use volume_fs::figures::Counted;

use crate::errno::Result;
use crate::quota::Use;

const LENGTH: usize = 64;
const SUMMED: usize = LENGTH - 8;
const UNSETTLED_LENGTH: usize = 16;
/// Longer files are not trusted: a million files.
const MOST_LENGTH: usize = 16 << 20;
const MAGIC: &[u8; 8] = b"HAWSUSE1";
const KERNELS_MAGIC: &[u8; 8] = b"HAWSKRN1";
/// The driver may be writing: a whole record follows.
const READS: usize = 4;

/// /proc/sys/kernel/random/boot_id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BootId([u8; 16]);

impl BootId {
    /// `None` if there is no such file: then no stored use is trusted.
    pub(crate) fn of_this_boot() -> Option<Self> {
        Self::parse(&std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let digits = text.trim_end().replace('-', "");
        u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32).map(|id| Self(id.to_be_bytes()))
    }
}

#[derive(Debug)]
pub(crate) struct UsageFile {
    fd: OwnedFd,
    boot: Option<BootId>,
}

impl UsageFile {
    /// `fd` must be open for reading and writing.
    pub(crate) fn new(fd: OwnedFd, boot: Option<BootId>) -> Self {
        Self { fd, boot }
    }

    /// The last daemon's use, if it is still valid.
    pub(crate) fn read(&self) -> Option<Use> {
        let length = usize::try_from(rustix::fs::fstat(&self.fd).ok()?.st_size).ok()?;
        let mut bytes = vec![0; Some(length).filter(|length| *length <= MOST_LENGTH)?];
        (rustix::io::pread(&self.fd, &mut bytes, 0) == Ok(bytes.len())).then_some(())?;
        decode(&bytes, self.boot?)
    }

    /// What the kernel counted last, if the driver has written that down.
    pub(crate) fn kernels_count(&self) -> Option<Counted> {
        (0..READS).find_map(|_| {
            let mut bytes = [0; LENGTH];
            (rustix::io::pread(&self.fd, &mut bytes, 0) == Ok(LENGTH)).then_some(())?;
            decode_kernels(&bytes)
        })
    }

    /// Called before the volume may change. Truncating takes no space, so it works on a full pool.
    pub(crate) fn forget(&self) -> Result<()> {
        rustix::fs::ftruncate(&self.fd, 0)
    }

    /// Called once the volume does not change any more.
    pub(crate) fn keep(&self, used: &Use) -> Result<()> {
        let Some(boot) = self.boot else { return Ok(()) };
        let bytes = encode(used, boot);
        if rustix::io::pwrite(&self.fd, &bytes, 0)? == bytes.len() {
            return Ok(());
        }
        // Otherwise the first half alone could look valid.
        self.forget()?;
        Err(rustix::io::Errno::NOSPC)
    }
}

fn encode(used: &Use, boot: BootId) -> Vec<u8> {
    let mut bytes = header(used.counted, boot).to_vec();
    if used.unsettled.is_empty() {
        return bytes;
    }
    for (id, charged) in &used.unsettled {
        bytes.extend(id.to_le_bytes());
        bytes.extend(charged.to_le_bytes());
    }
    let sum = fnv1a(&bytes[LENGTH..]);
    bytes.extend(sum.to_le_bytes());
    bytes
}

fn header(counted: Counted, boot: BootId) -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8] = 1;
    bytes[16..24].copy_from_slice(&counted.bytes.to_le_bytes());
    bytes[24..32].copy_from_slice(&counted.inodes.to_le_bytes());
    bytes[32..48].copy_from_slice(&boot.0);
    let sum = fnv1a(&bytes[..SUMMED]);
    bytes[SUMMED..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8], boot: BootId) -> Option<Use> {
    let number = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let counted = Counted { bytes: number(16)?, inodes: number(24)? };
    let mut used = Use { counted, unsettled: Vec::new() };
    for at in (LENGTH..bytes.len().saturating_sub(UNSETTLED_LENGTH)).step_by(UNSETTLED_LENGTH) {
        used.unsettled.push((number(at)?, number(at + 8)?));
    }
    // Equivalent to checking each field: every byte has one correct value.
    (bytes == encode(&used, boot)).then_some(used)
}

fn decode_kernels(bytes: &[u8; LENGTH]) -> Option<Counted> {
    let number = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let is_whole = bytes.starts_with(KERNELS_MAGIC) && number(SUMMED)? == fnv1a(&bytes[..SUMMED]);
    is_whole.then_some(Counted { bytes: number(16)?, inodes: number(24)? })
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOOT: BootId = BootId([7; 16]);
    const COUNTED: Counted = Counted { bytes: 123_456_789, inodes: 42 };

    fn used(unsettled: Vec<(u64, u64)>) -> Use {
        Use { counted: COUNTED, unsettled }
    }

    fn file(boot: Option<BootId>) -> (UsageFile, std::fs::File) {
        let file = tempfile::tempfile().unwrap();
        (UsageFile::new(file.try_clone().unwrap().into(), boot), file)
    }

    #[test]
    fn what_is_kept_is_read_until_it_is_forgotten_or_the_machine_is_booted_anew() {
        let (usage, file) = file(Some(BOOT));
        assert_eq!(usage.read(), None, "a new file");
        for unsettled in [vec![], vec![(77, 4096), (1 << 40, 0)], vec![(5, 8192)]] {
            let used = Use { counted: COUNTED, unsettled };
            usage.keep(&used).unwrap();
            assert_eq!(usage.read(), Some(used));
            usage.forget().unwrap();
        }
        usage.keep(&used(vec![(1, 2)])).unwrap();
        assert_eq!(UsageFile::new(file.try_clone().unwrap().into(), Some(BootId([8; 16]))).read(), None);
        assert_eq!(UsageFile::new(file.into(), None).read(), None);
        usage.forget().unwrap();
        assert_eq!(usage.read(), None);
    }

    #[test]
    fn a_file_of_another_length_or_with_a_bit_changed_is_not_believed() {
        for used in [used(vec![]), used(vec![(7, 4096), (8, 0)])] {
            let whole = encode(&used, BOOT);
            assert_eq!(decode(&whole, BOOT).as_ref(), Some(&used));
            for bit in 0..whole.len() * 8 {
                let mut torn = whole.clone();
                torn[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(decode(&torn, BOOT), None, "bit {bit}");
            }
            for length in (0..whole.len()).filter(|length| *length != LENGTH) {
                assert_eq!(decode(&whole[..length], BOOT), None, "{length} bytes");
            }
            assert_eq!(decode(&[&whole[..], b"x"].concat(), BOOT), None);
        }
    }

    #[test]
    fn the_kernels_count_is_read_whole_and_is_no_daemons() {
        let (usage, file) = file(Some(BOOT));
        assert_eq!(usage.kernels_count(), None, "a new file");
        let mut bytes = header(COUNTED, BOOT);
        bytes[..8].copy_from_slice(KERNELS_MAGIC);
        let sum = fnv1a(&bytes[..SUMMED]);
        bytes[SUMMED..].copy_from_slice(&sum.to_le_bytes());
        let write = |bytes: &[u8]| rustix::io::pwrite(&file, bytes, 0).unwrap();
        write(&bytes);
        assert_eq!((usage.kernels_count(), usage.read()), (Some(COUNTED), None));
        for bit in 0..LENGTH * 8 {
            let mut torn = bytes;
            torn[bit / 8] ^= 1 << (bit % 8);
            write(&torn);
            assert_eq!(usage.kernels_count(), None, "bit {bit}");
        }
        usage.keep(&used(vec![])).unwrap();
        assert_eq!(usage.kernels_count(), None, "a daemon's count");
    }

    #[test]
    fn the_sum_is_the_one_others_compute() {
        // The first published test vectors of FNV-1a, 64 bits.
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn the_boot_id_of_this_machine_is_read_and_half_a_one_is_none() {
        assert!(BootId::of_this_boot().is_some());
        assert_eq!(BootId::parse("07070707-0707-0707-0707-070707070707\n"), Some(BOOT));
        assert_eq!(BootId::parse("0707\n"), None);
        assert_eq!(BootId::parse(""), None);
    }
}
