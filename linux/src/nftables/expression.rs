//! The expressions of a rule: the kernel's small instructions, decoded into
//! values that can be compared, and back.
//!
//! Source: `include/uapi/linux/netfilter/nf_tables.h`.

use std::ffi::CStr;

use netlink_bindings::nftables::{
    BitwiseOps, CmpOps, CompatMatchAttrs, CompatTargetAttrs, ExprBitwiseAttrs, ExprCmpAttrs,
    ExprCounterAttrs, ExprCtAttrs, ExprFibAttrs, ExprImmediateAttrs, ExprMasqAttrs, ExprMetaAttrs,
    ExprNatAttrs, ExprPayloadAttrs, IterableDataAttrs, PushCompatMatchAttrs, PushCompatTargetAttrs,
    PushExprBitwiseAttrs, PushExprCmpAttrs, PushExprCounterAttrs, PushExprCtAttrs, PushExprFibAttrs,
    PushExprImmediateAttrs, PushExprMasqAttrs, PushExprMetaAttrs, PushExprNatAttrs, PushExprPayloadAttrs,
    VerdictCode,
};
use netlink_bindings::utils::{
    ErrorContext, chop_header, finalize_nested_header, find_attr, push_header, push_nested_header,
};

/// Of an element in a list of expressions, and inside it (`NFTA_LIST_ELEM`,
/// `NFTA_EXPR_NAME`, `NFTA_EXPR_DATA`).
const ELEMENT: u16 = 1;
const NAME: u16 = 1;
const DATA: u16 = 2;

/// Where verdicts go.
const VERDICT_REGISTER: u32 = 0;

/// The two flags of `nat` that only repeat which registers are given; the
/// kernel sets them itself.
const NAT_DERIVED: u32 = 0x1 | 0x2;

