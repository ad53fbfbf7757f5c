//! The expressions of a rule: the kernel's small instructions, decoded into
//! values that can be compared, and back.
//!
//! Source: `include/uapi/linux/netfilter/nf_tables.h`.

use std::net::{IpAddr, SocketAddr};

use crate::attributes::{each, find, find_text, find_u32, find_u64, nest, put, put_text, put_u32, put_u64};

/// Of an element in a list of expressions, and inside it (`NFTA_LIST_ELEM`,
/// `NFTA_EXPR_NAME`, `NFTA_EXPR_DATA`).
const ELEMENT: u16 = 1;
const NAME: u16 = 1;
const DATA: u16 = 2;

/// Inside a value (`NFTA_DATA_VALUE`, `NFTA_DATA_VERDICT`), and inside a
/// verdict (`NFTA_VERDICT_CODE`, `NFTA_VERDICT_CHAIN`).
const VALUE: u16 = 1;
const VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const VERDICT_CHAIN: u16 = 2;

/// `NFT_BITWISE_MASK_XOR`, the only operation supported here.
const MASK_XOR: u32 = 0;

/// The register of verdicts.
const VERDICT_REGISTER: u32 = 0;

/// Built into nf_tables (`nft_basic_types`), and so into every kernel with it.
const BASIC: [&str; 5] = ["bitwise", "cmp", "immediate", "meta", "payload"];

/// Two flags of `nat` that only repeat which registers are set; the kernel sets them itself.
const NAT_DERIVED: u32 = 0x1 | 0x2;

/// One instruction. Registers have the kernel's numbers: 1 to 4 hold 16 bytes each. Values are as
/// in a packet (ports and addresses in network order), or in host byte order if they are not from a
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
    /// Loads metadata of the packet.
    Meta {
        register: u32,
        key: MetaKey,
    },
    /// Sets metadata: the mark.
    SetMeta {
        register: u32,
        key: MetaKey,
    },
    /// Continues with the rule only if the comparison is true.
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
    /// Queries the routing table.
    Fib {
        register: u32,
        result: u32,
        flags: u32,
    },
    /// Loads metadata of connection tracking.
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
    /// Registers of first and last address and port; `flags` without the two that say which are
    /// set. `family` is an `NFPROTO_*`.
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
    /// Any other one, which cannot be encoded.
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
    /// The kernel's number of another verdict, such as `NF_QUEUE`.
    Other(u32),
}

impl Expression {
    /// The target chain of a jump or goto.
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
        nest(bytes, ELEMENT, |bytes| {
            put_text(bytes, NAME, expression.name());
            nest(bytes, DATA, |bytes| encode_data(expression, bytes));
        });
    }
}

/// The numbers are the attributes of each expression, in the order of its
/// `enum nft_*_attributes`.
fn encode_data(expression: &Expression, bytes: &mut Vec<u8>) {
    match expression {
        Expression::Payload { register, base, offset, length } => {
            put_u32(bytes, 1, *register);
            put_u32(bytes, 2, base.number());
            put_u32(bytes, 3, *offset);
            put_u32(bytes, 4, *length);
        }
        Expression::Meta { register, key } => {
            put_u32(bytes, 1, *register);
            put_u32(bytes, 2, key.number());
        }
        Expression::SetMeta { register, key } => {
            put_u32(bytes, 2, key.number());
            put_u32(bytes, 3, *register);
        }
        Expression::Cmp { register, op, value } => {
            put_u32(bytes, 1, *register);
            put_u32(bytes, 2, op.number());
            put_value(bytes, 3, value);
        }
        Expression::Bitwise { source, register, mask, xor } => {
            put_u32(bytes, 1, *source);
            put_u32(bytes, 2, *register);
            put_u32(bytes, 3, u32::try_from(mask.len()).unwrap_or(u32::MAX));
            put_value(bytes, 4, mask);
            put_value(bytes, 5, xor);
            put_u32(bytes, 6, MASK_XOR);
        }
        Expression::Fib { register, result, flags } => {
            put_u32(bytes, 1, *register);
            put_u32(bytes, 2, *result);
            put_u32(bytes, 3, *flags);
        }
        Expression::Ct { register, key, direction } => {
            put_u32(bytes, 1, *register);
            put_u32(bytes, 2, *key);
            if let Some(direction) = direction {
                put(bytes, 3, &[*direction]);
            }
        }
        Expression::Immediate { register, value } => {
            put_u32(bytes, 1, *register);
            put_value(bytes, 2, value);
        }
        Expression::Verdict(verdict) => {
            put_u32(bytes, 1, VERDICT_REGISTER);
            nest(bytes, 2, |bytes| nest(bytes, VERDICT, |bytes| verdict.encode(bytes)));
        }
        Expression::Masquerade { flags, ports } => {
            if *flags != 0 {
                put_u32(bytes, 1, *flags);
            }
            put_range(bytes, 2, *ports);
        }
        Expression::Nat { kind, family, addresses, ports, flags } => {
            put_u32(bytes, 1, kind.number());
            put_u32(bytes, 2, *family);
            put_range(bytes, 3, *addresses);
            put_range(bytes, 5, *ports);
            if *flags != 0 {
                put_u32(bytes, 7, *flags);
            }
        }
        Expression::Counter { packets, bytes: counted } => {
            put_u64(bytes, 1, *counted);
            put_u64(bytes, 2, *packets);
        }
        Expression::XtMatch { name, revision, info } | Expression::XtTarget { name, revision, info } => {
            put_text(bytes, 1, name);
            put_u32(bytes, 2, *revision);
            put(bytes, 3, info);
        }
        Expression::Unknown { .. } => {}
    }
}

