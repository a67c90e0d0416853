# The vcpkg port without vcpkg and without a network: cmake -DROOT= -DOUT= -DCOMPILER= -DGENERATOR= -P vcpkg.cmake
# Runs the portfile with stand-ins that do as little as vcpkg's functions of these names must, then looks at the files of the
# package. (docs/packaging.md says how vcpkg's own functions were run.)
set(PORT mdkv)
set(CURRENT_PORT_DIR "${ROOT}/cmake/packaging/vcpkg/ports/mdkv")
set(CURRENT_PACKAGES_DIR "${OUT}/package")
file(REMOVE_RECURSE "${OUT}")

function(run)
    execute_process(COMMAND ${ARGV} OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
endfunction()
function(vcpkg_cmake_configure)
    cmake_parse_arguments(PARSE_ARGV 0 given "" "SOURCE_PATH" "OPTIONS")
    run("${CMAKE_COMMAND}" -S "${given_SOURCE_PATH}" -B "${OUT}/build" -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${COMPILER}"
        "-DCMAKE_INSTALL_PREFIX=${CURRENT_PACKAGES_DIR}" ${given_OPTIONS})
endfunction()
function(vcpkg_cmake_install)
    run("${CMAKE_COMMAND}" --build "${OUT}/build" --target install)
endfunction()
function(vcpkg_cmake_config_fixup) # vcpkg's also corrects the paths in these files
    cmake_parse_arguments(PARSE_ARGV 0 given "" "CONFIG_PATH" "")
    file(RENAME "${CURRENT_PACKAGES_DIR}/${given_CONFIG_PATH}" "${CURRENT_PACKAGES_DIR}/share/${PORT}")
endfunction()
function(vcpkg_fixup_pkgconfig)
endfunction()
function(vcpkg_install_copyright)
    cmake_parse_arguments(PARSE_ARGV 0 given "" "" "FILE_LIST")
    file(INSTALL ${given_FILE_LIST} DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}" RENAME copyright)
endfunction()

include("${CURRENT_PORT_DIR}/portfile.cmake")

# Nothing but headers, and below share/ what vcpkg looks for.
file(GLOB_RECURSE others RELATIVE "${CURRENT_PACKAGES_DIR}" "${CURRENT_PACKAGES_DIR}/*")
list(FILTER others EXCLUDE REGEX "^include/mdkv/.*\\.(hpp|cuh)$")
set(expected share/mdkv/copyright share/mdkv/mdkvConfig.cmake share/mdkv/mdkvConfigVersion.cmake share/mdkv/mdkvTargets.cmake
    share/mdkv/usage share/pkgconfig/mdkv.pc)
list(SORT others)
if(NOT others STREQUAL expected)
    message(FATAL_ERROR "the package has, beside headers, ${others}; expected: ${expected}")
endif()
file(GLOB_RECURSE source RELATIVE "${ROOT}/include" "${ROOT}/include/*")
file(GLOB_RECURSE packed RELATIVE "${CURRENT_PACKAGES_DIR}/include" "${CURRENT_PACKAGES_DIR}/include/*")
if(NOT source STREQUAL packed)
    message(FATAL_ERROR "the headers of the package are not those of ${ROOT}/include")
endif()
