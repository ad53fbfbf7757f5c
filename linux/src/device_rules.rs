//! Device rules of a cgroup, as cgroup v1 understands them, and the BPF program
//! that enforces the same rules on cgroup v2. Pure: no I/O.
//!
//! Invariant: v1 and v2 get the same normal form ([`Policy`]), so that they decide alike. Its
//! meaning is the kernel's (security/device_cgroup.c): a default, and exceptions to it. An access
//! that is denied by default needs one exception that grants all of it. An access that is allowed
//! by default must match no exception.

use std::fmt;
use std::ops::{BitAnd, BitOr, Not};

/// A kind of access to a device: read, write, make its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access(u8);

impl Access {
    // BPF_DEVCG_ACC_* of linux/bpf.h.
    pub const MKNOD: Self = Self(1);
    pub const READ: Self = Self(2);
    pub const WRITE: Self = Self(4);
    pub const ALL: Self = Self(7);

    /// Parses `r`, `w` and `m` in any combination; `None` for other letters and for an empty text.
    pub fn parse(text: &str) -> Option<Self> {
        let bits = text.chars().try_fold(0, |bits, letter| match letter {
            'm' => Some(bits | Self::MKNOD.0),
            'r' => Some(bits | Self::READ.0),
            'w' => Some(bits | Self::WRITE.0),
            _ => None,
        })?;
        (bits != 0).then_some(Self(bits))
    }

    fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl BitOr for Access {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitAnd for Access {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl Not for Access {
    type Output = Self;
    fn not(self) -> Self {
        Self(!self.0 & Self::ALL.0)
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (bit, letter) in [(Self::READ, "r"), (Self::WRITE, "w"), (Self::MKNOD, "m")] {
            if !(*self & bit).is_empty() {
                f.write_str(letter)?;
            }
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    Block,
    Character,
}

/// The devices of a rule; `None` means all numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Devices {
    All,
    Some { kind: DeviceKind, major: Option<u32>, minor: Option<u32> },
}

/// One rule of a list. A rule for all devices covers every access and replaces all rules before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceRule {
    pub allow: bool,
    pub devices: Devices,
    pub access: Access,
}

/// The normal form of a rule list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    allow_by_default: bool,
    exceptions: Vec<Exception>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Exception {
    kind: DeviceKind,
    major: Option<u32>,
    minor: Option<u32>,
    access: Access,
}

impl Policy {
    /// Applies `rules` in order; initially everything is denied.
    pub fn of(rules: &[DeviceRule]) -> Self {
        let mut policy = Self { allow_by_default: false, exceptions: Vec::new() };
        for rule in rules {
            policy.apply(*rule);
        }
        policy
    }

    fn apply(&mut self, rule: DeviceRule) {
        let Devices::Some { kind, major, minor } = rule.devices else {
            *self = Self { allow_by_default: rule.allow, exceptions: Vec::new() };
            return;
        };
        // The kernel merges and removes exceptions by equal numbers only: a rule
        // for `c 1:*` does not touch an exception for `c 1:3`.
        let same = |e: &Exception| (e.kind, e.major, e.minor) == (kind, major, minor);
        let known = self.exceptions.iter().position(same);
        if rule.allow == self.allow_by_default {
            if let Some(index) = known {
                let left = self.exceptions[index].access & !rule.access;
                self.exceptions[index].access = left;
                if left.is_empty() {
                    self.exceptions.remove(index);
                }
            }
            return;
        }
        match known {
            Some(index) => {
                let merged = self.exceptions[index].access | rule.access;
                self.exceptions[index].access = merged;
            }
            None => self.exceptions.push(Exception { kind, major, minor, access: rule.access }),
        }
    }

    /// Whether every access to every device is allowed.
    pub fn allows_everything(&self) -> bool {
        self.allow_by_default && self.exceptions.is_empty()
    }

    /// v1's decision on `access` to one device.
    pub fn allows(&self, kind: DeviceKind, (major, minor): (u32, u32), access: Access) -> bool {
        let matches = |e: &Exception| {
            e.kind == kind && e.major.is_none_or(|m| m == major) && e.minor.is_none_or(|m| m == minor)
        };
        let mut matching = self.exceptions.iter().filter(|e| matches(e));
        if self.allow_by_default {
            !matching.any(|e| !(e.access & access).is_empty())
        } else {
            matching.any(|e| (access & !e.access).is_empty())
        }
    }

    /// The writes to a new v1 group that set this policy: file, content.
    pub fn v1_writes(&self) -> Vec<(&'static str, String)> {
        let file = |allow| if allow { "devices.allow" } else { "devices.deny" };
        let number = |n: Option<u32>| n.map_or_else(|| "*".to_owned(), |n| n.to_string());
        let default = (file(self.allow_by_default), "a".to_owned());
        let exceptions = self.exceptions.iter().map(|e| {
            let kind = if e.kind == DeviceKind::Block { 'b' } else { 'c' };
            let line = format!("{kind} {}:{} {}", number(e.major), number(e.minor), e.access);
            (file(!self.allow_by_default), line)
        });
        std::iter::once(default).chain(exceptions).collect()
    }

    /// The same policy as a program of type BPF_PROG_TYPE_CGROUP_DEVICE, which
    /// returns 1 to allow an access and 0 to deny it.
    pub fn program(&self) -> Vec<Instruction> {
        // struct bpf_cgroup_dev_ctx: u32 access_type (access << 16 | type), major, minor.
        let mut program = vec![
            Instruction::load(TYPE, 0),
            Instruction::copy(ACCESS, TYPE),
            Instruction::and(TYPE, 0xffff),
            Instruction::shift_right(ACCESS, 16),
            Instruction::load(MAJOR, 4),
            Instruction::load(MINOR, 8),
        ];
        for exception in &self.exceptions {
            program.extend(self.exception(exception));
        }
        program.extend([Instruction::set(RESULT, self.allow_by_default.into()), Instruction::exit()]);
        program
    }

    /// Ends the program if `exception` applies; otherwise continues after it.
    fn exception(&self, exception: &Exception) -> Vec<Instruction> {
        let kind = match exception.kind {
            DeviceKind::Block => 1,     // BPF_DEVCG_DEV_BLOCK
            DeviceKind::Character => 2, // BPF_DEVCG_DEV_CHAR
        };
        // Each closure makes a jump over the given number of instructions.
        let mut tests = vec![Test { before: None, jump: Jump::IfNot(TYPE, kind) }];
        if let Some(major) = exception.major {
            tests.push(Test { before: None, jump: Jump::IfNot(MAJOR, major) });
        }
        if let Some(minor) = exception.minor {
            tests.push(Test { before: None, jump: Jump::IfNot(MINOR, minor) });
        }
        let mask = |access: Access| Instruction::and(RESULT, access.0.into());
        if self.allow_by_default {
            // Applies to an access that shares a bit with the exception.
            tests.push(Test { before: Some(mask(exception.access)), jump: Jump::If(RESULT, 0) });
        } else if exception.access != Access::ALL {
            // Applies to an access without any other bit.
            tests.push(Test { before: Some(mask(!exception.access)), jump: Jump::IfNot(RESULT, 0) });
        }
        let end = [Instruction::set(RESULT, (!self.allow_by_default).into()), Instruction::exit()];
        let mut left: usize = tests.iter().map(Test::length).sum::<usize>() + end.len();
        let mut program = Vec::with_capacity(left);
        for test in tests {
            left -= test.length();
            if let Some(mask) = test.before {
                program.extend([Instruction::copy(RESULT, ACCESS), mask]);
            }
            let over = i16::try_from(left).expect("an exception has a handful of instructions");
            program.push(match test.jump {
                Jump::If(register, value) => Instruction::jump_if_equal(register, value, over),
                Jump::IfNot(register, value) => Instruction::jump_if_not_equal(register, value, over),
            });
        }
        program.extend(end);
        program
    }
}

/// A condition of an exception: jumps past the exception if it is false.
struct Test {
    /// Computes the value to test from a copy of the access.
    before: Option<Instruction>,
    jump: Jump,
}

impl Test {
    fn length(&self) -> usize {
        if self.before.is_some() { 3 } else { 1 }
    }
}

enum Jump {
    If(u8, u32),
    IfNot(u8, u32),
}

const RESULT: u8 = 0;
const CONTEXT: u8 = 1;
const TYPE: u8 = 2;
const ACCESS: u8 = 3;
const MAJOR: u8 = 4;
const MINOR: u8 = 5;

/// One instruction of eBPF, laid out as struct bpf_insn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Instruction {
    code: u8,
    /// Destination in the low four bits, source in the high ones.
    registers: u8,
    offset: i16,
    immediate: i32,
}

impl Instruction {
    fn new(code: u8, destination: u8, immediate: u32) -> Self {
        Self { code, registers: destination, offset: 0, immediate: immediate.cast_signed() }
    }

    /// A u32 of the context.
    fn load(to: u8, offset: i16) -> Self {
        const LDX_MEM_W: u8 = 0x61;
        Self { registers: to | CONTEXT << 4, offset, ..Self::new(LDX_MEM_W, to, 0) }
    }

    fn copy(to: u8, from: u8) -> Self {
        const ALU32_MOV_X: u8 = 0xbc;
        Self { registers: to | from << 4, ..Self::new(ALU32_MOV_X, to, 0) }
    }

    fn set(to: u8, value: u32) -> Self {
        const ALU64_MOV_K: u8 = 0xb7;
        Self::new(ALU64_MOV_K, to, value)
    }

    fn and(to: u8, value: u32) -> Self {
        const ALU32_AND_K: u8 = 0x54;
        Self::new(ALU32_AND_K, to, value)
    }

    fn shift_right(to: u8, bits: u32) -> Self {
        const ALU32_RSH_K: u8 = 0x74;
        Self::new(ALU32_RSH_K, to, bits)
    }

    // 32-bit comparisons: the 64-bit ones extend the sign of the immediate.
    fn jump_if_equal(register: u8, value: u32, offset: i16) -> Self {
        const JMP32_JEQ_K: u8 = 0x16;
        Self { offset, ..Self::new(JMP32_JEQ_K, register, value) }
    }

    fn jump_if_not_equal(register: u8, value: u32, offset: i16) -> Self {
        const JMP32_JNE_K: u8 = 0x56;
        Self { offset, ..Self::new(JMP32_JNE_K, register, value) }
    }

    fn exit() -> Self {
        const JMP_EXIT: u8 = 0x95;
        Self::new(JMP_EXIT, 0, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(allow: bool, text: &str) -> DeviceRule {
        let mut words = text.split([' ', ':']);
        let kind = match words.next() {
            Some("b") => DeviceKind::Block,
            Some("c") => DeviceKind::Character,
            _ => return DeviceRule { allow, devices: Devices::All, access: Access::ALL },
        };
        let mut number = || words.next().and_then(|n| n.parse().ok());
        let devices = Devices::Some { kind, major: number(), minor: number() };
        DeviceRule { allow, devices, access: Access::parse(words.next().unwrap()).unwrap() }
    }

    #[test]
    fn a_rule_for_all_devices_replaces_what_came_before() {
        let policy = Policy::of(&[rule(false, "a"), rule(true, "c 1:3 rwm"), rule(true, "a")]);
        assert!(policy.allows_everything());
        assert_eq!(policy.v1_writes(), [("devices.allow", "a".to_owned())]);
        let policy = Policy::of(&[rule(true, "a"), rule(false, "b 8:* w"), rule(false, "a")]);
        assert_eq!(policy.v1_writes(), [("devices.deny", "a".to_owned())]);
    }

    #[test]
    fn rules_are_merged_and_taken_back_by_equal_numbers_only() {
        let policy = Policy::of(&[
            rule(false, "a"),
            rule(true, "c 1:3 r"),
            rule(true, "c 1:3 w"),
            rule(true, "c 1:* m"),
            rule(false, "c 1:3 w"),
            rule(false, "c *:* m"),
        ]);
        let allow = |line: &str| ("devices.allow", line.to_owned());
        assert_eq!(
            policy.v1_writes(),
            [("devices.deny", "a".to_owned()), allow("c 1:3 r"), allow("c 1:* m")]
        );
    }

    #[test]
    fn one_exception_must_grant_all_of_an_access_that_is_denied_by_default() {
        let policy = Policy::of(&[rule(true, "c 1:3 r"), rule(true, "c 1:* w")]);
        let allows = |access| policy.allows(DeviceKind::Character, (1, 3), access);
        assert!(allows(Access::READ) && allows(Access::WRITE));
        assert!(!allows(Access::READ | Access::WRITE));
        assert!(!policy.allows(DeviceKind::Block, (1, 3), Access::READ));
    }

    #[test]
    fn an_access_that_is_allowed_by_default_must_touch_no_exception() {
        let policy = Policy::of(&[rule(true, "a"), rule(false, "b 8:* w")]);
        let allows = |access| policy.allows(DeviceKind::Block, (8, 1), access);
        assert!(allows(Access::READ | Access::MKNOD));
        assert!(!allows(Access::READ | Access::WRITE));
        assert!(policy.allows(DeviceKind::Character, (8, 1), Access::WRITE));
    }

    #[test]
    fn a_program_is_as_long_as_its_exceptions_and_ends_with_the_default() {
        let program = Policy::of(&[rule(true, "c 1:3 rwm"), rule(true, "b *:* m")]).program();
        // Six to read the context; 3 tests and an end; 1 test, 1 masked test and an end; the default.
        assert_eq!(program.len(), 6 + 5 + 6 + 2);
        assert_eq!(program[program.len() - 2], Instruction::set(RESULT, 0));
    }

    #[test]
    fn access_letters_are_those_of_the_kernel() {
        assert_eq!(Access::parse("rwm"), Some(Access::ALL));
        assert_eq!(Access::parse("mr").unwrap().to_string(), "rm");
        assert_eq!(Access::parse(""), None);
        assert_eq!(Access::parse("rx"), None);
    }
}