fn put_value(bytes: &mut Vec<u8>, kind: u16, value: &[u8]) {
    nest(bytes, kind, |bytes| put(bytes, VALUE, value));
}

/// First and last register; the last one only if it differs.
fn put_range(bytes: &mut Vec<u8>, kind: u16, range: Option<(u32, u32)>) {
    let Some((first, last)) = range else { return };
    put_u32(bytes, kind, first);
    if first != last {
        put_u32(bytes, kind + 1, last);
    }
}

/// Decodes the elements of `NFTA_RULE_EXPRESSIONS`. Unknown or torn ones become
/// [`Expression::Unknown`].
pub(super) fn decode(list: &[u8]) -> Vec<Expression> {
    each(list)
        .filter(|(kind, _)| *kind == ELEMENT)
        .map(|(_, element)| {
            let name = find_text(element, NAME).unwrap_or_default();
            let data = find(element, DATA).unwrap_or_default();
            decode_data(&name, data).unwrap_or(Expression::Unknown { name })
        })
        .collect()
}

/// The names of the expressions in a list that a kernel with nf_tables may lack.
pub(super) fn optional(list: &[u8]) -> Vec<String> {
    let names = each(list).filter_map(|(_, element)| find_text(element, NAME));
    names.filter(|name| !BASIC.contains(&name.as_str())).collect()
}

/// The destination of nft's `dnat to address:port`, whose registers hold constants.
pub(super) fn dnat_target(expressions: &[Expression]) -> Option<SocketAddr> {
    let constant = |(first, last): (u32, u32)| {
        expressions.iter().find_map(|expression| match expression {
            Expression::Immediate { register, value } if *register == first && first == last => Some(value),
            _ => None,
        })
    };
    expressions.iter().find_map(|expression| match expression {
        Expression::Nat { kind: NatKind::Destination, addresses, ports, .. } => {
            let address = constant((*addresses)?)?;
            let port = u16::from_be_bytes(constant((*ports)?)?.as_slice().try_into().ok()?);
            let ip: IpAddr = match <[u8; 4]>::try_from(address.as_slice()) {
                Ok(v4) => v4.into(),
                Err(_) => <[u8; 16]>::try_from(address.as_slice()).ok()?.into(),
            };
            Some(SocketAddr::new(ip, port))
        }
        _ => None,
    })
}

