#!/usr/bin/env bash
# The tests, from a fresh clone:
#
#   bash tests/run.sh               the library with g++, in the machine's vectors and half alone, the headers one by one, the
#                                   code in the documents, three examples: five minutes of two cores
#   bash tests/run.sh --daily       what CI runs: the parts of each day, and one deep part, another one tomorrow
#   bash tests/run.sh --deep NAME   one deep part: aarch64, wheels, fuzz, models, ptx, compilers, older, releases, benches, bare, cuda
#   bash tests/run.sh --all         all parts
#   ... --within MINUTES            parts that would begin later are skipped, and counted
#
# Installs and fetches what is missing (examples/setup.sh). Folders and logs: build/tests, or $MDKV_TEST_BUILD_DIR. No part depends
# on what another left behind. The last line counts everything:  N passed, N failed, N skipped
set -euo pipefail
# shellcheck source=examples/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../examples/setup.sh"
# shellcheck source=tests/tools/parts.sh # with tags, cuda, wheels, releases and bare
source "$mdkv_root/tests/tools/parts.sh"

daily=(size scripts words tags release clang gpu python)
deep=(aarch64 wheels fuzz models ptx compilers older releases benches bare cuda)
today=${deep[$(date +%-j) % ${#deep[@]}]}
[[ $today != ptx ]] || daily=(size scripts words tags release clang python) # ptx has all of gpu
parts=(size scripts words quick) most_minutes=0
while (($# > 0)); do
    case $1 in
        --daily) parts=("${daily[@]}" "$today") ;;
        --all) parts=("${daily[@]}" "${deep[@]}") ;;
        --deep)
            [[ " ${deep[*]} " == *" ${2:-} "* && -n ${2:-} ]] || die 2 "--deep is followed by one of: ${deep[*]}"
            parts=("$2")
            shift
            ;;
        --within)
            [[ ${2:-} =~ ^[1-9][0-9]{0,3}$ ]] || die 2 "--within is followed by a number of minutes, e.g. --within 60"
            most_minutes=$2
            shift
            ;;
        -h | --help)
            sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *) die 2 "unknown option: $1 (bash tests/run.sh [--daily | --all | --deep NAME] [--within MINUTES])" ;;
    esac
    shift
done
build=${MDKV_TEST_BUILD_DIR:-$mdkv_root/build/tests}
jobs=$(build_jobs)
results=() seconds=()
small=(-DMDKV_BUILD_BENCH=OFF -DMDKV_CUDA=OFF)

# --- every day -------------------------------------------------------------------------------------------------------

# No folder of the headers, the tests, the examples or the benchmarks has grown.
part_size() {
    if git -C "$mdkv_root" rev-parse >/dev/null 2>&1; then
        checked size python3 "$mdkv_root/tests/tools/size.py"
    else
        note SKIPPED "size: takes a clone"
    fi
}

# bash reads every script, and shellcheck finds no error in it where there is one.
part_scripts() {
    local scripts
    mapfile -t scripts < <(find "$mdkv_root"/{docs,examples,tests,bench,cmake,.ci} -name '*.sh' -o -path '*/.ci/run')
    # shellcheck disable=SC2016 # bash -c reads its own arguments
    checked scripts bash -c 'for one; do bash -n "$one" || exit 1; done; ! command -v shellcheck || shellcheck -S error "$@"' - "${scripts[@]}"
}

# Comments and pages by CONTRIBUTING.md's rule.
part_words() { checked "words (tests/tools/word_check.py --list)" python3 "$mdkv_root/tests/tools/word_check.py"; }

# The first thing that a change is tried with.
part_quick() {
    leg quick 'mdkv_tests mdkv_layer_tests mdkv_recorded_tests mdkv_header_checks example_best example_conversation example_engine_hook' \
        '-E ^(machines|comm/|examples/(cpu_pipeline|dispatch|ranks)$)' -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE=-O1 \
        -DMDKV_TEST_QUICK=ON -DMDKV_UNOPTIMISED_BENCH=ON -DCMAKE_CXX_COMPILER="$mdkv_cxx" "${small[@]}"
}

