#!/usr/bin/env bash
# What a release offers, as users install it, in Debian roots of essential packages: the Python wheel and the llama.cpp backend
# run where there is no compiler, then the Debian package's headers are compiled.
#
#   bash tests/build/packaging/installed.sh FOLDER RELEASE [PROGRAMS MODEL]
#
# RELEASE is the folder of cmake/packaging/release.sh. PROGRAMS is the folder bin of a llama.cpp that was built with
# GGML_BACKEND_DL=ON on a system no newer than Debian 12, and MODEL a GGUF file for it; without them the backend is not tried. As root,
# who makes the roots FOLDER/bookworm and FOLDER/trixie. Exit status: 1 if a try failed, 2 if none can be made.
set -euo pipefail
# shellcheck source=examples/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../../examples/setup.sh"

(($# == 2 || $# == 4)) || die 2 "which folders? (bash tests/build/packaging/installed.sh FOLDER RELEASE [PROGRAMS MODEL])"
mkdir -p "$1"
folder=$(cd "$1" && pwd)
release=$(cd "$2" && pwd)
programs=${3:-} model=${4:-}
# shellcheck source=tests/build/packaging/roots.sh
source "$(dirname "${BASH_SOURCE[0]}")/roots.sh"

if [[ -d $release/python ]]; then
    try "the wheels (log: $folder/wheels.log)" sh -c 'bash "$0" "$1" "$2" >"$1/wheels.log" 2>&1' \
        "$(dirname "${BASH_SOURCE[0]}")/wheel_try.sh" "$folder" "$release/python"
    grep -E '^mdkv: (passed|FAILED|skipped|wheels)' "$folder/wheels.log" || true
else
    skip "the wheels" "$release has no folder python"
fi

(cd "$release" && sha256sum --quiet --check SHA256SUMS) || die 1 "$release/SHA256SUMS does not hold"
for suite in bookworm trixie; do
    root=$folder/$suite
    make_root "$suite" || continue
    try "$suite: apt-get update" inside "$root" "" apt-get update -qq
    if [[ -z $programs ]]; then
        skip "$suite: the llama.cpp backend" "no PROGRAMS were named"
    elif ! archive=$(compgen -G "$release/llama.cpp/libggml-mdkv-*.tar.gz"); then
        skip "$suite: the llama.cpp backend" "$release/llama.cpp has no archive"
    else
        rm -rf "$root/try/llama"
        mkdir -p "$root/try/llama/bin" "$root/try/llama/mdkv"
        cp -L "$programs"/*.so* "$programs/llama-bench" "$programs/llama-completion" "$root/try/llama/bin"
        cp "$model" "$root/try/llama/model.gguf"
        tar -xz --strip-components=1 -C "$root/try/llama/mdkv" -f "$archive"
        try "$suite: libgomp1" inside "$root" "" apt-get install -y -qq libgomp1 # the programs need it
        for _ in {1..60}; do echo 'The sky over the harbour was grey.'; done >"$root/try/prompt"
        try "$suite: llama-completion answers from a compressed cache" inside "$root" "" env LD_LIBRARY_PATH=/try/llama/bin \
            GGML_BACKEND_PATH=/try/llama/mdkv/libggml-mdkv.so MDKV_BUDGET=25% sh -c '/try/llama/bin/llama-completion \
            -m /try/llama/model.gguf -f /try/prompt -n 8 --temp 0 -fa on -t 1 -st --no-warmup >/try/output 2>&1
            cat /try/output; grep -E "^mdkv: decoded [1-9]" /try/output'
    fi
    if ! package=$(compgen -G "$release/libmdkv-dev_*_all.deb"); then
        skip "$suite: the Debian package" "$release has none"
        continue
    fi
    mkdir -p "$root/try/library"
    cp "$package" "$root/try/library/libmdkv-dev.deb"
    cp -r "$mdkv_root/examples/best.cpp" "$mdkv_root/tests/build/consumer" "$root/try/library"
    try "$suite: apt install libmdkv-dev" inside "$root" "" apt-get install -y -qq /try/library/libmdkv-dev.deb g++ cmake make pkgconf
    version=$(dpkg-deb -f "$package" Version)
    # shellcheck disable=SC2016 # sh in the root reads its own variables
    try "$suite: examples/best.cpp by pkg-config" inside "$root" "" sh -ec \
        'g++ -std=c++20 /try/library/best.cpp $(pkg-config --cflags --libs mdkv) -o /try/library/best && /try/library/best'
    try "$suite: find_package(mdkv $version)" inside "$root" "" sh -ec "rm -rf /try/library/build
        cmake -S /try/library/consumer/find_package -B /try/library/build -DMDKV_EXPECTED_VERSION=$version
        cmake --build /try/library/build && /try/library/build/consumer $version"
    rm -rf --one-file-system "$root" # it has a compiler now, and the wheels' next root may have none
done
say "installed: $passed passed, $failed failed, $skipped skipped"
exit $((failed > 0))
