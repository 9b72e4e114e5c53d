//! From which picture a region is cut. A pure rule, so that a region gets the same vector whether it is embedded right
//! after detection, after a crash, or under another embedder a year later.
//!
//! The picture that the detector saw serves a region that has as many pixels in it as the embedder wants. For a smaller
//! one the file is decoded once more, at the smallest scale that gives these pixels. Without a detector every region
//! gets that scale.

use crate::geometry::Scale;
use crate::pixels::header::Probed;
use crate::pixels::picture::crop_box;
use crate::pixels::tensor;
use crate::recipe::ImageInput;
use crate::row::Region;

/// Regions that are cut from a picture of one scale.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its scale.
    pub scale: Scale,
    /// Indices of the regions.
    pub regions: Vec<usize>,
}

/// Groups the regions that still want a vector by the scale they are cut at, that of the detector's picture (`base`)
/// first, then the others from coarse to fine. `spare` as of
/// [`Decode::embedder_spare`](crate::recipe::Decode::embedder_spare).
pub fn by_scale(
    probed: &Probed,
    base: Option<Scale>,
    regions: &[Region],
    input: &ImageInput,
    spare: Option<u32>,
) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (index, region) in regions.iter().enumerate().filter(|(_, region)| !region.embedded) {
        let scale = match spare {
            None => Scale::FULL,
            Some(spare) => {
                let size = crop_box(probed.upright, region.bbox).map_or(probed.upright, |b| b.size);
                let enough = probed.possible(Scale::that_holds(size, tensor::wanted(size, input, spare)));
                base.filter(|base| base.denominator() <= enough.denominator()).unwrap_or(enough)
            }
        };
        match groups.iter_mut().find(|group| group.scale == scale) {
            Some(group) => group.regions.push(index),
            None => groups.push(Group { scale, regions: vec![index] }),
        }
    }
    groups.sort_by_key(|group| (Some(group.scale) != base, std::cmp::Reverse(group.scale.denominator())));
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{DecodeConfig, MAX_PIXELS_DEFAULT};
    use crate::geometry::{BoxPx, Size};
    use crate::pixels::header::probe;
    use crate::recipe::{Decode, Filter, Fit, Truncated};
    use libjpeg_turbo_rs::{PixelFormat, Subsampling, compress};

    const INPUT: ImageInput = ImageInput {
        size: Size::new(100, 100),
        filter: Filter::Bicubic,
        fit: Fit::Squash,
        mean: [0.0; 3],
        std: [1.0; 3],
    };

    fn photo() -> (tempfile::TempDir, Probed) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("photo.jpg");
        let grey = vec![128; 1600 * 1200 * 3];
        std::fs::write(&path, compress(&grey, 1600, 1200, PixelFormat::Rgb, 90, Subsampling::S420).unwrap()).unwrap();
        let mode = Decode::Scaled;
        let config = DecodeConfig { max_pixels: MAX_PIXELS_DEFAULT, truncated: Truncated::Fail, mode };
        let probed = probe(&path, &config).unwrap();
        (folder, probed)
    }

    fn region(side_px: f32) -> Region {
        let bbox = BoxPx { x0: 8.0, y0: 8.0, x1: 8.0 + side_px, y1: 8.0 + side_px };
        Region { bbox, ..Region::whole(Size::new(1600, 1200)) }
    }

    #[test]
    fn a_region_with_enough_pixels_is_cut_from_the_detectors_picture_and_a_smaller_one_from_a_second_decode() {
        let (_folder, probed) = photo();
        let embedded = Region { embedded: true, ..region(30.0) };
        let regions = [region(50.0), region(450.0), embedded, region(1000.0), region(220.0)];
        let found = by_scale(&probed, Some(Scale::QUARTER), &regions, &INPUT, Some(1));
        let group = |scale, regions: &[usize]| Group { scale, regions: regions.to_vec() };
        // 450 / 4 and 1000 / 4 are 100 pixels and more; 220 needs 1/2, and 50 has not even 100.
        let expected = [group(Scale::QUARTER, &[1, 3]), group(Scale::HALF, &[4]), group(Scale::FULL, &[0])];
        assert_eq!(found, expected);
        // Never from a smaller picture than the detector's, though 1000 / 8 would do; without a detector it does.
        assert_eq!(by_scale(&probed, None, &regions[3..4], &INPUT, Some(1)), [group(Scale::EIGHTH, &[0])]);
        // Four times the pixels.
        assert_eq!(by_scale(&probed, None, &regions[3..4], &INPUT, Some(4)), [group(Scale::HALF, &[0])]);
    }

    #[test]
    fn an_exact_decode_cuts_everything_at_full_size() {
        let (_folder, probed) = photo();
        let found = by_scale(&probed, Some(Scale::FULL), &[region(50.0), region(1000.0)], &INPUT, None);
        assert_eq!(found, [Group { scale: Scale::FULL, regions: vec![0, 1] }]);
    }
}
