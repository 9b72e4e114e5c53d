//! What `verify` reads: checks that SQL can make by itself, and pages of images with all that hangs on them. Writes
//! nothing. Each page is one short read transaction, so that a run beside it can cut its log back.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::PathBuf;

use rusqlite::{Connection, OptionalExtension, Row, params};

use super::due::RecipeId;
use super::rescue::live_runs;
use super::{Db, SqlPath};
use crate::error::Error;
use crate::geometry::{BoxPx, Size};
use crate::row::{ImageId, Stage};

/// Complaints of SQLite's own check that are looked at; a database with more is beyond counting.
const COMPLAINTS_MOST: u32 = 10_000;

/// Vectors of a recipe that say how many numbers its vectors have.
const USUAL_OF_ROWS: i64 = 1_000;

/// An image and everything that is stored of it.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredImage {
    /// `images.id`.
    pub id: ImageId,
    /// The file.
    pub path: PathBuf,
    /// Size of the upright image; `None` before a decode.
    pub size: Option<Size>,
    /// `embed_recipe_id`, where `embed_state` is `done`.
    pub embedded_by: Option<RecipeId>,
    /// Its regions stand: `detect` is done, or `embed` without a detector.
    pub is_done: bool,
    /// Done without a detector: the whole image is its region.
    pub is_whole: bool,
    /// What contradicts itself in the row's states, in words.
    pub contradiction: Option<String>,
    /// A stage that is done by no recipe of that stage.
    pub without_recipe: Option<Stage>,
    /// Its regions, by id.
    pub regions: Vec<StoredRegion>,
    /// Its raw detections.
    pub candidates: Option<StoredCandidates>,
}

/// A row of `regions`.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredRegion {
    /// `regions.id`.
    pub id: i64,
    /// In pixels of the upright image.
    pub bbox: BoxPx,
    /// The word that was found.
    pub label: Option<String>,
    /// 0..=1.
    pub score: Option<f64>,
    /// Name below the folder of crops.
    pub crop: Option<String>,
    /// One per recipe.
    pub vectors: Vec<StoredVector>,
}

/// A row of `embeddings`.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredVector {
    /// The recipe that made it.
    pub recipe: RecipeId,
    /// Numbers that it should hold.
    pub dim: i64,
    /// `f32` or `f16`.
    pub dtype: String,
    /// Little-endian.
    pub bytes: Vec<u8>,
}

/// A row of `candidates`.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredCandidates {
    /// How many there should be.
    pub count: i64,
    /// As `candidate::unpack` reads it.
    pub packed: Vec<u8>,
    /// Body of their vocabulary; `None` where there is no such row.
    pub vocabulary: Option<String>,
    /// The recipe that made them is there.
    pub has_recipe: bool,
}

/// A row that refers to one that is not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dangling {
    /// Table of the row.
    pub table: String,
    /// Its rowid.
    pub row: Option<i64>,
    /// Table that lacks the row it refers to.
    pub parent: String,
}

/// A combination of states that is counted wrongly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Miscount {
    /// States and recipes in words.
    pub standing: String,
    /// What `counts` says.
    pub counted: i64,
    /// How many images there are.
    pub there: i64,
}

/// A running row whose run is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abandoned {
    /// The row.
    pub id: ImageId,
    /// Its file.
    pub path: PathBuf,
    /// The run that holds it.
    pub run: Option<i64>,
}

/// What contradicts itself in a row, in words, or NULL. The same rules as the table's CHECKs, and those that no CHECK can
/// hold.
const CONTRADICTION: &str = "CASE
    WHEN detect_state NOT IN ('pending', 'running', 'done', 'failed', 'quarantined') THEN 'detect_state is no state'
    WHEN embed_state NOT IN ('pending', 'running', 'done', 'failed', 'quarantined') THEN 'embed_state is no state'
    WHEN embed_state IS NOT NULL AND detect_state IS NOT NULL AND detect_state <> 'done'
        THEN 'embed_state is ' || embed_state || ' while detect_state is ' || detect_state
    WHEN (token IS NULL) <> (run_id IS NULL) THEN 'a token without a run, or a run without a token'
    WHEN (detect_state IS 'running' OR embed_state IS 'running') AND token IS NULL THEN 'running without a token'
    WHEN token IS NOT NULL AND NOT (detect_state IS 'running' OR embed_state IS 'running') THEN 'a token without running'
    WHEN (detect_state IS 'failed' OR detect_state IS 'quarantined') AND detect_code IS NULL THEN 'detect failed without a code'
    WHEN (embed_state IS 'failed' OR embed_state IS 'quarantined') AND embed_code IS NULL THEN 'embed failed without a code'
    WHEN NOT (detect_state IS 'failed' OR detect_state IS 'quarantined') AND detect_code IS NOT NULL
        THEN 'detect_code without a failure'
    WHEN NOT (embed_state IS 'failed' OR embed_state IS 'quarantined') AND embed_code IS NOT NULL
        THEN 'embed_code without a failure'
    WHEN detect_state IS NOT 'done' AND detect_recipe_id IS NOT NULL THEN 'detect_recipe_id while detect is not done'
    WHEN embed_state IS NOT 'done' AND embed_recipe_id IS NOT NULL THEN 'embed_recipe_id while embed is not done'
    WHEN detect_state IS 'failed' AND EXISTS (SELECT 1 FROM regions r WHERE r.image_id = images.id)
        THEN 'detect failed and yet there are regions'
    END";

