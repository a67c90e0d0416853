#!/usr/bin/env bash
# The tests, from a fresh clone:
#
#   bash tests/run.sh          Release with g++: library and runner, each header alone, the code in the documents, projects
#                              that use an installed mdkv, and the kernels through nvcc where there is one
#   bash tests/run.sh --all    also the library's tests with clang under AddressSanitizer and UndefinedBehaviorSanitizer, those
#                              of the GPU on an emulated one, the tests for 64-bit Arm on an emulated one, the programs
#                              for a GPU through nvcc, the benchmarks (compiled only), the runner against independent Python
#                              implementations, the package for Python, other projects' compilers and flags, each stage's
#                              instructions beside recorded ones, the reference of the public headers, the quick start and this
#                              script in a Debian root that has nothing (tests/bare.sh), and a release's files, made and
#                              installed in bare Debian roots (tests/build/packaging/installed.sh)
#   ... --within MINUTES       parts of --all that would end later are skipped, and counted: a part takes a known share of
#                              the seconds that the release leg took
#
# Installs and fetches what is missing (examples/setup.sh). Folders and logs: build/tests, or $MDKV_TEST_BUILD_DIR.
# The last line counts everything:  N passed, N failed, N skipped
set -euo pipefail
# shellcheck source=examples/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../examples/setup.sh"

all=OFF within=0
while (($# > 0)); do
    case $1 in
        --all) all=ON ;;
        --within)
            [[ ${2:-} =~ ^[1-9][0-9]{0,3}$ ]] || die 2 "--within is followed by a number of minutes, e.g. --within 60"
            within=$2
            shift
            ;;
        -h | --help)
            sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *) die 2 "unknown option: $1 (bash tests/run.sh [--all] [--within MINUTES])" ;;
    esac
    shift
done

build=${MDKV_TEST_BUILD_DIR:-$mdkv_root/build/tests}
jobs=$(build_jobs)
results=() # what tests/tools/count_results.py adds up
seconds=() # how long each part of --all took

# note KIND NAME: a result that no CTest run knows of; KIND is PASSED, FAILED or SKIPPED
note() {
    printf '%s: %s\n' "$1" "$2" | tee -a "$build/notes.txt"
}

# part NAME SHARE COMMAND...: a part of --all, which takes SHARE percent of the release leg's seconds
part() {
    local name=$1 needs=$((release_seconds * $2 / 100)) begin=$SECONDS
    shift 2
    if ((within > 0 && SECONDS + needs > within * 60)); then
        note SKIPPED "$name: would take $(minutes "$needs"), after $(minutes "$SECONDS") of $within minutes"
        return
    fi
    "$@"
    seconds+=("$name $(minutes $((SECONDS - begin)))")
}

# minutes SECONDS: as 12:05
minutes() {
    printf '%d:%02d' $(($1 / 60)) $(($1 % 60))
}

# leg NAME TARGETS CTEST_OPTIONS CONFIGURE_OPTION...: configures, builds and tests in a folder of its own. A build that
# fails does not keep what could be built from being tested.
leg() {
    local name=$1 targets=$2 ctest_options=$3 folder=$build/$1 log=$build/$1.log
    shift 3
    say "$name: building (log: $log)"
    mkdir -p "$folder"
    rm -f "$folder/results.xml"
    # shellcheck disable=SC2086 # lists of words
    : >"$log"
    if ! { configure "$folder" "$@" && cmake --build "$folder" --parallel "$jobs" ${targets:+--target $targets} -- -k 0; } 2>&1 |
        minutely "$log"; then
        grep -E 'error:|Error|^FAILED' "$log" | sed -n 1,60p || tail -n 40 "$log"
        note FAILED "$name: the build"
    fi
    say "$name: testing"
    : >"$log.tests"
    # shellcheck disable=SC2086 # a list of words
    if ! ctest --test-dir "$folder" --parallel "$jobs" --output-on-failure --output-junit "$folder/results.xml" --no-tests=error \
        --test-output-size-passed 100000000 --test-output-size-failed 100000000 $ctest_options 2>&1 |
        minutely "$log.tests"; then
        grep -vE ' Passed +[0-9.]+ sec$|^ +Start +[0-9]+: ' "$log.tests" | tail -n 400 || true
    fi
    if [[ -f $folder/results.xml ]]; then
        results+=("$name=$folder/results.xml")
    else
        note FAILED "$name: ctest wrote no results"
    fi
}

