#!/usr/bin/env bash
# The demo's models on the CPU and on CUDA: results compared, images per second, device memory. Needs no
# Rust toolchain and no network where these are there already: the release binary, .demo/models,
# .demo/photos (or any folder of images) and ONNX Runtime for CUDA in .demo/runtime-cuda
# (scripts/fetch-runtime.sh --cuda). CUDA 13 and cuDNN 9 are found in the system or in Python's packages.
# Ends in less than five minutes.
#
#   scripts/gpu-check.sh [--binary FILE] [--runtime DIR] [--models DIR] [--images DIR] [--rounds N]
#
# Exit code 0: the results agree. 1: they do not, or something is missing. 3: there is no NVIDIA GPU.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$PROJECT_DIR"

BINARY=target/release/croprow
RUNTIME=.demo/runtime-cuda
MODELS=.demo/models
IMAGES=.demo/photos
ROUNDS=20
while [[ $# -gt 0 ]]; do
    case $1 in
        --binary) BINARY=$2 ;;
        --runtime) RUNTIME=$2 ;;
        --models) MODELS=$2 ;;
        --images) IMAGES=$2 ;;
        --rounds) ROUNDS=$2 ;;
        *) die "usage: scripts/gpu-check.sh [--binary FILE] [--runtime DIR] [--models DIR] [--images DIR] [--rounds N]" ;;
    esac
    shift 2
done

if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; then
    say "no NVIDIA GPU here: nothing was checked"
    exit 3
fi
[[ -x $BINARY ]] || die "$BINARY is missing: cargo build --release"
LIBRARY=$RUNTIME/libonnxruntime.so
[[ -e $LIBRARY ]] || LIBRARY=$(find "$RUNTIME" -name 'libonnxruntime.so.*' 2>/dev/null | head -n 1)
[[ -n $LIBRARY ]] || die "no runtime library for CUDA in $RUNTIME: scripts/fetch-runtime.sh --cuda"

# Python's packages keep each CUDA library in a folder of its own.
PYTHON_LIBRARIES=$(python3 - <<'PYTHON'
import glob, site, sysconfig
roots = {sysconfig.get_paths()["purelib"], *site.getsitepackages(), site.getusersitepackages()}
print(":".join(sorted(folder for root in roots for pattern in ("nvidia/*/lib", "nvidia/*/*/lib")
                      for folder in glob.glob(f"{root}/{pattern}"))))
PYTHON
)
export LD_LIBRARY_PATH=${PYTHON_LIBRARIES:+$PYTHON_LIBRARIES:}${LD_LIBRARY_PATH:-}

FOLDER=$(mktemp -d)
SAMPLER=
trap '[[ -n $SAMPLER ]] && kill "$SAMPLER" 2>/dev/null; rm -rf "$FOLDER"' EXIT
# The same images many times under keys of their own: a run long enough to have a rate.
python3 - "$IMAGES" "$ROUNDS" >"$FOLDER/rows.jsonl" <<'PYTHON'
import json, os, sys
folder, rounds = sys.argv[1], int(sys.argv[2])
for round_number in range(rounds):
    for name in sorted(os.listdir(folder)):
        print(json.dumps({"path": os.path.abspath(os.path.join(folder, name)), "key": f"{round_number}/{name}"}))
PYTHON

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
# measure NAME DEVICE SOURCE [FLAG...]: a run, its summary line, and what it left in NAME.db
measure() {
    local name=$1 device=$2
    shift 2
    "$BINARY" add "$FOLDER/$name.db" "$@" >/dev/null
    nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -lms 200 >"$FOLDER/$name.memory" &
    SAMPLER=$!
    "$BINARY" -v run "$FOLDER/$name.db" --detector "$MODELS/yolov3-tiny" --embedder "$MODELS/efficientnet-lite0" \
        --device "$device" --runtime "$LIBRARY" --batch 8 --json >"$FOLDER/$name.json" 2>"$FOLDER/$name.log" || {
        cat "$FOLDER/$name.log" >&2
        die "the run on $device failed"
    }
    kill "$SAMPLER" 2>/dev/null || true
    SAMPLER=
    python3 - "$name" "$FOLDER/$name.json" "$FOLDER/$name.memory" <<'PYTHON'
import json, sys
name, summary, memory = sys.argv[1], json.load(open(sys.argv[2])), [int(v) for v in open(sys.argv[3]).read().split() if v.isdigit()]
used = f", device memory {min(memory)} to {max(memory)} MiB" if memory else ""
print(f"{name}: {summary['done']} images in {summary['seconds']:.2f} s, {summary['done'] / summary['seconds']:.1f} images/s{used}")
PYTHON
}
measure cpu cpu "$IMAGES"
measure cuda cuda "$IMAGES"
measure cuda-long cuda --from "$FOLDER/rows.jsonl"
# Without page-locked memory a run works all the same and is slower, so it has to be asked for.
pinned() {
    [[ $(grep -c "$1" "$FOLDER/cuda.log") -eq $2 ]] || {
        cat "$FOLDER/cuda.log" >&2
        die "not $2 times in the log of the run on CUDA: $1"
    }
}
pinned "tensors of calls are filled in page-locked memory" 1
pinned "its outputs come into page-locked memory" 2
say "inputs and outputs of both models were in page-locked memory"
# CUDA sums in another order and may use TF32 in convolutions.
python3 scripts/compare_dumps.py "$FOLDER/cpu.db" "$FOLDER/cuda.db" --box-px 2 --score 0.01 --cosine 0.999
