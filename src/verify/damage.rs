//! Kinds of damage, what they are called, and what mends them.

use std::path::PathBuf;

use crate::db::repair::{CropId, Repair, VectorId};
use crate::db::verify::StoredImage;
use crate::printable;

use super::rows::{Fault, Mend};

/// A kind of damage. The order is that of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Damage {
    /// SQLite's own check complains, or a page cannot be read.
    Structure,
    /// A row refers to one that is not there; the three kinds below have words of their own.
    Dangling,
    /// A region of no image.
    RegionWithoutImage,
    /// A vector of no region.
    VectorWithoutRegion,
    /// Candidates of no image.
    CandidatesWithoutImage,
    /// `counts` differs from a new count.
    Counts,
    /// States, codes and tokens of a row contradict one another.
    States,
    /// A running row whose run is over.
    Abandoned,
    /// A stage is done by no recipe of that stage.
    DoneWithoutRecipe,
    /// Embedded as a whole image, and there is no region.
    DoneWithoutRegion,
    /// Embedded, and a region lacks the vector of that recipe.
    VectorLacking,
    /// A vector that is not as long as its dim and dtype say, or of another dim than the others.
    VectorLength,
    /// NaN or infinity in a vector.
    VectorNotFinite,
    /// All of a vector is zero.
    VectorZero,
    /// A vector whose length is not 1 although its recipe normalises.
    VectorNorm,
    /// Packed candidates that cannot be read.
    Candidates,
    /// Edges of a box in the wrong order, or no numbers.
    RegionReversed,
    /// A box that is not inside its image.
    RegionOutside,
    /// A score that is not 0 to 1.
    RegionScore,
    /// The same label and box twice in an image.
    RegionTwice,
    /// A crop that is not named as this program names them: it is not looked at.
    CropName,
    /// Its folder is not there: nothing can be said of it.
    CropFolder,
    /// No file of that name.
    CropMissing,
    /// The file is there and cannot be read: nothing can be said of it.
    CropUnreadable,
    /// A file of no bytes.
    CropEmpty,
    /// A file that is no whole picture.
    CropUndecodable,
    /// A picture of another size than its box.
    CropSize,
    /// A file with a name of ours that no row names.
    CropOrphan,
    /// An unfinished file of a process that is gone.
    CropUnfinished,
}

impl Damage {
    /// Every kind, in the order of the report.
    pub const ALL: [Self; 29] = [
        Self::Structure,
        Self::Dangling,
        Self::RegionWithoutImage,
        Self::VectorWithoutRegion,
        Self::CandidatesWithoutImage,
        Self::Counts,
        Self::States,
        Self::Abandoned,
        Self::DoneWithoutRecipe,
        Self::DoneWithoutRegion,
        Self::VectorLacking,
        Self::VectorLength,
        Self::VectorNotFinite,
        Self::VectorZero,
        Self::VectorNorm,
        Self::Candidates,
        Self::RegionReversed,
        Self::RegionOutside,
        Self::RegionScore,
        Self::RegionTwice,
        Self::CropName,
        Self::CropFolder,
        Self::CropMissing,
        Self::CropUnreadable,
        Self::CropEmpty,
        Self::CropUndecodable,
        Self::CropSize,
        Self::CropOrphan,
        Self::CropUnfinished,
    ];

