//! The error object of the CNI protocol, and its codes.
//!
//! Convention: `msg` is the reference's message, since callers match it. Further help goes into
//! `details`.

use std::fmt::Display;

use serde_json::{Map, Value};

use crate::conf::Fields;

/// Codes of the CNI specification (section 5, "Error") and of the reference library.
pub mod code {
    /// `cniVersion` is one that the plugin does not know.
    pub const INCOMPATIBLE_CNI_VERSION: u32 = 1;
    /// The network configuration has a field that is not supported; the message must name it with its value.
    pub const UNSUPPORTED_FIELD: u32 = 2;
    /// A necessary variable, such as CNI_COMMAND or CNI_CONTAINERID, is missing or invalid.
    pub const INVALID_ENVIRONMENT_VARIABLES: u32 = 4;
    /// For example, stdin could not be read.
    pub const IO_FAILURE: u32 = 5;
    /// The network configuration is no JSON, or its version cannot be parsed.
    pub const DECODING_FAILURE: u32 = 6;
    /// A check of the network configuration failed.
    pub const INVALID_NETWORK_CONFIG: u32 = 7;
    /// The reference's code: the plugin's own namespace was given as the container's.
    pub const INVALID_NETNS: u32 = 8;
    /// A condition that passes, so that the runtime should try again.
    pub const TRY_AGAIN_LATER: u32 = 11;
    /// STATUS: the plugin cannot serve ADD.
    pub const PLUGIN_NOT_AVAILABLE: u32 = 50;
    /// The reference's code for everything a plugin reports without a code.
    pub const INTERNAL: u32 = 999;
}

/// The error object that a plugin prints on stdout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{msg}{}{details}", if details.is_empty() { "" } else { "; " })]
pub struct CniError {
    pub code: u32,
    pub msg: String,
    /// Empty: left out of the JSON.
    pub details: String,
}

impl CniError {
    pub fn new(code: u32, msg: impl Display) -> Self {
        Self { code, msg: msg.to_string(), details: String::new() }
    }

    /// An error without its own code (999).
    pub fn internal(msg: impl Display) -> Self {
        Self::new(code::INTERNAL, msg)
    }

    /// [`Self::internal`] with all causes, outermost first, in the reference's format; system call
    /// errors by [`linux::reason`].
    pub fn chain(error: &dyn std::error::Error) -> Self {
        let mut msg = error.to_string();
        let mut cause = error.source();
        while let Some(next) = cause {
            msg = match next.downcast_ref() {
                Some(refused) => format!("{msg}: {}", linux::reason(refused)),
                None => format!("{msg}: {next}"),
            };
            cause = next.source();
        }
        Self::internal(msg)
    }

    /// An invalid value in the network configuration (7).
    pub fn config(msg: impl Display) -> Self {
        Self::new(code::INVALID_NETWORK_CONFIG, msg)
    }

    #[must_use]
    pub fn with_details(mut self, details: impl Display) -> Self {
        let details = details.to_string();
        if self.details.is_empty() {
            self.details = details;
        } else if !details.is_empty() {
            self.details = format!("{}; {details}", self.details);
        }
        self
    }

    /// The JSON object: `code`, `msg` and, unless empty, `details`.
    pub fn to_json(&self) -> Value {
        let mut object = Map::new();
        object.insert("code".to_owned(), self.code.into());
        object.insert("msg".to_owned(), self.msg.clone().into());
        if !self.details.is_empty() {
            object.insert("details".to_owned(), self.details.clone().into());
        }
        Value::Object(object)
    }

    /// Reads another plugin's error object; absent fields are zero or empty.
    pub fn from_json(value: &Value) -> Result<Self, CniError> {
        let fields = Fields::of(value, "error")?;
        Ok(Self {
            code: fields.u32("code")?.unwrap_or(0),
            msg: fields.string("msg")?.unwrap_or_default(),
            details: fields.string("details")?.unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_system_call_is_in_the_references_words() {
        let refused = std::io::Error::from_raw_os_error(40);
        let error = linux::Error::new("open", "/run/x", refused);
        assert_eq!(CniError::chain(&error).msg, "open /run/x: too many levels of symbolic links");
    }

    #[test]
    fn empty_details_are_left_out() {
        assert_eq!(CniError::new(7, "no").to_json().to_string(), r#"{"code":7,"msg":"no"}"#);
        let full = CniError::new(7, "no").with_details("a").with_details("b");
        assert_eq!(full.to_json().to_string(), r#"{"code":7,"msg":"no","details":"a; b"}"#);
        assert_eq!(CniError::from_json(&full.to_json()).unwrap(), full);
    }
}
