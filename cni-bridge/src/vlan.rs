//! The VLAN keys (`vlan`, `vlanTrunk`): judged like the reference does, then
//! refused, since bridge VLANs are not supported yet. No I/O.

use cni_plugin::conf::Fields;
use cni_plugin::{CniError, code};

/// 0 stands for "none", 4095 is reserved (IEEE 802.1Q).
const VLAN_MAX: i64 = 4094;

/// Values that no version could accept, in the reference's words.
pub(crate) fn check(fields: &Fields<'_>) -> Result<(), CniError> {
    if let Some(vlan) = fields.i64("vlan")?.filter(|vlan| !(0..=VLAN_MAX).contains(vlan)) {
        return Err(CniError::internal(format_args!(
            "invalid VLAN ID {vlan} (must be between 0 and {VLAN_MAX})"
        )));
    }
    fields.bool("preserveDefaultVlan")?;
    for trunk in fields.objects("vlanTrunk")? {
        check_trunk(&trunk)?;
    }
    Ok(())
}

fn check_trunk(trunk: &Fields<'_>) -> Result<(), CniError> {
    let judged = |key: &str, value: i64| {
        let incorrect = || CniError::internal(format_args!("incorrect trunk {key} parameter"));
        (1..=VLAN_MAX).contains(&value).then_some(value).ok_or_else(incorrect)
    };
    let missing = |key: &str| {
        let rule = "minID and maxID should be configured simultaneously";
        CniError::internal(format_args!("{rule}, {key} is missing"))
    };
    match (trunk.i64("minID")?, trunk.i64("maxID")?) {
        (None, None) => {}
        (Some(_), None) => return Err(missing("maxID")),
        (None, Some(_)) => return Err(missing("minID")),
        (Some(first), Some(last)) => {
            if judged("minID", first)? > judged("maxID", last)? {
                return Err(CniError::internal("minID is greater than maxID in trunk parameter"));
            }
        }
    }
    if let Some(id) = trunk.i64("id")? {
        judged("id", id)?;
    }
    Ok(())
}

/// The refusal of the first VLAN key that asks for something; `None` when none
/// does.
pub(crate) fn unsupported(fields: &Fields<'_>) -> Option<CniError> {
    let vlan = fields.get("vlan").filter(|vlan| vlan.as_i64() != Some(0)).map(|value| ("vlan", value));
    // The reference makes a VLAN-aware bridge for an empty list, too.
    let trunk = fields.get("vlanTrunk").map(|value| ("vlanTrunk", value));
    let (key, value) = vlan.or(trunk)?;
    let msg =
        format_args!("{key}: {value} is not supported: this bridge plugin has no VLANs yet").to_string();
    Some(CniError::new(code::UNSUPPORTED_FIELD, msg))
}
