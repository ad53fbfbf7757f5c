//! ValidateVolumeCapabilities: confirms only what it has checked.

use std::collections::HashMap;

use proto::csi::validate_volume_capabilities_response::Confirmed;
use proto::csi::{ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse, VolumeCapability};

use super::{find_volume, required_id};
use crate::engine::driver::Driver;
use crate::error::{Error, Result};
use crate::model::capability::Access;
use crate::model::parameters::Parameters;
use crate::model::records::VolumeRecord;
use crate::model::sizes;

pub(super) fn validate(
    driver: &Driver,
    request: ValidateVolumeCapabilitiesRequest,
) -> Result<ValidateVolumeCapabilitiesResponse> {
    let volume_id = required_id("volume_id", request.volume_id.clone())?;
    for (field, map) in [
        ("volume_context", &request.volume_context),
        ("parameters", &request.parameters),
        ("mutable_parameters", &request.mutable_parameters),
        ("secrets", &request.secrets),
    ] {
        sizes::bounded_map(field, map)?;
    }
    if request.volume_capabilities.is_empty() {
        return Err(Error::MissingField { field: "volume_capabilities" });
    }
    request.volume_capabilities.iter().try_for_each(check_complete)?;
    let record = driver.journal.get(&find_volume(driver, &volume_id)?)?;
    Ok(match why_not(&request, &record) {
        Some(message) => ValidateVolumeCapabilitiesResponse { confirmed: None, message },
        None => ValidateVolumeCapabilitiesResponse {
            confirmed: Some(Confirmed {
                volume_context: request.volume_context,
                volume_capabilities: request.volume_capabilities,
                parameters: request.parameters,
                mutable_parameters: HashMap::new(),
            }),
            message: String::new(),
        },
    })
}

/// CSI spec: both fields are required.
fn check_complete(capability: &VolumeCapability) -> Result<()> {
    let missing = match capability {
        VolumeCapability { access_type: None, .. } => "volume_capabilities.access_type",
        VolumeCapability { access_mode: None, .. } => "volume_capabilities.access_mode",
        VolumeCapability { access_type: Some(_), access_mode: Some(_) } => return Ok(()),
    };
    Err(Error::MissingField { field: missing })
}

/// Why the volume is not as the request describes it, or cannot be used so.
fn why_not(request: &ValidateVolumeCapabilitiesRequest, record: &VolumeRecord) -> Option<String> {
    if let Err(unsupported) = Access::parse_all(&request.volume_capabilities) {
        return Some(unsupported.to_string());
    }
    if let Some(key) = request.volume_context.keys().min() {
        return Some(format!("volume_context: unknown key {key:?}: volumes have no volume_context"));
    }
    if let Some(key) = request.mutable_parameters.keys().min() {
        return Some(format!("mutable_parameters: unknown parameter {key:?}: MODIFY_VOLUME is not offered"));
    }
    if request.parameters.is_empty() {
        return None;
    }
    match Parameters::parse(&request.parameters) {
        Err(wrong) => Some(wrong.to_string()),
        Ok(parameters) if parameters != record.parameters => Some(format!(
            "parameters: the volume was created with {}, not with {parameters}",
            record.parameters
        )),
        Ok(_same) => None,
    }
}