# crosscheck NAME COMMAND...
crosscheck() {
    local name=$1
    shift
    say "cross-check: $name"
    if "$@" >"$build/crosscheck.log" 2>&1; then
        grep '^crosscheck\|^reference_forward' "$build/crosscheck.log" || true
        note PASSED "$name"
    else
        tail -n 40 "$build/crosscheck.log"
        note FAILED "$name"
    fi
}

# python_crosschecks: the runner against independent Python implementations, with each model that is there
python_crosschecks() {
    local tools=$mdkv_root/tests/tools programs=$build/release/tests reason='' name model
    if [[ ! -f ${MDKV_MODEL:-} ]]; then
        reason="no reference model"
    elif [[ ! -x $programs/dump || ! -x $programs/dump_logits ]]; then
        note FAILED "cross-checks: their programs were not built"
        return
    elif ! (setup_python) || ! "$mdkv_cache/venv/bin/python" -m pip install -q --disable-pip-version-check \
        numpy gguf==0.19.0 jinja2 tokenizers >"$build/pip.log" 2>&1; then
        reason="PyPI is out of reach (log: $build/pip.log)"
    fi
    if [[ -n $reason ]]; then
        for name in crosscheck_gguf crosscheck_tokenizer reference_forward; do
            note SKIPPED "$name: $reason"
        done
        return
    fi
    local python=$mdkv_cache/venv/bin/python text=() second=()
    if [[ -f ${MDKV_TEXT:-} ]]; then
        text=(--text "$MDKV_TEXT")
    fi
    for model in "$MDKV_MODEL" "${MDKV_SECOND_MODEL:-}"; do
        name=${second:+ of the second model}
        if [[ ! -f $model ]]; then
            note SKIPPED "cross-checks$name: bash examples/setup.sh second-model fetches it"
            return
        fi
        crosscheck "crosscheck_gguf$name" "$python" "$tools/crosscheck_gguf.py" "$programs/dump" "$model"
        crosscheck "crosscheck_tokenizer$name" "$python" "$tools/crosscheck_tokenizer.py" "$programs/dump" --model "$model" \
            "${text[@]}" "${second[@]}"
        if [[ -f ${MDKV_TEXT:-} ]]; then
            crosscheck "reference_forward$name" "$python" "$tools/reference_forward.py" check "$model" "$programs/dump_logits" \
                "$MDKV_TEXT"
        else
            note SKIPPED "reference_forward$name: no text"
        fi
        second=(--alone)
    done
}

