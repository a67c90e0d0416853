#!/usr/bin/env bash
# Installs the project into folders that distributions ask for, and looks for its headers with pkg-config and with find_package:
# folders.sh CMAKE GENERATOR COMPILER ROOT VERSION
set -euo pipefail
cmake=$1 compiler=$3 root=$4 version=$5
export CMAKE_GENERATOR=$2 # the default one needs make, which a machine may lack
scratch=$(mktemp -d) # CMake refuses absolute folders of headers inside the sources
trap 'rm -rf "$scratch"' EXIT
out=$scratch/folders
failed=0

# finds NAME PKGCONFIG_FOLDER CMAKE_FOLDER SYSROOT
finds() {
    local folder
    rm -rf "$out/consumer"
    eval "folder=($(PKG_CONFIG_PATH=$2 PKG_CONFIG_SYSROOT_DIR=$4 pkg-config --cflags-only-I mdkv))" # undoes escaped spaces
    folder=${folder[*]#-I}
    if [[ ! -f $folder/mdkv/mdkv.hpp ]]; then
        echo "FAILED: $1: mdkv.pc names $folder"
        failed=1
    elif [[ -n $3 ]] && ! "$cmake" -S "$root/tests/build/consumer/find_package" -B "$out/consumer" "-Dmdkv_DIR=$3" \
        "-DCMAKE_CXX_COMPILER=$compiler" "-DMDKV_EXPECTED_VERSION=$version" >"$out/log" 2>&1; then
        echo "FAILED: $1: find_package: $(grep -A5 Error "$out/log")" # CMake refuses folders of headers that do not exist
        failed=1
    else
        echo "passed: $1"
    fi
}

# installs PREFIX OPTION...
installs() {
    rm -rf "$out"
    "$cmake" -S "$root" -B "$out/build" -DMDKV_BUILD_TESTS=OFF -DMDKV_BUILD_BENCH=OFF -DMDKV_BUILD_EXAMPLES=OFF \
        "-DCMAKE_CXX_COMPILER=$compiler" "-DCMAKE_INSTALL_PREFIX=$1" "${@:2}" >/dev/null
    "$cmake" --install "$out/build" >/dev/null
}

p="$out/a prefix"
export DESTDIR=
installs "$p"
finds "the usual folders" "$p/share/pkgconfig" "$p/share/cmake/mdkv" ""
mv "$p" "$out/moved"
finds "a prefix that was moved" "$out/moved/share/pkgconfig" "$out/moved/share/cmake/mdkv" ""
installs "$p" -DCMAKE_INSTALL_INCLUDEDIR=include/mdkv-1 -DCMAKE_INSTALL_DATADIR=lib/x/share
finds "other folders in the prefix" "$p/lib/x/share/pkgconfig" "$p/lib/x/share/cmake/mdkv" ""
installs "$p" "-DCMAKE_INSTALL_INCLUDEDIR=$out/for development/include"
finds "headers in a folder of their own" "$p/share/pkgconfig" "$p/share/cmake/mdkv" ""
mkdir "$out/for development/share"
mv "$p/share/pkgconfig" "$out/for development/share"
finds "headers and mdkv.pc in one of their own" "$out/for development/share/pkgconfig" "" ""
installs "$p" "-DCMAKE_INSTALL_INCLUDEDIR=$p/include"
finds "headers by an absolute path in the prefix" "$p/share/pkgconfig" "$p/share/cmake/mdkv" ""
installs "$p" "-DCMAKE_INSTALL_DATADIR=$out/all/share"
finds "data in a folder of its own" "$out/all/share/pkgconfig" "$out/all/share/cmake/mdkv" ""
installs "$p" "-DCMAKE_INSTALL_INCLUDEDIR=$out/headers" "-DCMAKE_INSTALL_DATADIR=$out/all/share"
finds "headers and data in folders of their own" "$out/all/share/pkgconfig" "$out/all/share/cmake/mdkv" ""
export DESTDIR=$out/staged
installs /opt/mdkv
finds "a staged installation" "$DESTDIR/opt/mdkv/share/pkgconfig" "$DESTDIR/opt/mdkv/share/cmake/mdkv" ""
installs /opt/mdkv -DCMAKE_INSTALL_INCLUDEDIR=/opt/headers
finds "a staged installation, headers in a folder of their own" "$DESTDIR/opt/mdkv/share/pkgconfig" "" "$DESTDIR"
exit $failed
