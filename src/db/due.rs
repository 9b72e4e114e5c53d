//! Which stages are due under the recipes in force. The rule is pure and works on a combination of states
//! and recipes; the database applies it to all rows of a combination, in chunks, while the run goes on.

use rusqlite::{Row, params};
use serde::Serialize;

use super::Db;
use crate::config::Stale;
use crate::error::Error;
use crate::fault;
use crate::row::{Stage, State};

/// Rows looked at in one chunk of a sweep. Larger chunks hold the write lock longer.
pub const SWEEP_ROWS: i64 = 5_000;

/// `recipes.id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct RecipeId(pub i64);

/// States and recipes that some rows have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Standing {
    /// `detect_state`.
    pub detect: Option<State>,
    /// `detect_recipe_id`; only done rows have one.
    pub detect_recipe: Option<RecipeId>,
    /// `embed_state`.
    pub embed: Option<State>,
    /// `embed_recipe_id`; only done rows have one.
    pub embed_recipe: Option<RecipeId>,
}

/// The recipes that pending rows are worked with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InForce {
    /// `None`: no detector, the whole image is the region.
    pub detect: Option<RecipeId>,
    /// `None`: no embedder.
    pub embed: Option<RecipeId>,
}

impl Standing {
    /// The state of that stage.
    pub fn state(&self, stage: Stage) -> Option<State> {
        match stage {
            Stage::Detect => self.detect,
            Stage::Embed => self.embed,
        }
    }

    /// True for finished work that another recipe made.
    pub fn is_stale(&self, in_force: InForce) -> bool {
        let detect_stale = match (in_force.detect, self.detect) {
            (Some(recipe), Some(State::Done)) => self.detect_recipe != Some(recipe),
            (None, Some(State::Done)) => true,
            // Embedded as a whole image, and now a detector is asked for.
            (Some(_), None) => self.embed == Some(State::Done),
            _ => false,
        };
        let embed_stale =
            self.embed == Some(State::Done) && in_force.embed.is_some_and(|recipe| self.embed_recipe != Some(recipe));
        detect_stale || embed_stale
    }

    /// Where rows of this standing belong under `in_force`. The same standing where nothing is to be done.
    /// Failed and quarantined rows stay: `retry` is for them.
    pub fn settled(self, in_force: InForce, stale: Stale) -> Self {
        if [self.detect, self.embed].contains(&Some(State::Running)) {
            // Somebody works on it; what comes of it settles later.
            return self;
        }
        let redo = stale == Stale::Redo && self.is_stale(in_force);
        let mut to = self;
        match (in_force.detect, self.detect) {
            (Some(recipe), Some(State::Done)) if redo && self.detect_recipe != Some(recipe) => {
                (to.detect, to.detect_recipe) = (Some(State::Pending), None);
            }
            (Some(_), None) if redo || self.embed.is_none() || self.embed == Some(State::Pending) => {
                to.detect = Some(State::Pending);
            }
            (None, Some(State::Pending)) => to.detect = None,
            (None, Some(State::Done)) if redo => (to.detect, to.detect_recipe) = (None, None),
            _ => {}
        }
        let ready = match to.detect {
            None => in_force.detect.is_none() || to.embed.is_some(),
            Some(state) => state == State::Done,
        };
        if !ready {
            // The stage before it has not ended. A failed row keeps nothing either: its regions are gone.
            (to.embed, to.embed_recipe) = (None, None);
        } else if let Some(recipe) = in_force.embed {
            let other = to.embed == Some(State::Done) && to.embed_recipe != Some(recipe);
            if to.embed.is_none() || (redo && (other || to.detect != self.detect)) {
                (to.embed, to.embed_recipe) = (Some(State::Pending), None);
            }
        } else if to.embed == Some(State::Pending) {
            to.embed = None;
        }
        to
    }

    fn from_row(row: &Row<'_>) -> rusqlite::Result<(Self, u64)> {
        let state = |i| row.get::<_, String>(i).map(|word| State::from_word(&word));
        let recipe = |i| row.get::<_, i64>(i).map(|id| (id != 0).then_some(RecipeId(id)));
        let standing =
            Self { detect: state(0)?, detect_recipe: recipe(1)?, embed: state(2)?, embed_recipe: recipe(3)? };
        Ok((standing, row.get(4)?))
    }
}

/// Rows of one chunk of a sweep that do not stand where they belong.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// The last id that was looked at.
    pub last: i64,
    /// The rows, in no order. Whoever works on some images only takes the others out.
    pub ids: Vec<i64>,
    moves: Vec<(Standing, Standing)>,
}