/// The stage that is done without a recipe of its own, or NULL.
const WITHOUT_RECIPE: &str = "CASE
    WHEN detect_state IS 'done' AND NOT EXISTS (SELECT 1 FROM recipes WHERE id = detect_recipe_id AND stage = 'detect')
        THEN 'detect'
    WHEN embed_state IS 'done' AND NOT EXISTS (SELECT 1 FROM recipes WHERE id = embed_recipe_id AND stage = 'embed')
        THEN 'embed'
    END";

impl Db {
    /// What SQLite says of the file's structure; empty where it is sound. Reads all of the file.
    ///
    /// # Errors
    /// Those of the database, where it is too damaged to be looked at.
    pub fn complaints(&self) -> Result<Vec<String>, Error> {
        let mut statement = self.conn.prepare(&format!("PRAGMA integrity_check({COMPLAINTS_MOST})"))?;
        let rows = statement.query_map([], |r| r.get::<_, String>(0))?;
        let mut lines: Vec<String> = rows.collect::<Result<_, _>>()?;
        lines.retain(|line| line != "ok");
        Ok(lines)
    }

    /// Rows that refer to rows that are not there.
    ///
    /// # Errors
    /// Those of the database.
    pub fn dangling(&self) -> Result<Vec<Dangling>, Error> {
        let mut statement = self.conn.prepare("PRAGMA foreign_key_check")?;
        let rows = statement
            .query_map([], |r| Ok(Dangling { table: r.get(0)?, row: r.get(1)?, parent: r.get(2)? }))?
            .collect::<Result<_, _>>()?;
        Ok(rows)
    }

    /// Where `counts` differs from a new count.
    ///
    /// # Errors
    /// Those of the database.
    pub fn miscounts(&self) -> Result<Vec<Miscount>, Error> {
        let tx = self.conn.unchecked_transaction()?;
        // What is counted and what is there, at one moment.
        let mut both: BTreeMap<Standing, (i64, i64)> = BTreeMap::new();
        for (standing, images) in stored_counts(&tx)? {
            both.entry(standing).or_default().0 += images;
        }
        for (standing, images) in counted_again(&tx)? {
            both.entry(standing).or_default().1 += images;
        }
        let wrong = both.into_iter().filter(|(_, (counted, there))| counted != there);
        Ok(wrong.map(|(s, (counted, there))| Miscount { standing: s.to_string(), counted, there }).collect())
    }

    /// Running rows that no live run holds.
    ///
    /// # Errors
    /// Those of the database.
    pub fn abandoned(&self) -> Result<Vec<Abandoned>, Error> {
        let tx = self.conn.unchecked_transaction()?;
        let live = live_runs(&tx, self.lease)?;
        let mut statement = tx.prepare(
            "SELECT id, path, run_id FROM images WHERE detect_state = 'running' AND detect_state <> 'done'
             UNION ALL SELECT id, path, run_id FROM images WHERE embed_state = 'running' AND embed_state <> 'done'",
        )?;
        let rows = statement.query_map([], |r| {
            Ok(Abandoned { id: ImageId(r.get(0)?), path: r.get::<_, SqlPath>(1)?.0, run: r.get(2)? })
        })?;
        let mut rows: Vec<Abandoned> = rows.collect::<Result<_, _>>()?;
        rows.retain(|row| !row.run.is_some_and(|run| live.iter().any(|l| l.run.0 == run)));
        Ok(rows)
    }

    /// When the first of the live runs began, in seconds since 1970; `None` where none is at work.
    ///
    /// # Errors
    /// Those of the database.
    pub fn live_since(&self) -> Result<Option<f64>, Error> {
        Ok(live_runs(&self.conn, self.lease)?.into_iter().map(|run| run.started_at).min_by(f64::total_cmp))
    }

