//! The terms of a connection: struct fuse_init_out of the first daemon's answer to FUSE_INIT, which the
//! kernel keeps to. A later daemon may want more flags, and does without them until the next stage.

use std::ops::Range;

use fuser::InitFlags;

use crate::filesystem::{NEEDED, OF_EARLIER_RELEASES};
use crate::{Error, Result};

/// Behind struct fuse_out_header of 16 bytes.
const FLAGS: Range<usize> = 28..32;
const FLAGS2: Range<usize> = 48..52;

/// Compares the answer that this daemon would give with the `first` one. Returns the names of flags
/// that this daemon would ask for, and the connection lacks. An error if it cannot serve without
/// them, does not know one that the connection has, or differs in anything else.
pub(super) fn compare(own: &[u8], first: &[u8]) -> Result<Vec<String>> {
    let differs = |reason: String| Error::InitTerms { reason };
    let flags_of = |answer| flags(answer).ok_or_else(|| differs("no fuse_init_out".to_owned()));
    let (wanted, granted) = (flags_of(own)?, flags_of(first)?);
    let unknown = granted - wanted - OF_EARLIER_RELEASES;
    if !unknown.is_empty() {
        return Err(differs(format!("this daemon does not use {}, which the connection has", list(unknown))));
    }
    let lacking = wanted - granted;
    let needed = lacking & NEEDED;
    if !needed.is_empty() {
        return Err(differs(format!("the connection lacks {}, which this daemon needs", list(needed))));
    }
    if without_flags(own) != without_flags(first) {
        let reason = "this daemon would answer FUSE_INIT with other sizes than the first one did".to_owned();
        return Err(differs(reason));
    }
    Ok(names(lacking))
}

/// Removes flags of the first word from an answer.
pub(super) fn take_out(answer: &mut [u8], refused: InitFlags) {
    let refused = u32::try_from(refused.bits() & u64::from(u32::MAX)).unwrap_or_default();
    if let Some(flags) = answer.get_mut(FLAGS)
        && let Ok(now) = <[u8; 4]>::try_from(&*flags)
    {
        flags.copy_from_slice(&(u32::from_ne_bytes(now) & !refused).to_ne_bytes());
    }
}

fn flags(answer: &[u8]) -> Option<InitFlags> {
    let number = |at: Range<usize>| answer.get(at)?.try_into().ok().map(u32::from_ne_bytes);
    let (low, high) = (u64::from(number(FLAGS)?), u64::from(number(FLAGS2)?));
    Some(InitFlags::from_bits_retain(high << 32 | low))
}

/// Without the header too: its length is that of the answer.
fn without_flags(answer: &[u8]) -> Vec<u8> {
    let is_flag = |at: &usize| FLAGS.contains(at) || FLAGS2.contains(at);
    answer.iter().enumerate().filter(|(at, _)| !is_flag(at)).map(|(_, byte)| *byte).collect()
}

fn names(flags: InitFlags) -> Vec<String> {
    let mut names: Vec<String> = flags.iter_names().map(|(name, _)| name.to_owned()).collect();
    let unnamed = flags.bits() & !InitFlags::all().bits();
    if unnamed != 0 {
        names.push(format!("{unnamed:#x}"));
    }
    names
}

fn list(flags: InitFlags) -> String {
    names(flags).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(flags: InitFlags) -> Vec<u8> {
        let mut answer = vec![7; 80];
        let [low, high] = [flags.bits() & u64::from(u32::MAX), flags.bits() >> 32]
            .map(|half| u32::try_from(half).unwrap().to_ne_bytes());
        answer[FLAGS].copy_from_slice(&low);
        answer[FLAGS2].copy_from_slice(&high);
        answer
    }

    #[test]
    fn flags_that_only_a_new_stage_brings_are_named() {
        let base = NEEDED | InitFlags::FUSE_ASYNC_READ;
        let own = answer(base | InitFlags::FUSE_CACHE_SYMLINKS | InitFlags::FUSE_HAS_RESEND);
        assert_eq!(compare(&own, &answer(base)).unwrap(), ["FUSE_CACHE_SYMLINKS", "FUSE_HAS_RESEND"]);
        assert_eq!(compare(&own, &own).unwrap(), [""; 0]);
    }

    #[test]
    fn flags_are_taken_out_of_an_answer() {
        let mut changed = answer(NEEDED | InitFlags::FUSE_ASYNC_READ);
        take_out(&mut changed, InitFlags::FUSE_ASYNC_READ | InitFlags::FUSE_PASSTHROUGH);
        assert_eq!(changed, answer(NEEDED));
        take_out(&mut [], InitFlags::FUSE_ASYNC_READ);
    }

    #[test]
    fn other_differences_are_refused_and_named() {
        let own = answer(NEEDED);
        let refused = |first: &[u8]| compare(&own, first).unwrap_err().to_string();
        let more = refused(&answer(NEEDED | InitFlags::FUSE_WRITEBACK_CACHE));
        assert!(more.contains("does not use FUSE_WRITEBACK_CACHE"), "{more}");
        assert_eq!(compare(&own, &answer(NEEDED | OF_EARLIER_RELEASES)).unwrap(), [""; 0]);
        let less = refused(&answer(NEEDED - InitFlags::FUSE_POSIX_ACL));
        assert!(less.contains("lacks FUSE_POSIX_ACL"), "{less}");
        let mut sizes = own.clone();
        sizes[36] += 1;
        assert!(refused(&sizes).contains("other sizes"));
        assert!(refused(&own[..40]).contains("no fuse_init_out"));
        assert!(refused(&[]).contains("no fuse_init_out"));
    }
}
