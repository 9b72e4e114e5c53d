#!/usr/bin/env bash
# Times `croprow select` on 100,000 images, and compares what it leaves with a fresh run at the new threshold.
#
#   scripts/bench/select.sh                      from 0.3 to 0.5 and back, 100,000 images
#   scripts/bench/select.sh 10000                as many images
#
# The candidates are those of the trained detector on 795 frames of video, each taken again and again.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR/.. source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
cd "$PROJECT_DIR"
IMAGES=${1:-100000}
WORK=$DEMO_DIR/bench-select
CROPROW=target/release/croprow
# The embedder is a tiny one: what counts here is how many vectors there are, not how long they are.
MODELS=(--detector .demo/models/yolov3-tiny --embedder tests/data/models/tiny-tokens --device cpu)

require_build_tools
scripts/fetch-runtime.sh >/dev/null
scripts/fetch-demo.sh --video
build_release
mkdir -p "$WORK"

# worked THRESHOLD: a database of the frames, worked on once and kept.
worked() {
    local db=$WORK/frames-$1.db
    if [[ ! -f $db.done ]]; then
        rm -f "$db" "$db"-wal "$db"-shm
        say "working on the frames with threshold $1 (some minutes, once)"
        "$CROPROW" -q add "$db" .demo/video >/dev/null
        "$CROPROW" -q run "$db" "${MODELS[@]}" --box-threshold "$1"
        touch "$db.done"
    fi
    python3 scripts/bench/multiply.py "$db" "$WORK/$1.db" --images "$IMAGES"
}

worked 0.3
worked 0.5
say "from 0.3 to 0.5"
"$CROPROW" select "$WORK/0.3.db" --box-threshold 0.5
python3 scripts/compare_dumps.py "$WORK/0.3.db" "$WORK/0.5.db"
say "from 0.5 to 0.3: what is new waits for the embedder"
worked 0.3
"$CROPROW" select "$WORK/0.5.db" --box-threshold 0.3
python3 scripts/compare_dumps.py --without-vectors "$WORK/0.5.db" "$WORK/0.3.db"
sqlite3 -readonly "$WORK/0.5.db" "SELECT stage, pending, done FROM progress" 2>/dev/null || true
rm -f "$WORK"/0.[35].db*
