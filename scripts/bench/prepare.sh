#!/usr/bin/env bash
# Prepares what scripts/bench/run.sh measures with: a Python environment, seeded models, photos. Once; quick afterwards.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR/.. source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

usage() {
    cat <<'TEXT'
usage: scripts/bench/prepare.sh

Puts into .demo/:
  venv-bench       torch, transformers, onnxruntime, opencv and the like (about 5 GB, unless .demo/venv-export has
                   the most of it already; then 80 MB)
  bench/lib        libturbojpeg of Debian (left out where there is no apt-get)
  bench/models     a small GroundingDINO, DINOv2-small and an embedder of one layer, with seeded weights, as ONNX
  bench/photos     about 1,600 JPEGs of 0.3 to 400 megapixels (1 GB, some minutes of all cores)
  bench/ways.json  how near other ways of preprocessing come to that of Hugging Face

example: scripts/bench/prepare.sh && ls .demo/bench/photos
TEXT
}

HERE=$PROJECT_DIR/scripts/bench
BENCH=$DEMO_DIR/bench
VENV=$DEMO_DIR/venv-bench
EXPORT_VENV=$DEMO_DIR/venv-export
EXPORT_PINS=$PROJECT_DIR/scripts/models/requirements-export.txt
PHOTO_SETS=(mix large web shapes mp24 mp400)
# Of the mix: enough for each kind of JPEG to be among them.
PHOTOS_COMPARED=60

export HF_HUB_OFFLINE=1

# has_pins PYTHON FILE: are exactly these versions installed?
has_pins() {
    [[ -x $1 ]] && "$1" - "$2" <<'PYTHON'
import importlib.metadata, pathlib, sys

lines = [line.split("#")[0].strip() for line in pathlib.Path(sys.argv[1]).read_text().splitlines()]
for name, version in (line.split("==") for line in lines if line):
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        sys.exit(1)
    if found.split("+")[0] != version:
        sys.exit(1)
PYTHON
}

install() {
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --only-binary=:all: "$@" >&2 \
        || die "pip could not install what scripts/bench needs (see its message above)"
}

# borrow_packages: venv-bench sees the packages of venv-export, of which each is 1 GB and more.
borrow_packages() {
    "$EXPORT_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv-export.pth"
}

make_bench_venv() {
    local recipe
    recipe=$(recipe_of "$HERE/requirements.txt" "$EXPORT_PINS" "$(python3 --version)")
    if stamped venv-bench "$recipe" && "$VENV/bin/python" -c 'import cv2, torch, turbojpeg' 2>/dev/null; then
        return
    fi
    rm -f "$STAMP_DIR/venv-bench"
    python3 -m venv --clear "$VENV" >&2 \
        || die "python3 cannot make environments (Debian, Ubuntu: apt install python3-venv)"
    if has_pins "$EXPORT_VENV/bin/python" "$EXPORT_PINS"; then
        say "making the Python environment .demo/venv-bench on top of .demo/venv-export (80 MB)"
        borrow_packages
    else
        say "making the Python environment .demo/venv-bench (torch and transformers, about 5 GB)"
        install --requirement "$EXPORT_PINS"
    fi
    install --no-deps --requirement <(grep opencv "$HERE/requirements.txt")
    # Only its source is published.
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
        "$(grep PyTurboJPEG "$HERE/requirements.txt")" >&2 || die "pip could not install PyTurboJPEG"
    stamp venv-bench "$recipe"
}

# Debian rebuilds packages, so there is no hash to pin; apt-get checks the archive's signature.
fetch_turbojpeg() {
    local unpacked=$SCRATCH_DIR/turbojpeg
    if [[ -e $BENCH/lib/libturbojpeg.so.0 ]]; then
        return
    fi
    if ! apt_unpack libturbojpeg0 "$unpacked" && ! apt_unpack libturbojpeg "$unpacked"; then
        say "going on without libturbojpeg: three ways of decoding are left out, unless the system has it"
        return
    fi
    mkdir -p "$BENCH/lib"
    find "$unpacked" -name 'libturbojpeg.so.0*' -exec cp -a {} "$BENCH/lib" \;
    [[ -e $BENCH/lib/libturbojpeg.so.0 ]] || die "the package holds no libturbojpeg.so.0"
}

