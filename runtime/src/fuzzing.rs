//! Entry points of the fuzz targets in `fuzz/`: images, as their builders wrote them.

pub use crate::images::fuzzing::{image_layer, image_reference};

#[cfg(test)]
mod tests {
    use tests::seeds;

    #[test]
    fn seeds_of_image_references_hold() {
        seeds::run("image_reference", super::image_reference);
    }

    #[test]
    fn seeds_of_image_layers_hold() {
        let scratch = tempfile::tempdir().unwrap();
        seeds::run("image_layer", |layer| super::image_layer(layer, scratch.path()));
    }
}
