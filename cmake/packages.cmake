# Packages that our own programs need: one that is missing ends the configuration with the name of the Debian package that holds it.

# mdkv_package(NAME DEBIAN_PACKAGE OPTION...): find_package(NAME OPTION...), a macro because its results are the caller's variables
macro(mdkv_package name debian)
    find_package(${name} QUIET ${ARGN})
    if(NOT ${name}_FOUND)
        message(FATAL_ERROR "${name} was not found (Debian and Ubuntu: ${debian}). Tests, benchmarks and examples need such packages, "
            "the library needs none: -DMDKV_BUILD_TESTS=OFF -DMDKV_BUILD_BENCH=OFF -DMDKV_BUILD_EXAMPLES=OFF")
    endif()
endmacro()
