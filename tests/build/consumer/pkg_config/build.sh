#!/usr/bin/env bash
# Builds and runs the consumer with what pkg-config says: build.sh COMPILER PREFIX PKGCONFIG_FOLDER VERSION OUTPUT_FOLDER
# The prefix is moved first, because an installation must work wherever it was unpacked.
set -euo pipefail
compiler=$1 prefix=$2 pkgconfig=$3 version=$4 out=$5

rm -rf "$out"
mkdir -p "$out"
cp -r "$prefix" "$out/moved"
export PKG_CONFIG_PATH="$out/moved/$pkgconfig"
pkg-config --exists --print-errors "mdkv = $version"
# shellcheck disable=SC2046 # the flags are meant to be split into words
"$compiler" -std=c++20 "$(dirname "$0")/../main.cpp" $(pkg-config --cflags --libs mdkv) -o "$out/consumer"
"$out/consumer" "$version"