make_models() {
    local recipe
    recipe=$(recipe_of "$EXPORT_PINS" "$HERE/prepare_models.py" \
        "$PROJECT_DIR"/scripts/models/{one_layer_embedder,export_embedder,export_grounding_dino}.py \
        "$PROJECT_DIR"/scripts/models/{grounding_dino_patches,torch_export,onnx_graph}.py \
        "$PROJECT_DIR/scripts/reference/tiny_grounding_dino.py")
    if stamped bench-models "$recipe" && [[ -f $BENCH/models/grounding-dino-small-input/model.onnx ]]; then
        return
    fi
    say "making the seeded models and proving their exports (about a minute)"
    "$VENV/bin/python" "$HERE/prepare_models.py" "$BENCH/models" >"$SCRATCH_DIR/models.log" 2>&1 \
        || { cat "$SCRATCH_DIR/models.log" >&2; die "the models could not be made"; }
    say "  .demo/bench/models, $(human_size "$BENCH/models")"
    rm -f "$STAMP_DIR/bench-ways"
    stamp bench-models "$recipe"
}

make_photos() {
    local name recipe
    # The tables name the files by their full paths.
    recipe=$(recipe_of "$HERE/prepare_photos.py" "$(grep ^pillow "$EXPORT_PINS")" "$(readlink -f "$BENCH")")
    for name in "${PHOTO_SETS[@]}"; do
        if stamped "bench-photos-$name" "$recipe" && [[ -f $BENCH/photos/$name.db ]]; then
            continue
        fi
        say "making the photos of the set $name"
        prepare_photos "$name"
        stamp "bench-photos-$name" "$recipe"
    done
    # Tables only; their files are there.
    recipe=$(recipe_of "$recipe" "$STAMP_DIR/bench-photos-mix" "$STAMP_DIR/video")
    if ! stamped bench-photos-tables "$recipe"; then
        prepare_photos twelve video
        stamp bench-photos-tables "$recipe"
    fi
}

prepare_photos() {
    "$VENV/bin/python" "$HERE/prepare_photos.py" --photos "$DEMO_DIR/photos" --video "$DEMO_DIR/video" \
        --out "$BENCH/photos" "$@" >&2
}

compare_ways() {
    local recipe
    recipe=$(recipe_of "$PHOTOS_COMPARED" "$HERE"/peer/{cosine_of_ways,preprocessing_ways,pictures}.py \
        "$STAMP_DIR/bench-models" "$STAMP_DIR/bench-photos-mix")
    if stamped bench-ways "$recipe" && [[ -f $BENCH/ways.json && -f $BENCH/ways.npz ]]; then
        return
    fi
    say "comparing ways of preprocessing on $PHOTOS_COMPARED photos (about two minutes)"
    "$VENV/bin/python" "$HERE/peer/cosine_of_ways.py" --photos "$BENCH/photos/mix.db" --limit "$PHOTOS_COMPARED" \
        --embedder "$BENCH/models/dinov2-small-onnx" --out "$BENCH/ways.json" >&2
    stamp bench-ways "$recipe"
}

main() {
    case ${1:-} in
        "") ;;
        -h | --help)
            usage
            exit 0
            ;;
        *)
            usage >&2
            die "unknown argument: $1"
            ;;
    esac
    require_python
    "$PROJECT_DIR/scripts/fetch-runtime.sh" >/dev/null
    "$PROJECT_DIR/scripts/fetch-demo.sh" --video
    lock_demo
    mkdir -p "$BENCH"
    make_bench_venv
    fetch_turbojpeg
    make_models
    make_photos
    compare_ways
}

main "$@"
