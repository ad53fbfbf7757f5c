//! Resource names on the command line.

use super::Error;
use crate::objects::Kind;

/// Any of kubectl's names: `po`, `pod`, `pods`, `Pod`.
pub(super) fn parse(word: &str) -> Result<Kind, Error> {
    let kind = match word.to_lowercase().as_str() {
        "po" | "pod" | "pods" => Kind::Pod,
        "pvc" | "persistentvolumeclaim" | "persistentvolumeclaims" => Kind::PersistentVolumeClaim,
        "pv" | "persistentvolume" | "persistentvolumes" => Kind::PersistentVolume,
        "sc" | "storageclass" | "storageclasses" => Kind::StorageClass,
        "csidriver" | "csidrivers" => Kind::CsiDriver,
        "cm" | "configmap" | "configmaps" => Kind::ConfigMap,
        "secret" | "secrets" => Kind::Secret,
        "ev" | "event" | "events" => Kind::Event,
        "no" | "node" | "nodes" => Kind::Node,
        _ => return Err(Error::UnknownKind { kind: word.to_owned() }),
    };
    Ok(kind)
}

/// The kinds and names of `KIND[,KIND] [NAME…]` or `KIND/NAME`.
pub(super) fn select(kind: &str, names: &[String]) -> Result<Vec<(Kind, Vec<String>)>, Error> {
    if let Some((kind, name)) = kind.split_once('/') {
        let mut selected = vec![(parse(kind)?, vec![name.to_owned()])];
        for other in names {
            let Some((kind, name)) = other.split_once('/') else {
                return Err(Error::Usage(
                    "there is no need to specify a resource type as a separate argument when passing arguments in resource/name form",
                ));
            };
            selected.push((parse(kind)?, vec![name.to_owned()]));
        }
        return Ok(selected);
    }
    kind.split(',').map(|word| Ok((parse(word)?, names.to_vec()))).collect()
}

/// The name in `-o name`, with the group where there is one.
pub(super) fn resource(kind: Kind) -> String {
    let name = kind.as_str().to_lowercase();
    match kind.api_version().split_once('/') {
        Some((group, _)) => format!("{name}.{group}"),
        None => name,
    }
}
