//! What a runtime does on its own, without a call: it adopts the pods of an earlier runtime
//! (`adopt`), ends those whose records it cannot read (`unreadable`), and imports the images
//! directory (`preload`).

pub(crate) mod adopt;
pub(crate) mod preload;
mod unreadable;
