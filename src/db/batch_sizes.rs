//! What `--batch auto` learnt, kept per model, device and shape of the input, so that the next run starts with it.

use std::path::Path;

use rusqlite::types::Type;
use rusqlite::{Row, params};

use super::{Db, now, path_to_sql};
use crate::error::Error;
use crate::geometry::Size;

/// The batch size that was fastest for one shape of a model's input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearntBatch {
    /// The model's input.
    pub shape: Size,
    /// Images in a batch; at least 1.
    pub images: usize,
    /// Images per second at that size; above 0.
    pub per_s: f64,
}

impl Db {
    /// What was learnt of the model with that digest on `device` (`cpu` or the GPU's name), in no order.
    ///
    /// # Errors
    /// Those of the database; a shape that a person wrote and that is none.
    pub fn learnt_batches(&self, digest: &str, device: &str) -> Result<Vec<LearntBatch>, Error> {
        let mut statement = self.conn.prepare(
            "SELECT shape, images, per_s FROM batch_sizes
             WHERE model_id = (SELECT id FROM models WHERE digest = ?1) AND device = ?2",
        )?;
        let rows = statement.query_map([digest, device], learnt)?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    /// Keeps what was learnt, in place of what was known of the same shape. `path` is where the model is, for one
    /// that no recipe named yet.
    ///
    /// # Errors
    /// Those of the database, also where `images` or `per_s` is not above 0.
    pub fn remember_batch(
        &mut self,
        digest: &str,
        path: &Path,
        device: &str,
        batch: &LearntBatch,
    ) -> Result<(), Error> {
        let tx = self.write()?;
        tx.execute(
            "INSERT INTO models (digest, path, first_at) VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING",
            params![digest, path_to_sql(path), now()],
        )?;
        tx.execute(
            "INSERT INTO batch_sizes (model_id, device, shape, images, per_s, at)
             VALUES ((SELECT id FROM models WHERE digest = ?1), ?2, ?3, ?4, ?5, ?6)
             ON CONFLICT DO UPDATE SET images = excluded.images, per_s = excluded.per_s, at = excluded.at",
            params![digest, device, shape_word(batch.shape), batch.images, batch.per_s, now()],
        )?;
        Ok(tx.commit()?)
    }
}

fn learnt(r: &Row<'_>) -> rusqlite::Result<LearntBatch> {
    let word: String = r.get(0)?;
    let shape = shape_of(&word).ok_or_else(|| {
        rusqlite::Error::FromSqlConversionFailure(0, Type::Text, format!("{word:?} is no shape, like 416x416").into())
    })?;
    Ok(LearntBatch { shape, images: r.get(1)?, per_s: r.get(2)? })
}

fn shape_word(shape: Size) -> String {
    format!("{}x{}", shape.width_px, shape.height_px)
}

fn shape_of(word: &str) -> Option<Size> {
    let (width_px, height_px) = word.split_once('x')?;
    Some(Size::new(width_px.parse().ok()?, height_px.parse().ok()?))
}
