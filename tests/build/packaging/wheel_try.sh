#!/usr/bin/env bash
# The wheels that cmake/packaging/wheel.sh made, as users install them: `pip install FILE` in Debian roots with Python and no
# compiler, and in fresh environments of this machine's Pythons; then the lines of "A layer" in the package's README, on this
# processor, on one without AVX-512, and the messages on one without AVX2 and, of the wheel with CUDA, without a GPU.
#
#   bash tests/build/packaging/wheel_try.sh FOLDER OUT [PYTHON]...     OUT: the wheels' folder; PYTHON: interpreters of this machine
#
# As root, who makes the roots FOLDER/bookworm, FOLDER/trixie and FOLDER/forky with mmdebstrap. README's lines of transformers need
# torch, whose wheel for Linux on PyPI takes 6 GB: they, and test_mdkv.py, run in this machine's environment for the package's tests
# (examples/setup.sh python-peers), with the wheel beside it, if there is one. OUT/TRIED gets a line for each try. Exit status: 1 if a
# try failed, 2 if none can be made.
set -euo pipefail
# shellcheck source=examples/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../../examples/setup.sh"

(($# >= 2)) || die 2 "which folders? (bash tests/build/packaging/wheel_try.sh FOLDER OUT [PYTHON]...)"
mkdir -p "$1"
folder=$(cd "$1" && pwd)
out=$(cd "$2" && pwd)
shift 2
# shellcheck source=tests/build/packaging/roots.sh
source "$(dirname "${BASH_SOURCE[0]}")/roots.sh"

# The lines: all Python blocks of one section, and the four lines of transformers around a model without weights of its own.
section() { awk -v title="## $1" '/^## / {on = $0 == title} /^```/ {inside = on && $0 == "```python"; next} on && inside' "$2"; }
section "A layer" "$mdkv_root/examples/python/README.md" >"$folder/lines.py"
echo 'import mdkv, os; assert mdkv.compiled_for == os.environ.get("EXPECTED", mdkv.compiled_for), mdkv.compiled_for' >>"$folder/lines.py"
{
    echo 'import torch, transformers
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, hidden_size=64, intermediate_size=64,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))
inputs = {"input_ids": torch.randint(99, (1, 200)), "max_new_tokens": 4}'
    section "From Python" "$mdkv_root/README.md"
} >"$folder/with_torch.py"
echo 'try: import mdkv
except ImportError as error: raise SystemExit("it lacks abm, avx2, bmi1, bmi2, f16c, fma, movbe." not in str(error) and str(error))
raise SystemExit("the import succeeded")' >"$folder/older.py"
echo 'import mdkv
assert mdkv.build()["cuda"] == "80,90", mdkv.build()
try: mdkv.Prompt(mdkv.presets.by_window, layers=1, heads=1, key_dim=64, tokens=9, dtype="float16", backend=mdkv.CudaBackend())
except RuntimeError as error: raise SystemExit("CudaBackend" not in str(error) and str(error))' >"$folder/no_gpu.py"
printf 'flags\t\t: fpu %s\n' "avx2 fma bmi1 bmi2 f16c movbe abm" >"$folder/cpuinfo.v3"
printf 'flags\t\t: fpu sse4_2\n' >"$folder/cpuinfo.v2"

# wheel_for VERSION [PACKAGE]: prints the wheel for a version of Python
wheel_for() {
    local tag=cp${1/./}-cp${1/./}
    ((${1#3.} < 12)) || tag='cp3*-abi3'
    compgen -G "$out/${2:-mdkv}-*-$tag-*.whl"
}

# try_wheel NAME ROOT PYTHON FOLDER: FOLDER is this script's own one as the root sees it
try_wheel() {
    local name root=$2 python=$3 seen=$4 version wheel package
    version=$(inside "$root" "" "$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    mkdir -p "${root%/}$seen"
    [[ $root == / ]] || cp "$folder"/*.py "${root%/}$seen/"
    for package in mdkv 'mdkv_cu*'; do
        name="$1, Python $version, $package"
        wheel=$(wheel_for "$version" "$package") || { skip "$name" "$out has no such wheel" && continue; }
        cp "$wheel" "${root%/}$seen/"
        inside "$root" "" "$python" -m venv --clear "$seen/venv"
        try "$name: pip install" inside "$root" "" "$seen/venv/bin/python" -m pip install -q --only-binary=:all: "$seen/$(basename "$wheel")"
        try "$name: README's lines" inside "$root" "" "$seen/venv/bin/python" "$seen/lines.py"
        try "$name: README's lines without AVX-512" inside "$root" "$folder/cpuinfo.v3" env EXPECTED=x86-64-v3 "$seen/venv/bin/python" "$seen/lines.py"
        try "$name: the message without AVX2" inside "$root" "$folder/cpuinfo.v2" "$seen/venv/bin/python" "$seen/older.py"
        [[ $package == mdkv ]] || try "$name: the message without a GPU" inside "$root" "" "$seen/venv/bin/python" "$seen/no_gpu.py"
    done
}

for suite in "${suites[@]}"; do
    root=$folder/$suite
    make_root "$suite" || continue
    try "$suite: there is no compiler" inside "$root" "" sh -c '! command -v cc c++ gcc g++ clang'
    try_wheel "$suite" "$root" python3 /try
done
environment=("${base[@]}" PIP_CERT="$certificates")
for python in "$@"; do
    try_wheel "this machine" / "$(command -v "$python")" "$folder"
done

peers=$mdkv_cache/python-new/bin/python name="transformers' lines (they need torch)"
if [[ ! -x $peers ]]; then
    skip "$name" "bash examples/setup.sh python-peers makes their environment"
elif ! wheel=$(wheel_for "$("$peers" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"); then
    skip "$name" "$out has no wheel for $peers"
else
    rm -rf "$folder/target"
    "$peers" -m pip install -q --disable-pip-version-check --no-deps --target "$folder/target" "$wheel"
    try "$name" env PYTHONPATH="$folder/target" "$peers" "$folder/with_torch.py"
    try "tests of the modules for two processors" env PYTHONPATH="$folder/target" "$peers" -m pytest -q -p no:cacheprovider \
        "$mdkv_root/examples/python/tests/test_mdkv.py"
fi
cp "$results" "$out/TRIED"
python3 "$mdkv_root/tests/tools/count_results.py" "wheels=$results"