    /// The stable word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Structure => "structure",
            Self::Dangling => "dangling",
            Self::RegionWithoutImage => "region_without_image",
            Self::VectorWithoutRegion => "vector_without_region",
            Self::CandidatesWithoutImage => "candidates_without_image",
            Self::Counts => "counts",
            Self::States => "states",
            Self::Abandoned => "abandoned",
            Self::DoneWithoutRecipe => "done_without_recipe",
            Self::DoneWithoutRegion => "done_without_region",
            Self::VectorLacking => "vector_lacking",
            Self::VectorLength => "vector_length",
            Self::VectorNotFinite => "vector_not_finite",
            Self::VectorZero => "vector_zero",
            Self::VectorNorm => "vector_norm",
            Self::Candidates => "candidates",
            Self::RegionReversed => "region_reversed",
            Self::RegionOutside => "region_outside",
            Self::RegionScore => "region_score",
            Self::RegionTwice => "region_twice",
            Self::CropName => "crop_name",
            Self::CropFolder => "crop_folder",
            Self::CropMissing => "crop_missing",
            Self::CropUnreadable => "crop_unreadable",
            Self::CropEmpty => "crop_empty",
            Self::CropUndecodable => "crop_undecodable",
            Self::CropSize => "crop_size",
            Self::CropOrphan => "crop_orphan",
            Self::CropUnfinished => "crop_unfinished",
        }
    }

    /// What is wrong, in a few words.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Structure => "the file itself is damaged",
            Self::Dangling => "rows refer to rows that are not there",
            Self::RegionWithoutImage => "regions of images that are not there",
            Self::VectorWithoutRegion => "vectors of regions that are not there",
            Self::CandidatesWithoutImage => "candidates of images that are not there",
            Self::Counts => "counters differ from a new count",
            Self::States => "states of a row contradict one another",
            Self::Abandoned => "rows are running in runs that are over",
            Self::DoneWithoutRecipe => "stages are done by no recipe",
            Self::DoneWithoutRegion => "images are embedded and have no region",
            Self::VectorLacking => "images are embedded and a region has no vector",
            Self::VectorLength => "vectors have the wrong length",
            Self::VectorNotFinite => "vectors hold NaN or infinity",
            Self::VectorZero => "vectors are zero",
            Self::VectorNorm => "vectors are not normalised although their recipe says so",
            Self::Candidates => "stored detections cannot be read",
            Self::RegionReversed => "boxes have their edges in the wrong order",
            Self::RegionOutside => "boxes are not inside their image",
            Self::RegionScore => "scores are not 0 to 1",
            Self::RegionTwice => "the same box and label twice in an image",
            Self::CropName => "crops have names that croprow does not give",
            Self::CropFolder => "crop files are in a folder that is not there or empty, and were not looked at",
            Self::CropMissing => "crop files are missing",
            Self::CropUnreadable => "crop files are there and cannot be read",
            Self::CropEmpty => "crop files are empty",
            Self::CropUndecodable => "crop files cannot be decoded",
            Self::CropSize => "crop files have another size than their box",
            Self::CropOrphan => "crop files that no row names",
            Self::CropUnfinished => "unfinished crop files of processes that are gone",
        }
    }

    /// What mends it.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Structure => {
                "keep a copy, then go back to a backup, or try `sqlite3 DB .recover | sqlite3 NEW.db` and verify that"
            }
            Self::Dangling => {
                "croprow verify DB --repair removes them; where a model or a run is gone, go back to a backup"
            }
            Self::RegionWithoutImage | Self::VectorWithoutRegion | Self::CandidatesWithoutImage => {
                "croprow verify DB --repair removes them"
            }
            Self::Counts => "croprow verify DB --repair counts again",
            Self::Abandoned => "the next croprow run DB takes them back, and so does croprow verify DB --repair",
            Self::VectorLacking | Self::VectorLength | Self::VectorNotFinite | Self::VectorZero | Self::VectorNorm => {
                "croprow verify DB --repair makes these images wait for the embedder; then croprow run DB"
            }
            Self::States
            | Self::DoneWithoutRecipe
            | Self::DoneWithoutRegion
            | Self::Candidates
            | Self::RegionReversed
            | Self::RegionOutside
            | Self::RegionScore
            | Self::RegionTwice => "croprow verify DB --repair makes these images pending; then croprow run DB",
            Self::CropName | Self::CropMissing | Self::CropEmpty | Self::CropUndecodable | Self::CropSize => {
                "croprow verify DB --repair makes these images pending; then croprow run DB writes the crops anew"
            }
            Self::CropFolder => {
                "bring its disk back, or name where it is now with --crops DIR; --repair leaves them alone; where they are gone for \
                 good, make that folder with any file in it"
            }
            Self::CropUnreadable => "mend the disk, or its permissions, and verify again; --repair leaves them alone",
            Self::CropOrphan => {
                "remove them if no other database has this folder; --json --examples 1000000 lists them all"
            }
            Self::CropUnfinished => "the next croprow run DB with this folder removes them",
        }
    }
}

