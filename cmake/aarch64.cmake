# Arm, 64 bit, on another processor: compiled by Debian's cross compiler, executed by qemu-user.
#
#   cmake -B build/aarch64 -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake -DMDKV_ARCH=armv8-a -DMDKV_AARCH64_PACKAGES=FOLDER
#
# FOLDER holds what was unpacked from arm64 packages of libraries that tests link (setup_aarch64 in cmake/setup/tools.sh).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++ CACHE STRING "")
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64;-L;/usr/aarch64-linux-gnu CACHE STRING "")

set(MDKV_AARCH64_PACKAGES "" CACHE PATH "What arm64 packages hold, unpacked")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES MDKV_AARCH64_PACKAGES)
# Headers are the same on every processor: the compiler reads those in /usr/include, too.
set(CMAKE_LIBRARY_PATH "${MDKV_AARCH64_PACKAGES}/usr/lib/aarch64-linux-gnu")
set(CMAKE_IGNORE_PATH /usr/lib/x86_64-linux-gnu)
set(ENV{PKG_CONFIG_LIBDIR} "${MDKV_AARCH64_PACKAGES}/usr/lib/aarch64-linux-gnu/pkgconfig")
set(ENV{PKG_CONFIG_SYSROOT_DIR} "${MDKV_AARCH64_PACKAGES}")
