# What the parts of tests/run.sh are made of. Results go to $build/notes.txt and to results=(NAME=FILE...), which
# tests/tools/count_results.py adds up.
# shellcheck shell=bash disable=SC2154 # variables of run.sh and examples/setup.sh

# note KIND NAME: a result that no CTest run knows of; KIND is PASSED, FAILED or SKIPPED
note() { printf '%s: %s\n' "$1" "$2" | tee -a "$build/notes.txt"; }

# minutes SECONDS: as 12:05
minutes() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }

# joined WORD...: the words with commas between them
joined() {
    local IFS=,
    printf '%s' "$*"
}

# checked NAME COMMAND...: PASSED or FAILED by the command's status; its output is shown where it fails
checked() {
    local name=$1 log=$build/checked.log
    shift
    if "$@" >"$log" 2>&1; then
        note PASSED "$name"
    else
        tail -n 60 "$log"
        note FAILED "$name"
    fi
}

# part NAME: runs the function of that name, and keeps its minutes. A part that would begin after $most_minutes is skipped.
part() {
    local name=$1 begin=$SECONDS
    if ((most_minutes > 0 && SECONDS > most_minutes * 60)); then
        note SKIPPED "part $name: begins after $(minutes "$SECONDS") of $most_minutes minutes"
        return
    fi
    "part_$name"
    seconds+=("$name $(minutes $((SECONDS - begin)))")
}

