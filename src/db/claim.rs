//! Claiming pages of pending rows, and giving rows back.

use rusqlite::params;
use rusqlite::types::Value;

use super::suspects::Claims;
use super::{Db, SqlPath, SqlText};
use crate::error::Error;
use crate::fault;
use crate::geometry::{BoxPx, Scale};
use crate::row::{Claim, FileStamp, ImageId, Region, Stage, Token};

/// `runs.id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunId(pub i64);

/// Makes tokens that no other claim has: the run in the upper half, a counter in the lower.
#[derive(Debug)]
pub struct Tokens {
    run: RunId,
    next: i64,
}

impl Tokens {
    /// Tokens of that run. One object per process.
    pub fn new(run: RunId) -> Self {
        Self { run, next: 0 }
    }

    fn next(&mut self) -> Token {
        self.next += 1;
        Token((self.run.0 << 32) | self.next)
    }
}

/// One statement takes the page, so that two workers never take the same row. The attempt is counted here,
/// durably, before any byte of the file is looked at. A run that was taken for dead claims nothing more.
///
/// `?3` is the id before the page; or a JSON list of the ids that may be taken, where they are `listed`. Suspects are
/// taken from a list only.
fn claim_sql(stage: Stage, listed: bool, suspects_too: bool) -> String {
    let (state, attempts) = match stage {
        Stage::Detect => ("detect_state", "detect_attempts"),
        Stage::Embed => ("embed_state", "embed_attempts"),
    };
    let page = if listed { "id IN (SELECT value FROM json_each(?3))" } else { "id > ?3" };
    let others = if suspects_too { "" } else { "AND id NOT IN (SELECT image_id FROM suspects)" };
    format!(
        "UPDATE images SET {state} = 'running', run_id = ?1, token = ?2, {attempts} = {attempts} + 1
         WHERE id IN (SELECT id FROM images WHERE {state} = 'pending' AND {state} <> 'done' AND {page} {others} ORDER BY id LIMIT ?4)
           AND EXISTS (SELECT 1 FROM runs WHERE id = ?1 AND ended_at IS NULL)
         RETURNING id, path, prompt, file_size_bytes, file_mtime_ns, detect_state, decode_denominator"
    )
}

impl Db {
    /// Claims up to `rows` pending rows of `stage` with ids above `after`, in the order of their ids; those of the
    /// condition where this process is restricted.
    ///
    /// # Errors
    /// Those of the database.
    pub fn claim_page(
        &mut self,
        tokens: &mut Tokens,
        stage: Stage,
        after: i64,
        rows: usize,
    ) -> Result<Vec<Claim>, Error> {
        if self.claims != Claims::Ordinary {
            return self.claim_suspects(tokens, stage, rows);
        }
        let mut after = after;
        loop {
            let page = match &self.scope {
                None => Value::Integer(after),
                Some(scope) => {
                    let ids = scope.pending(stage, after, rows)?;
                    let Some(last) = ids.last() else { return Ok(Vec::new()) };
                    after = *last;
                    Value::Text(serde_json::json!(ids).to_string())
                }
            };
            let claims = self.claim(tokens, stage, &page, rows)?;
            // Another worker may have taken all of them meanwhile.
            if !claims.is_empty() || self.scope.is_none() {
                return Ok(claims);
            }
        }
    }

    /// The cursor does not matter: a suspect that has ended is none any more.
    fn claim_suspects(&mut self, tokens: &mut Tokens, stage: Stage, rows: usize) -> Result<Vec<Claim>, Error> {
        let alone = self.claims == Claims::Alone;
        let ids: Vec<i64> = self.waiting_suspects()?.iter().filter(|s| s.alone == alone).map(|s| s.id.0).collect();
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        self.claim(tokens, stage, &Value::Text(serde_json::json!(ids).to_string()), rows)
    }