# python_package: the package for Python as pip builds it, and its tests with two versions of transformers, kvpress and LMCache
python_package() {
    local tests=$mdkv_root/examples/python/tests folder=$build/python log=$build/python.log name
    say "the package for Python (log: $log)"
    if ! (setup_python_peers); then
        note SKIPPED "python: PyPI is out of reach"
        return
    fi
    local -x CXX=$mdkv_cxx CMAKE_BUILD_PARALLEL_LEVEL=$jobs
    local install=("$mdkv_cache/python-new/bin/python" -m pip install -q --disable-pip-version-check --no-deps)
    rm -rf "$folder"
    if ! "${install[@]}" --target "$folder/packages" "$mdkv_root" >"$log" 2>&1; then
        tail -n 40 "$log"
        note FAILED "python: the build"
        return
    fi
    if ! command -v nvcc >/dev/null && [[ ! -x /usr/local/cuda/bin/nvcc ]]; then
        note SKIPPED "python: the build with CUDA: there is no nvcc"
    elif PATH=$PATH:/usr/local/cuda/bin "${install[@]}" --target "$folder/cuda" -C cmake.define.MDKV_PYTHON_CUDA=ON \
        -C cmake.define.CMAKE_CUDA_ARCHITECTURES=90 -C 'cmake.define.CMAKE_CUDA_FLAGS=-Xcicc -O0' "$mdkv_root" \
        >"$log.cuda" 2>&1; then # unoptimised, in a third of the time: nothing runs it
        note PASSED "python: the build with CUDA"
    else
        tail -n 40 "$log.cuda"
        note FAILED "python: the build with CUDA"
    fi
    for name in new kvpress lmcache; do
        if [[ $name == kvpress ]]; then
            local -x MDKV_SECOND_MODEL= # one version of transformers runs the larger model
        fi
        if [[ $name == lmcache ]]; then tests+=/test_lmcache.py; fi
        if ! PYTHONPATH=$folder/packages "$mdkv_cache/python-$name/bin/python" -m pytest -q -p no:cacheprovider \
            --junitxml "$folder/$name.xml" "$tests" >"$log.$name" 2>&1; then
            tail -n 200 "$log.$name"
        fi
        if [[ -f $folder/$name.xml ]]; then
            results+=("python-$name=$folder/$name.xml")
        else
            note FAILED "python-$name: no test ran"
        fi
    done
}

# other_compilers: small programs as other projects compile them
other_compilers() {
    local log=$build/compilers.log
    say "other projects' compilers and flags (log: $log)"
    if [[ -z $mdkv_newest_clang ]]; then
        note SKIPPED "compilers/clang++: apt offers no clang of version 16 or newer"
    fi
    # shellcheck disable=SC2086 # none or one
    python3 "$mdkv_root/tests/build/compilers/compilers.py" "$mdkv_root" "$mdkv_cxx" $mdkv_newest_clang >"$log" 2>&1 || true
    grep -E '^(FAILED|SKIPPED): ' "$log" || true
    if ! grep -E '^(PASSED|FAILED|SKIPPED): ' "$log" >>"$build/notes.txt"; then
        tail -n 40 "$log"
        note FAILED "compilers: nothing was tried"
    fi
}

# instruction_counts: what each stage executes beside what was recorded; growth is a warning in the closing lines
instruction_counts() {
    local log=$build/instruction_counts.log code=0
    say "instruction counts (log: $log)"
    if ! (setup_packages "${mdkv_count_packages[@]}"); then
        note SKIPPED "instruction counts: packages are missing: ${mdkv_count_packages[*]}"
        return
    fi
    python3 "$mdkv_root/tests/tools/instruction_counts.py" --compiler "$mdkv_cxx" --folder "$build/growth" >"$log" 2>&1 || code=$?
    grep -E '^(WARNING|SKIPPED): ' "$log" | tee -a "$build/notes.txt" || true
    case $code in
        0) note PASSED "instruction counts" ;;
        77) ;; # its line says why
        *)
            tail -n 40 "$log"
            note FAILED "instruction counts"
            ;;
    esac
}

