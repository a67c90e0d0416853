/// \file version.hpp: the only definition of the version of mdkv: CMake, pkg-config and the packages read this file.
#pragma once

#define MDKV_VERSION_MAJOR 0
#define MDKV_VERSION_MINOR 3
#define MDKV_VERSION_PATCH 0

/// One number that grows with the version, for `#if MDKV_VERSION >= 300`.
#define MDKV_VERSION (MDKV_VERSION_MAJOR * 10000 + MDKV_VERSION_MINOR * 100 + MDKV_VERSION_PATCH)