/// `None`: not understood.
fn decode_data(name: &str, data: &[u8]) -> Option<Expression> {
    let number = |kind| find_u32(data, kind);
    Some(match name {
        // The attribute 5 is the register that a payload is written from.
        "payload" if find(data, 5).is_none() => Expression::Payload {
            register: number(1)?,
            base: PayloadBase::from_number(number(2)?),
            offset: number(3)?,
            length: number(4)?,
        },
        "meta" => {
            let key = MetaKey::from_number(number(2)?);
            match number(1) {
                Some(register) => Expression::Meta { register, key },
                None => Expression::SetMeta { register: number(3)?, key },
            }
        }
        "cmp" => Expression::Cmp {
            register: number(1)?,
            op: CmpOp::from_number(number(2)?)?,
            value: find_value(data, 3)?,
        },
        "bitwise" if number(6).is_none_or(|op| op == MASK_XOR) => Expression::Bitwise {
            source: number(1)?,
            register: number(2)?,
            mask: find_value(data, 4)?,
            xor: find_value(data, 5)?,
        },
        "fib" => Expression::Fib { register: number(1)?, result: number(2)?, flags: number(3)? },
        "ct" => Expression::Ct {
            register: number(1)?,
            key: number(2)?,
            direction: find(data, 3).and_then(|direction| direction.first().copied()),
        },
        "immediate" => match find(find(data, 2)?, VERDICT) {
            Some(verdict) => Expression::Verdict(Verdict::decode(verdict)?),
            None => Expression::Immediate { register: number(1)?, value: find_value(data, 2)? },
        },
        "masq" => Expression::Masquerade { flags: number(1).unwrap_or(0), ports: find_range(data, 2) },
        "nat" => Expression::Nat {
            kind: NatKind::from_number(number(1)?)?,
            family: number(2)?,
            addresses: find_range(data, 3),
            ports: find_range(data, 5),
            flags: number(7).unwrap_or(0) & !NAT_DERIVED,
        },
        "counter" => Expression::Counter { packets: find_u64(data, 2)?, bytes: find_u64(data, 1)? },
        "match" => Expression::XtMatch {
            name: find_text(data, 1)?,
            revision: number(2)?,
            info: find(data, 3)?.to_vec(),
        },
        "target" => Expression::XtTarget {
            name: find_text(data, 1)?,
            revision: number(2)?,
            info: find(data, 3)?.to_vec(),
        },
        _ => return None,
    })
}

fn find_value(data: &[u8], kind: u16) -> Option<Vec<u8>> {
    Some(find(find(data, kind)?, VALUE)?.to_vec())
}

fn find_range(data: &[u8], kind: u16) -> Option<(u32, u32)> {
    let first = find_u32(data, kind)?;
    Some((first, find_u32(data, kind + 1).unwrap_or(first)))
}

/// `NFT_*` verdicts below 0, and those of netfilter (`NF_*`).
const VERDICT_JUMP: u32 = (-3_i32).cast_unsigned();
const VERDICT_GOTO: u32 = (-4_i32).cast_unsigned();
static PLAIN_VERDICTS: [(Verdict, u32); 4] = [
    (Verdict::Drop, 0),
    (Verdict::Accept, 1),
    (Verdict::Continue, (-1_i32).cast_unsigned()),
    (Verdict::Return, (-5_i32).cast_unsigned()),
];

impl Verdict {
    fn encode(&self, bytes: &mut Vec<u8>) {
        let (number, chain) = match self {
            Self::Jump(chain) => (VERDICT_JUMP, Some(chain)),
            Self::Goto(chain) => (VERDICT_GOTO, Some(chain)),
            Self::Other(number) => (*number, None),
            plain => {
                let known = PLAIN_VERDICTS.iter().find(|(verdict, _)| verdict == plain);
                (known.map_or(0, |(_, number)| *number), None)
            }
        };
        put_u32(bytes, VERDICT_CODE, number);
        if let Some(chain) = chain {
            put_text(bytes, VERDICT_CHAIN, chain);
        }
    }

    fn decode(attributes: &[u8]) -> Option<Self> {
        let number = find_u32(attributes, VERDICT_CODE)?;
        Some(match number {
            VERDICT_JUMP => Self::Jump(find_text(attributes, VERDICT_CHAIN)?),
            VERDICT_GOTO => Self::Goto(find_text(attributes, VERDICT_CHAIN)?),
            _ => PLAIN_VERDICTS
                .iter()
                .find(|(_, known)| *known == number)
                .map_or(Self::Other(number), |(verdict, _)| verdict.clone()),
        })
    }
}

impl NatKind {
    fn number(self) -> u32 {
        match self {
            Self::Source => 0,
            Self::Destination => 1,
        }
    }

    fn from_number(number: u32) -> Option<Self> {
        [Self::Source, Self::Destination].into_iter().find(|kind| kind.number() == number)
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

/// Used for encoding and decoding.
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

    pub(super) fn from_number(number: u32) -> Self {
        META_KEYS.iter().find(|(_, known)| *known == number).map_or(Self::Other(number), |(key, _)| *key)
    }
}

impl CmpOp {
    pub(super) const ALL: [Self; 6] = [Self::Eq, Self::Ne, Self::Lt, Self::Le, Self::Gt, Self::Ge];

    fn number(self) -> u32 {
        match self {
            Self::Eq => 0,
            Self::Ne => 1,
            Self::Lt => 2,
            Self::Le => 3,
            Self::Gt => 4,
            Self::Ge => 5,
        }
    }

    fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|op| op.number() == number)
    }
}