# bare: README's commands in a Debian root that has nothing, of the last commit; objects of the release leg are not compiled again
bare() {
    local log=$build/bare.log folder=$build/bare code=0 commands=('bash tests/run.sh')
    say "a machine that has nothing (log: $log)"
    if ((EUID != 0)) || [[ ! -d $mdkv_root/.git ]]; then
        note SKIPPED "bare: takes root and a clone"
        return
    fi
    [[ -z ${MDKV_REFERENCE_MODEL:-} ]] || commands+=('bash examples/quickstart.sh') # what cannot be fetched here cannot be there
    rm -rf --one-file-system "$folder"
    bash "$mdkv_root/tests/bare.sh" "$folder" "${commands[@]}" >"$log" 2>&1 || code=$?
    if [[ ! -f $folder/1.log ]]; then
        note SKIPPED "bare: $(tail -n 1 "$log")"
        return
    fi
    local there=$folder/root$mdkv_root/build/tests
    if cp "$there/release/results.xml" "$there/notes.txt" "$folder"; then
        results+=("bare=$folder/results.xml" "bare=$folder/notes.txt")
    else
        note FAILED "bare: bash tests/run.sh wrote no results"
    fi
    if ((code != 0)); then
        tail -n 60 "$log"
        note FAILED "bare: a command's status (log: $log)"
    elif [[ -f $folder/2.log ]]; then
        note PASSED "bare: bash examples/quickstart.sh"
    fi
    rm -rf --one-file-system "$folder/root"
}

# release_files: what a release offers, made from the last commit, and installed in Debian roots
release_files() {
    local log=$build/release_files.log folder=$build/release_files code=0
    say "a release's files, and Debian roots that install them (log: $log)"
    if ((EUID != 0)) || [[ ! -d $mdkv_root/.git ]]; then
        note SKIPPED "release files: they take root and a clone"
        return
    fi
    rm -rf --one-file-system "$folder"
    if ! bash "$mdkv_root/cmake/packaging/release.sh" "$folder/files" >"$log" 2>&1; then
        if grep -q 'out of reach' "$log"; then
            note SKIPPED "release files: $(tail -n 1 "$log")"
        else
            tail -n 40 "$log"
            note FAILED "release files: cmake/packaging/release.sh"
        fi
        return
    fi
    note PASSED "release files: cmake/packaging/release.sh"
    bash "$mdkv_root/tests/build/packaging/installed.sh" "$folder/roots" "$folder/files" >>"$log" 2>&1 || code=$?
    ((code == 0)) || tail -n 60 "$log"
    if [[ -f $folder/files/TRIED ]]; then # it came to its end
        results+=("installed=$folder/files/TRIED")
    elif ((code == 2)); then
        note SKIPPED "release files, installed: $(tail -n 1 "$log")"
    else
        note FAILED "release files: tests/build/packaging/installed.sh ended early"
    fi
}

# words: comments and pages by CONTRIBUTING.md's rule, as far as a script can see
words() {
    if python3 "$mdkv_root/tests/tools/word_check.py"; then note PASSED words; else note FAILED "words (tests/tools/word_check.py --list)"; fi
}

# size: no folder of the headers, the tests, the examples or the benchmarks has grown
size() {
    if ! git -C "$mdkv_root" rev-parse >/dev/null 2>&1; then
        note SKIPPED "size: takes a clone"
    elif python3 "$mdkv_root/tests/tools/size.py"; then
        note PASSED size
    else
        note FAILED "size (tests/tools/size.py)"
    fi
}

# tags: ctags, which reads no macros, finds what the headers declare, as editors do
tags() {
    local found name
    if ! (setup_packages "${mdkv_tag_packages[@]}"); then
        note SKIPPED "tags: packages are missing: ${mdkv_tag_packages[*]}"
        return
    fi
    found=$(ctags -x --languages=C++ --langmap=C++:+.cuh -R "$mdkv_root/include")
    for name in prompt reader preset attend allocate score_block; do
        if ! grep -qE "^$name +(class|struct|function) " <<<"$found"; then
            note FAILED "tags: ctags finds no $name"
            return
        fi
    done
    note PASSED tags
}

# reference: the pages of the public headers, made without a warning
reference() {
    local log=$build/reference.log
    say "reference (log: $log)"
    if ! (setup_packages "${mdkv_reference_packages[@]}") || ! command -v doxygen >/dev/null; then
        note SKIPPED "reference: packages are missing: ${mdkv_reference_packages[*]}"
    elif bash "$mdkv_root/docs/reference/make.sh" "$build/reference" >"$log" 2>&1; then
        note PASSED "reference"
    else
        tail -n 40 "$log"
        note FAILED "reference"
    fi
}

