#!/usr/bin/env bash
# Measures croprow's release binary side by side with Python programs that do the same, and writes a table.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR/.. source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

usage() {
    cat <<'TEXT'
usage: scripts/bench/run.sh [--quick] [--scenario NAME]... [--pairs N] [--cores N] [--out FILE] [--binary FILE]

Prepares what is missing (see scripts/bench/prepare.sh --help), builds croprow and measures. The table goes to
scripts/bench/RESULTS.md, the figures beside it to RESULTS.json; a run of some scenarios leaves the others' as they are.

  --quick          few photos, one pair, under three minutes: does everything still work? (.demo/bench/quick.md)
  --scenario NAME  detect-embed, video, large, web, decode, memory or database; repeatable (default: all)
  --pairs N        how often each program runs (default: 5)
  --cores N        on the first N cores only (default: all)
  --out FILE       another table
  --binary FILE    another croprow; nothing is built

A full run takes about an hour on two cores. Leave the machine alone meanwhile.

example: scripts/bench/run.sh --scenario video --pairs 3
TEXT
}

for argument in "$@"; do
    case $argument in
        -h | --help)
            usage
            exit 0
            ;;
    esac
done

"$PROJECT_DIR/scripts/bench/prepare.sh"
if [[ " $* " != *" --binary"* ]]; then
    require_build_tools
    build_release
    (cd "$PROJECT_DIR" && cargo build --release --locked --quiet --example database)
fi
# measure.py ends what it has started when it is stopped itself.
exec "$DEMO_DIR/venv-bench/bin/python" "$PROJECT_DIR/scripts/bench/measure.py" "$@"
