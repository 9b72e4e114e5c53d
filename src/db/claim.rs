//! Claiming pages of pending rows, and giving rows back.

use rusqlite::params_from_iter;
use rusqlite::types::Value;

use super::scope::Span;
use super::suspects::Claims;
use super::{Db, SqlPath};
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

/// Which rows may be claimed.
#[derive(Clone, Copy, Debug)]
pub enum Among<'a> {
    /// All of these.
    Span(Span),
    /// Those that a look found. Some may be in others' hands by now.
    Listed(&'a [i64]),
}

impl From<i64> for Among<'_> {
    /// All with ids above it.
    fn from(after: i64) -> Self {
        Self::Span(Span { after, ..Span::ALL })
    }
}

impl Among<'_> {
    fn holds(self, id: ImageId) -> bool {
        match self {
            Self::Span(Span { after, to }) => after < id.0 && id.0 <= to,
            Self::Listed(ids) => ids.contains(&id.0),
        }
    }
}

/// One statement takes the page, so that two workers never take the same row. The attempt is counted here,
/// durably, before any byte of the file is looked at. A run that was taken for dead claims nothing more.
///
/// `?4` is the id before the page and `?5` the last that may be in it; or `?4` is a JSON list of ids. Suspects are taken
/// from a list only.
fn claim_sql(stage: Stage, among: Among<'_>, suspects_too: bool) -> String {
    let (state, attempts) = match stage {
        Stage::Detect => ("detect_state", "detect_attempts"),
        Stage::Embed => ("embed_state", "embed_attempts"),
    };
    let page = match among {
        Among::Span(_) => "id > ?4 AND id <= ?5",
        Among::Listed(_) => "id IN (SELECT value FROM json_each(?4))",
    };
    let others = if suspects_too { "" } else { "AND id NOT IN (SELECT image_id FROM suspects)" };
    format!(
        "UPDATE images SET {state} = 'running', run_id = ?1, token = ?2, {attempts} = {attempts} + 1
         WHERE id IN (SELECT id FROM images WHERE {state} = 'pending' AND {state} <> 'done' AND {page} {others} ORDER BY id LIMIT ?3)
           AND EXISTS (SELECT 1 FROM runs WHERE id = ?1 AND ended_at IS NULL)
         RETURNING id, path, prompt, file_size_bytes, file_mtime_ns, detect_state, decode_denominator"
    )
}

impl Db {
    /// Claims up to `rows` pending rows of `stage`, in the order of their ids. Does not ask the condition that this process
    /// is restricted by: where there is one, rows are listed that it was found to hold for.
    ///
    /// # Errors
    /// Those of the database.
    pub fn claim_page<'a>(
        &mut self,
        tokens: &mut Tokens,
        stage: Stage,
        among: impl Into<Among<'a>>,
        rows: usize,
    ) -> Result<Vec<Claim>, Error> {
        let among = among.into();
        if self.claims == Claims::Ordinary {
            return self.claim(tokens, stage, among, rows);
        }
        let alone = self.claims == Claims::Alone;
        let suspects = self.waiting_suspects()?.into_iter().filter(|s| s.alone == alone && among.holds(s.id));
        let ids: Vec<i64> = suspects.map(|suspect| suspect.id.0).collect();
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        self.claim(tokens, stage, Among::Listed(&ids), rows)
    }

    fn claim(&mut self, tokens: &mut Tokens, stage: Stage, among: Among<'_>, rows: usize) -> Result<Vec<Claim>, Error> {
        let token = tokens.next();
        let run = tokens.run;
        let sql = claim_sql(stage, among, self.claims != Claims::Ordinary);
        let mut values = vec![Value::Integer(run.0), Value::Integer(token.0), Value::Integer(rows as i64)];
        match among {
            Among::Span(Span { after, to }) => values.extend([Value::Integer(after), Value::Integer(to)]),
            Among::Listed(ids) => values.push(Value::Text(serde_json::json!(ids).to_string())),
        }
        let tx = self.write()?;
        let mut claims: Vec<(Claim, bool)> = {
            let mut statement = tx.prepare_cached(&sql)?;
            let found = statement.query_map(params_from_iter(values), |r| {
                let stamp = r.get::<_, Option<i64>>(3)?.zip(r.get::<_, Option<i64>>(4)?);
                let claim = Claim {
                    id: ImageId(r.get(0)?),
                    token,
                    stage,
                    path: r.get::<_, SqlPath>(1)?.0,
                    prompt: r.get(2)?,
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
        Ok((
            r.get(0)?,
            Region { bbox, label: r.get(1)?, score: r.get(2)?, crop: r.get(7)?, vector: None, embedded: false },
        ))
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}
