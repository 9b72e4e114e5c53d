//! `--where`: a condition of the user's that tells which images a run works on. It is text that becomes part of a
//! statement, so it is looked at only through a connection of its own that cannot write, by statements in which nothing
//! but reading is permitted, and never together with a statement that writes: what it finds are ids, which are bound.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rusqlite::config::DbConfig;
use rusqlite::hooks::{AuthAction, AuthContext, Authorization};
use rusqlite::limits::Limit;
use rusqlite::{Connection, ErrorCode, Params, Row, Statement};

use super::open::open_for_reading;
use crate::error::Error;
use crate::row::Stage;

/// One statement works no longer than this, over at most [`LOOK_ROWS`] images. Then the run ends with an error.
const STATEMENT_TIME: Duration = Duration::from_secs(10);

/// Images that one statement looks at: a condition that few of them meet must not make one statement of all.
const LOOK_ROWS: i64 = 20_000;

/// The same while a run works, which may be stopped between two.
const STEP_ROWS: i64 = 2_000;

/// Steps of SQLite's machine between two looks at the clock.
const STEPS_PER_LOOK: i32 = 10_000;

/// Longer values, and texts and blobs that a function makes, are an error.
const VALUE_BYTES: i32 = 16 << 20;

/// A longer condition is refused.
const CONDITION_BYTES: usize = 64 << 10;

/// What a condition may read.
const TABLES: [&str; 6] = ["images", "regions", "candidates", "embeddings", "models", "recipes"];

/// What a condition may call: functions of their arguments, and the clock. None of them makes much out of little.
const FUNCTIONS: [&str; 51] = [
    "abs",
    "avg",
    "ceil",
    "ceiling",
    "coalesce",
    "concat",
    "concat_ws",
    "count",
    "date",
    "datetime",
    "floor",
    "glob",
    "hex",
    "if",
    "ifnull",
    "iif",
    "instr",
    "json_array_length",
    "json_extract",
    "json_type",
    "json_valid",
    "julianday",
    "length",
    "like",
    "likelihood",
    "likely",
    "lower",
    "ltrim",
    "max",
    "min",
    "mod",
    "nullif",
    "octet_length",
    "pow",
    "power",
    "round",
    "rtrim",
    "sign",
    "sqrt",
    "strftime",
    "substr",
    "substring",
    "sum",
    "time",
    "timediff",
    "total",
    "trim",
    "typeof",
    "unicode",
    "unixepoch",
    "unlikely",
];

/// Ids above `after`, up to `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The id before the first.
    pub after: i64,
    /// The last id.
    pub to: i64,
}

impl Span {
    /// All images. Ids may be negative.
    pub const ALL: Self = Self { after: i64::MIN, to: i64::MAX };
}

/// What one look for rows found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    /// In their order.
    pub ids: Vec<i64>,
    /// Everything up to this id was looked at.
    pub to: i64,
}

/// A condition that was found to be one. It has a connection of its own, so that nobody waits for the database's write
/// connection while it is asked.
#[derive(Debug)]
pub struct Scope {
    conn: Mutex<Connection>,
    condition: String,
    /// When the statement at hand has to be through: milliseconds after `began`.
    due_ms: Arc<AtomicU64>,
    began: Instant,
}