# aarch64: tests for 64-bit Arm on an emulator, without a real model and without what the emulator takes long over. Library, runner
# and policies for processors with products of bytes; what has vector code of its own again for those without.
aarch64() {
    if ! (setup_aarch64); then
        note SKIPPED "aarch64: a cross compiler, qemu-user or arm64 libraries are missing"
        return
    fi
    local -x MDKV_REFERENCE_MODEL= # its tests say SKIPPED
    local options=(-DCMAKE_TOOLCHAIN_FILE="$mdkv_root/cmake/aarch64.cmake" -DMDKV_AARCH64_PACKAGES="$mdkv_cache/aarch64"
        -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DMDKV_BUILD_EXAMPLES=OFF -DMDKV_BUILD_BENCH=OFF
        -DMDKV_BUILD_EMULATED_TESTS=OFF -DMDKV_CUDA=OFF)
    # Patterns of doctest, in which a star stands for anything.
    local long=('allocate agrees with a bisection*' 'raising the limit never raises the loss' 'resident bytes are those of the buffer*'
        'every policy stays within its bytes*' 'a long generation*s cache never takes more*' '*with any bit of it flipped is refused or can be used')
    local forks=('a forked child*' 'pools end in a forked child*')
    local bits=('a cache of many parts*' 'a batch of sequences gives*' 'a batch asks for the scratch*') # the same on every processor
    local first='unit/[a-z_]*|(comm|core|cpu|detail|engine|replay|stages|runner|systems)/.*'
    local again='cpu/simd|attend|(stages/)?pack' name
    leg aarch64-i8mm 'mdkv_tests mdkv_layer_tests mdkv_runner_tests' '-L doctest -E ^recorded$' "${options[@]}" \
        -DMDKV_ARCH=armv8.2-a+dotprod+i8mm "-DMDKV_TEST_SOURCES=/($first)\\.cpp\$" "-DMDKV_TEST_CASES_LEFT_OUT=$(joined "${long[@]}" "${forks[@]}")"
    options+=("-DMDKV_TEST_SOURCES=/($again)\\.cpp\$" "-DMDKV_TEST_CASES_LEFT_OUT=$(joined "${bits[@]}")")
    leg aarch64-dotprod mdkv_tests "-R ^($again)\$" "${options[@]}" -DMDKV_ARCH=armv8.2-a+dotprod
    leg aarch64-armv8 'mdkv_tests mdkv_recorded_tests' "-R ^($again|recorded)\$" "${options[@]}" -DMDKV_ARCH=armv8-a \
        '-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-cpu;cortex-a72;-L;/usr/aarch64-linux-gnu'
    for name in "${long[@]}"; do
        note SKIPPED "aarch64-i8mm: $name: takes the emulator twenty seconds or more"
    done
    for name in "${forks[@]}"; do
        note SKIPPED "aarch64-i8mm: $name: qemu-user ends where a forked child starts threads"
    done
    for name in "${bits[@]}"; do
        note SKIPPED "aarch64-dotprod, aarch64-armv8: $name: runs in aarch64-i8mm only"
    done
}

# sanitized NAME SOURCES TARGETS CTEST_OPTIONS CONFIGURE_OPTION...: tests of some sources with the other compiler, under sanitizers
# and without the machine's own instructions, so that the narrow vectors run, too
sanitized() {
    local name=$1 sources=$2 targets=$3 ctest_options=$4 compiler=$mdkv_cxx
    shift 4
    if [[ -n $mdkv_clang ]]; then
        compiler=$mdkv_clang name=clang-$name
    else
        note SKIPPED "clang-$name: apt offers no clang of version 16 or newer; it runs with g++"
    fi
    leg "$name" "$targets" "$ctest_options" -DCMAKE_BUILD_TYPE=RelWithDebInfo '-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1' \
        '-DMDKV_SANITIZE=address,undefined' -DMDKV_ARCH= -DMDKV_BUILD_EXAMPLES=OFF -DMDKV_BUILD_BENCH=OFF -DMDKV_CUDA=OFF \
        -DCMAKE_CXX_COMPILER="$compiler" "-DMDKV_TEST_SOURCES=/tests/$sources/" "$@"
}

