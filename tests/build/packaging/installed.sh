#!/usr/bin/env bash
# What a release offers beside the wheels (wheel_try.sh), as users install it, in Debian roots of essential packages: the llama.cpp
# backend runs in Debian's own llama.cpp, and the Debian package's headers are compiled.
#
#   bash tests/build/packaging/installed.sh FOLDER RELEASE
#
# RELEASE is the folder of cmake/packaging/release.sh. As root, who makes the roots FOLDER/bookworm, FOLDER/trixie and FOLDER/forky.
# RELEASE/TRIED gets a line for each try. Exit status: 1 if a try failed, 2 if none can be made.
set -euo pipefail
# shellcheck source=examples/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../../examples/setup.sh"

(($# == 2)) || die 2 "which folders? (bash tests/build/packaging/installed.sh FOLDER RELEASE)"
mkdir -p "$1"
folder=$(cd "$1" && pwd)
release=$(cd "$2" && pwd)
tests=$mdkv_root/tests
(cd "$release" && sha256sum --quiet --check SHA256SUMS) || die 1 "$release/SHA256SUMS does not hold"
# shellcheck source=tests/build/packaging/roots.sh
source "$tests/build/packaging/roots.sh"

# llama_cpp SUITE: Debian's llama.cpp loads its backends, and gets one more
llama_cpp() {
    local name="$1, Debian's llama.cpp" there=$folder/$1/try/llama archive result
    if ! archive=$(compgen -G "$release/llama.cpp/libggml-mdkv-*.tar.gz"); then
        skip "$name" "$release/llama.cpp has no archive"
    elif ! (setup_model && setup_text) >"$folder/try.log"; then
        skip "$name" "there is no model or no text"
    else
        setup_model
        setup_text
        rm -rf "$there"
        mkdir -p "$there"
        cp "$archive" "$there/archive.tar.gz"
        cp "$MDKV_MODEL" "$there/model.gguf"
        cp "$MDKV_TEXT" "$there/text.txt"
        cp "$tests/llama_cpp"/{plugin_file,server_load}.py "$there"
        try "$name: apt-get install" inside "$folder/$1" "" apt-get install -y -qq --no-install-recommends llama.cpp
        # ggml's code for AMX ends in SIGILL where a virtual machine announces AMX and does not serve it.
        rm -f "$folder/$1"/usr/lib/*/ggml/backends*/libggml-cpu-sapphirerapids.so
        inside "$folder/$1" "" python3 /try/llama/plugin_file.py --archive /try/llama/archive.tar.gz --programs /usr/bin \
            --model /try/llama/model.gguf --text /try/llama/text.txt </dev/null >"$folder/llama.log" 2>&1 ||
            tail -n 20 "$folder/llama.log"
        for result in passed FAILED skipped; do
            sed -n "s/^$result: /${result^^}: $name: /p" "$folder/llama.log" >>"$results"
        done
        say "$name: $(tail -n 1 "$folder/llama.log")"
        grep -q '^[0-9]* passed, ' "$folder/llama.log" || echo "FAILED: $name: plugin_file.py ended early" >>"$results"
    fi
}

for suite in "${suites[@]}"; do
    root=$folder/$suite
    make_root "$suite" || continue
    try "$suite: apt-get update" inside "$root" "" apt-get update -qq
    if [[ $suite == forky ]]; then llama_cpp "$suite"; fi # the other suites have none
    if ! package=$(compgen -G "$release/libmdkv-dev_*_all.deb"); then
        skip "$suite: the Debian package" "$release has none"
        continue
    fi
    mkdir -p "$root/try/library"
    cp "$package" "$root/try/library/libmdkv-dev.deb"
    cp -r "$mdkv_root/examples/best.cpp" "$tests/build/consumer" "$root/try/library"
    try "$suite: apt-get install libmdkv-dev" inside "$root" "" apt-get install -y -qq /try/library/libmdkv-dev.deb g++ cmake make pkgconf
    version=$(dpkg-deb -f "$package" Version)
    # shellcheck disable=SC2016 # sh in the root reads its own variables
    try "$suite: examples/best.cpp by pkg-config" inside "$root" "" sh -ec \
        'g++ -std=c++20 /try/library/best.cpp $(pkg-config --cflags --libs mdkv) -o /try/library/best && /try/library/best'
    try "$suite: find_package(mdkv $version)" inside "$root" "" sh -ec "rm -rf /try/library/build
        cmake -S /try/library/consumer/find_package -B /try/library/build -DMDKV_EXPECTED_VERSION=$version
        cmake --build /try/library/build && /try/library/build/consumer $version"
    rm -rf --one-file-system "$root" # it has a compiler now, and the next run's root may have none
done
cp "$results" "$release/TRIED"
python3 "$tests/tools/count_results.py" "installed=$results"