    fn claim(&mut self, tokens: &mut Tokens, stage: Stage, page: &Value, rows: usize) -> Result<Vec<Claim>, Error> {
        let token = tokens.next();
        let run = tokens.run;
        let suspects_too = self.claims != Claims::Ordinary;
        let sql = claim_sql(stage, self.scope.is_some() || suspects_too, suspects_too);
        let tx = self.write()?;
        let mut claims: Vec<(Claim, bool)> = {
            let mut statement = tx.prepare_cached(&sql)?;
            let found = statement.query_map(params![run.0, token.0, page, rows as i64], |r| {
                let stamp = r.get::<_, Option<i64>>(3)?.zip(r.get::<_, Option<i64>>(4)?);
                let claim = Claim {
                    id: ImageId(r.get(0)?),
                    token,
                    stage,
                    path: r.get::<_, SqlPath>(1)?.0,
                    prompt: r.get::<_, Option<SqlText>>(2)?.map(|text| text.0),
                    seen: stamp.map(|(size_bytes, mtime_ns)| FileStamp { size_bytes, mtime_ns }),
                    scale: r.get::<_, Option<u32>>(6)?.and_then(Scale::from_denominator),
                    regions: None,
                };
                Ok((claim, r.get::<_, Option<String>>(5)?.as_deref() == Some("done")))
            })?;
            found.collect::<Result<_, _>>()?
        };
        if stage == Stage::Embed {
            for (claim, detected) in &mut claims {
                if *detected {
                    claim.regions = Some(regions_to_embed(&tx, claim.id)?);
                }
            }
        }
        tx.commit()?;
        fault::point("read.claimed");
        let mut claims: Vec<Claim> = claims.into_iter().map(|(claim, _)| claim).collect();
        // RETURNING promises no order.
        claims.sort_by_key(|c| c.id);
        Ok(claims)
    }

    /// Everything that `run` still holds is pending again. Returns how many rows that were.
    ///
    /// # Errors
    /// Those of the database.
    pub fn release(&mut self, run: RunId) -> Result<usize, Error> {
        let tx = self.write()?;
        let mut released = 0;
        for sql in [
            "UPDATE images SET detect_state = 'pending', run_id = NULL, token = NULL
             WHERE detect_state = 'running' AND detect_state <> 'done' AND run_id = ?1",
            "UPDATE images SET embed_state = 'pending', run_id = NULL, token = NULL
             WHERE embed_state = 'running' AND embed_state <> 'done' AND run_id = ?1",
        ] {
            released += tx.execute(sql, [run.0])?;
        }
        tx.commit()?;
        fault::point("release.released");
        Ok(released)
    }
}

/// The stored regions of an image, in the order they were stored, with those marked that have the vector of the
/// recipe in force already.
fn regions_to_embed(conn: &rusqlite::Connection, image: ImageId) -> Result<Vec<Region>, Error> {
    let mut embedded = conn.prepare_cached(
        "SELECT EXISTS (SELECT 1 FROM embeddings WHERE region_id = ?1
                        AND recipe_id = (SELECT id FROM recipes WHERE stage = 'embed' AND in_force = 1))",
    )?;
    let mut regions = Vec::new();
    for (id, region) in stored_regions(conn, image)? {
        regions.push(Region { embedded: embedded.query_row([id], |r| r.get(0))?, ..region });
    }
    Ok(regions)
}

/// The stored regions of an image with their ids, in the order they were stored.
pub(super) fn stored_regions(conn: &rusqlite::Connection, image: ImageId) -> Result<Vec<(i64, Region)>, Error> {
    let mut statement = conn
        .prepare_cached("SELECT id, label, score, x0, y0, x1, y1, crop FROM regions WHERE image_id = ?1 ORDER BY id")?;
    let rows = statement.query_map([image.0], |r| {
        let bbox = BoxPx { x0: r.get(3)?, y0: r.get(4)?, x1: r.get(5)?, y1: r.get(6)? };
        let text = |column| Ok::<_, rusqlite::Error>(r.get::<_, Option<SqlText>>(column)?.map(|text| text.0));
        let (label, crop) = (text(1)?, text(7)?);
        Ok((r.get(0)?, Region { bbox, label, score: r.get(2)?, crop, vector: None, embedded: false }))
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}
