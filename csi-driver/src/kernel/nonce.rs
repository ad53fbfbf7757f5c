//! Random numbers.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::{Result, Step};

const NONCE_BYTES: usize = 16;

/// 128 bits from the kernel, as hexadecimal digits.
pub(crate) fn new_nonce() -> Result<String> {
    let path = Path::new("/dev/urandom");
    let mut bytes = [0; NONCE_BYTES];
    File::open(path)
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|e| linux::Error::at("read", path, e))
        .step("draw nonce")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
