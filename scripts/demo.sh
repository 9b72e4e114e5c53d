#!/usr/bin/env bash
# The main job on real photos with real models, from a fresh checkout. The second time it only shows what
# is there.
#
#   scripts/demo.sh            15 photos
#   scripts/demo.sh --video    795 frames of a street as well
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$PROJECT_DIR"

VIDEO=no
case ${1:-} in
    "") ;;
    --video) VIDEO=yes ;;
    *) die "usage: scripts/demo.sh [--video]" ;;
esac

require_build_tools
scripts/fetch-runtime.sh >/dev/null
if [[ $VIDEO == yes ]]; then scripts/fetch-demo.sh --video; else scripts/fetch-demo.sh; fi
build_release

CROPROW=target/release/croprow
MODELS=(--detector .demo/models/yolov3-tiny --embedder .demo/models/efficientnet-lite0)

# show COMMAND...: prints and runs it. Failed rows (exit code 2) are shown by status and end nothing.
show() {
    say "\$ $*"
    local code=0
    "$@" || code=$?
    [[ $code -eq 0 || $code -eq 2 ]] || exit "$code"
}

# work DATABASE FOLDER
work() {
    say ""
    show $CROPROW add "$1" "$2"
    show $CROPROW run "$1" "${MODELS[@]}"
    show $CROPROW status "$1"
}

work .demo/photos.db .demo/photos
say ""
say "what was found:"
python3 scripts/show_results.py .demo/photos.db
if [[ $VIDEO == yes ]]; then
    work .demo/video.db .demo/video
fi

cat <<'TEXT'

Three ways to go on:
  ask    sqlite3 .demo/photos.db "SELECT label, count(*), round(avg(score), 2) FROM results GROUP BY label"
  again  target/release/croprow run .demo/photos.db          (nothing is pending: it ends at once)
  yours  target/release/croprow add my.db ~/Pictures
         target/release/croprow run my.db --detector .demo/models/yolov3-tiny --embedder .demo/models/efficientnet-lite0
TEXT
