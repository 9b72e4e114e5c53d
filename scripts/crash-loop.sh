#!/usr/bin/env bash
# Kills a worker with SIGKILL at random moments, starts it again each time, and compares the database with
# that of an undisturbed run. Real models, the 795 video frames, the release binary.
#
#   scripts/crash-loop.sh [--kills 20] [--seed 1]
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$PROJECT_DIR"

KILLS=20
RANDOM=1
while [[ $# -gt 0 ]]; do
    case $1 in
        --kills) KILLS=$2 ;;
        --seed) RANDOM=$2 ;;
        *) die "usage: scripts/crash-loop.sh [--kills N] [--seed N]" ;;
    esac
    shift 2
done

require_build_tools
scripts/fetch-runtime.sh >/dev/null
scripts/fetch-demo.sh --video
build_release
CROPROW=target/release/croprow
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
MODELS=(--detector .demo/models/yolov3-tiny --embedder .demo/models/efficientnet-lite0)

ask() { python3 -c 'import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute(sys.argv[2]).fetchone()[0])' "$@"; }

say "an undisturbed run"
$CROPROW add "$FOLDER/calm.db" .demo/video >/dev/null
BEGAN=$SECONDS
$CROPROW -q run "$FOLDER/calm.db" "${MODELS[@]}" || die "the undisturbed run failed"
TOOK=$((SECONDS - BEGAN))
say "$TOOK s; now with $KILLS kills"

$CROPROW add "$FOLDER/killed.db" .demo/video >/dev/null
IN_FLIGHT=0
for ((kill = 1; kill <= KILLS; kill++)); do
    $CROPROW -q run "$FOLDER/killed.db" "${MODELS[@]}" --crops "$FOLDER/crops" 2>/dev/null &
    WORKER=$!
    # Between 0.3 s and what lets the work last for all kills.
    sleep "$(python3 -c "print(0.3 + $RANDOM / 32768 * max(0.5, 1.5 * $TOOK / $KILLS))")"
    if ! kill -9 "$WORKER" 2>/dev/null; then
        wait "$WORKER" || die "the worker ended by itself with code $?"
        say "the work was done after $((kill - 1)) kills"
        break
    fi
    wait "$WORKER" 2>/dev/null || true
    HELD=$(ask "$FOLDER/killed.db" "SELECT count(*) FROM images WHERE token IS NOT NULL")
    DONE=$(ask "$FOLDER/killed.db" "SELECT count(*) FROM images WHERE embed_state = 'done'")
    [[ $HELD -gt 0 ]] && IN_FLIGHT=$((IN_FLIGHT + 1))
    say "kill $kill: $DONE done, $HELD in flight"
done
$CROPROW run "$FOLDER/killed.db" || die "the last run failed"
say "$IN_FLIGHT kills met rows in flight"
ask "$FOLDER/killed.db" "SELECT 'rows ' || count(*) || ', done ' || sum(embed_state = 'done') || ', most attempts ' || max(detect_attempts) FROM images"
python3 scripts/compare_dumps.py "$FOLDER/calm.db" "$FOLDER/killed.db"
