-- Rows that were in the hands of a worker when its process died: one of them may have killed it. They are worked on in a child
-- process until they have ended. `alone`: a child died with this row and few others in its hands, and it is now worked on with no
-- other row beside it; `deaths` counts the children that died like that, seen by their living parent.
CREATE TABLE suspects (
    image_id INTEGER PRIMARY KEY REFERENCES images (id) ON DELETE CASCADE,
    run_id   INTEGER NOT NULL REFERENCES runs (id),
    at       REAL NOT NULL,
    alone    INTEGER NOT NULL DEFAULT 0 CHECK (alone IN (0, 1)),
    deaths   INTEGER NOT NULL DEFAULT 0 CHECK (deaths >= 0)
) STRICT;
