//! Any expression is read as it was written; nothing that is read panics.

use proptest::collection::vec;
use proptest::prelude::*;

use super::expression::{CmpOp, Expression, MetaKey, NatKind, PayloadBase, Verdict, decode, encode};
use super::*;
use crate::attributes::find;

fn bytes(most: usize) -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 1..=most)
}

fn name() -> impl Strategy<Value = String> {
    "[a-zA-Z][a-zA-Z0-9_.-]{0,40}"
}

fn verdict() -> impl Strategy<Value = Verdict> {
    prop_oneof![
        Just(Verdict::Accept),
        Just(Verdict::Drop),
        Just(Verdict::Return),
        Just(Verdict::Continue),
        name().prop_map(Verdict::Jump),
        name().prop_map(Verdict::Goto),
        (2..5_u32).prop_map(Verdict::Other),
    ]
}

fn meta_key() -> impl Strategy<Value = MetaKey> {
    (0..40_u32).prop_map(MetaKey::from_number)
}

fn range() -> impl Strategy<Value = Option<(u32, u32)>> {
    proptest::option::of((1..5_u32, 1..5_u32))
}

fn cmp_op() -> impl Strategy<Value = CmpOp> {
    prop::sample::select(CmpOp::ALL.to_vec())
}

fn packet() -> impl Strategy<Value = Expression> {
    let base = [PayloadBase::Link, PayloadBase::Network, PayloadBase::Transport, PayloadBase::Other(3)];
    let base = prop::sample::select(base.to_vec());
    prop_oneof![
        (any::<u32>(), base, any::<u32>(), any::<u32>()).prop_map(|(register, base, offset, length)| {
            Expression::Payload { register, base, offset, length }
        }),
        (any::<u32>(), meta_key()).prop_map(|(register, key)| Expression::Meta { register, key }),
        (any::<u32>(), meta_key()).prop_map(|(register, key)| Expression::SetMeta { register, key }),
        (any::<u32>(), any::<u32>(), any::<u32>()).prop_map(|(register, result, flags)| Expression::Fib {
            register,
            result,
            flags
        }),
        (any::<u32>(), any::<u32>(), any::<Option<u8>>())
            .prop_map(|(register, key, direction)| Expression::Ct { register, key, direction }),
        (any::<u64>(), any::<u64>()).prop_map(|(packets, bytes)| Expression::Counter { packets, bytes }),
    ]
}

fn expression() -> impl Strategy<Value = Expression> {
    let kind = prop::sample::select(vec![NatKind::Source, NatKind::Destination]);
    let xt = || (name(), any::<u32>(), vec(any::<u8>(), 0..300));
    prop_oneof![
        packet(),
        verdict().prop_map(Expression::Verdict),
        (any::<u32>(), cmp_op(), bytes(16)).prop_map(|(register, op, value)| Expression::Cmp {
            register,
            op,
            value
        }),
        (any::<u32>(), any::<u32>(), bytes(16), bytes(16)).prop_map(|(source, register, mask, xor)| {
            Expression::Bitwise { source, register, mask, xor }
        }),
        (any::<u32>(), bytes(16)).prop_map(|(register, value)| Expression::Immediate { register, value }),
        (any::<u32>(), range()).prop_map(|(flags, ports)| Expression::Masquerade { flags, ports }),
        (kind, any::<u32>(), range(), range(), any::<u16>()).prop_map(
            |(kind, family, addresses, ports, flags)| {
                // The lowest two flags say what is given, and are not kept.
                Expression::Nat { kind, family, addresses, ports, flags: u32::from(flags) << 2 }
            }
        ),
        xt().prop_map(|(name, revision, info)| Expression::XtMatch { name, revision, info }),
        xt().prop_map(|(name, revision, info)| Expression::XtTarget { name, revision, info }),
        name().prop_map(|name| Expression::Unknown { name: format!("_{name}") }),
    ]
}

proptest! {
    #[test]
    fn what_is_written_is_read(expressions in vec(expression(), 0..8)) {
        let mut written = Vec::new();
        encode(&expressions, &mut written);
        prop_assert_eq!(decode(&written), expressions);
    }

    #[test]
    fn a_rule_in_a_batch_is_the_rule_that_is_read(
        expressions in vec(expression(), 0..8),
        comment in proptest::option::of("[^\0]{0,60}"),
        tag in vec(any::<u8>(), 0..8),
        chain in name(),
    ) {
        let mut batch = Batch::new();
        batch.append_tagged_rule(Family::Inet, "t", &chain, &expressions, comment.as_deref(), &tag);
        let attributes = batch.messages.get(0).unwrap().attributes;
        let numbered = [attributes, &[12, 0, 3, 0], &7_u64.to_be_bytes()].concat();
        let rule = decode_rule(&numbered).unwrap();
        prop_assert_eq!(&rule.expressions, &expressions);
        let in_match = || expressions.iter().find_map(xt::comment);
        prop_assert_eq!((rule.chain, rule.handle, rule.comment), (chain, 7, comment.or_else(in_match)));
        prop_assert_eq!(rule.tag.unwrap_or_default(), tag);
    }

    #[test]
    fn noise_is_read_without_a_panic(noise in vec(any::<u8>(), 0..400)) {
        if let Ok(rule) = decode_rule(&noise) {
            drop((rule.dnat_target(), rule.target_chain().map(str::to_owned)));
        }
        drop((decode_chain(&noise), decode(&noise), find(&noise, 1)));
    }

    /// Noise hardly ever gets past the first length: this has one wrong byte.
    #[test]
    fn a_rule_with_a_wrong_byte_is_read_without_a_panic(
        expressions in vec(expression(), 1..6),
        at in any::<prop::sample::Index>(),
        wrong in any::<u8>(),
    ) {
        let mut batch = Batch::new();
        batch.append_rule(Family::Inet, "t", "c", &expressions, Some("comment"));
        let attributes = batch.messages.get(0).unwrap().attributes;
        let mut noise = [&[12, 0, 3, 0], &7_u64.to_be_bytes()[..], attributes].concat();
        let at = at.index(noise.len());
        noise[at] = wrong;
        if let Ok(rule) = decode_rule(&noise) {
            drop((rule.dnat_target(), rule.target_chain().map(str::to_owned)));
        }
    }
}
