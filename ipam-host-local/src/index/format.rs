//! The format of the index file. No I/O.
//!
//! A header of 16 words, then `buckets` buckets (leases by container), then `slots` blocks (taken
//! addresses). Words are little-endian 64-bit numbers. Header, buckets and blocks have checksums,
//! which include their position and the build of the file. So no other data can pass for a part of
//! the index.

use std::net::{IpAddr, Ipv6Addr};

/// Word 0 of the header; the last digit is the format's version.
const MAGIC: u64 = u64::from_le_bytes(*b"hawsidx2");

const HEADER_WORDS: usize = 16;
pub(crate) const HEADER_BYTES: usize = HEADER_WORDS * 8;

const ENTRY_WORDS: usize = 7;
/// Capacity of one bucket.
pub(crate) const BUCKET_ENTRIES: usize = 18;
const BUCKET_WORDS: usize = 2 + BUCKET_ENTRIES * ENTRY_WORDS;
pub(crate) const BUCKET_BYTES: usize = BUCKET_WORDS * 8;

/// A block covers 2 to the power of this many consecutive addresses.
const BLOCK_SHIFT: u32 = 11;
const BLOCK_ADDRESSES: u32 = 1 << BLOCK_SHIFT;
const BITS_WORDS: usize = BLOCK_ADDRESSES as usize / 64;
const BLOCK_WORDS: usize = 4 + BITS_WORDS;
pub(crate) const BLOCK_BYTES: usize = BLOCK_WORDS * 8;

/// A larger index is invalid. Keeps offsets far from overflow.
const MOST_PARTS: u64 = 1 << 32;

/// Distinguishes the checksums of the three kinds of parts.
const BUCKET_SORT: u64 = 1 << 62;
const BLOCK_SORT: u64 = 2 << 62;

/// A directory's state from stat(2); any change of its entries changes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) inode: u64,
    /// Seconds and nanoseconds.
    pub(crate) modified: (i64, i64),
    pub(crate) changed: (i64, i64),
}

/// One boot of one machine, where a lease was made or an index built. A part that is zero is
/// unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Origin {
    /// See [`machine`].
    pub(crate) machine: u64,
    /// See [`boot`].
    pub(crate) boot: u64,
}

impl Origin {
    /// Whether this is another boot of the same machine as `now`. False if any part is unknown.
    pub(crate) fn is_past(self, now: Self) -> bool {
        let known = ![self.machine, self.boot, now.machine, now.boot].contains(&0);
        known && self.machine == now.machine && self.boot != now.boot
    }
}

/// A number for the kernel's boot id: 32 hexadecimal digits and hyphens. 0 if it is invalid.
pub(crate) fn boot(id: &str) -> u64 {
    let digits: String = id.trim().chars().filter(|c| *c != '-').collect();
    id_number(&digits).map_or(0, |number| digest_of_id(4, number))
}

/// A number for a machine: its machine-id(5), 32 hexadecimal digits, together with its host name.
/// Copies of a disk image may share the id, but nodes of a cluster have different names. 0 if
/// either is missing.
pub(crate) fn machine(id: &str, host_name: &str) -> u64 {
    let host_name = host_name.trim();
    let number = id_number(id.trim()).filter(|_| !host_name.is_empty());
    number.map_or(0, |number| mix(digest_of_id(5, number), digest(host_name)).max(1))
}

/// `None` if it is not 32 hexadecimal digits, or only zeros.
fn id_number(digits: &str) -> Option<u128> {
    let whole = digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = whole.then(|| u128::from_str_radix(digits, 16).ok()).flatten();
    number.filter(|number| *number != 0)
}

