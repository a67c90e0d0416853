#!/usr/bin/env bash
# Everything that only a real GPU can say, in one go: the tests of tests/gpu on the device, each call of the library recorded
# into a graph first (which fails where it would wait or allocate); compute-sanitizer's tools over them where installed; the
# benchmarks. Writes one JSON file with date, device, driver and results.
#
#   bash tests/gpu.sh [OUTPUT.json]      default: build/gpu/results.json
#
# Needs a driver and nvcc; everything else is installed as for tests/run.sh. Builds in build/gpu, or $MDKV_GPU_BUILD_DIR,
# for the GPU that is there; what is built already is used as it is, so that a folder built elsewhere
# (MDKV_GPU_ARCHITECTURES=90 MDKV_GPU_BUILD_ONLY=1) can be brought along. Exit status 0: all passed; 1: something failed;
# 77: there is no GPU.
set -euo pipefail
# shellcheck source=examples/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../examples/setup.sh"

build=${MDKV_GPU_BUILD_DIR:-$mdkv_root/build/gpu}
output=${1:-$build/results.json}
mkdir -p "$build"

# query NAME: what the driver says of the first GPU
query() {
    nvidia-smi --id=0 --query-gpu="$1" --format=csv,noheader 2>/dev/null
}

architecture=${MDKV_GPU_ARCHITECTURES:-}
if [[ -z $architecture ]]; then
    if ! command -v nvidia-smi >/dev/null || ! query name >/dev/null; then
        echo "SKIPPED: tests/gpu.sh: there is no GPU here (nvidia-smi finds none)"
        exit 77
    fi
    architecture=$(query compute_cap | tr -d '. ')
fi

program=$build/tests/gpu/gpu_tests
if [[ ! -x $program ]]; then
    setup_packages "${mdkv_build_packages[@]}" "${mdkv_test_packages[@]}"
    setup_compiler
    setup_cuda_headers
    say "gpu: building for compute capability $architecture (log: $build/build.log)"
    configure "$build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER="$mdkv_cxx" -DMDKV_CUDA=ON \
        -DMDKV_CUDA_ARCHITECTURES="$architecture" -DMDKV_CUDA_PROGRAM_ARCHITECTURES="$architecture" >"$build/build.log" 2>&1 || die 1 "see $build/build.log"
    cmake --build "$build" --parallel "$(build_jobs)" --target mdkv_gpu_tests mdkv_gpu_bench >>"$build/build.log" 2>&1 ||
        die 1 "the build failed; see $build/build.log"
fi
if [[ -n ${MDKV_GPU_BUILD_ONLY:-} ]]; then
    say "gpu: built in $build"
    exit 0
fi

failed=0
results=$build/results.txt # lines NAME STATUS; what the JSON is made of
: >"$results"

# run NAME COMMAND...: a line of the results
run() {
    local name=$1 status=passed
    shift
    "$@" >"$build/$name.log" 2>&1 || { status=failed && failed=1; }
    printf '%s %s\n' "$name" "$status" | tee -a "$results"
    [[ $status == passed ]] || tail -n 40 "$build/$name.log"
}

run tests "$program"
sed -n '/\[doctest\]/p' "$build/tests.log"

# The sanitizers slow kernels down a hundred times: of every stage what its shortest test cases reach, within a time limit.
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck initcheck synccheck; do
        run "$tool" timeout 60 compute-sanitizer --tool "$tool" --error-exitcode 1 "$program" \
            --test-case="*merge*,*pool*,*twice with the same bits*,*same bits*"
    done
else
    printf 'compute-sanitizer skipped\n' | tee -a "$results"
fi

for bench in "$build"/bench/gpu/gpu_*; do
    if [[ -x $bench && ! -d $bench ]]; then
        name=$(basename "$bench")
        run "$name" "$bench" --json "$build/$name.json"
        cat "$build/$name.log"
    fi
done

python3 "$mdkv_root/tests/tools/gpu_record.py" --results "$results" --output "$output" \
    --device "$(query name)" --driver "$(query driver_version)" --memory "$(query memory.total)" \
    --clock "$(query clocks.max.sm)" --architecture "$architecture" "$build"/gpu_*.json
say "gpu: $output"
exit "$failed"
