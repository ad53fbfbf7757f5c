//! How the runtime keeps files: records (`record`), directories of mount points (`mount_dir`), and
//! trees that wait for their removal (`trash`).

pub(crate) mod mount_dir;
pub(crate) mod record;
pub(crate) mod trash;
