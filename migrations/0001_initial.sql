-- The first schema: images with one state column per stage, what the stages made of them, and the runs
-- that did it. It uses nothing newer than SQLite 3.40, so that any sqlite3 program can read it.
-- Times are seconds since 1970 (UTC). Boxes are pixels of the upright image: x0 y0 x1 y1, origin top left.

-- One row per image. `path` is TEXT, or a BLOB where the file's name is not UTF-8.
-- A state is NULL while its stage is not due: no such model, or the stage before it has not ended.
CREATE TABLE images (
    id                 INTEGER PRIMARY KEY AUTOINCREMENT,
    path               ANY NOT NULL CHECK (typeof(path) IN ('text', 'blob')),
    key                TEXT,
    tag                TEXT,
    prompt             TEXT,
    detect_state       TEXT CHECK (detect_state IN ('pending', 'running', 'done', 'failed', 'quarantined')),
    detect_recipe_id   INTEGER REFERENCES recipes (id),
    detect_attempts    INTEGER NOT NULL DEFAULT 0,
    detect_code        TEXT,
    detect_message     TEXT,
    embed_state        TEXT CHECK (embed_state IN ('pending', 'running', 'done', 'failed', 'quarantined')),
    embed_recipe_id    INTEGER REFERENCES recipes (id),
    embed_attempts     INTEGER NOT NULL DEFAULT 0,
    embed_code         TEXT,
    embed_message      TEXT,
    run_id             INTEGER REFERENCES runs (id),
    token              INTEGER,
    file_size_bytes    INTEGER,
    file_mtime_ns      INTEGER,
    format             TEXT,
    width_px           INTEGER,
    height_px          INTEGER,
    stored_width_px    INTEGER,
    stored_height_px   INTEGER,
    orientation        INTEGER CHECK (orientation BETWEEN 1 AND 8),
    orientation_source TEXT,
    components         INTEGER,
    truncated          INTEGER,
    added_at           REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    done_at            REAL,
    CHECK (embed_state IS NULL OR detect_state IS NULL OR detect_state = 'done'),
    CHECK ((token IS NULL) = (run_id IS NULL)),
    CHECK ((detect_state IS 'running' OR embed_state IS 'running') = (token IS NOT NULL)),
    CHECK ((detect_state IS 'failed' OR detect_state IS 'quarantined') = (detect_code IS NOT NULL)),
    CHECK ((embed_state IS 'failed' OR embed_state IS 'quarantined') = (embed_code IS NOT NULL))
) STRICT;

-- Identity: the user's key where there is one, else the path.
CREATE UNIQUE INDEX images_by_key ON images (key) WHERE key IS NOT NULL;
CREATE UNIQUE INDEX images_by_path ON images (path) WHERE key IS NULL;

-- A page of pending rows costs the page: these hold nothing that is done.
CREATE INDEX images_detect_queue ON images (detect_state) WHERE detect_state <> 'done';
CREATE INDEX images_embed_queue ON images (embed_state) WHERE embed_state <> 'done';