    /// Up to `rows` images with ids above `after`, with all that hangs on them, as they were at one moment.
    ///
    /// # Errors
    /// Those of the database.
    pub fn stored_page(&self, after: i64, rows: usize) -> Result<Vec<StoredImage>, Error> {
        let tx = self.conn.unchecked_transaction()?;
        let mut images: Vec<StoredImage> = tx
            .prepare_cached(&format!(
                "SELECT id, path, width_px, height_px, iif(embed_state IS 'done', embed_recipe_id, NULL),
                        detect_state IS NULL AND embed_state IS 'done', {CONTRADICTION}, {WITHOUT_RECIPE},
                        detect_state IS 'done'
                 FROM images WHERE id > ?1 ORDER BY id LIMIT ?2"
            ))?
            .query_map(params![after, rows as i64], stored_image)?
            .collect::<Result<_, _>>()?;
        let (Some(first), Some(last)) = (images.first().map(|i| i.id), images.last().map(|i| i.id)) else {
            return Ok(images);
        };
        let places: HashMap<i64, usize> = images.iter().enumerate().map(|(place, i)| (i.id.0, place)).collect();
        for (image, region) in regions(&tx, first, last)? {
            if let Some(&place) = places.get(&image) {
                images[place].regions.push(region);
            }
        }
        let mut statement = tx.prepare_cached(
            "SELECT c.image_id, c.count, c.packed, v.body, EXISTS (SELECT 1 FROM recipes WHERE id = c.recipe_id)
             FROM candidates c LEFT JOIN vocabularies v ON v.id = c.vocabulary_id WHERE c.image_id BETWEEN ?1 AND ?2",
        )?;
        let mut rows = statement.query([first.0, last.0])?;
        while let Some(r) = rows.next()? {
            if let Some(&place) = places.get(&r.get(0)?) {
                let (count, packed, vocabulary, has_recipe) = (r.get(1)?, r.get(2)?, r.get(3)?, r.get(4)?);
                images[place].candidates = Some(StoredCandidates { count, packed, vocabulary, has_recipe });
            }
        }
        Ok(images)
    }

    /// Numbers in most of the first vectors of a recipe; `None` where it has none.
    ///
    /// # Errors
    /// Those of the database.
    pub fn usual_dim(&self, recipe: RecipeId) -> Result<Option<i64>, Error> {
        let mut statement = self.conn.prepare_cached(
            "SELECT dim FROM (SELECT dim FROM embeddings WHERE recipe_id = ?1 LIMIT ?2)
             GROUP BY dim ORDER BY count(*) DESC LIMIT 1",
        )?;
        Ok(statement.query_row(params![recipe.0, USUAL_OF_ROWS], |r| r.get(0)).optional()?)
    }

    /// True where a region of `image` names that crop.
    ///
    /// # Errors
    /// Those of the database.
    pub fn names_crop(&self, image: ImageId, crop: &str) -> Result<bool, Error> {
        let mut statement = self.conn.prepare_cached("SELECT 1 FROM regions WHERE image_id = ?1 AND crop = ?2")?;
        Ok(statement.exists(params![image.0, crop])?)
    }

    /// True where any region names a crop.
    ///
    /// # Errors
    /// Those of the database.
    pub fn has_crops(&self) -> Result<bool, Error> {
        Ok(self.conn.prepare("SELECT 1 FROM regions WHERE crop IS NOT NULL")?.exists([])?)
    }

    /// The folders that runs wrote crops to, the last one first.
    ///
    /// # Errors
    /// Those of the database.
    pub fn crop_folders(&self) -> Result<Vec<PathBuf>, Error> {
        let mut statement = self.conn.prepare(
            "SELECT json_extract(settings, '$.crops') AS folder FROM runs
             WHERE json_valid(settings) AND json_type(settings, '$.crops') = 'text' GROUP BY folder ORDER BY max(id) DESC",
        )?;
        let rows = statement.query_map([], |r| r.get::<_, String>(0).map(PathBuf::from))?;
        Ok(rows.collect::<Result<_, _>>()?)
    }
}

/// States and recipes as `counts` has them: `''` for NULL, 0 for none. Words may be anything in a damaged database.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Standing {
    pub(super) detect: String,
    pub(super) detect_recipe: i64,
    pub(super) embed: String,
    pub(super) embed_recipe: i64,
}