# leg NAME TARGETS CTEST_OPTIONS CONFIGURE_OPTION...: configures, builds and tests in a folder of its own. A build that
# fails does not keep what could be built from being tested.
leg() {
    local name=$1 targets=$2 ctest_options=$3 folder=$build/$1 log=$build/$1.log
    shift 3
    say "$name: building (log: $log)"
    mkdir -p "$folder"
    rm -f "$folder/results.xml"
    : >"$log"
    # shellcheck disable=SC2086 # lists of words
    if ! { configure "$folder" "$@" && cmake --build "$folder" --parallel "$jobs" ${targets:+--target $targets} -- -k 0; } 2>&1 |
        minutely "$log"; then
        grep -E 'error:|Error|^FAILED' "$log" | sed -n 1,60p || tail -n 40 "$log"
        note FAILED "$name: the build"
    fi
    [[ $ctest_options != none ]] || { note PASSED "$name"; return; }
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

# package_tests ENVIRONMENT ARGUMENT...: pytest, of all tests without ARGUMENT, of the package in $build/python/packages, or in $package
package_tests() {
    local name=$1 results_file=$build/python-${#results[@]}-$1.xml tests=("${@:2}")
    ((${#tests[@]} > 0)) || tests=("$mdkv_root/examples/python/tests")
    rm -f "$results_file"
    if ! PYTHONPATH=$build/python/${package:-packages} "$mdkv_cache/python-$name/bin/python" -m pytest -q -p no:cacheprovider \
        --junitxml "$results_file" "${tests[@]}" >"$build/python.$name.log" 2>&1; then
        tail -n 200 "$build/python.$name.log"
    fi
    if [[ -f $results_file ]]; then
        results+=("python-$name=$results_file")
    else
        note FAILED "python-$name: no test ran"
    fi
}

# build_package: the Python package as pip builds it, for this processor alone (the part of wheels has modules for two), in
# $build/python/packages, once in a run
build_package() {
    local log=$build/python.log
    [[ -z ${package_built:-} ]] || return 0
    say "the package for Python (log: $log)"
    if ! (setup_python_peers); then
        note SKIPPED "python: PyPI is out of reach"
        return 1
    fi
    rm -rf "$build/python"
    if ! install_package packages -C cmake.define.MDKV_PYTHON_INSTRUCTIONS=native -C cmake.define.MDKV_PYTHON_CUDA=OFF >"$log" 2>&1; then
        tail -n 40 "$log"
        note FAILED "python: the build"
        return 1
    fi
    package_built=yes
}

# device_tests NAME...: tests of layers on a device, whose kernels the executor of PTX runs; $chosen is an argument for pytest
device_tests() {
    local package=executor files=("${@/#/$mdkv_root/examples/python/tests/test_}")
    if ! has_nvcc; then
        note SKIPPED "python: layers on a device: there is no nvcc"
    elif install_package executor -C cmake.define.MDKV_PYTHON_CUDA=ON -C cmake.define.MDKV_PYTHON_EXECUTOR=ON \
        -C build-dir="$build/python/executor-build" >"$build/python.executor.log" 2>&1; then # the executor reads sources by paths from there
        OMP_NUM_THREADS=1 package_tests new --device executor "$chosen" "${files[@]/%/.py}"
    else
        tail -n 40 "$build/python.executor.log"
        note FAILED "python: the build with the executor of PTX"
    fi
}

# install_package FOLDER OPTION...: the package into $build/python/FOLDER
install_package() {
    local -x CXX=$mdkv_cxx CMAKE_BUILD_PARALLEL_LEVEL=$jobs
    "$mdkv_cache/python-new/bin/python" -m pip install -q --disable-pip-version-check --no-deps \
        --target "$build/python/$1" "${@:2}" "$mdkv_root"
}

# setup_test_models: exports MDKV_REFERENCE_MODEL, and the text's MDKV_TEXT, where they can be had; tests without say SKIPPED
setup_test_models() {
    if (setup_model); then
        MDKV_MODEL=${MDKV_MODEL:-$mdkv_cache/$(basename "$model_member")}
        export MDKV_REFERENCE_MODEL=$MDKV_MODEL
    fi
    if (setup_text); then MDKV_TEXT=${MDKV_TEXT:-$mdkv_cache/prose/prose.txt}; fi
}

# has_nvcc: whether there is one, on the PATH or where toolkits lie
has_nvcc() { command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc || -x /opt/cuda/bin/nvcc ]]; }

# crosschecks FOLDER: the runner's programs in it beside Python's packages, with each model
crosschecks() {
    local tools=$mdkv_root/tests/tools programs=$1 python=$mdkv_cache/venv/bin/python model name alone=()
    if ! (setup_python) || ! "$python" -m pip install -q --disable-pip-version-check numpy gguf==0.19.0 jinja2 tokenizers; then
        note SKIPPED "cross-checks: PyPI is out of reach"
        return
    fi
    for model in "${MDKV_REFERENCE_MODEL:-}" "${MDKV_SECOND_MODEL:-}"; do
        [[ -f $model && -f ${MDKV_TEXT:-} ]] || { note SKIPPED "cross-checks: there is no model or no text" && continue; }
        name=$(basename "$model")
        checked "crosscheck_gguf $name" "$python" "$tools/crosscheck_gguf.py" "$programs/dump" "$model"
        checked "crosscheck_tokenizer $name" "$python" "$tools/crosscheck_tokenizer.py" "$programs/dump" \
            --model "$model" --text "$MDKV_TEXT" "${alone[@]}"
        checked "reference_forward $name" "$python" "$tools/reference_forward.py" check "$model" "$programs/dump_logits" "$MDKV_TEXT"
        alone=(--alone)
    done
}

# --- parts that say more about their surroundings than about the code ------------------------------------------------

# ctags, which reads no macros, finds what the headers declare, as editors do.
part_tags() {
    if (setup_packages "${mdkv_tag_packages[@]}"); then
        # shellcheck disable=SC2016 # bash -c reads its own arguments
        checked tags bash -c 'found=$(ctags -x --languages=C++ --langmap=C++:+.cuh -R "$0/include")
            for name; do grep -qE "^$name +(class|struct|function) " <<<"$found" || { echo "$name" && exit 1; }; done' \
            "$mdkv_root" prompt reader preset attend allocate score_block
    else
        note SKIPPED "tags: packages are missing: ${mdkv_tag_packages[*]}"
    fi
}

# The Python package's build with CUDA, and by turns a third of its tests on a device, which take more than an hour.
part_cuda() {
    if ! has_nvcc || ! (setup_python_peers); then
        note SKIPPED "python: the build with CUDA: there is no nvcc, or PyPI is out of reach"
    else
        PATH=$PATH:/usr/local/cuda/bin checked "python: the build with CUDA" install_package cuda -C cmake.define.MDKV_PYTHON_CUDA=ON \
            -C cmake.define.CMAKE_CUDA_ARCHITECTURES=90 -C 'cmake.define.CMAKE_CUDA_FLAGS=-Xcicc -O0'
        chosen=--part=$(($(date +%-j) / 11 % 3))/3 device_tests device transformers while_reading reader storing mdkv every_decoder examples
    fi
}

# What a release offers, made from the last commit, and installed in Debian roots.
part_wheels() { release_part wheels wheel wheel_try.sh files/python; }
part_releases() { release_part releases 'archive debian plugin' installed.sh files; }

# release_part NAME MADE SCRIPT FOLDER: MADE are parts of release.sh, SCRIPT tries them
release_part() {
    local name=$1 log=$build/$1.log folder=$build/$1
    if ((EUID != 0)) || [[ ! -d $mdkv_root/.git ]]; then
        note SKIPPED "$name: takes root and a clone"
        return
    fi
    rm -rf --one-file-system "$folder"
    say "$name (log: $log)"
    # shellcheck disable=SC2086 # a list of words
    if ! bash "$mdkv_root/cmake/packaging/release.sh" "$folder/files" $2 >"$log" 2>&1; then
        grep -q 'out of reach' "$log" && note SKIPPED "$name: $(tail -n 1 "$log")" && return
        tail -n 40 "$log"
        note FAILED "$name: cmake/packaging/release.sh"
        return
    fi
    bash "$mdkv_root/tests/build/packaging/$3" "$folder/roots" "$folder/$4" >>"$log" 2>&1 || tail -n 60 "$log"
    if [[ -f $folder/$4/TRIED ]]; then results+=("$name=$folder/$4/TRIED"); else note FAILED "$name: $3 ended early"; fi
}

# README's commands in a Debian root that has nothing, of the last commit.
part_bare() {
    local folder=$build/bare log=$build/bare.log code=0
    if ((EUID != 0)) || [[ ! -d $mdkv_root/.git ]]; then
        note SKIPPED "bare: takes root and a clone"
        return
    fi
    rm -rf --one-file-system "$folder"
    say "a machine that has nothing (log: $log)"
    bash "$mdkv_root/tests/bare.sh" "$folder" 'bash tests/run.sh' 'bash examples/quickstart.sh' >"$log" 2>&1 || code=$?
    if [[ ! -f $folder/1.log ]]; then
        note SKIPPED "bare: $(tail -n 1 "$log")"
    elif ((code == 0)); then
        note PASSED "bare: bash tests/run.sh, bash examples/quickstart.sh"
    else
        tail -n 60 "$log"
        note FAILED "bare: a command's status (log: $log)"
    fi
    rm -rf --one-file-system "$folder/root"
}