fn digest_of_id(sort: u64, number: u128) -> u64 {
    let [high, low] = halves(number);
    mix(mix(sort, high), low).max(1)
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Header {
    /// The origin of the call that built it.
    pub(crate) origin: Origin,
    /// The directory's stamp when the index was last sealed.
    pub(crate) stamp: Stamp,
    /// Different for every build of the file.
    pub(crate) build: u64,
    /// At least 1.
    pub(crate) buckets: u64,
    /// At least 1.
    pub(crate) slots: u64,
    /// Slots that hold a block.
    pub(crate) blocks: u64,
    /// Entries in all buckets.
    pub(crate) leases: u64,
    /// Entries from an earlier boot of this machine.
    pub(crate) earlier: u64,
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let Stamp { inode, modified, changed } = self.stamp;
        let mut words = [
            MAGIC,
            self.origin.machine,
            self.origin.boot,
            inode,
            modified.0.cast_unsigned(),
            modified.1.cast_unsigned(),
            changed.0.cast_unsigned(),
            changed.1.cast_unsigned(),
            self.build,
            self.buckets,
            self.slots,
            self.blocks,
            self.leases,
            self.earlier,
            0,
            0,
        ];
        words[HEADER_WORDS - 1] = checksum(&words[..HEADER_WORDS - 1], self.build);
        to_bytes(&words)
    }

    /// `None` if it was not written by [`encode`](Self::encode).
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let words: [u64; HEADER_WORDS] = to_words(bytes);
        let header = Self {
            origin: Origin { machine: words[1], boot: words[2] },
            stamp: Stamp {
                inode: words[3],
                modified: (words[4].cast_signed(), words[5].cast_signed()),
                changed: (words[6].cast_signed(), words[7].cast_signed()),
            },
            build: words[8],
            buckets: words[9],
            slots: words[10],
            blocks: words[11],
            leases: words[12],
            earlier: words[13],
        };
        let whole = words[0] == MAGIC
            && words[HEADER_WORDS - 1] == checksum(&words[..HEADER_WORDS - 1], header.build)
            && (1..MOST_PARTS).contains(&header.buckets)
            && (1..MOST_PARTS).contains(&header.slots);
        whole.then_some(header)
    }

    /// The number of a container's bucket.
    pub(crate) fn bucket_of(&self, container: u64) -> u64 {
        container % self.buckets
    }

    /// The slot at which the search for a block begins.
    pub(crate) fn slot_of(&self, key: u128) -> u64 {
        mix(mix(0, halves(key)[0]), halves(key)[1]) % self.slots
    }

    pub(crate) fn bucket_offset(&self, bucket: u64) -> u64 {
        HEADER_BYTES as u64 + bucket * BUCKET_BYTES as u64
    }

    pub(crate) fn slot_offset(&self, slot: u64) -> u64 {
        self.bucket_offset(self.buckets) + slot * BLOCK_BYTES as u64
    }

    /// The file's exact length.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.slot_offset(self.slots)
    }
}

/// One lease in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// [`digest`] of the container id.
    pub(crate) container: u64,
    /// [`digest`] of the interface's name; 0 for a lease without one.
    pub(crate) ifname: u64,
    pub(crate) address: u128,
    /// Distinguishes successive lease files of the same name.
    pub(crate) life: u64,
    /// The origin of the lease, if one of our own calls made it.
    pub(crate) origin: Origin,
}

/// The entries of the containers that share a bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bucket {
    /// At most [`BUCKET_ENTRIES`].
    pub(crate) entries: Vec<Entry>,
}

impl Bucket {
    /// Does not write entries above the capacity; the caller must check first.
    pub(crate) fn encode(&self, at: u64, build: u64) -> [u8; BUCKET_BYTES] {
        let mut words = [0; BUCKET_WORDS];
        words[1] = self.entries.len().min(BUCKET_ENTRIES) as u64;
        for (entry, room) in self.entries.iter().zip(words[2..].chunks_exact_mut(ENTRY_WORDS)) {
            let [high, low] = halves(entry.address);
            room.copy_from_slice(&[
                entry.container,
                entry.ifname,
                high,
                low,
                entry.life,
                entry.origin.machine,
                entry.origin.boot,
            ]);
        }
        words[0] = checksum(&words[1..], build ^ BUCKET_SORT ^ at);
        to_bytes(&words)
    }

    /// `None` if it is not bucket `at` of this build.
    pub(crate) fn decode(bytes: &[u8; BUCKET_BYTES], at: u64, build: u64) -> Option<Self> {
        let words: [u64; BUCKET_WORDS] = to_words(bytes);
        let count = usize::try_from(words[1]).ok().filter(|count| *count <= BUCKET_ENTRIES)?;
        if words[0] != checksum(&words[1..], build ^ BUCKET_SORT ^ at) {
            return None;
        }
        let entry = |room: &[u64]| Entry {
            container: room[0],
            ifname: room[1],
            address: whole([room[2], room[3]]),
            life: room[4],
            origin: Origin { machine: room[5], boot: room[6] },
        };
        Some(Self { entries: words[2..].chunks_exact(ENTRY_WORDS).take(count).map(entry).collect() })
    }
}

/// Which of [`BLOCK_ADDRESSES`] consecutive addresses are taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    key: u128,
    bits: [u64; BITS_WORDS],
}

impl Block {
    /// With all addresses free.
    pub(crate) fn new(key: u128) -> Self {
        Self { key, bits: [0; BITS_WORDS] }
    }

    /// The key of the block with `address`.
    pub(crate) fn key_of(address: u128) -> u128 {
        address >> BLOCK_SHIFT
    }

    pub(crate) fn key(&self) -> u128 {
        self.key
    }

