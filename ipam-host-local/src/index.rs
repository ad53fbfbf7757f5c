//! The index: finds holders and free addresses in a few reads, with any number of leases. This file
//! reads and changes its parts in place.
//!
//! It is never authoritative. [`Index::describes`] checks that the directory is unchanged since the
//! index was sealed. The caller (`store`) validates results against the lease files. Any
//! inconsistency is [`Unusable`]; then the index is built anew from the lease files.
//!
//! A process may be killed between any two writes. The directory changes before the first of them,
//! so the index no longer describes it.

pub(crate) mod format;

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use format::{
    BLOCK_BYTES, BUCKET_BYTES, BUCKET_ENTRIES, Block, Bucket, Entry, HEADER_BYTES, Header, Origin, Stamp,
};

/// Entries in each bucket of a new index: it may double, and single buckets may grow further,
/// before it must be built anew and larger.
const ENTRIES_AT_FIRST: u64 = 5;
const BUCKETS_AT_LEAST: u64 = 8;
const SLOTS_AT_LEAST: u64 = 16;
/// How often a build that does not fit is repeated with twice the buckets.
const BUILDS: u32 = 4;

/// The index is unreadable, invalid or full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unusable;

impl From<io::Error> for Unusable {
    fn from(_: io::Error) -> Self {
        Self
    }
}

/// An index file with a valid header.
#[derive(Debug)]
pub(crate) struct Index {
    file: File,
    header: Header,
}

/// The contents for a new index.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    pub(crate) leases: Vec<Entry>,
    /// Addresses taken by files that name no holder.
    pub(crate) others: Vec<u128>,
}

