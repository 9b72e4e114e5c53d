-- Raw detections are kept, so that thresholds can change without the model, and the outcome of a model's
-- self-test is remembered with the model.

-- What label numbers mean, as canonical JSON: the labels of a model or of a prompt, or the prompt's tokens.
CREATE TABLE vocabularies (
    id   INTEGER PRIMARY KEY,
    body TEXT NOT NULL UNIQUE
) STRICT;

-- Candidates of an image, best first: box and (label, score) pairs, packed as `src/candidate.rs` says.
-- `recipe_id` is the recipe that the model ran under; its `candidate_floor` is the lowest score there is.
CREATE TABLE candidates (
    image_id      INTEGER PRIMARY KEY REFERENCES images (id) ON DELETE CASCADE,
    recipe_id     INTEGER NOT NULL REFERENCES recipes (id),
    vocabulary_id INTEGER NOT NULL REFERENCES vocabularies (id),
    count         INTEGER NOT NULL,
    packed        BLOB NOT NULL
) STRICT;

-- Outcomes of the self-test by device and runtime, as JSON. NULL: not tested yet.
ALTER TABLE models ADD COLUMN self_test TEXT;