# sanitizers: the library's tests, and the emulated GPU, which is met here only: what its tests look for are accesses and orders of
# threads. The headers alone are the release leg's; here the first that every test includes is its own.
sanitizers() {
    local targets='mdkv_tests mdkv_layer_tests mdkv_recorded_tests mdkv_emulated_tests' more=()
    if [[ -n ${MDKV_LLAMA_CPP:-} ]]; then # the backend is an example
        more=(-DMDKV_BUILD_EXAMPLES=ON -DMDKV_LLAMA_CPP="$MDKV_LLAMA_CPP"
            -DMDKV_LLAMA_CPP_BUILD="${MDKV_LLAMA_CPP_BUILD:-$MDKV_LLAMA_CPP/build}")
        targets+=' mdkv_llama_cpp_tests'
    fi
    sanitized asan '(unit|apps/llama_cpp)' "$targets" '-L doctest|compiler -E header_checks' "${more[@]}"
}

# sanitizers_of_apps: the tests of the runner, which takes minutes to compile
sanitizers_of_apps() {
    sanitized asan-apps 'apps/(runner|systems)' mdkv_runner_tests '-R ^(runner|systems)/' -DMDKV_BUILD_EMULATED_TESTS=OFF
}

# gpu_programs: tests and benchmarks for a GPU through nvcc; the tests' PTX is executed without one
gpu_programs() {
    if ! command -v nvcc >/dev/null && [[ ! -x /usr/local/cuda/bin/nvcc && ! -x /opt/cuda/bin/nvcc ]]; then
        return # it was said that there is none
    fi
    leg gpu 'mdkv_gpu_tests mdkv_gpu_bench mdkv_ptx_tests' '-R ^(ptx/|consumer/cuda$|gpu/gpu_)' -DCMAKE_BUILD_TYPE=Release \
        -DCMAKE_CXX_COMPILER="$mdkv_cxx" -DMDKV_UNOPTIMISED_BENCH=ON -DMDKV_BUILD_EXAMPLES=OFF -DMDKV_BUILD_EMULATED_TESTS=OFF
}

# fuzz: a number of runs of each fuzz target
fuzz() {
    if [[ -z $mdkv_clang ]]; then
        note SKIPPED "fuzz: apt offers no clang of version 16 or newer"
        return
    fi
    leg fuzz mdkv_fuzzers '-L fuzz' -DCMAKE_BUILD_TYPE=RelWithDebInfo -DMDKV_ARCH= -DMDKV_BUILD_EXAMPLES=OFF \
        -DMDKV_BUILD_BENCH=OFF -DMDKV_BUILD_EMULATED_TESTS=OFF -DMDKV_CUDA=OFF -DMDKV_BUILD_FUZZERS=ON \
        -DMDKV_FUZZ_RUNS=100000 -DCMAKE_CXX_COMPILER="$mdkv_clang"
}

# joined WORD...: the words with commas between them
joined() {
    local IFS=,
    printf '%s' "$*"
}

setup_packages "${mdkv_build_packages[@]}" "${mdkv_test_packages[@]}"
setup_compiler
setup_cuda_headers
mkdir -p "$build"
: >"$build/notes.txt"

# Without the model or the text the tests that need them say SKIPPED; everything else still runs.
if (setup_model); then
    MDKV_MODEL=${MDKV_MODEL:-$mdkv_cache/$(basename "$model_member")}
    export MDKV_REFERENCE_MODEL=$MDKV_MODEL