# All elements, optimised; the runner, the llama.cpp backend, the examples, each header alone, one consumer.
part_release() {
    local llama=()
    setup_test_models
    (setup_packages "${mdkv_mpi_packages[@]}") || note SKIPPED "comm/mpi, examples/ranks: there is no MPI (packages: ${mdkv_mpi_packages[*]})"
    if (setup_llama_cpp ggml); then
        setup_llama_cpp ggml
        llama=(-DMDKV_LLAMA_CPP="$MDKV_LLAMA_CPP" -DMDKV_LLAMA_CPP_BUILD="$MDKV_LLAMA_CPP_BUILD")
    else
        note SKIPPED "llama_cpp/backend: llama.cpp's sources are out of reach"
    fi
    leg release '' '-E ^(consumer/(fetch_content|parent|pkg_config)|packaging/(folders|without))$' -DCMAKE_BUILD_TYPE=Release \
        -DCMAKE_CXX_COMPILER="$mdkv_cxx" -DMDKV_UNOPTIMISED_BENCH=ON "${small[@]}" "${llama[@]}"
}

# The library in half, and the readers of files, under sanitizers, with the other compiler and without the machine's own
# instructions, so that the narrow vectors run, too.
part_clang() {
    setup_clang
    [[ -n $mdkv_clang ]] || note SKIPPED "clang: apt offers no clang of version 16 or newer; it runs with g++"
    leg clang 'mdkv_tests mdkv_layer_tests mdkv_recorded_tests mdkv_reader_tests' '-L doctest' -DCMAKE_BUILD_TYPE=RelWithDebInfo \
        -DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -DMDKV_SANITIZE=address,undefined -DMDKV_ARCH= -DMDKV_TEST_HALF=ON -DMDKV_BUILD_EXAMPLES=OFF \
        "-DMDKV_TEST_SOURCES=/tests/(unit/|runner/(gguf|tokenizer)\\.cpp\$)" -DCMAKE_CXX_COMPILER="${mdkv_clang:-$mdkv_cxx}" "${small[@]}"
}

# Kernels through nvcc, registers that spill, and the device's tests in one order of threads: another one each day, and another
# architecture. The deep part has them all.
part_gpu() {
    local orders=(ascending descending shuffled) architectures=(80 90)
    gpu_leg gpu "mdkv_gpu_kernels mdkv_gpu_tests mdkv_ptx_tests" "^(gpu/|ptx/clock/|ptx/.*/${orders[$(date +%-j) % 3]}\$)" \
        "-DMDKV_CUDA_ARCHITECTURES=${architectures[$(date +%-j) % 2]}"
}
gpu_leg() {
    if has_nvcc; then
        setup_cuda_tools
        leg "$1" "$2" "-R $3" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER="$mdkv_cxx" -DMDKV_UNOPTIMISED_BENCH=ON \
            -DMDKV_BUILD_EXAMPLES=OFF -DMDKV_BUILD_BENCH=OFF "${@:4}"
    else
        note SKIPPED "$1: there is no nvcc"
    fi
}

# The Python package with the newest transformers, in kvpress, and with layers on a device.
part_python() {
    setup_test_models
    if build_package; then
        package_tests new
        package_tests kvpress "$mdkv_root/examples/python/tests/test_kvpress.py"
        chosen='-k test_device or llama-best or llama-by_window or sinks or batch or tail or beams' device_tests device transformers
    fi
}

# --- deep parts ------------------------------------------------------------------------------------------------------

# The library's tests for 64-bit Arm on an emulator, with products of bytes; what has vector code of its own without them, too.
part_aarch64() {
    if ! (setup_aarch64); then
        note SKIPPED "aarch64: a cross compiler, qemu-user or arm64 libraries are missing"
        return
    fi
    local options=(-DCMAKE_TOOLCHAIN_FILE="$mdkv_root/cmake/aarch64.cmake" -DMDKV_AARCH64_PACKAGES="$mdkv_cache/aarch64"
        -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DMDKV_BUILD_EXAMPLES=OFF "${small[@]}")
    local left_out=('allocate agrees with a bisection*' 'raising the limit never raises the loss' # twenty seconds or more
        'a forked child*' 'pools end in a forked child*')                                         # qemu-user ends there
    local bits=('a cache of many parts*' 'a batch of sequences gives*' 'a batch asks for the scratch*') # the same on every processor
    local again='cpu/simd|attend|(stages/)?pack' name
    leg aarch64-i8mm 'mdkv_tests mdkv_layer_tests' '-L doctest -E ^(recorded|gguf|tokenizer|runner/.*)$' "${options[@]}" \
        -DMDKV_ARCH=armv8.2-a+dotprod+i8mm '-DMDKV_TEST_SOURCES=/tests/unit/' "-DMDKV_TEST_CASES_LEFT_OUT=$(joined "${left_out[@]}")"
    leg aarch64-armv8 'mdkv_tests mdkv_recorded_tests' "-R ^($again|recorded)\$" "${options[@]}" -DMDKV_ARCH=armv8-a \
        "-DMDKV_TEST_SOURCES=/tests/unit/($again)\\.cpp\$" "-DMDKV_TEST_CASES_LEFT_OUT=$(joined "${bits[@]}")" \
        '-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-cpu;cortex-a72;-L;/usr/aarch64-linux-gnu'
    for name in "${left_out[@]}" "${bits[@]}"; do note SKIPPED "aarch64: $name"; done
}

