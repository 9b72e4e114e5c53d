//! What may be wrong with the rows of one image. Pure: no file is looked at.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use half::f16;

use super::damage::Damage;
use crate::candidate::{Vocabulary, unpack};
use crate::db::Db;
use crate::db::due::RecipeId;
use crate::db::verify::{StoredCandidates, StoredImage, StoredRegion, StoredVector};
use crate::error::Error;
use crate::geometry::{BoxPx, Size};
use crate::recipe::EmbedRecipe;
use crate::row::Stage;

/// How far a box may reach over the edge: boxes are clipped, and 32-bit numbers round.
const OUTSIDE_PX: f32 = 0.01;

/// How far the length of a normalised vector may be from 1, of 32-bit and of 16-bit numbers.
const NORM_OFF_F32: f64 = 1e-3;
const NORM_OFF_F16: f64 = 1e-2;

/// One thing that is wrong with an image.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Fault {
    pub(super) damage: Damage,
    /// Where in the image, and what.
    pub(super) what: String,
    pub(super) mend: Mend,
}

/// What makes it good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Mend {
    /// The image begins anew.
    Whole,
    /// The image waits for the embedder again.
    Embed,
    /// The vector of that region and recipe goes.
    Vector(i64, RecipeId),
    /// The crop of that region is written again; the file that lies there goes.
    Crop(i64, Option<PathBuf>),
    /// Nothing that is in the database: it may be all right.
    Nothing,
}

/// What all rows have in common.
#[derive(Debug, Default)]
pub(super) struct Facts {
    /// Recipes whose vectors have length 1.
    normalised: HashSet<RecipeId>,
    /// Dimension of nearly all vectors of a recipe.
    dims: HashMap<RecipeId, i64>,
}

impl Facts {
    pub(super) fn read(db: &Db) -> Result<Self, Error> {
        let mut facts = Self::default();
        for (id, body) in db.recipes(Stage::Embed)? {
            // What an older or newer program means by its recipe is not known; then nothing is asked of its vectors.
            if serde_json::from_str::<EmbedRecipe>(&body).is_ok_and(|recipe| recipe.normalize == Some(true)) {
                facts.normalised.insert(id);
            }
            if let Some(dim) = db.usual_dim(id)? {
                facts.dims.insert(id, dim);
            }
        }
        Ok(facts)
    }
}

/// All that is wrong with the rows of an image.
pub(super) fn faults(image: &StoredImage, facts: &Facts) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut whole = |damage, what| faults.push(Fault { damage, what, mend: Mend::Whole });
    if let Some(contradiction) = &image.contradiction {
        whole(Damage::States, contradiction.clone());
    }
    if let Some(stage) = image.without_recipe {
        whole(Damage::DoneWithoutRecipe, stage.word().to_owned());
    }
    if image.is_whole && image.regions.is_empty() {
        whole(Damage::DoneWithoutRegion, "no detector was used, so the whole image is its region".to_owned());
    }
    if image.is_done {
        if let Some(candidates) = &image.candidates
            && let Err(reason) = check_candidates(candidates, image.size)
        {
            whole(Damage::Candidates, reason);
        }
        check_regions(image, &mut whole);
    }
    for region in &image.regions {
        if let Some(recipe) = image.embedded_by
            && !region.vectors.iter().any(|v| v.recipe == recipe)
        {
            let what = format!("region {} has no vector of recipe {}", region.id, recipe.0);
            faults.push(Fault { damage: Damage::VectorLacking, what, mend: Mend::Embed });
        }
        for vector in &region.vectors {
            if let Err((damage, reason)) = check_vector(vector, facts) {
                let what = format!("region {}, recipe {}: {reason}", region.id, vector.recipe.0);
                faults.push(Fault { damage, what, mend: Mend::Vector(region.id, vector.recipe) });
            }
        }
    }
    faults
}