impl Index {
    /// `None` if there is none, or if it is invalid.
    pub(crate) fn open(path: &Path) -> Option<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path).ok()?;
        let mut bytes = [0; HEADER_BYTES];
        file.read_exact_at(&mut bytes, 0).ok()?;
        let header = Header::decode(&bytes)?;
        (file.metadata().ok()?.len() == header.file_bytes()).then_some(Self { file, header })
    }

    /// Replaces the index at `path`, and creates its directory. It describes no directory until it
    /// is sealed.
    pub(crate) fn build(path: &Path, origin: Origin, mut contents: Contents) -> Result<Self, Unusable> {
        let parent = path.parent().ok_or(Unusable)?;
        DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
        let unfinished = path.with_extension("new");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&unfinished)?;
        let mut index = Self { file, header: Header { origin, build: build_number(), ..Header::default() } };
        index.write_all(&mut contents).and_then(|()| Ok(std::fs::rename(&unfinished, path)?)).inspect_err(
            |_| {
                // Best effort: the next build replaces a remaining file.
                let _may_be_gone = std::fs::remove_file(&unfinished);
            },
        )?;
        Ok(index)
    }

    /// Whether the directory is unchanged since the index was sealed, in this boot.
    pub(crate) fn describes(&self, directory: Stamp, boot: u64) -> bool {
        self.header.stamp == directory && self.header.origin.boot == boot
    }

    /// From here on, the index describes a directory with the stamp `directory`.
    pub(crate) fn seal(&mut self, directory: Stamp) -> Result<(), Unusable> {
        self.header.stamp = directory;
        self.write_header()
    }

    /// The origin of the call that built it.
    pub(crate) fn origin(&self) -> Origin {
        self.header.origin
    }

    pub(crate) fn leases(&self) -> u64 {
        self.header.leases
    }

    /// Whether it takes more space than an index of few leases needs.
    pub(crate) fn is_large(&self) -> bool {
        self.header.buckets > 8 * BUCKETS_AT_LEAST || self.header.slots > 8 * SLOTS_AT_LEAST
    }

    /// Number of leases that are known to be from an earlier boot of this machine.
    pub(crate) fn earlier(&self) -> u64 {
        self.header.earlier
    }

    /// The leases of a container, on any interface. `container` is a [`format::digest`].
    pub(crate) fn entries_of(&self, container: u64) -> Result<Vec<Entry>, Unusable> {
        let bucket = self.bucket(self.header.bucket_of(container))?;
        Ok(bucket.entries.into_iter().filter(|entry| entry.container == container).collect())
    }

    /// The entries with a known origin, ordered by address, from all valid buckets.
    pub(crate) fn of_known_origin(&self) -> Vec<Entry> {
        let room = self.header.leases.min(self.header.buckets * BUCKET_ENTRIES as u64);
        let mut known = Vec::with_capacity(usize::try_from(room).unwrap_or_default());
        for bucket in (0..self.header.buckets).filter_map(|at| self.bucket(at).ok()) {
            known.extend(bucket.entries.into_iter().filter(|entry| entry.origin != Origin::default()));
        }
        known.sort_unstable_by_key(|entry: &Entry| entry.address);
        known
    }

    /// The first free address from `from` to `last`, both inclusive.
    pub(crate) fn first_free(&self, from: u128, last: u128) -> Result<Option<u128>, Unusable> {
        let mut next = Some(from);
        while let Some(address) = next.filter(|address| *address <= last) {
            let (_, found) = self.find_block(Block::key_of(address))?;
            let Some(block) = found else { return Ok(Some(address)) };
            if let Some(free) = block.first_free(address, last) {
                return Ok(Some(free));
            }
            next = block.last().checked_add(1);
        }
        Ok(None)
    }

    /// Adds a lease that the directory has already.
    pub(crate) fn insert(&mut self, entry: Entry) -> Result<(), Unusable> {
        let at = self.header.bucket_of(entry.container);
        let mut bucket = self.bucket(at)?;
        if bucket.entries.len() >= BUCKET_ENTRIES {
            return Err(Unusable);
        }
        bucket.entries.push(entry);
        self.header.leases += 1;
        self.header.earlier += self.earlier_count(&entry);
        self.write_bucket(at, &bucket)?;
        self.mark(entry.address, true)
    }

    /// Removes the lease of `address`, held by `container`, which the directory no longer has.
    pub(crate) fn remove(&mut self, container: u64, address: u128) -> Result<(), Unusable> {
        let at = self.header.bucket_of(container);
        let mut bucket = self.bucket(at)?;
        let found = bucket.entries.iter().position(|e| e.container == container && e.address == address);
        let entry = bucket.entries.swap_remove(found.ok_or(Unusable)?);
        self.header.leases = self.header.leases.checked_sub(1).ok_or(Unusable)?;
        self.header.earlier = self.header.earlier.checked_sub(self.earlier_count(&entry)).ok_or(Unusable)?;
        self.write_bucket(at, &bucket)?;
        self.mark(address, false)
    }

    /// The entry's contribution to [`earlier`](Self::earlier).
    fn earlier_count(&self, entry: &Entry) -> u64 {
        entry.origin.is_past(self.header.origin).into()
    }

    fn mark(&mut self, address: u128, taken: bool) -> Result<(), Unusable> {
        let key = Block::key_of(address);
        let (slot, found) = self.find_block(key)?;
        if found.is_none() {
            // A quarter stays empty, so that searches are short.
            if (self.header.blocks + 1).saturating_mul(4) > self.header.slots.saturating_mul(3) {
                return Err(Unusable);
            }
            self.header.blocks += 1;
        }
        let mut block = found.unwrap_or_else(|| Block::new(key));
        block.set(address, taken);
        let bytes = Block::encode_slot(Some(&block), slot, self.header.build);
        Ok(self.file.write_all_at(&bytes, self.header.slot_offset(slot))?)
    }

    fn bucket(&self, at: u64) -> Result<Bucket, Unusable> {
        let mut bytes = [0; BUCKET_BYTES];
        self.file.read_exact_at(&mut bytes, self.header.bucket_offset(at))?;
        Bucket::decode(&bytes, at, self.header.build).ok_or(Unusable)
    }

    fn write_bucket(&self, at: u64, bucket: &Bucket) -> Result<(), Unusable> {
        let bytes = bucket.encode(at, self.header.build);
        Ok(self.file.write_all_at(&bytes, self.header.bucket_offset(at))?)
    }

    /// The slot and block, or the slot where the block would be.
    fn find_block(&self, key: u128) -> Result<(u64, Option<Block>), Unusable> {
        let first = self.header.slot_of(key);
        for step in 0..self.header.slots {
            let slot = (first + step) % self.header.slots;
            let mut bytes = [0; BLOCK_BYTES];
            self.file.read_exact_at(&mut bytes, self.header.slot_offset(slot))?;
            match Block::decode_slot(&bytes, slot, self.header.build).ok_or(Unusable)? {
                Some(block) if block.key() != key => {}
                found => return Ok((slot, found)),
            }
        }
        Err(Unusable)
    }

    fn write_header(&self) -> Result<(), Unusable> {
        Ok(self.file.write_all_at(&self.header.encode(), 0)?)
    }

    fn write_all(&mut self, contents: &mut Contents) -> Result<(), Unusable> {
        let blocks = blocks_of(contents);
        let leases = &mut contents.leases;
        let header = &mut self.header;
        header.blocks = blocks.len() as u64;
        header.slots = (header.blocks * 2).max(SLOTS_AT_LEAST);
        header.leases = leases.len() as u64;
        header.earlier = leases.iter().filter(|entry| entry.origin.is_past(header.origin)).count() as u64;
        header.buckets = (header.leases / ENTRIES_AT_FIRST).max(BUCKETS_AT_LEAST);
        let mut builds = 1;
        loop {
            leases.sort_unstable_by_key(|entry| header.bucket_of(entry.container));
            let same_bucket =
                |a: &Entry, b: &Entry| header.bucket_of(a.container) == header.bucket_of(b.container);
            if leases.chunk_by(same_bucket).all(|chunk| chunk.len() <= BUCKET_ENTRIES) {
                break;
            }
            if builds == BUILDS {
                return Err(Unusable);
            }
            builds += 1;
            header.buckets *= 2;
        }
        self.write_parts(leases, &blocks)?;
        self.write_header()
    }

    /// `leases` ordered by bucket.
    fn write_parts(&self, mut leases: &[Entry], blocks: &[Block]) -> Result<(), Unusable> {
        let header = &self.header;
        let mut out = BufWriter::with_capacity(1 << 16, &self.file);
        // The header is written last: without it the index is invalid.
        out.write_all(&[0; HEADER_BYTES])?;
        for at in 0..header.buckets {
            let count = leases.iter().take_while(|entry| header.bucket_of(entry.container) == at).count();
            let (entries, rest) = leases.split_at(count);
            leases = rest;
            out.write_all(&Bucket { entries: entries.to_vec() }.encode(at, header.build))?;
        }
        let slots = usize::try_from(header.slots).map_err(|_| Unusable)?;
        let mut placed: Vec<Option<&Block>> = vec![None; slots];
        for block in blocks {
            let mut slot = usize::try_from(header.slot_of(block.key())).map_err(|_| Unusable)?;
            while placed[slot].is_some() {
                slot = (slot + 1) % slots;
            }
            placed[slot] = Some(block);
        }
        for (at, block) in (0..).zip(placed) {
            out.write_all(&Block::encode_slot(block, at, header.build))?;
        }
        Ok(out.flush()?)
    }
}

/// Ordered by address.
fn blocks_of(contents: &mut Contents) -> Vec<Block> {
    contents.leases.sort_unstable_by_key(|entry| entry.address);
    contents.others.sort_unstable();
    let mut blocks: Vec<Block> = Vec::new();
    let mut take = |address: u128| {
        let key = Block::key_of(address);
        if blocks.last().is_none_or(|block| block.key() != key) {
            blocks.push(Block::new(key));
        }
        if let Some(block) = blocks.last_mut() {
            block.set(address, true);
        }
    };
    let mut others = contents.others.iter().copied().peekable();
    for entry in &contents.leases {
        while let Some(other) = others.next_if(|other| *other < entry.address) {
            take(other);
        }
        take(entry.address);
    }
    others.for_each(take);
    blocks
}

fn build_number() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_secs() << 30 ^ u64::from(now.subsec_nanos()) ^ u64::from(std::process::id()) << 44
}

#[cfg(test)]
mod tests;
