#!/usr/bin/env bash
# Makes everything that a release offers, of the last commit, into one folder with checksums; uploads nothing.
#
#   bash cmake/packaging/release.sh FOLDER [PART]...   parts: archive debian wheel plugin; without one all
#
#   archive   mdkv-VERSION.tar.gz: the repository
#   debian    libmdkv-dev_VERSION_all.deb: headers, CMake package, pkg-config file
#   wheel     mdkv-VERSION*.whl and mdkv-VERSION.tar.gz of Python, in FOLDER/python (wheel.sh)
#   plugin    the llama.cpp backend as a file, in FOLDER/llama.cpp (plugin.sh)
#
# FOLDER/SHA256SUMS has the sum of each file. tests/build/packaging/installed.sh and wheel_try.sh install them on bare machines.
set -euo pipefail
# shellcheck source=examples/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../examples/setup.sh"

(($# > 0)) || die 2 "which folder? (bash cmake/packaging/release.sh FOLDER)"
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
(($# > 0)) || set -- archive debian wheel plugin
packaging=$mdkv_root/cmake/packaging
version=$(sed -n 's/^#define MDKV_VERSION_\(MAJOR\|MINOR\|PATCH\) //p' "$mdkv_root/include/mdkv/core/version.hpp" | paste -sd .)
archive=$folder/mdkv-$version.tar.gz

make_archive() {
    say "release: the last commit as ${archive##*/}"
    git -C "$mdkv_root" archive --prefix="mdkv-$version/" HEAD | gzip -9n >"$archive"
}

# The changelog's entry has the commit's time, so that the package's bytes follow from the commit.
make_debian() {
    local work=$folder/debian.work tree
    setup_packages debhelper dpkg-dev cmake g++ lintian
    rm -rf "$work"
    mkdir -p "$work"
    git -C "$mdkv_root" archive --prefix="mdkv-$version/" HEAD | tar -x -C "$work"
    tree=$work/mdkv-$version
    cp -r "$packaging/debian" "$tree/debian"
    printf 'mdkv (%s) unstable; urgency=medium\n\n  * See CHANGELOG.md.\n\n -- %s  %s\n' "$version" \
        "$(sed -n 's/^Maintainer: //p' "$tree/debian/control")" "$(git -C "$mdkv_root" log -1 --format=%cD)" >"$tree/debian/changelog"
    say "release: libmdkv-dev_${version}_all.deb"
    (cd "$tree" && dpkg-buildpackage --build=binary --no-sign) >"$folder/debian.log" 2>&1 ||
        die 1 "dpkg-buildpackage failed: $(tail -n 3 "$folder/debian.log")"
    lintian --fail-on error,warning --suppress-tags bogus-mail-host,initial-upload-closes-no-bugs "$work"/*.deb
    cp "$work"/*.deb "$folder"
    rm -rf "$work" "$folder/debian.log"
}

make_wheel() { bash "$packaging/wheel.sh" "$folder/python"; }
make_plugin() { bash "$packaging/plugin.sh" "$folder/llama.cpp"; }

for part in "$@"; do
    case $part in
        archive | debian | wheel | plugin) "make_$part" ;;
        *) die 2 "no such part: $part (archive, debian, wheel or plugin)" ;;
    esac
done

# wheel.sh and plugin.sh look for this machine's folders in their own files.
for file in "$folder"/mdkv-*.tar.gz "$folder"/*.deb; do
    [[ -e $file ]] || continue
    rm -rf "$folder/unpacked"
    mkdir "$folder/unpacked"
    case $file in
        *.deb) dpkg-deb -x "$file" "$folder/unpacked" ;;
        *) tar -xz -C "$folder/unpacked" -f "$file" ;;
    esac
    ! grep -rlF -e "$mdkv_root/" -e "$mdkv_cache/" "$folder/unpacked" || die 1 "${file##*/} holds a path of this machine in these files"
    rm -rf "$folder/unpacked"
done
find "$folder" -type f \( -name '*.deb' -o -name '*.whl' -o -name '*.tar.gz' \) -printf '%P\n' | LC_ALL=C sort >"$folder/files"
(cd "$folder" && xargs -d '\n' sha256sum <files >SHA256SUMS)
rm "$folder/files"
cat "$folder/SHA256SUMS"