-- How many images are in which states under which recipes, kept by triggers in the transaction that
-- changes them. '' stands for a NULL state and 0 for a NULL recipe.
CREATE TABLE counts (
    detect_state     TEXT NOT NULL,
    detect_recipe_id INTEGER NOT NULL,
    embed_state      TEXT NOT NULL,
    embed_recipe_id  INTEGER NOT NULL,
    images           INTEGER NOT NULL,
    PRIMARY KEY (detect_state, detect_recipe_id, embed_state, embed_recipe_id)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER images_counted_on_insert AFTER INSERT ON images BEGIN
    INSERT INTO counts VALUES (ifnull(NEW.detect_state, ''), ifnull(NEW.detect_recipe_id, 0),
                               ifnull(NEW.embed_state, ''), ifnull(NEW.embed_recipe_id, 0), 1)
    ON CONFLICT DO UPDATE SET images = images + 1;
END;

CREATE TRIGGER images_counted_on_delete AFTER DELETE ON images BEGIN
    UPDATE counts SET images = images - 1
    WHERE detect_state = ifnull(OLD.detect_state, '') AND detect_recipe_id = ifnull(OLD.detect_recipe_id, 0)
      AND embed_state = ifnull(OLD.embed_state, '') AND embed_recipe_id = ifnull(OLD.embed_recipe_id, 0);
END;

CREATE TRIGGER images_counted_on_update
AFTER UPDATE OF detect_state, detect_recipe_id, embed_state, embed_recipe_id ON images
WHEN OLD.detect_state IS NOT NEW.detect_state OR OLD.detect_recipe_id IS NOT NEW.detect_recipe_id
  OR OLD.embed_state IS NOT NEW.embed_state OR OLD.embed_recipe_id IS NOT NEW.embed_recipe_id
BEGIN
    UPDATE counts SET images = images - 1
    WHERE detect_state = ifnull(OLD.detect_state, '') AND detect_recipe_id = ifnull(OLD.detect_recipe_id, 0)
      AND embed_state = ifnull(OLD.embed_state, '') AND embed_recipe_id = ifnull(OLD.embed_recipe_id, 0);
    INSERT INTO counts VALUES (ifnull(NEW.detect_state, ''), ifnull(NEW.detect_recipe_id, 0),
                               ifnull(NEW.embed_state, ''), ifnull(NEW.embed_recipe_id, 0), 1)
    ON CONFLICT DO UPDATE SET images = images + 1;
END;

-- A box that was selected, or the whole image (label and score NULL). `crop` is relative to the folder
-- that `--crops` named.
CREATE TABLE regions (
    id       INTEGER PRIMARY KEY AUTOINCREMENT,
    image_id INTEGER NOT NULL REFERENCES images (id) ON DELETE CASCADE,
    label    TEXT,
    score    REAL,
    x0       REAL NOT NULL,
    y0       REAL NOT NULL,
    x1       REAL NOT NULL,
    y1       REAL NOT NULL,
    crop     TEXT,
    CHECK (x0 < x1 AND y0 < y1)
) STRICT;
CREATE INDEX regions_by_image ON regions (image_id);
CREATE INDEX regions_by_label ON regions (label);

-- One vector per region and recipe: little-endian numbers of `dtype`, `dim` of them.
CREATE TABLE embeddings (
    region_id INTEGER NOT NULL REFERENCES regions (id) ON DELETE CASCADE,
    recipe_id INTEGER NOT NULL REFERENCES recipes (id),
    dim       INTEGER NOT NULL,
    dtype     TEXT NOT NULL CHECK (dtype IN ('f32', 'f16')),
    vector    BLOB NOT NULL,
    PRIMARY KEY (region_id, recipe_id),
    CHECK (length(vector) = dim * CASE dtype WHEN 'f32' THEN 4 ELSE 2 END)
) STRICT;

-- Models by content. `digest` is SHA-256 over all files that decide the model's results.
CREATE TABLE models (
    id       INTEGER PRIMARY KEY,
    digest   TEXT NOT NULL UNIQUE,
    path     ANY NOT NULL,
    first_at REAL NOT NULL
) STRICT;

-- Digests of files already read, so that a start does not read gigabytes again.
CREATE TABLE model_files (
    path       ANY NOT NULL PRIMARY KEY,
    size_bytes INTEGER NOT NULL,
    mtime_ns   INTEGER NOT NULL,
    sha256     TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- Everything that decides a stage's results, as canonical JSON. At most one per stage is in force: the one
-- that pending rows are worked with.
CREATE TABLE recipes (
    id       INTEGER PRIMARY KEY AUTOINCREMENT,
    stage    TEXT NOT NULL CHECK (stage IN ('detect', 'embed')),
    body     TEXT NOT NULL,
    model_id INTEGER NOT NULL REFERENCES models (id),
    in_force INTEGER NOT NULL DEFAULT 0 CHECK (in_force IN (0, 1)),
    first_at REAL NOT NULL,
    UNIQUE (stage, body)
) STRICT;
CREATE UNIQUE INDEX recipes_in_force ON recipes (stage) WHERE in_force = 1;

-- One row per process that worked on this database. `ended_at` is NULL while it lives, or when it died.
CREATE TABLE runs (
    id               INTEGER PRIMARY KEY AUTOINCREMENT,
    host             TEXT NOT NULL,
    boot_id          TEXT NOT NULL,
    pid              INTEGER NOT NULL,
    pid_started      INTEGER NOT NULL,
    version          TEXT NOT NULL,
    device           TEXT NOT NULL,
    device_note      TEXT,
    runtime          TEXT NOT NULL,
    settings         TEXT NOT NULL,
    detect_recipe_id INTEGER REFERENCES recipes (id),
    embed_recipe_id  INTEGER REFERENCES recipes (id),
    started_at       REAL NOT NULL,
    heartbeat_at     REAL NOT NULL,
    ended_at         REAL,
    ended_how        TEXT,
    exit_code        INTEGER,
    done             INTEGER NOT NULL DEFAULT 0,
    failed           INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX runs_open ON runs (id) WHERE ended_at IS NULL;

-- Once a second while a run works. Rates are over the last seconds of this run's own work.
CREATE TABLE samples (
    run_id       INTEGER NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    at           REAL NOT NULL,
    done         INTEGER NOT NULL,
    failed       INTEGER NOT NULL,
    detect_per_s REAL NOT NULL,
    embed_per_s  REAL NOT NULL,
    slowest      TEXT NOT NULL,
    rss_bytes    INTEGER NOT NULL,
    held_bytes   INTEGER NOT NULL,
    PRIMARY KEY (run_id, at)
) STRICT, WITHOUT ROWID;

-- Per stage: images by state, the rate of the live runs, and how long the rest will take them.
CREATE VIEW progress AS
WITH
    per_stage (stage, pending, running, done, failed, quarantined) AS (
        SELECT 'detect',
               total(iif(detect_state = 'pending', images, 0)), total(iif(detect_state = 'running', images, 0)),
               total(iif(detect_state = 'done', images, 0)), total(iif(detect_state = 'failed', images, 0)),
               total(iif(detect_state = 'quarantined', images, 0))
        FROM counts
        UNION ALL
        SELECT 'embed',
               total(iif(embed_state = 'pending', images, 0)), total(iif(embed_state = 'running', images, 0)),
               total(iif(embed_state = 'done', images, 0)), total(iif(embed_state = 'failed', images, 0)),
               total(iif(embed_state = 'quarantined', images, 0))
        FROM counts
    ),
    live (detect_per_s, embed_per_s, slowest) AS (
        SELECT sum(s.detect_per_s), sum(s.embed_per_s), max(s.slowest)
        FROM runs r JOIN samples s ON s.run_id = r.id
        WHERE r.ended_at IS NULL
          AND r.heartbeat_at > (julianday('now') - 2440587.5) * 86400.0 - 30
          AND s.at = (SELECT max(at) FROM samples WHERE run_id = r.id)
    ),
    rates AS (
        SELECT p.*,
               CASE stage WHEN 'detect' THEN live.detect_per_s ELSE live.embed_per_s END AS per_s,
               -- What waits for `detect` will wait for `embed` too, where an embedder is in force.
               pending + running + CASE
                   WHEN stage = 'embed' AND EXISTS (SELECT 1 FROM recipes WHERE stage = 'embed' AND in_force = 1)
                   THEN (SELECT total(images) FROM counts WHERE detect_state IN ('pending', 'running')) ELSE 0 END AS ahead,
               live.slowest
        FROM per_stage p, live
    )
SELECT stage,
       CAST(pending AS INTEGER) AS pending, CAST(running AS INTEGER) AS running, CAST(done AS INTEGER) AS done,
       CAST(failed AS INTEGER) AS failed, CAST(quarantined AS INTEGER) AS quarantined,
       round(per_s, 2) AS per_s,
       CASE WHEN ahead = 0 THEN 0 WHEN per_s > 0 THEN CAST(round(ahead / per_s) AS INTEGER) END AS eta_s,
       slowest
FROM rates;

-- Rows that ended with a code.
CREATE VIEW failures AS
SELECT path, 'detect' AS stage, detect_code AS code, detect_attempts AS attempts, detect_message AS message, id AS image_id
FROM images WHERE detect_state IN ('failed', 'quarantined') AND detect_state <> 'done'
UNION ALL
SELECT path, 'embed', embed_code, embed_attempts, embed_message, id
FROM images WHERE embed_state IN ('failed', 'quarantined') AND embed_state <> 'done';

-- Every region that stands, with 1 in `embedded` where the recipe in force (or any, if none is) has its vector.
CREATE VIEW results AS
SELECT i.path, i.key, i.tag, r.label, r.score, r.x0, r.y0, r.x1, r.y1,
       EXISTS (SELECT 1 FROM embeddings e WHERE e.region_id = r.id
               AND e.recipe_id = ifnull((SELECT id FROM recipes WHERE stage = 'embed' AND in_force = 1), e.recipe_id)) AS embedded,
       r.crop, i.id AS image_id, r.id AS region_id
FROM images i JOIN regions r ON r.image_id = i.id
WHERE i.detect_state = 'done' OR (i.detect_state IS NULL AND i.embed_state = 'done');
