# How our own executables are compiled. Nothing here reaches a consumer.
if(PROJECT_IS_TOP_LEVEL)
    if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
        set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
    endif()
    find_program(MDKV_CCACHE ccache)
    mark_as_advanced(MDKV_CCACHE)
    if(MDKV_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
        set(CMAKE_CXX_COMPILER_LAUNCHER "${MDKV_CCACHE}")
    endif()
    set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
    set(CMAKE_CXX_EXTENSIONS OFF)
endif()

add_library(mdkv_warnings INTERFACE)
# g++ 12 warns of its own AVX-512 intrinsics and of std::string wherever they are inlined; clang keeps watch over these.
# What its optimiser says of the bounds of vectors depends on the processor that is compiled for, and so is never an error.
target_compile_options(mdkv_warnings INTERFACE -Wall -Wextra -Wpedantic -Wconversion -Wshadow $<$<BOOL:${MDKV_WARNINGS_AS_ERRORS}>:-Werror>
    $<$<AND:$<CXX_COMPILER_ID:GNU>,$<BOOL:${MDKV_WARNINGS_AS_ERRORS}>>:-Wno-error=stringop-overflow;-Wno-error=aggressive-loop-optimizations;-Wno-error=stringop-overread>
    $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-uninitialized;-Wno-maybe-uninitialized;-Wno-array-bounds;-Wno-restrict>)

# warnings + processor + sanitizers: link this into every executable of ours
add_library(mdkv_build_flags INTERFACE)
target_link_libraries(mdkv_build_flags INTERFACE mdkv_warnings)
if(MDKV_ARCH)
    target_compile_options(mdkv_build_flags INTERFACE -march=${MDKV_ARCH})
endif()
if(MDKV_SANITIZE)
    target_compile_options(mdkv_build_flags INTERFACE -fsanitize=${MDKV_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
    target_link_options(mdkv_build_flags INTERFACE -fsanitize=${MDKV_SANITIZE})
endif()
