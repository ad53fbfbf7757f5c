//! Inside xtables matches and targets, as iptables-nft writes them: C
//! structures in the machine's own byte order (`include/uapi/linux/netfilter/xt_*.h`).

use super::attributes::text;
use super::expression::Expression;

/// The text of a `comment` match: `struct xt_comment_info { char comment[256]; }`.
pub(super) fn comment(expression: &Expression) -> Option<String> {
    match expression {
        Expression::XtMatch { name, info, .. } if name == "comment" => Some(text(info)),
        _ => None,
    }
}
