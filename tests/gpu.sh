#!/usr/bin/env bash
# Everything that only a real GPU can say, in one go: the tests of tests/gpu on the device, each call of the library recorded
# into a graph first (which fails where it would wait or allocate); the example; the benchmarks (attention with 1, 4 and 8 query
# heads per KV head, full, at 10 %, in int8 and int4), and the attention of PyTorch, and of FlashInfer where it is installed,
# beside them; compute-sanitizer's tools over the tests where installed. Writes one JSON file with
# date, device, driver and results, anew after every part: what is cut short keeps what it has.
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
if [[ ! -f $build/complete ]]; then
    setup_packages "${mdkv_build_packages[@]}" "${mdkv_test_packages[@]}" "${mdkv_all_test_packages[@]}"
    setup_compiler
    say "gpu: building for compute capability $architecture (log: $build/build.log)"
    configure "$build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER="$mdkv_cxx" -DMDKV_CUDA=ON \
        -DMDKV_CUDA_ARCHITECTURES="$architecture" -DMDKV_CUDA_PROGRAM_ARCHITECTURES="$architecture" >"$build/build.log" 2>&1 || die 1 "see $build/build.log"
    cmake --build "$build" --parallel "$(build_jobs)" --target mdkv_gpu_tests mdkv_gpu_bench >>"$build/build.log" 2>&1 ||
        die 1 "the build failed; see $build/build.log"
    touch "$build/complete"
fi
if [[ -n ${MDKV_GPU_BUILD_ONLY:-} ]]; then
    say "gpu: built in $build"
    exit 0
fi

export CUDA_MODULE_LOADING=EAGER # older drivers cannot load a kernel that a recording is the first to meet
failed=0
results=$build/results.txt # lines NAME STATUS; what the JSON is made of
: >"$results"
rm -f "$build"/gpu_*.json

# status NAME STATUS: a line of the results
status() {
    printf '%s %s\n' "$1" "$2" | tee -a "$results"
    if [[ $2 == failed ]]; then
        failed=1
    fi
}

# ended NAME CODE: says how it went; what `timeout` ended was cut short, which is no failure
ended() {
    case $2 in
        0) status "$1" passed ;;
        124) status "$1" "cut short" ;;
        *)
            status "$1" failed
            tail -n 40 "$build/$1.log"
            ;;
    esac
}

# run NAME COMMAND...: runs it and says how it went
run() {
    local name=$1 code=0
    shift
    "$@" >"$build/$name.log" 2>&1 || code=$?
    ended "$name" "$code"
}

write_record() {
    python3 "$mdkv_root/tests/tools/gpu_record.py" --results "$results" --output "$output" \
        --device "$(query name)" --driver "$(query driver_version)" --memory "$(query memory.total)" \
        --clock "$(query clocks.max.sm)" --architecture "$architecture" "$build"/gpu_*.json
}

run tests "$program"
sed -n '/\[doctest\]/p' "$build/tests.log"
run pipeline "$build/tests/gpu/gpu_pipeline"
cat "$build/pipeline.log"
write_record

for bench in machine attend stamps allocate compress; do
    run "gpu_$bench" "$build/bench/gpu/gpu_$bench" --json "$build/gpu_$bench.json"
    cat "$build/gpu_$bench.log"
    write_record
done
if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    run torch_sdpa python3 "$mdkv_root/bench/gpu/torch_sdpa.py" --json "$build/gpu_torch_sdpa.json"
    cat "$build/torch_sdpa.log"
else
    status torch_sdpa skipped
fi
write_record

# They slow kernels down a hundred times: a few short test cases of several stages. They run side by side: nothing is timed.
cases='*merge*,*pool on the GPU is*,*stream beside*,*packing again empties*,*tells every status*,*first offending row*'
cases+=',*rows in pages*,*lists of tokens*,*twice with the same bits*,*preserves q . k*,*in two runs*,*turned coordinates*'
cases+=',*of two kinds, one run behind*'
sanitizer=$(PATH=$PATH:/usr/local/cuda/bin:/opt/cuda/bin command -v compute-sanitizer || true)
tools=(memcheck racecheck initcheck synccheck)
for tool in "${tools[@]}"; do
    if [[ -z $sanitizer ]]; then
        status "$tool" skipped
        continue
    fi
    # What a test fills in no tool can call uninitialised.
    (
        code=0
        MDKV_TEST_LEAVE_SCRATCH="$([[ $tool == initcheck ]] && echo 1)" timeout 120 "$sanitizer" --tool "$tool" \
            --error-exitcode 1 "$program" --test-case="$cases" >"$build/$tool.log" 2>&1 || code=$?
        echo "$code" >"$build/$tool.code"
    ) &
done
wait
for tool in "${tools[@]}"; do
    if [[ -n $sanitizer ]]; then
        ended "$tool" "$(cat "$build/$tool.code")"
    fi
done
write_record
say "gpu: $output"
exit "$failed"