impl Scope {
    /// Checks `condition` against the database at `path`. Nothing is changed by it.
    ///
    /// # Errors
    /// It is not one expression over what may be read, with the reason.
    pub(super) fn new(path: &Path, condition: &str) -> Result<Self, Error> {
        if condition.len() > CONDITION_BYTES {
            return Err(refused(format!("longer than {CONDITION_BYTES} bytes")));
        }
        if condition.contains('\0') {
            return Err(refused("holds a NUL byte".to_owned()));
        }
        let (mut conn, _) = open_for_reading(path)?;
        conn.set_limit(Limit::SQLITE_LIMIT_LENGTH, VALUE_BYTES)?;
        conn.set_limit(Limit::SQLITE_LIMIT_ATTACHED, 0)?;
        conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_TRIGGER, false)?;
        conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_VIEW, false)?;
        // "holiday" is a column, and not the text that it is taken for where there is none.
        conn.set_db_config(DbConfig::SQLITE_DBCONFIG_DQS_DML, false)?;
        let (began, due_ms) = (Instant::now(), Arc::new(AtomicU64::new(u64::MAX)));
        let due = Arc::clone(&due_ms);
        let too_late = move || began.elapsed().as_millis() as u64 > due.load(Ordering::Relaxed);
        conn.progress_handler(STEPS_PER_LOOK, Some(too_late))?;
        conn.authorizer(Some(permitted))?;
        let scope = Self { conn: Mutex::new(conn), condition: condition.to_owned(), due_ms, began };
        scope.check()?;
        Ok(scope)
    }

    /// A text that closes a bracket of the one statement and opens it again stands where `CASE` expects an expression
    /// in the other, and the reverse: what is sound in both is an expression.
    fn check(&self) -> Result<(), Error> {
        let conn = self.conn.lock().unwrap_or_else(PoisonError::into_inner);
        for sql in [
            format!("SELECT id FROM images WHERE (\n{}\n) LIMIT 0", self.condition),
            format!("SELECT id FROM images WHERE CASE WHEN\n{}\nTHEN 1 END LIMIT 0", self.condition),
        ] {
            let statement = conn.prepare(&sql).map_err(|e| refused(words(&e)))?;
            if statement.parameter_count() > 0 {
                return Err(refused("holds a parameter; write the value itself".to_owned()));
            }
        }
        Ok(())
    }

    /// Pending rows of `stage` that the condition holds for, at most `rows`: one look at a bounded number of images, which
    /// may find none although there are some behind it.
    ///
    /// # Errors
    /// Those of the condition.
    pub fn pending(&self, stage: Stage, span: Span, rows: usize) -> Result<Look, Error> {
        let state = match stage {
            Stage::Detect => "detect_state",
            Stage::Embed => "embed_state",
        };
        // The second comparison is that of the partial index.
        let pending = format!("{state} = 'pending' AND {state} <> 'done'");
        let Some(end) = self.look_to(span, &pending, STEP_ROWS)? else {
            return Ok(Look { ids: Vec::new(), to: span.to });
        };
        let sql = format!(
            "SELECT id FROM images WHERE id > ?1 AND id <= ?2 AND {pending} AND (\n{}\n) ORDER BY id LIMIT ?3",
            self.condition
        );
        let ids: Vec<i64> = self.rows(&sql, [span.after, end, rows as i64], |r| r.get(0))?;
        let to = ids.last().copied().filter(|_| ids.len() >= rows).unwrap_or(end);
        Ok(Look { ids, to })
    }

    /// Those of `ids` that the condition holds for.
    ///
    /// # Errors
    /// Those of the condition.
    pub fn among(&self, ids: &[i64]) -> Result<Vec<i64>, Error> {
        let sql =
            format!("SELECT id FROM images WHERE id IN (SELECT value FROM json_each(?1)) AND (\n{}\n)", self.condition);
        self.rows(&sql, [serde_json::json!(ids).to_string()], |r| r.get(0))
    }

    /// What `each` makes of the images of the condition, `columns` being the select list and `more` what follows it.
    /// Groups are those of parts of the images: one may come several times.
    pub(super) fn over_all<T>(
        &self,
        columns: &str,
        more: &str,
        each: impl Fn(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, Error> {
        let mut span = Span::ALL;
        let mut found = Vec::new();
        while let Some(end) = self.look_to(span, "1", LOOK_ROWS)? {
            let sql =
                format!("SELECT {columns} FROM images WHERE id > ?1 AND id <= ?2 AND (\n{}\n) {more}", self.condition);
            found.extend(self.rows(&sql, [span.after, end], &each)?);
            span.after = end;
        }
        Ok(found)
    }

    /// The last id that a statement looks at, which takes `most` images; `None` where there is nothing in `span`.
    fn look_to(&self, span: Span, which: &str, most: i64) -> Result<Option<i64>, Error> {
        // Steps by the index; the condition is no part of it.
        let sql = format!(
            "SELECT max(id) FROM (SELECT id FROM images WHERE id > ?1 AND id <= ?2 AND {which} ORDER BY id LIMIT {most})"
        );
        Ok(self.rows(&sql, [span.after, span.to], |r| r.get(0))?.pop().flatten())
    }

    fn rows<T>(
        &self,
        sql: &str,
        values: impl Params,
        each: impl Fn(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, Error> {
        let conn = self.conn.lock().unwrap_or_else(PoisonError::into_inner);
        let deadline = self.began.elapsed() + STATEMENT_TIME;
        self.due_ms.store(deadline.as_millis() as u64, Ordering::Relaxed);
        let mut statement = conn.prepare_cached(sql).map_err(|e| failed(&e))?;
        let rows = read_all(&mut statement, values, each);
        self.due_ms.store(u64::MAX, Ordering::Relaxed);
        rows.map_err(|e| failed(&e))
    }
}

fn read_all<T>(
    statement: &mut Statement<'_>,
    values: impl Params,
    each: impl Fn(&Row<'_>) -> rusqlite::Result<T>,
) -> rusqlite::Result<Vec<T>> {
    statement.query_map(values, each)?.collect()
}

/// Reading of the tables and pure functions. No recursion: it need not end.
fn permitted(context: AuthContext<'_>) -> Authorization {
    let known = |names: &[&str], name: &str| names.iter().any(|known| known.eq_ignore_ascii_case(name));
    let is_permitted = match context.action {
        AuthAction::Select => true,
        AuthAction::Read { table_name, .. } => {
            known(&TABLES, table_name) || table_name.eq_ignore_ascii_case("json_each")
        }
        AuthAction::Function { function_name } => known(&FUNCTIONS, function_name),
        _ => false,
    };
    if is_permitted { Authorization::Allow } else { Authorization::Deny }
}

/// Before anything was begun.
fn refused(why: String) -> Error {
    Error::Usage(format!(
        "--where: {why}; expected one condition on the columns of images, as \"tag = 'holiday'\", that only reads"
    ))
}

/// While the run is at work.
fn failed(error: &rusqlite::Error) -> Error {
    if error.sqlite_error_code() == Some(ErrorCode::OperationInterrupted) {
        let seconds = STATEMENT_TIME.as_secs();
        return Error::System(format!(
            "--where: {LOOK_ROWS} images take longer than {seconds} s; give a simpler condition"
        ));
    }
    Error::System(format!("--where: {}", words(error)))
}

/// SQLite's own words, without the statement.
fn words(error: &rusqlite::Error) -> String {
    match error {
        rusqlite::Error::SqliteFailure(_, Some(text)) => text.clone(),
        rusqlite::Error::SqlInputError { msg, .. } => msg.clone(),
        rusqlite::Error::MultipleStatement => "several statements".to_owned(),
        other => other.to_string(),
    }
}