fn check_candidates(stored: &StoredCandidates, size: Option<Size>) -> Result<(), String> {
    let size = size.filter(|size| size.pixels() > 0).ok_or("the size of the image is not known")?;
    if !stored.has_recipe {
        return Err("the recipe that made them is not there".to_owned());
    }
    let body = stored.vocabulary.as_ref().ok_or("their labels are not there")?;
    let vocabulary: Vocabulary = serde_json::from_str(body).map_err(|e| format!("their labels: {e}"))?;
    let candidates = unpack(&stored.packed, size)?;
    if i64::try_from(candidates.len()) != Ok(stored.count) {
        return Err(format!("{} candidates where there should be {}", candidates.len(), stored.count));
    }
    let unknown = candidates.iter().flat_map(|c| &c.scores).find(|s| s.label >= vocabulary.labels.len());
    match unknown {
        Some(score) => Err(format!("label {} of {}", score.label, vocabulary.labels.len())),
        None => Ok(()),
    }
}

fn check_regions(image: &StoredImage, whole: &mut impl FnMut(Damage, String)) {
    for (place, region) in image.regions.iter().enumerate() {
        let BoxPx { x0, y0, x1, y1 } = region.bbox;
        let at = |reason: &str| format!("region {} at {x0} {y0} {x1} {y1}{reason}", region.id);
        if !region.bbox.is_sound(f32::MIN_POSITIVE) {
            whole(Damage::RegionReversed, at(""));
        } else if let Some(size) = image.size.filter(|size| !is_inside(region.bbox, *size)) {
            whole(Damage::RegionOutside, at(&format!(" in {}x{}", size.width_px, size.height_px)));
        }
        if region.score.is_some_and(|score| !(0.0..=1.0).contains(&score)) {
            whole(Damage::RegionScore, at(&format!(" has the score {}", region.score.unwrap_or_default())));
        }
        let same = |other: &&StoredRegion| other.label == region.label && other.bbox == region.bbox;
        if let Some(other) = image.regions[..place].iter().find(same) {
            whole(Damage::RegionTwice, at(&format!(" is region {} again", other.id)));
        }
    }
}

fn is_inside(bbox: BoxPx, size: Size) -> bool {
    bbox.x0 >= -OUTSIDE_PX
        && bbox.y0 >= -OUTSIDE_PX
        && bbox.x1 <= size.width_px as f32 + OUTSIDE_PX
        && bbox.y1 <= size.height_px as f32 + OUTSIDE_PX
}

fn check_vector(vector: &StoredVector, facts: &Facts) -> Result<(), (Damage, String)> {
    let (width, norm_off) = match vector.dtype.as_str() {
        "f32" => (4, NORM_OFF_F32),
        "f16" => (2, NORM_OFF_F16),
        other => return Err((Damage::VectorLength, format!("the dtype {other} is not known"))),
    };
    let bytes = vector.bytes.len();
    if i64::try_from(bytes).ok() != vector.dim.checked_mul(width) || vector.dim <= 0 {
        return Err((Damage::VectorLength, format!("{bytes} bytes for {} numbers of {}", vector.dim, vector.dtype)));
    }
    if let Some(usual) = facts.dims.get(&vector.recipe).filter(|usual| **usual != vector.dim) {
        return Err((Damage::VectorLength, format!("{} numbers where the others have {usual}", vector.dim)));
    }
    let squares: f64 = match width {
        4 => {
            vector.bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])).powi(2)).sum()
        }
        _ => vector.bytes.chunks_exact(2).map(|b| f64::from(f16::from_le_bytes([b[0], b[1]])).powi(2)).sum(),
    };
    // NaN and infinity survive squaring and summing; no sum of squared 32-bit numbers overflows 64 bits.
    if !squares.is_finite() {
        return Err((Damage::VectorNotFinite, "NaN or infinity".to_owned()));
    }
    if squares == 0.0 {
        return Err((Damage::VectorZero, format!("{} times 0", vector.dim)));
    }
    let norm = squares.sqrt();
    if facts.normalised.contains(&vector.recipe) && (norm - 1.0).abs() > norm_off {
        return Err((Damage::VectorNorm, format!("its length is {norm:.4}")));
    }
    Ok(())
}
