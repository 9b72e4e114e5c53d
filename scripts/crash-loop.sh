#!/usr/bin/env bash
# Kills workers with SIGKILL at random moments, starts them again each time, and compares the database with that of an
# undisturbed run, round after round. Real models, the 795 video frames, the release binary.
#
#   scripts/crash-loop.sh [--minutes 10] [--workers 1] [--reader] [--seed 1] [--images 795]
#
#   --minutes N   begin another round of all images until that time is over
#   --workers N   on one database; each kill hits one of them
#   --reader      a reader holds a snapshot of the database through each round
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$PROJECT_DIR"

MINUTES=10 WORKERS=1 READER=no IMAGES=795
RANDOM=1
while [[ $# -gt 0 ]]; do
    case $1 in
        --minutes) MINUTES=$2 && shift ;;
        --workers) WORKERS=$2 && shift ;;
        --seed) RANDOM=$2 && shift ;;
        --images) IMAGES=$2 && shift ;;
        --reader) READER=yes ;;
        *) die "usage: scripts/crash-loop.sh [--minutes N] [--workers N] [--reader] [--seed N] [--images N]" ;;
    esac
    shift
done

require_build_tools
scripts/fetch-runtime.sh >/dev/null
scripts/fetch-demo.sh --video
build_release
CROPROW=target/release/croprow
FOLDER=$(mktemp -d)
PIDS=()
READER_PID=
trap 'kill -9 "${PIDS[@]}" $READER_PID 2>/dev/null; rm -rf "$FOLDER"' EXIT
MODELS=(--detector .demo/models/yolov3-tiny --embedder .demo/models/efficientnet-lite0 --threads 2)
find "$PWD/.demo/video" -name '*.jpg' | sort | sed -n "1,${IMAGES}p" >"$FOLDER/images.txt"

ask() { python3 -c 'import sqlite3, sys; print(sqlite3.connect(sys.argv[1], timeout=30).execute(sys.argv[2]).fetchone()[0])' "$@"; }

worker() {
    "$CROPROW" -q run "$1" "${MODELS[@]}" --crops "$FOLDER/crops" 2>>"$FOLDER/worker.log" &
    PIDS[$2]=$!
}

# One read transaction from now until it is killed.
hold_snapshot() {
    python3 -c '
import sqlite3, sys, time
db = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True, isolation_level=None)
db.execute("BEGIN")
db.execute("SELECT count(*) FROM images").fetchone()
print("held", flush=True)
time.sleep(1e6)' "$1" >"$FOLDER/reader.out" &
    READER_PID=$!
    until [[ -s $FOLDER/reader.out ]]; do sleep 0.05; done
}

# The rows of one round that are not as they should be: sets LOST and DOUBLED.
count_faults() {
    LOST=$(ask "$1" "SELECT count(*) FROM images WHERE embed_state IS NOT 'done'")
    DOUBLED=$(ask "$1" "SELECT (SELECT count(*) FROM (SELECT 1 FROM regions GROUP BY image_id, label, round(x0), round(y0), round(x1), round(y1) HAVING count(*) > 1))
                            + (SELECT count(*) FROM (SELECT 1 FROM embeddings GROUP BY region_id, recipe_id HAVING count(*) > 1))")
}

say "an undisturbed run of $IMAGES images"
$CROPROW add "$FOLDER/calm.db" --from "$FOLDER/images.txt" >/dev/null
BEGAN=$SECONDS
$CROPROW -q run "$FOLDER/calm.db" "${MODELS[@]}" || die "the undisturbed run failed"
say "$((SECONDS - BEGAN)) s; now $MINUTES minutes of kills, $WORKERS worker(s), reader: $READER"

ENDS=$((SECONDS + 60 * MINUTES))
ROUND=0 KILLS=0 IN_FLIGHT=0 ALL_LOST=0 ALL_DOUBLED=0
while [[ $SECONDS -lt $ENDS ]]; do
    ROUND=$((ROUND + 1))
    DB=$FOLDER/round-$ROUND.db
    rm -rf "$FOLDER/crops" && : >"$FOLDER/reader.out"
    $CROPROW add "$DB" --from "$FOLDER/images.txt" >/dev/null
    [[ $READER == no ]] || hold_snapshot "$DB"
    for ((w = 0; w < WORKERS; w++)); do worker "$DB" $w; done
    while :; do
        sleep "$(python3 -c "print(0.3 + $RANDOM / 32768 * 5)")"
        VICTIM=$((RANDOM % WORKERS))
        if kill -9 "${PIDS[$VICTIM]}" 2>/dev/null; then
            KILLS=$((KILLS + 1))
            wait "${PIDS[$VICTIM]}" 2>/dev/null || true
            [[ $(ask "$DB" "SELECT count(*) FROM images WHERE token IS NOT NULL") -eq 0 ]] || IN_FLIGHT=$((IN_FLIGHT + 1))
        else
            wait "${PIDS[$VICTIM]}" || die "a worker ended by itself with code $?: $(tail -n 5 "$FOLDER/worker.log")"
            break
        fi
        worker "$DB" $VICTIM
    done
    # The others end by themselves.
    for ((w = 0; w < WORKERS; w++)); do
        [[ $w -eq $VICTIM ]] || wait "${PIDS[$w]}" || die "a worker ended with code $?: $(tail -n 5 "$FOLDER/worker.log")"
    done
    if [[ $READER == yes ]]; then
        say "the log has $(($(stat -c %s "$DB-wal" 2>/dev/null || echo 0) >> 20)) MiB while the snapshot is held"
        kill -9 "$READER_PID" && wait "$READER_PID" 2>/dev/null || true
        READER_PID=
    fi
    $CROPROW -q run "$DB" || die "nothing should be pending in $DB"
    count_faults "$DB"
    ALL_LOST=$((ALL_LOST + LOST)) ALL_DOUBLED=$((ALL_DOUBLED + DOUBLED))
    say "round $ROUND: $KILLS kills so far, $IN_FLIGHT with rows in flight; lost $LOST, doubled $DOUBLED"
    python3 scripts/compare_dumps.py "$FOLDER/calm.db" "$DB" || die "round $ROUND differs from the undisturbed run"
    rm -f "$DB" "$DB-wal" "$DB-shm"
done
say "$ROUND rounds, $KILLS kills ($IN_FLIGHT with rows in flight), $ALL_LOST rows lost, $ALL_DOUBLED rows doubled, all dumps equal"
[[ $ALL_LOST -eq 0 && $ALL_DOUBLED -eq 0 ]]
