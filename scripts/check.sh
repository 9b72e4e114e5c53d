#!/usr/bin/env bash
# What a change must pass before it is committed: format, lints, import rules, documentation, tests.
#
#   scripts/check.sh               everything
#   scripts/check.sh --no-tests    all but the tests
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$PROJECT_DIR"
require_build_tools

FAULTS=0

# forbid MESSAGE PATTERN FILE...: every line of the files that matches is a fault. Comments may name things.
forbid() {
    local message=$1 pattern=$2
    shift 2
    local hits
    hits=$(grep -nE "$pattern" "$@" /dev/null | grep -vE '^[^:]+:[0-9]+:\s*//' || true)
    if [[ -n $hits ]]; then
        say "error: $message"
        say "$hits"
        FAULTS=$((FAULTS + 1))
    fi
}

# sources FOLDER_OR_FILE...: the Rust files below.
sources() { find "$@" -name '*.rs' | sort; }

say "import rules"
mapfile -t PLAIN < <(sources src/candidate.rs src/config.rs src/error.rs src/fault.rs src/file_system.rs src/geometry.rs \
    src/locked.rs src/printable.rs src/recipe.rs src/row.rs)
mapfile -t LIBRARY < <(sources src/lib.rs src/verify src/pipeline src/input src/db src/model src/pixels "${PLAIN[@]}")
mapfile -t DB < <(sources src/db)
mapfile -t MODEL < <(sources src/model)
mapfile -t PIXELS < <(sources src/pixels)
mapfile -t INPUT < <(sources src/input)
mapfile -t OUTSIDE_DB < <(sources src | grep -v '^src/db/')
mapfile -t STAGES < <(printf 'src/pipeline/%s.rs\n' read decode detect crop embed commit)
forbid "plain data imports a module that does things" 'crate::(verify|pipeline|input|db|model|pixels|cli)' "${PLAIN[@]}"
forbid "db imports what is not to its right" 'crate::(verify|pipeline|input|model|pixels|cli)' "${DB[@]}"
forbid "model imports what is not to its right" 'crate::(verify|pipeline|input|db|pixels|cli)' "${MODEL[@]}"
forbid "pixels imports what is not to its right" 'crate::(verify|pipeline|input|db|model|cli)' "${PIXELS[@]}"
forbid "input imports what is not to its right" 'crate::(verify|pipeline|cli)' "${INPUT[@]}"
forbid "a stage names another stage" 'super::(read|decode|detect|crop|embed|commit)\b' "${STAGES[@]}"
forbid "the library sees the command line" '\b(clap|indicatif)::' "${LIBRARY[@]}"
forbid "SQL outside src/db" '"[^"]*\b(SELECT .* FROM|INSERT INTO|UPDATE [a-z_]+ SET|DELETE FROM|PRAGMA [a-z_]+)\b' \
    $(printf '%s\n' "${OUTSIDE_DB[@]}" | grep -v '^src/cli/')
forbid "a name for everything and nothing" '^(pub )?mod (utils?|common|helpers?|managers?);' $(sources src)
forbid "a path on its way to people that is not made printable" '\.display\(\)' $(sources src)
# A child says numbers to its parent, and nothing that came from outside.
forbid "stdout or stderr past src/cli/talk.rs" '\b(e?print(ln)?!|io::(stdout|stderr)\(\)\.lock)' \
    $(sources src | grep -v -e '^src/cli/talk.rs' -e '^src/pipeline/apart.rs')
forbid "a session of the runtime outside src/model" '\bort::' $(sources src | grep -v '^src/model/')

say "sizes"
while read -r lines file; do
    if [[ $file != total && $lines -gt 500 ]]; then
        say "error: $file has $lines lines; 500 is the limit"
        FAULTS=$((FAULTS + 1))
    fi
done < <(sources src | xargs wc -l)

say "format"
cargo fmt --check || FAULTS=$((FAULTS + 1))
cargo fmt --check --manifest-path tests/fuzz/Cargo.toml || FAULTS=$((FAULTS + 1))
# Its lock file follows the program's dependencies.
cargo metadata --locked --format-version 1 --manifest-path tests/fuzz/Cargo.toml >/dev/null || FAULTS=$((FAULTS + 1))
say "clippy"
cargo clippy --locked --all-targets --all-features -- -D warnings || FAULTS=$((FAULTS + 1))
say "documentation"
RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --document-private-items || FAULTS=$((FAULTS + 1))
if [[ ${1:-} != --no-tests ]]; then
    scripts/test.sh || FAULTS=$((FAULTS + 1))
fi

[[ $FAULTS -eq 0 ]] || die "$FAULTS checks failed"
say "all checks passed"
