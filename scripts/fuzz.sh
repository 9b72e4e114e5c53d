#!/usr/bin/env bash
# Feeds what reads a stranger's bytes with made-up ones, guided by the branches they reach, and stops at what is wrong.
#
#   scripts/fuzz.sh                              one minute for each target
#   scripts/fuzz.sh --minutes 10 jpeg formats    these two
#   scripts/fuzz.sh --input FILE jpeg            one input again, with what it said
#
# Needs a C++ compiler; with the stable toolchain. New inputs that reach something new are kept in target/fuzz/corpus,
# what crashes, hangs or takes 2 GB in target/fuzz/found. The seeds are in tests/data/fuzz.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$PROJECT_DIR"
require_build_tools

ALL=(header jpeg formats candidates outputs prompts graphs importers conditions)
MINUTES=1
INPUT=
TARGETS=()
while [[ $# -gt 0 ]]; do
    case $1 in
        --minutes) MINUTES=${2:?minutes} && shift 2 ;;
        --input) INPUT=${2:?a file} && shift 2 ;;
        -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0" && exit 0 ;;
        -*) die "unknown option $1" ;;
        *) TARGETS+=("$1") && shift ;;
    esac
done
[[ ${#TARGETS[@]} -gt 0 ]] || TARGETS=("${ALL[@]}")

# What cargo-fuzz sets, without the sanitizers, which only a nightly toolchain has.
export RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing"
HOST=$(rustc -vV | sed -n 's/^host: //p')
say "building the fuzzer (the first time takes some minutes)"
cargo build --release --manifest-path tests/fuzz/Cargo.toml --target "$HOST" --target-dir target/fuzz
FUZZER=target/fuzz/$HOST/release/croprow-fuzz

LIMITS=(-rss_limit_mb=2048 -malloc_limit_mb=1024 -timeout=20)
FAULTS=0
for target in "${TARGETS[@]}"; do
    export CROPROW_FUZZ_TARGET=$target
    if [[ -n $INPUT ]]; then
        CROPROW_FUZZ_PANICS=1 "$FUZZER" "${LIMITS[@]}" "$INPUT"
        continue
    fi
    mkdir -p "target/fuzz/corpus/$target" "target/fuzz/found"
    log=target/fuzz/$target.log
    code=0
    "$FUZZER" "${LIMITS[@]}" -max_len=65536 -max_total_time=$((MINUTES * 60)) -print_final_stats=1 \
        -artifact_prefix="target/fuzz/found/$target-" "target/fuzz/corpus/$target" "tests/data/fuzz/$target" \
        2>"$log" || code=$?
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    branches=$(grep -oE 'cov: [0-9]+' "$log" | tail -n 1)
    say "$target: ${runs:-?} inputs, ${branches:-cov: ?}, $MINUTES min"
    if [[ $code -ne 0 ]]; then
        tail -n 15 "$log" >&2
        say "error: $target found something: see target/fuzz/found/$target-*"
        FAULTS=$((FAULTS + 1))
    fi
done
[[ $FAULTS -eq 0 ]] || die "$FAULTS targets found something"
