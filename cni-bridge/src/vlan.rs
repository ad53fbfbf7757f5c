//! The VLAN keys (`vlan`, `vlanTrunk`): validated like the reference does, then refused, since
//! bridge VLANs are not supported yet. No I/O.

use cni_plugin::{CniError, code};

use crate::keys::{Keys, TrunkEntry};

/// 0 means "none", 4095 is reserved (IEEE 802.1Q).
const VLAN_MAX: i64 = 4094;

/// Refuses invalid values with the reference's messages.
pub(crate) fn check(keys: &Keys) -> Result<(), CniError> {
    if let Some(vlan) = keys.vlan.filter(|vlan| !(0..=VLAN_MAX).contains(vlan)) {
        return Err(CniError::internal(format_args!(
            "invalid VLAN ID {vlan} (must be between 0 and {VLAN_MAX})"
        )));
    }
    keys.vlan_trunk.iter().flat_map(|trunk| &trunk.entries).try_for_each(check_entry)
}

fn check_entry(entry: &TrunkEntry) -> Result<(), CniError> {
    let validated = |key: &str, value: i64| {
        let incorrect = || CniError::internal(format_args!("incorrect trunk {key} parameter"));
        (1..=VLAN_MAX).contains(&value).then_some(value).ok_or_else(incorrect)
    };
    let missing = |key: &str| {
        let rule = "minID and maxID should be configured simultaneously";
        CniError::internal(format_args!("{rule}, {key} is missing"))
    };
    match (entry.min_id, entry.max_id) {
        (None, None) => {}
        (Some(_), None) => return Err(missing("maxID")),
        (None, Some(_)) => return Err(missing("minID")),
        (Some(first), Some(last)) => {
            if validated("minID", first)? > validated("maxID", last)? {
                return Err(CniError::internal("minID is greater than maxID in trunk parameter"));
            }
        }
    }
    entry.id.map_or(Ok(()), |id| validated("id", id).map(drop))
}

/// An error for the first VLAN key that requests something.
pub(crate) fn refuse(keys: &Keys) -> Result<(), CniError> {
    let vlan = keys.vlan.filter(|vlan| *vlan != 0).map(|vlan| ("vlan", vlan.to_string()));
    // The reference makes a VLAN-aware bridge also for an empty list.
    let trunk = keys.vlan_trunk.as_ref().map(|trunk| ("vlanTrunk", trunk.written.to_string()));
    let Some((key, value)) = vlan.or(trunk) else { return Ok(()) };
    let msg = format!("{key}: {value} is not supported: this bridge plugin has no VLANs yet");
    Err(CniError::new(code::UNSUPPORTED_FIELD, msg))
}