fi
# The second model is used where it is, and fetched only by whoever asks for it.
MDKV_SECOND_MODEL=${MDKV_SECOND_MODEL:-$mdkv_cache/$second_model_name}
if [[ -f $MDKV_SECOND_MODEL ]]; then
    export MDKV_SECOND_MODEL
else
    unset MDKV_SECOND_MODEL
fi

if command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc || -x /opt/cuda/bin/nvcc ]]; then
    setup_cuda_tools
else
    note SKIPPED "gpu/kernels: there is no nvcc, so the kernels are not compiled; --all runs them on an emulated GPU"
fi

if [[ $all == ON ]]; then
    (setup_packages "${mdkv_mpi_packages[@]}") || true
fi
if ! command -v mpiexec >/dev/null || ! command -v mpicxx >/dev/null; then
    note SKIPPED "comm/mpi, examples/ranks: there is no MPI (packages: ${mdkv_mpi_packages[*]})"
fi

release=(-DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER="$mdkv_cxx" -DMDKV_UNOPTIMISED_BENCH=ON
    -DMDKV_BUILD_EMULATED_TESTS=OFF -DMDKV_BUILD_BENCH="$all" -DMDKV_BUILD_GPU_PROGRAMS=OFF)
if [[ -n ${MDKV_LLAMA_CPP:-} ]]; then
    release+=(-DMDKV_LLAMA_CPP="$MDKV_LLAMA_CPP" -DMDKV_LLAMA_CPP_BUILD="${MDKV_LLAMA_CPP_BUILD:-$MDKV_LLAMA_CPP/build}")
else
    note SKIPPED "llama_cpp/backend: MDKV_LLAMA_CPP names no llama.cpp (bash examples/setup.sh llama-cpp builds one)"
fi
size
if [[ $all == OFF ]]; then
    leg release '' '' "${release[@]}"
else
    setup_packages "${mdkv_all_test_packages[@]}"
    setup_clang
    setup_newest_clang
    if (setup_text); then
        MDKV_TEXT=${MDKV_TEXT:-$mdkv_cache/prose/prose.txt}
    fi
    had_ccache=$(command -v ccache || true)
    if ((EUID == 0)) && (setup_packages "${mdkv_bare_packages[@]}"); then
        export CCACHE_DIR=$build/ccache CCACHE_COMPILERCHECK=content CCACHE_SLOPPINESS=locale # as in the root
    fi
    release_seconds=$SECONDS
    leg release 'all mdkv_crosscheck_programs' '' "${release[@]}"
    release_seconds=$((SECONDS - release_seconds))
    seconds+=("release $(minutes "$release_seconds")")
    part words 1 words
    part tags 1 tags
    part bare 35 bare
    unset CCACHE_DIR CCACHE_COMPILERCHECK CCACHE_SLOPPINESS
    [[ -n $had_ccache ]] || export CCACHE_DISABLE=1 # no other leg compiles the same twice
    part python 42 python_package
    part cross-checks 14 python_crosschecks
    unset MDKV_SECOND_MODEL # an emulator and sanitizers take too long over it
    part sanitizers 65 sanitizers
    part reference 4 reference
    even=$(($(date +%-d) % 2 == 0)) # what --within leaves out is not the same each day
    if ((even)); then
        part gpu 55 gpu_programs
    else
        part 'release files' 150 release_files
    fi
    part compilers 16 other_compilers
    part 'instruction counts' 14 instruction_counts
    part aarch64 40 aarch64
    part fuzz 18 fuzz
    part 'sanitizers of apps' 45 sanitizers_of_apps
    if ((even)); then
        part 'release files' 150 release_files
    else
        part gpu 55 gpu_programs
    fi
    say "minutes: $(joined "${seconds[@]}")"
fi

echo
python3 "$mdkv_root/tests/tools/count_results.py" "${results[@]}" "other=$build/notes.txt"
