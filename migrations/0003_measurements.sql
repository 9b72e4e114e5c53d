-- What a run measures is kept, so that the next one starts with it and people can see where the time went: the best
-- batch sizes, what each step's threads did second by second, memory of the device, and a summary at the end.

-- What `--batch auto` learnt: images per second of a model on a device (`cpu` or the GPU's name) at a batch of
-- `images`, for a model input of `shape` (`416x416`: width x height).
CREATE TABLE batch_sizes (
    model_id INTEGER NOT NULL REFERENCES models (id) ON DELETE CASCADE,
    device   TEXT NOT NULL,
    shape    TEXT NOT NULL CHECK (shape GLOB '[1-9]*x[1-9]*'),
    images   INTEGER NOT NULL CHECK (images > 0),
    per_s    REAL NOT NULL CHECK (per_s >= 0),
    at       REAL NOT NULL,
    PRIMARY KEY (model_id, device, shape)
) STRICT, WITHOUT ROWID;

-- Device memory in use by this process as its driver tells (0 without a GPU); the share of the model's input values
-- that were padding, and the mean linear scale at which pictures were decoded (1 full size, 0.125 an eighth), both
-- since the sample before.
ALTER TABLE samples ADD COLUMN device_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE samples ADD COLUMN padding REAL NOT NULL DEFAULT 0;
ALTER TABLE samples ADD COLUMN decode_scale REAL NOT NULL DEFAULT 1;

-- Beside each line of `samples`, one per step of the flow: the shares of the time since the line before that its
-- threads worked, waited for input, and waited for the next step or for memory, and the messages that waited for it.
CREATE TABLE step_samples (
    run_id      INTEGER NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    at          REAL NOT NULL,
    step        TEXT NOT NULL CHECK (step IN ('read', 'decode', 'detect', 'crop', 'embed', 'commit')),
    busy        REAL NOT NULL,
    waiting_in  REAL NOT NULL,
    waiting_out REAL NOT NULL,
    queued      INTEGER NOT NULL,
    PRIMARY KEY (run_id, at, step)
) STRICT, WITHOUT ROWID;

-- What a run did in all, as JSON; written at its end.
ALTER TABLE runs ADD COLUMN summary TEXT;

-- The scale at which the picture was decoded that the detector saw: 1/1, 1/2, 1/4 or 1/8. Regions that are large enough
-- in it are cut from it, so it must be known when another embedder comes.
ALTER TABLE images ADD COLUMN decode_denominator INTEGER CHECK (decode_denominator IN (1, 2, 4, 8));