/// All damage of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What kind.
    pub damage: Damage,
    /// How often.
    pub count: u64,
    /// The first of them: which row or file, and what is wrong with it.
    pub examples: Vec<String>,
}

/// What `verify` looked at and found.
#[derive(Clone, Debug)]
pub struct Report {
    /// By kind, in the order of [`Damage`].
    pub findings: Vec<Finding>,
    /// Images that were looked at.
    pub images: u64,
    /// Their regions.
    pub regions: u64,
    /// Their vectors.
    pub vectors: u64,
    /// Crops that were looked for.
    pub crops: u64,
    /// What could not be checked, and why.
    pub notes: Vec<String>,
    /// What mends the rows.
    pub(super) repair: Repair,
    /// Crops that are to be written anew.
    pub(super) damaged_files: Vec<PathBuf>,
    examples_most: usize,
}

impl Report {
    pub(super) fn new(examples_most: usize) -> Self {
        Self {
            findings: Vec::new(),
            images: 0,
            regions: 0,
            vectors: 0,
            crops: 0,
            notes: Vec::new(),
            repair: Repair::default(),
            damaged_files: Vec::new(),
            examples_most,
        }
    }

    /// Why nothing may be mended, where that is so.
    pub fn forbids_mending(&self) -> Option<&'static str> {
        let is_structure = self.findings.iter().any(|finding| finding.damage == Damage::Structure);
        is_structure.then_some(
            "nothing was mended: the file itself is damaged, and every write could make it worse; keep a copy, then go back to a \
             backup, or try `sqlite3 DB .recover | sqlite3 NEW.db`, and verify and mend that",
        )
    }

    /// True where nothing was found.
    pub fn is_sound(&self) -> bool {
        self.findings.is_empty()
    }

    pub(super) fn add(&mut self, damage: Damage, example: String) {
        let place = match self.findings.binary_search_by_key(&damage, |finding| finding.damage) {
            Ok(place) => place,
            Err(place) => {
                self.findings.insert(place, Finding { damage, count: 0, examples: Vec::new() });
                place
            }
        };
        let finding = &mut self.findings[place];
        finding.count += 1;
        if finding.examples.len() < self.examples_most {
            finding.examples.push(example);
        }
    }

    pub(super) fn count(&mut self, image: &StoredImage, has_folders: bool) {
        self.images += 1;
        self.regions += image.regions.len() as u64;
        self.vectors += image.regions.iter().map(|r| r.vectors.len() as u64).sum::<u64>();
        if has_folders && image.is_done {
            self.crops += image.regions.iter().filter(|r| r.crop.is_some()).count() as u64;
        }
    }

    pub(super) fn fault(&mut self, image: &StoredImage, fault: Fault) {
        let Fault { damage, what, mend } = fault;
        self.add(damage, format!("image {} {}: {what}", image.id, printable::path(&image.path)));
        let push = |images: &mut Vec<_>| {
            if images.last() != Some(&image.id) {
                images.push(image.id);
            }
        };
        match mend {
            Mend::Whole => push(&mut self.repair.whole),
            Mend::Embed => push(&mut self.repair.embed),
            Mend::Nothing => {}
            Mend::Crop(region, file) => {
                self.repair.crops.push(CropId { image: image.id, region });
                self.damaged_files.extend(file);
            }
            Mend::Vector(region, recipe) => {
                self.repair.vectors.push(VectorId { region, recipe });
                if image.embedded_by == Some(recipe) {
                    push(&mut self.repair.embed);
                }
            }
        }
    }
}
