//! The syntax of what users type: the command's own name, durations, selectors, and templates for
//! output. `config` has the commands and their flags.

pub(crate) mod called_as;
pub(crate) mod durations;
pub(crate) mod jsonpath;
pub mod selectors;
