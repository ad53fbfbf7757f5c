//! Which objects a command means: selectors of labels and of fields.

mod fields;
mod labels;

pub use fields::{FieldSelector, UnknownField};
pub use labels::LabelSelector;