/// How many images stand where.
pub type Tally = Vec<(Standing, u64)>;

/// How many images of `tally` stand as `wanted` says.
pub fn images_where(tally: &Tally, wanted: impl Fn(&Standing) -> bool) -> u64 {
    tally.iter().filter(|(standing, _)| wanted(standing)).map(|(_, images)| images).sum()
}

impl Db {
    /// How many images stand where. Costs the number of combinations, not of images.
    ///
    /// # Errors
    /// Those of the database.
    pub fn tally(&self) -> Result<Tally, Error> {
        let mut statement = self.conn.prepare_cached(
            "SELECT detect_state, detect_recipe_id, embed_state, embed_recipe_id, images FROM counts WHERE images > 0",
        )?;
        let rows = statement.query_map([], Standing::from_row)?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    /// The same over the images that this process works on. A combination may come several times. Costs the number of
    /// images where they are restricted.
    ///
    /// # Errors
    /// Those of the database and of the condition.
    pub fn tally_in_scope(&self) -> Result<Tally, Error> {
        let Some(scope) = &self.scope else { return self.tally() };
        scope.over_all(
            "ifnull(detect_state, ''), ifnull(detect_recipe_id, 0), ifnull(embed_state, ''), ifnull(embed_recipe_id, 0), count(*)",
            "GROUP BY 1, 2, 3, 4",
            Standing::from_row,
        )
    }

    /// Looks through one chunk of rows with ids above `after`; `None` where all stand where they belong, or there are no
    /// more. Nothing is changed.
    ///
    /// # Errors
    /// Those of the database.
    pub fn misplaced(&self, after: i64, in_force: InForce, stale: Stale) -> Result<Option<Chunk>, Error> {
        let moves: Vec<(Standing, Standing)> = self
            .tally()?
            .into_iter()
            .map(|(from, _)| (from, from.settled(in_force, stale)))
            .filter(|(from, to)| from != to)
            .collect();
        if moves.is_empty() {
            return Ok(None);
        }
        let last: Option<i64> = self
            .conn
            .prepare_cached("SELECT max(id) FROM (SELECT id FROM images WHERE id > ?1 ORDER BY id LIMIT ?2)")?
            .query_row([after, SWEEP_ROWS], |r| r.get(0))?;
        let Some(last) = last else { return Ok(None) };
        let mut look = self.conn.prepare_cached(
            "SELECT id FROM images WHERE id > ?1 AND id <= ?2 AND detect_state IS ?3 AND detect_recipe_id IS ?4
                AND embed_state IS ?5 AND embed_recipe_id IS ?6",
        )?;
        let mut ids = Vec::new();
        for (from, _) in &moves {
            let values = params![
                after,
                last,
                word(from.detect),
                number(from.detect_recipe),
                word(from.embed),
                number(from.embed_recipe)
            ];
            for id in look.query_map(values, |r| r.get::<_, i64>(0))? {
                ids.push(id?);
            }
        }
        Ok(Some(Chunk { last, ids, moves }))
    }

    /// Puts the rows of a chunk where they belong. Those that changed since it was looked through stay as they are.
    ///
    /// # Errors
    /// Those of the database.
    pub fn settle(&mut self, chunk: &Chunk) -> Result<(), Error> {
        let ids = serde_json::json!(chunk.ids).to_string();
        let tx = self.write()?;
        let mut update = tx.prepare_cached(
            "UPDATE images SET detect_state = ?6, detect_recipe_id = ?7, embed_state = ?8, embed_recipe_id = ?9,
                    detect_attempts = iif(?6 IS 'pending', 0, detect_attempts),
                    embed_attempts = iif(?8 IS 'pending', 0, embed_attempts),
                    embed_code = iif(?8 IN ('failed', 'quarantined'), embed_code, NULL),
                    embed_message = iif(?8 IN ('failed', 'quarantined'), embed_message, NULL)
             WHERE id IN (SELECT value FROM json_each(?1)) AND detect_state IS ?2 AND detect_recipe_id IS ?3
               AND embed_state IS ?4 AND embed_recipe_id IS ?5",
        )?;
        for (from, to) in &chunk.moves {
            update.execute(params![
                ids,
                word(from.detect),
                number(from.detect_recipe),
                word(from.embed),
                number(from.embed_recipe),
                word(to.detect),
                number(to.detect_recipe),
                word(to.embed),
                number(to.embed_recipe),
            ])?;
        }
        drop(update);
        tx.commit()?;
        fault::point("settle.chunk");
        Ok(())
    }
}

fn word(state: Option<State>) -> Option<&'static str> {
    state.map(State::word)
}

