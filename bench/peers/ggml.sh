#!/usr/bin/env bash
# ggml's attention on a CPU beside mdkv's, on the same tokens, by turns in one process (bench/peers/ggml.cpp says what is
# compared and how).
#
#   bash bench/peers/ggml.sh CHECKOUT [BUILD_FOLDER] [--json FILE] [OPTION...]
#
#   CHECKOUT      your own copy of ggml; the script fetches nothing, and changes nothing in it
#   BUILD_FOLDER  default: build/peers; a second run builds only the sources that changed
#   --json FILE   the same figures for programs
#   OPTION        of the program: --tokens N,N --threads N,N --rounds N
#
# Takes about two minutes to build, a minute to measure, and 6 GB of memory. Two threads need two idle cores: where other
# programs run, ggml's threads wait for each other and the figures mean little. Exit status: 0 measured; 1 something failed,
# also where the outputs of both disagree; 2 something has to be installed or named first.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

say() { printf 'mdkv: %s\n' "$*"; }

# die CODE MESSAGE...
die() {
    local code=$1
    shift
    printf 'mdkv: error: %s\n' "$@" >&2
    exit "$code"
}

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

case ${1:-} in
    -h | --help)
        usage
        exit 0
        ;;
    '' | -*)
        usage >&2
        die 2 "name the folder of a checkout of ggml; if you have none, make it outside of this repository:" \
            "  git clone --depth 1 https://github.com/ggml-org/ggml ../ggml && bash bench/peers/ggml.sh ../ggml"
        ;;
esac
[[ -d $1 ]] || die 2 "no such folder: $1"
checkout=$(cd "$1" && pwd)
shift
[[ -f $checkout/include/ggml-cpu.h && -f $checkout/CMakeLists.txt ]] ||
    die 2 "$checkout is no checkout of ggml (it has no include/ggml-cpu.h); make one outside of this repository:" \
        "  git clone --depth 1 https://github.com/ggml-org/ggml ../ggml && bash bench/peers/ggml.sh ../ggml"
[[ $checkout != "$root"/* || $checkout == "$root"/build/* ]] ||
    die 2 "$checkout lies in this repository, where a commit would take it along; move it elsewhere or into $root/build"
build=$root/build/peers
if [[ ${1:-} && ${1:-} != -* ]]; then
    build=$1
    shift
fi

for tool in cmake ninja "${CXX:-g++}" "${CC:-gcc}"; do
    command -v "$tool" >/dev/null || die 2 "there is no $tool; install it and run this again:" \
        "  sudo apt-get install -y --no-install-recommends g++ cmake ninja-build libbenchmark-dev"
done
echo '#include <benchmark/benchmark.h>' | "${CXX:-g++}" -x c++ -fsyntax-only - 2>/dev/null ||
    die 2 "Google Benchmark is missing; install it and run this again:" \
        "  sudo apt-get install -y --no-install-recommends libbenchmark-dev"

export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
free=$(awk '/^MemAvailable:/ {print int($2 / 1000000)}' /proc/meminfo 2>/dev/null || echo 6)
((free >= 6)) || die 2 "$free GB of memory are free, and the layers take 6; close other programs and run this again"

mkdir -p "$build"
build=$(cd "$build" && pwd)
say "building ggml of $checkout and the benchmark in $build (log: $build/build.log)"
if ! { cmake -S "$root/bench/peers" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_CHECKOUT="$checkout" &&
    cmake --build "$build" --target peers_ggml; } >"$build/build.log" 2>&1; then
    tail -n 20 "$build/build.log" >&2
    die 1 "the build failed; see $build/build.log. It is known to build with ggml 0.21.0: try that"
fi
"$build/peers_ggml" "$@"
