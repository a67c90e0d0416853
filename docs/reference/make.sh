#!/usr/bin/env bash
# The reference: a page for each public function and type, from the comments of the headers.
#
#   bash docs/reference/make.sh [FOLDER]   pages in FOLDER/html, from index.html on (build/reference, unless named)
#
# Installs doxygen if it is missing (examples/setup.sh). Fails if a function stands in no namespace page or has no comment, if a stage
# does not say its cost and synchronisation, if the main page names a function that is not there, or if Doxygen warns. Versions other
# than Debian 12's may warn for reasons of their own, which are printed only.
set -euo pipefail
# shellcheck source=examples/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../examples/setup.sh"

folder=$(realpath -m "${1:-$mdkv_root/build/reference}")
setup_packages "${mdkv_reference_packages[@]}"
command -v doxygen >/dev/null || die 2 "there is no doxygen"
cd "$mdkv_root"
rm -rf "$folder/html" "$folder/xml"
mkdir -p "$folder"
warnings=NO
[[ $(doxygen --version) == 1.9.4* ]] && warnings=FAIL_ON_WARNINGS
printf '%s\n' "OUTPUT_DIRECTORY = \"$folder\"" "WARN_AS_ERROR = $warnings" | cat docs/reference/Doxyfile - | doxygen -
python3 docs/reference/check.py "$folder"
say "reference: $folder/html/index.html"