impl Standing {
    fn from_row(r: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self { detect: r.get(0)?, detect_recipe: r.get(1)?, embed: r.get(2)?, embed_recipe: r.get(3)? })
    }

    fn is_row(&self, r: &Row<'_>) -> rusqlite::Result<bool> {
        let is_word = |column, word: &str| Ok::<_, rusqlite::Error>(r.get_ref(column)?.as_str()? == word);
        Ok(is_word(0, &self.detect)?
            && r.get::<_, i64>(1)? == self.detect_recipe
            && is_word(2, &self.embed)?
            && r.get::<_, i64>(3)? == self.embed_recipe)
    }
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |state: &str| if state.is_empty() { "not due".to_owned() } else { state.to_owned() };
        let by = |recipe: i64| if recipe == 0 { String::new() } else { format!(" by recipe {recipe}") };
        let (detect, embed) = (word(&self.detect), word(&self.embed));
        write!(f, "detect {detect}{}, embed {embed}{}", by(self.detect_recipe), by(self.embed_recipe))
    }
}

fn stored_counts(conn: &Connection) -> Result<Vec<(Standing, i64)>, Error> {
    let mut statement =
        conn.prepare("SELECT detect_state, detect_recipe_id, embed_state, embed_recipe_id, images FROM counts")?;
    let rows = statement.query_map([], |r| Ok((Standing::from_row(r)?, r.get(4)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Counts all images. Not by GROUP BY: that would sort ten million rows, in memory.
pub(super) fn counted_again(conn: &Connection) -> Result<Vec<(Standing, i64)>, Error> {
    let mut statement = conn.prepare(
        "SELECT ifnull(detect_state, ''), ifnull(detect_recipe_id, 0), ifnull(embed_state, ''), ifnull(embed_recipe_id, 0)
         FROM images",
    )?;
    let mut counts: Vec<(Standing, i64)> = Vec::new();
    let mut rows = statement.query([])?;
    let mut last = 0;
    while let Some(r) = rows.next()? {
        // Neighbours mostly stand alike.
        if counts.get(last).is_none_or(|(standing, _)| !standing.is_row(r).unwrap_or(false)) {
            let standing = Standing::from_row(r)?;
            last = counts.iter().position(|(known, _)| *known == standing).unwrap_or_else(|| {
                counts.push((standing, 0));
                counts.len() - 1
            });
        }
        counts[last].1 += 1;
    }
    Ok(counts)
}

fn stored_image(r: &Row<'_>) -> rusqlite::Result<StoredImage> {
    let side = |column| r.get::<_, Option<i64>>(column).map(|side| side.and_then(|side| u32::try_from(side).ok()));
    let word: Option<String> = r.get(7)?;
    Ok(StoredImage {
        id: ImageId(r.get(0)?),
        path: r.get::<_, SqlPath>(1)?.0,
        size: side(2)?.zip(side(3)?).map(|(width_px, height_px)| Size::new(width_px, height_px)),
        embedded_by: r.get::<_, Option<i64>>(4)?.map(RecipeId),
        is_done: r.get(5)? || r.get(8)?,
        is_whole: r.get(5)?,
        contradiction: r.get(6)?,
        without_recipe: Stage::ALL.into_iter().find(|stage| Some(stage.word()) == word.as_deref()),
        regions: Vec::new(),
        candidates: None,
    })
}

/// The regions of images `first..=last` with their vectors, and the image of each.
fn regions(tx: &Connection, first: ImageId, last: ImageId) -> Result<Vec<(i64, StoredRegion)>, Error> {
    let mut statement = tx.prepare_cached(
        "SELECT image_id, id, label, score, x0, y0, x1, y1, crop FROM regions
         WHERE image_id BETWEEN ?1 AND ?2 ORDER BY image_id, id",
    )?;
    let mut regions: Vec<(i64, StoredRegion)> = statement
        .query_map([first.0, last.0], |r| {
            let bbox = BoxPx { x0: r.get(4)?, y0: r.get(5)?, x1: r.get(6)?, y1: r.get(7)? };
            let (id, label, score, crop) = (r.get(1)?, r.get(2)?, r.get(3)?, r.get(8)?);
            Ok((r.get(0)?, StoredRegion { id, bbox, label, score, crop, vectors: Vec::new() }))
        })?
        .collect::<Result<_, _>>()?;
    let mut statement = tx.prepare_cached(
        "SELECT recipe_id, dim, dtype, vector FROM embeddings WHERE region_id = ?1 ORDER BY recipe_id",
    )?;
    for (_, region) in &mut regions {
        let vectors = statement.query_map([region.id], |r| {
            Ok(StoredVector { recipe: RecipeId(r.get(0)?), dim: r.get(1)?, dtype: r.get(2)?, bytes: r.get(3)? })
        })?;
        region.vectors = vectors.collect::<Result<_, _>>()?;
    }
    Ok(regions)
}
