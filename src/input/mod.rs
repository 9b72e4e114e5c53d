//! Sources of rows: folders, lists, JSON, JSONL, CSV, another SQLite. Explicit lists are neither opened nor
//! stat-ed beyond the list itself. All SQL is in `db`.