/// One instruction. Registers are numbered as the kernel shows them: 1 to 4
/// hold 16 bytes each. Values are as they stand in a packet (ports and
/// addresses in network order) or in the host's order where the kernel has no
/// packet (marks, address types).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expression {
    /// Loads `length` bytes of the packet.
    Payload {
        register: u32,
        base: PayloadBase,
        offset: u32,
        length: u32,
    },
    /// Loads what the kernel knows about the packet.
    Meta {
        register: u32,
        key: MetaKey,
    },
    /// Stores it: the mark.
    SetMeta {
        register: u32,
        key: MetaKey,
    },
    /// The rule goes on only if the register compares so with the value.
    Cmp {
        register: u32,
        op: CmpOp,
        value: Vec<u8>,
    },
    /// `register = (source & mask) ^ xor`.
    Bitwise {
        source: u32,
        register: u32,
        mask: Vec<u8>,
        xor: Vec<u8>,
    },
    /// Asks the routing table.
    Fib {
        register: u32,
        result: u32,
        flags: u32,
    },
    /// Loads what connection tracking knows.
    Ct {
        register: u32,
        key: u32,
        direction: Option<u8>,
    },
    Immediate {
        register: u32,
        value: Vec<u8>,
    },
    Verdict(Verdict),
    /// `ports`: the registers of the first and the last port.
    Masquerade {
        flags: u32,
        ports: Option<(u32, u32)>,
    },
    /// Registers of first and last address and port; `flags` without the two
    /// that say which of them are given. `family` is an `NFPROTO_*`.
    Nat {
        kind: NatKind,
        family: u32,
        addresses: Option<(u32, u32)>,
        ports: Option<(u32, u32)>,
        flags: u32,
    },
    Counter {
        packets: u64,
        bytes: u64,
    },
    /// An xtables match, as iptables-nft writes it; `info` is the C structure
    /// of that name and revision.
    XtMatch {
        name: String,
        revision: u32,
        info: Vec<u8>,
    },
    XtTarget {
        name: String,
        revision: u32,
        info: Vec<u8>,
    },
    /// Any other. It cannot be written.
    Unknown {
        name: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PayloadBase {
    Link,
    Network,
    Transport,
    /// Of a tunnel, or newer than this list.
    Other(u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetaKey {
    /// The ethertype, network order.
    Protocol,
    Mark,
    /// Interface indexes.
    Iif,
    Oif,
    /// 16 bytes, padded with zeroes.
    IifName,
    OifName,
    /// One byte, `NFPROTO_IPV4` or `NFPROTO_IPV6`.
    NfProto,
    /// One byte, `IPPROTO_*`.
    L4Proto,
    Other(u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CmpOp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NatKind {
    Source,
    Destination,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Accept,
    Drop,
    Return,
    Continue,
    Jump(String),
    Goto(String),
    /// `NF_QUEUE` and the like: the kernel's number.
    Other(u32),
}

impl Expression {
    /// The chain that this expression goes to: a jump or goto.
    pub fn target_chain(&self) -> Option<&str> {
        match self {
            Self::Verdict(Verdict::Jump(chain) | Verdict::Goto(chain)) => Some(chain),
            _ => None,
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Payload { .. } => "payload",
            Self::Meta { .. } | Self::SetMeta { .. } => "meta",
            Self::Cmp { .. } => "cmp",
            Self::Bitwise { .. } => "bitwise",
            Self::Fib { .. } => "fib",
            Self::Ct { .. } => "ct",
            Self::Immediate { .. } | Self::Verdict(_) => "immediate",
            Self::Masquerade { .. } => "masq",
            Self::Nat { .. } => "nat",
            Self::Counter { .. } => "counter",
            Self::XtMatch { .. } => "match",
            Self::XtTarget { .. } => "target",
            Self::Unknown { name } => name,
        }
    }
}

/// Writes the elements of `NFTA_RULE_EXPRESSIONS`.
pub(super) fn encode(expressions: &[Expression], bytes: &mut Vec<u8>) {
    for expression in expressions {
        let element = push_nested_header(bytes, ELEMENT);
        let name = expression.name();
        push_header(bytes, NAME, super::attribute_length(name.len() + 1));
        bytes.extend(name.as_bytes());
        bytes.push(0);
        let data = push_nested_header(bytes, DATA);
        encode_data(expression, bytes);
        finalize_nested_header(bytes, data);
        finalize_nested_header(bytes, element);
    }
}

fn encode_data(expression: &Expression, bytes: &mut Vec<u8>) {
    match expression {
        Expression::Payload { register, base, offset, length } => {
            PushExprPayloadAttrs::new(bytes)
                .push_dreg(*register)
                .push_base(base.number())
                .push_offset(*offset)
                .push_len(*length);
        }
        Expression::Meta { register, key } => {
            PushExprMetaAttrs::new(bytes).push_dreg(*register).push_key(key.number());
        }
        Expression::SetMeta { register, key } => {
            PushExprMetaAttrs::new(bytes).push_sreg(*register).push_key(key.number());
        }
        Expression::Cmp { register, op, value } => {
            PushExprCmpAttrs::new(bytes)
                .push_sreg(*register)
                .push_op(op.number())
                .nested_data()
                .push_value(value);
        }
        Expression::Bitwise { source, register, mask, xor } => {
            PushExprBitwiseAttrs::new(bytes)
                .push_sreg(*source)
                .push_dreg(*register)
                .push_len(u32::from(super::attribute_length(mask.len())))
                .push_op(BitwiseOps::MaskXor as u32)
                .nested_mask()
                .push_value(mask)
                .end_nested()
                .nested_xor()
                .push_value(xor);
        }
        Expression::Fib { register, result, flags } => {
            PushExprFibAttrs::new(bytes).push_dreg(*register).push_result(*result).push_flags(*flags);
        }
        Expression::Ct { register, key, direction } => {
            let ct = PushExprCtAttrs::new(bytes).push_dreg(*register).push_key(*key);
            if let Some(direction) = direction {
                ct.push_direction(*direction);
            }
        }
        Expression::Immediate { register, value } => {
            PushExprImmediateAttrs::new(bytes).push_dreg(*register).nested_data().push_value(value);
        }
        Expression::Verdict(verdict) => {
            let code = PushExprImmediateAttrs::new(bytes)
                .push_dreg(VERDICT_REGISTER)
                .nested_data()
                .nested_verdict()
                .push_code(verdict.number());
            if let Verdict::Jump(chain) | Verdict::Goto(chain) = verdict {
                code.push_chain_bytes(super::kept(chain).as_bytes());
            }
        }
        Expression::Masquerade { flags, ports } => {
            let mut masquerade = PushExprMasqAttrs::new(bytes);
            if *flags != 0 {
                masquerade = masquerade.push_flags(*flags);
            }
            if let Some((first, last)) = ports {
                masquerade.push_reg_proto_min(*first).push_reg_proto_max(*last);
            }
        }
        Expression::Nat { kind, family, addresses, ports, flags } => {
            let mut nat = PushExprNatAttrs::new(bytes).push_type(*kind as u32).push_family(*family);
            if let Some((first, last)) = addresses {
                nat = nat.push_reg_addr_min(*first);
                if first != last {
                    nat = nat.push_reg_addr_max(*last);
                }
            }
            if let Some((first, last)) = ports {
                nat = nat.push_reg_proto_min(*first);
                if first != last {
                    nat = nat.push_reg_proto_max(*last);
                }
            }
            if *flags != 0 {
                nat.push_flags(*flags);
            }
        }
        Expression::Counter { packets, bytes: counted } => {
            PushExprCounterAttrs::new(bytes).push_bytes(*counted).push_packets(*packets);
        }
        Expression::XtMatch { name, revision, info } => {
            PushCompatMatchAttrs::new(bytes)
                .push_name_bytes(super::kept(name).as_bytes())
                .push_rev(*revision)
                .push_info(info);
        }
        Expression::XtTarget { name, revision, info } => {
            PushCompatTargetAttrs::new(bytes)
                .push_name_bytes(super::kept(name).as_bytes())
                .push_rev(*revision)
                .push_info(info);
        }
        Expression::Unknown { .. } => {}
    }
}

/// Reads the elements of `NFTA_RULE_EXPRESSIONS`. What is not understood, or
/// is torn, becomes [`Expression::Unknown`].
pub(super) fn decode(list: &[u8]) -> Vec<Expression> {
    let (mut expressions, mut at) = (Vec::new(), 0);
    while let Some((header, element)) = chop_header(list, &mut at) {
        if header.r#type != ELEMENT {
            continue;
        }
        let name = find_attr(element, NAME).map(text).unwrap_or_default();
        let data = find_attr(element, DATA).unwrap_or_default();
        expressions.push(decode_data(&name, data).unwrap_or(Expression::Unknown { name }));
    }
    expressions
}

/// `None`: not understood. (`netlink_bindings::nftables::ExprOps` would choose
/// by name too, but it knows no `masq`.)
fn decode_data(name: &str, data: &[u8]) -> Option<Expression> {
    match name {
        "payload" => {
            let payload = ExprPayloadAttrs::new(data);
            Some(Expression::Payload {
                register: payload.get_dreg().ok()?,
                base: PayloadBase::from_number(payload.get_base().ok()?),
                offset: payload.get_offset().ok()?,
                length: payload.get_len().ok()?,
            })
        }
        "meta" => {
            let meta = ExprMetaAttrs::new(data);
            let key = MetaKey::from_number(meta.get_key().ok()?);
            Some(match meta.get_dreg() {
                Ok(register) => Expression::Meta { register, key },
                Err(_) => Expression::SetMeta { register: meta.get_sreg().ok()?, key },
            })
        }
        "cmp" => {
            let cmp = ExprCmpAttrs::new(data);
            Some(Expression::Cmp {
                register: cmp.get_sreg().ok()?,
                op: CmpOp::from_number(cmp.get_op().ok()?)?,
                value: value(cmp.get_data())?,
            })
        }
        "bitwise" => {
            let bitwise = ExprBitwiseAttrs::new(data);
            if bitwise.get_op().is_ok_and(|op| op != BitwiseOps::MaskXor as u32) {
                return None;
            }
            Some(Expression::Bitwise {
                source: bitwise.get_sreg().ok()?,
                register: bitwise.get_dreg().ok()?,
                mask: value(bitwise.get_mask())?,
                xor: value(bitwise.get_xor())?,
            })
        }
        "fib" => {
            let fib = ExprFibAttrs::new(data);
            Some(Expression::Fib {
                register: fib.get_dreg().ok()?,
                result: fib.get_result().ok()?,
                flags: fib.get_flags().ok()?,
            })
        }
        "ct" => {
            let ct = ExprCtAttrs::new(data);
            Some(Expression::Ct {
                register: ct.get_dreg().ok()?,
                key: ct.get_key().ok()?,
                direction: ct.get_direction().ok(),
            })
        }
        "immediate" => {
            let immediate = ExprImmediateAttrs::new(data);
            let content = immediate.get_data().ok()?;
            if let Ok(verdict) = content.get_verdict() {
                return Some(Expression::Verdict(Verdict::decode(
                    verdict.get_code().ok()?,
                    verdict.get_chain().ok(),
                )));
            }
            Some(Expression::Immediate {
                register: immediate.get_dreg().ok()?,
                value: content.get_value().ok()?.to_vec(),
            })
        }
        "masq" => {
            let masquerade = ExprMasqAttrs::new(data);
            Some(Expression::Masquerade {
                flags: masquerade.get_flags().unwrap_or(0),
                ports: range(masquerade.get_reg_proto_min(), masquerade.get_reg_proto_max()),
            })
        }
        "nat" => {
            let nat = ExprNatAttrs::new(data);
            Some(Expression::Nat {
                kind: match nat.get_type().ok()? {
                    0 => NatKind::Source,
                    1 => NatKind::Destination,
                    _ => return None,
                },
                family: nat.get_family().ok()?,
                addresses: range(nat.get_reg_addr_min(), nat.get_reg_addr_max()),
                ports: range(nat.get_reg_proto_min(), nat.get_reg_proto_max()),
                flags: nat.get_flags().unwrap_or(0) & !NAT_DERIVED,
            })
        }
        "counter" => {
            let counter = ExprCounterAttrs::new(data);
            Some(Expression::Counter {
                packets: counter.get_packets().unwrap_or(0),
                bytes: counter.get_bytes().unwrap_or(0),
            })
        }
        "match" => {
            let compat = CompatMatchAttrs::new(data);
            Some(Expression::XtMatch {
                name: string(compat.get_name().ok()?),
                revision: compat.get_rev().ok()?,
                info: compat.get_info().ok()?.to_vec(),
            })
        }
        "target" => {
            let compat = CompatTargetAttrs::new(data);
            Some(Expression::XtTarget {
                name: string(compat.get_name().ok()?),
                revision: compat.get_rev().ok()?,
                info: compat.get_info().ok()?.to_vec(),
            })
        }
        _ => None,
    }
}

fn value(data: Result<IterableDataAttrs<'_>, ErrorContext>) -> Option<Vec<u8>> {
    Some(data.ok()?.get_value().ok()?.to_vec())
}

fn range<E>(first: Result<u32, E>, last: Result<u32, E>) -> Option<(u32, u32)> {
    let first = first.ok()?;
    Some((first, last.unwrap_or(first)))
}

fn string(text: &CStr) -> String {
    text.to_string_lossy().into_owned()
}

/// A string attribute, with or without its final zero.
pub(super) fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

impl Verdict {
    fn number(&self) -> u32 {
        match self {
            Self::Accept => VerdictCode::Accept as u32,
            Self::Drop => VerdictCode::Drop as u32,
            Self::Return => VerdictCode::Return as u32,
            Self::Continue => VerdictCode::Continue as u32,
            Self::Jump(_) => VerdictCode::Jump as u32,
            Self::Goto(_) => VerdictCode::Goto as u32,
            Self::Other(number) => *number,
        }
    }

    fn decode(number: u32, chain: Option<&CStr>) -> Self {
        match (VerdictCode::from_value(u64::from(number)), chain) {
            (Some(VerdictCode::Accept), _) => Self::Accept,
            (Some(VerdictCode::Drop), _) => Self::Drop,
            (Some(VerdictCode::Return), _) => Self::Return,
            (Some(VerdictCode::Continue), _) => Self::Continue,
            (Some(VerdictCode::Jump), Some(chain)) => Self::Jump(string(chain)),
            (Some(VerdictCode::Goto), Some(chain)) => Self::Goto(string(chain)),
            _ => Self::Other(number),
        }
    }
}

impl PayloadBase {
    fn number(self) -> u32 {
        match self {
            Self::Link => 0,
            Self::Network => 1,
            Self::Transport => 2,
            Self::Other(number) => number,
        }
    }

    fn from_number(number: u32) -> Self {
        match number {
            0 => Self::Link,
            1 => Self::Network,
            2 => Self::Transport,
            _ => Self::Other(number),
        }
    }
}

/// Both directions of one table.
const META_KEYS: [(MetaKey, u32); 8] = [
    (MetaKey::Protocol, 1),
    (MetaKey::Mark, 3),
    (MetaKey::Iif, 4),
    (MetaKey::Oif, 5),
    (MetaKey::IifName, 6),
    (MetaKey::OifName, 7),
    (MetaKey::NfProto, 15),
    (MetaKey::L4Proto, 16),
];

impl MetaKey {
    fn number(self) -> u32 {
        match self {
            Self::Other(number) => number,
            key => META_KEYS.iter().find(|(known, _)| *known == key).map_or(0, |(_, number)| *number),
        }
    }

    fn from_number(number: u32) -> Self {
        META_KEYS.iter().find(|(_, known)| *known == number).map_or(Self::Other(number), |(key, _)| *key)
    }
}

impl CmpOp {
    fn number(self) -> u32 {
        (match self {
            Self::Eq => CmpOps::Eq,
            Self::Ne => CmpOps::Neq,
            Self::Lt => CmpOps::Lt,
            Self::Le => CmpOps::Lte,
            Self::Gt => CmpOps::Gt,
            Self::Ge => CmpOps::Gte,
        }) as u32
    }

    fn from_number(number: u32) -> Option<Self> {
        Some(match CmpOps::from_value(u64::from(number))? {
            CmpOps::Eq => Self::Eq,
            CmpOps::Neq => Self::Ne,
            CmpOps::Lt => Self::Lt,
            CmpOps::Lte => Self::Le,
            CmpOps::Gt => Self::Gt,
            CmpOps::Gte => Self::Ge,
        })
    }
}