    pub(crate) fn set(&mut self, address: u128, taken: bool) {
        let (word, bit) = place(address);
        if taken {
            self.bits[word] |= bit;
        } else {
            self.bits[word] &= !bit;
        }
    }

    /// The first free address from `from`, which is in this block, to `last` or the block's end,
    /// both inclusive.
    pub(crate) fn first_free(&self, from: u128, last: u128) -> Option<u128> {
        let end = self.last().min(last);
        let mut address = from;
        while address <= end {
            let (word, bit) = place(address);
            if self.bits[word] == u64::MAX {
                // The first address of the next word; `None` after the last one.
                address = (address | 63).checked_add(1)?;
                continue;
            }
            if self.bits[word] & bit == 0 {
                return Some(address);
            }
            address = address.checked_add(1)?;
        }
        None
    }

    /// The last address of the block.
    pub(crate) fn last(&self) -> u128 {
        self.key << BLOCK_SHIFT | u128::from(BLOCK_ADDRESSES - 1)
    }

    /// The slot with `block`, or an empty one.
    pub(crate) fn encode_slot(block: Option<&Self>, at: u64, build: u64) -> [u8; BLOCK_BYTES] {
        let mut words = [0; BLOCK_WORDS];
        if let Some(block) = block {
            words[1] = 1;
            words[2..4].copy_from_slice(&halves(block.key));
            words[4..].copy_from_slice(&block.bits);
        }
        words[0] = checksum(&words[1..], build ^ BLOCK_SORT ^ at);
        to_bytes(&words)
    }

    /// `None`: not slot `at` of this build. `Some(None)`: empty.
    #[expect(clippy::option_option, reason = "whether it is valid, and then whether it is empty")]
    pub(crate) fn decode_slot(bytes: &[u8; BLOCK_BYTES], at: u64, build: u64) -> Option<Option<Self>> {
        let words: [u64; BLOCK_WORDS] = to_words(bytes);
        if words[0] != checksum(&words[1..], build ^ BLOCK_SORT ^ at) {
            return None;
        }
        let mut block = Self::new(whole([words[2], words[3]]));
        block.bits.copy_from_slice(&words[4..]);
        Some((words[1] == 1).then_some(block))
    }
}

/// The word and bit of an address in its block.
fn place(address: u128) -> (usize, u64) {
    let offset = (address & u128::from(BLOCK_ADDRESSES - 1)) as usize;
    (offset / 64, 1 << (offset % 64))
}

/// A unique number for an address of either family.
pub(crate) fn number(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().into(),
        IpAddr::V6(v6) => v6.into(),
    }
}

/// The opposite of [`number`].
pub(crate) fn address(number: u128) -> IpAddr {
    Ipv6Addr::from(number).to_canonical()
}

/// A digest of a container id or an interface name; never 0. Two texts with the same digest only
/// cost an additional read of a file.
pub(crate) fn digest(text: &str) -> u64 {
    let words = text.as_bytes().chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    words.fold(mix(1, text.len() as u64), mix).max(1)
}

/// See [`Entry::life`]. `changed` is the lease file's ctime, which no process can choose.
pub(crate) fn life(inode: u64, changed: (i64, i64)) -> u64 {
    mix(mix(mix(2, inode), changed.0.cast_unsigned()), changed.1.cast_unsigned())
}

fn checksum(words: &[u64], seed: u64) -> u64 {
    words.iter().copied().fold(mix(3, seed), mix)
}

/// A multiplication, then the upper half folded onto the lower: every bit of both inputs affects
/// about half of the result's bits.
fn mix(state: u64, word: u64) -> u64 {
    let [high, low] = halves(u128::from(state ^ word ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93_u128);
    (high ^ low).rotate_left(23).wrapping_add(word.wrapping_mul(0x2545_f491_4f6c_dd1d))
}

/// Upper and lower half.
fn halves(number: u128) -> [u64; 2] {
    #[expect(clippy::cast_possible_truncation, reason = "the two halves, each exactly")]
    let halves = [(number >> 64) as u64, number as u64];
    halves
}

fn whole([high, low]: [u64; 2]) -> u128 {
    u128::from(high) << 64 | u128::from(low)
}

fn to_bytes<const WORDS: usize, const BYTES: usize>(words: &[u64; WORDS]) -> [u8; BYTES] {
    const { assert!(WORDS * 8 == BYTES) };
    let mut bytes = [0; BYTES];
    for (room, word) in bytes.chunks_exact_mut(8).zip(words) {
        room.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn to_words<const BYTES: usize, const WORDS: usize>(bytes: &[u8; BYTES]) -> [u64; WORDS] {
    const { assert!(WORDS * 8 == BYTES) };
    let mut words = [0; WORDS];
    for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = chunk.try_into().map_or(0, u64::from_le_bytes);
    }
    words
}