# 200,000 inputs for each fuzz target.
part_fuzz() {
    setup_clang
    if [[ -z $mdkv_clang ]]; then
        note SKIPPED "fuzz: apt offers no clang of version 16 or newer"
        return
    fi
    leg fuzz mdkv_fuzzers '-L fuzz' -DCMAKE_BUILD_TYPE=RelWithDebInfo -DMDKV_ARCH= -DMDKV_BUILD_EXAMPLES=OFF -DMDKV_BUILD_FUZZERS=ON \
        -DMDKV_FUZZ_RUNS=200000 -DCMAKE_CXX_COMPILER="$mdkv_clang" "${small[@]}"
}

# The device's tests in three orders of threads, and faults that they must find.
part_ptx() {
    gpu_leg ptx 'mdkv_gpu_kernels mdkv_gpu_tests mdkv_ptx_tests' '^(gpu/kernels|ptx/)'
    if has_nvcc; then checked "ptx/mutations" python3 "$mdkv_root/tests/ptx/mutations.py" "$build/ptx/tests/gpu/mdkv_ptx_tests"; fi
}

# Other projects' compilers and flags; the reference.
part_compilers() {
    local log=$build/compilers.log
    setup_newest_clang
    # shellcheck disable=SC2086 # none or one
    python3 "$mdkv_root/tests/build/compilers/compilers.py" "$mdkv_root" "$mdkv_cxx" $mdkv_newest_clang >"$log" 2>&1 || true
    grep -E '^(PASSED|FAILED|SKIPPED): ' "$log" | tee -a "$build/notes.txt" || { tail -n 40 "$log"; note FAILED "compilers: nothing was tried"; }
    if (setup_packages "${mdkv_reference_packages[@]}") && command -v doxygen >/dev/null; then
        checked reference bash "$mdkv_root/docs/reference/make.sh" "$build/reference"
    else
        note SKIPPED "reference: packages are missing: ${mdkv_reference_packages[*]}"
    fi
}

# Benchmarks, compiled; other people's projects and packages.
part_benches() {
    setup_packages "${mdkv_all_test_packages[@]}"
    leg benches bench/all '-R ^(consumer|packaging)/' -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER="$mdkv_cxx" -DMDKV_UNOPTIMISED_BENCH=ON \
        -DMDKV_TEST_SOURCES=/version -DMDKV_BUILD_EXAMPLES=OFF -DMDKV_CUDA=OFF
    gpu_leg gpu-benches mdkv_gpu_bench '^consumer/(install|cuda)$' -DMDKV_TEST_SOURCES=/version -DMDKV_BUILD_BENCH=ON
}

# The second model; the runner beside Python's packages.
part_models() {
    setup_test_models
    if (setup_second_model); then export MDKV_SECOND_MODEL=$mdkv_cache/$second_model_name; fi
    leg models 'mdkv_crosscheck_programs mdkv_runner_tests mdkv_reader_tests' '-R ^(runner|systems)/' -DCMAKE_BUILD_TYPE=Release \
        -DCMAKE_CXX_COMPILER="$mdkv_cxx" -DMDKV_BUILD_EXAMPLES=OFF "${small[@]}"
    crosschecks "$build/models/tests"
}

# The Python package with the older transformers, and in LMCache.
part_older() {
    setup_test_models
    if build_package; then
        package_tests kvpress "$mdkv_root"/examples/python/tests/test_{transformers,every_decoder,storing}.py
        package_tests lmcache "$mdkv_root/examples/python/tests/test_lmcache.py"
    fi
}

setup_packages "${mdkv_build_packages[@]}" "${mdkv_test_packages[@]}"
setup_compiler
mkdir -p "$build"
: >"$build/notes.txt"
for name in "${parts[@]}"; do part "$name"; done
say "minutes: $(joined "${seconds[@]}")"
echo
python3 "$mdkv_root/tests/tools/count_results.py" "${results[@]}" "other=$build/notes.txt"