fn number(recipe: Option<RecipeId>) -> Option<i64> {
    recipe.map(|recipe| recipe.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const D1: Option<RecipeId> = Some(RecipeId(1));
    const D2: Option<RecipeId> = Some(RecipeId(2));
    const E1: Option<RecipeId> = Some(RecipeId(11));
    const E2: Option<RecipeId> = Some(RecipeId(12));
    const DONE: Option<State> = Some(State::Done);
    const PENDING: Option<State> = Some(State::Pending);
    const FAILED: Option<State> = Some(State::Failed);

    fn standing(
        detect: Option<State>,
        detect_recipe: Option<RecipeId>,
        embed: Option<State>,
        embed_recipe: Option<RecipeId>,
    ) -> Standing {
        Standing { detect, detect_recipe, embed, embed_recipe }
    }

    #[test]
    fn rows_settle_by_the_table() {
        use Stale::{Keep, Redo};
        let both = InForce { detect: D1, embed: E1 };
        let detect_only = InForce { detect: D1, embed: None };
        let embed_only = InForce { detect: None, embed: E1 };
        let fresh = standing(PENDING, None, None, None);
        let by_hand = standing(None, None, None, None);
        let whole_done = standing(None, None, DONE, E1);
        let detected = standing(DONE, D1, None, None);
        let all_done = standing(DONE, D1, DONE, E1);
        let table = [
            // (from, recipes in force, --stale, to)
            (fresh, both, Keep, fresh),
            (fresh, embed_only, Keep, standing(None, None, PENDING, None)),
            (by_hand, both, Keep, fresh),
            (by_hand, embed_only, Keep, standing(None, None, PENDING, None)),
            (standing(None, None, PENDING, None), both, Keep, fresh),
            (detected, both, Keep, standing(DONE, D1, PENDING, None)),
            (detected, detect_only, Redo, detected),
            (standing(DONE, D1, PENDING, None), detect_only, Keep, detected),
            (all_done, both, Redo, all_done),
            (all_done, detect_only, Redo, all_done),
            (all_done, InForce { detect: D1, embed: E2 }, Keep, all_done),
            (all_done, InForce { detect: D1, embed: E2 }, Redo, standing(DONE, D1, PENDING, None)),
            (all_done, InForce { detect: D2, embed: E1 }, Keep, all_done),
            (all_done, InForce { detect: D2, embed: E1 }, Redo, fresh),
            (detected, InForce { detect: D2, embed: E1 }, Keep, standing(DONE, D1, PENDING, None)),
            (all_done, embed_only, Keep, all_done),
            (all_done, embed_only, Redo, standing(None, None, PENDING, None)),
            (whole_done, both, Keep, whole_done),
            (whole_done, both, Redo, fresh),
            (standing(FAILED, None, None, None), embed_only, Redo, standing(FAILED, None, None, None)),
            (standing(DONE, D1, FAILED, None), both, Redo, standing(DONE, D1, FAILED, None)),
        ];
        for (from, in_force, stale, to) in table {
            assert_eq!(from.settled(in_force, stale), to, "{from:?} under {in_force:?} with {stale:?}");
        }
    }

    #[test]
    fn settling_twice_changes_nothing_more() {
        let states = [None, PENDING, Some(State::Running), DONE, FAILED];
        for detect in states {
            for embed in states {
                if embed.is_some() && detect.is_some() && detect != DONE {
                    continue;
                }
                for detect_recipe in if detect == DONE { vec![D1, D2] } else { vec![None] } {
                    for embed_recipe in if embed == DONE { vec![E1, E2] } else { vec![None] } {
                        let from = standing(detect, detect_recipe, embed, embed_recipe);
                        for in_force in
                            [D1, None].into_iter().flat_map(|d| [E1, None].map(|e| InForce { detect: d, embed: e }))
                        {
                            for stale in [Stale::Keep, Stale::Redo] {
                                let once = from.settled(in_force, stale);
                                assert_eq!(once.settled(in_force, stale), once, "{from:?} {in_force:?} {stale:?}");
                                let running = |s: Standing| [s.detect, s.embed].contains(&Some(State::Running));
                                assert!(
                                    !running(from) || once == from,
                                    "a running row was moved: {from:?} -> {once:?}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }
}
