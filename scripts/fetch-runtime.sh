#!/usr/bin/env bash
# Fetches the ONNX Runtime library that croprow loads at run time. The Python wheel is the one place
# where package registries hold it; no Python is needed afterwards.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

VERSION=1.31.1
LIBRARY=libonnxruntime.so.$VERSION

usage() {
    cat <<TEXT
usage: scripts/fetch-runtime.sh [--cuda] [--to DIR]

Downloads ONNX Runtime $VERSION and puts its library into DIR.
The last line on stdout is the path of the library.

  --cuda     the build for NVIDIA GPUs (256 MB to download; CUDA 13 and cuDNN 9 are not in it)
  --to DIR   where the library goes (default: .demo/runtime, with --cuda .demo/runtime-cuda)

example: export ORT_DYLIB_PATH=\$(scripts/fetch-runtime.sh)
TEXT
}

parse_arguments() {
    cuda=false
    target_dir=
    while (($# > 0)); do
        case $1 in
            --cuda) cuda=true ;;
            --to)
                (($# > 1)) || die "--to wants a folder"
                target_dir=$2
                shift
                ;;
            --to=*) target_dir=${1#--to=} ;;
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
    if [[ -z $target_dir ]]; then
        if $cuda; then target_dir=$DEMO_DIR/runtime-cuda; else target_dir=$DEMO_DIR/runtime; fi
    fi
}

# Sets package, wheel, wheel_sha256, platform and libraries for this machine.
choose_wheel() {
    local machine
    machine=$(uname -m)
    [[ $(uname -s) == Linux ]] \
        || die "this script knows Linux only; elsewhere install onnxruntime $VERSION and set ORT_DYLIB_PATH"
    case $machine in
        x86_64 | aarch64) ;;
        arm64) machine=aarch64 ;;
        *)
            die "there is no ONNX Runtime $VERSION wheel for $machine, only for x86_64 and aarch64:
  build the library from source and set ORT_DYLIB_PATH"
            ;;
    esac
    platform=manylinux_2_28_$machine
    if $cuda; then
        [[ $machine == x86_64 ]] \
            || die "there is no onnxruntime-gpu $VERSION wheel for $machine: leave --cuda out, or build from source"
        package=onnxruntime-gpu
        wheel_sha256=05d548956197b9d01f59b625de740e0d6be3593f874e241a12dc0362650ecdf7
        libraries=("$LIBRARY" libonnxruntime_providers_shared.so libonnxruntime_providers_cuda.so)
    else
        package=onnxruntime
        case $machine in
            x86_64) wheel_sha256=1f3dea47f2f0e5117c2404cea7d21fd253ae7836a3bf167a501cdfbb2600d536 ;;
            aarch64) wheel_sha256=0b9a492176886992e0e875f06bc0367e333f5fff11711a2d642e18b02f3009cc ;;
        esac
        libraries=("$LIBRARY")
    fi
    wheel=${package/-/_}-$VERSION-cp312-cp312-$platform.whl
}

# The stamp names each file and its size: a copy that was cut short is seen without hashing 300 MB.
wanted_stamp() {
    printf '%s\n' "$wheel_sha256"
    (cd "$1" && stat --format '%n %s' "${libraries[@]}")
}

is_there() {
    [[ -f $target_dir/.croprow-runtime && -e $target_dir/libonnxruntime.so ]] \
        && [[ $(wanted_stamp "$target_dir" 2>/dev/null) == "$(<"$target_dir/.croprow-runtime")" ]]
}

fetch_wheel() {
    local python
    python=$(find_pip)
    # The wheel is chosen by these flags and not by the Python at hand: the library inside is the same.
    pip_download "$python" "$package==$VERSION" "$wheel" "$wheel_sha256" \
        --only-binary=:all: --implementation cp --python-version 3.12 --abi cp312 --platform "$platform"
}

install_libraries() {
    local staging library
    mkdir -p "$target_dir"
    # Beside its destination, so that the renames stay within one file system.
    staging=$(mktemp -d "$target_dir/.incoming-XXXXXX")
    unpack "$DOWNLOAD_DIR/$wheel" "$staging" "${libraries[@]/#/onnxruntime/capi/}"
    wanted_stamp "$staging" >"$staging/.croprow-runtime"
    ln -s "$LIBRARY" "$staging/libonnxruntime.so"
    for library in "${libraries[@]}" libonnxruntime.so .croprow-runtime; do
        mv -fT "$staging/$library" "$target_dir/$library"
    done
    rmdir "$staging"
    rm -rf "$target_dir"/.incoming-*
}

say_what_cuda_needs() {
    cat >&2 <<'TEXT'
The CUDA build also needs these, which it does not contain. Debian's and NVIDIA's system packages hold
them, and so do these PyPI packages (below site-packages/nvidia/, to be put on LD_LIBRARY_PATH):
  libcublasLt.so.13, libcublas.so.13   nvidia-cublas 13
  libcudart.so.13                      nvidia-cuda-runtime 13
  libcurand.so.10                      nvidia-curand 10
  libcufft.so.12                       nvidia-cufft 12
  libcudnn.so.9                        nvidia-cudnn-cu13 9
  libnvrtc.so.13                       nvidia-cuda-nvrtc 13
  libcuda.so.1                         the NVIDIA driver itself, one that serves CUDA 13 (580 or newer)
TEXT
}

main() {
    parse_arguments "$@"
    choose_wheel
    if is_there; then
        say "ONNX Runtime $VERSION is there already"
    else
        require_python
        lock_demo
        fetch_wheel
        install_libraries
        say "ONNX Runtime $VERSION ($package, $platform) is in $target_dir"
    fi
    if $cuda; then say_what_cuda_needs; fi
    printf '%s\n' "$(cd "$target_dir" && pwd)/$LIBRARY"
}

main "$@"
