#!/usr/bin/env bash
# All tests, on a fresh machine too: fetches the runtime library, the trained models and the photos first.
#
#   scripts/test.sh                      everything
#   scripts/test.sh kill_9               tests whose name holds that word
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$PROJECT_DIR"
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,5s/^# \{0,1\}//p' "$0" && exit 0; }

require_build_tools
scripts/fetch-runtime.sh >/dev/null
scripts/fetch-demo.sh
say "running the tests (the first build takes some minutes)"
cargo test --locked --no-fail-fast -- "$@"
