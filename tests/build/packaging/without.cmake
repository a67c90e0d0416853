# Script (cmake -DROOT= -DOUT= -DCOMPILER= -DGENERATOR= -P): configures the project on a machine that lacks one package.
# What needs an optional package is then not built, and a missing one that is needed is named as Debian calls it.

# configure(OPTION...): sets `status` and `output`
function(configure)
    file(REMOVE_RECURSE "${OUT}")
    execute_process(COMMAND "${CMAKE_COMMAND}" -S "${ROOT}" -B "${OUT}" -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${COMPILER}" ${ARGN}
        RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
    string(REGEX REPLACE "[ \n]+" " " output "${output}") # CMake breaks lines
    set(status "${status}" PARENT_SCOPE)
    set(output "${output}" PARENT_SCOPE)
endfunction()

# leaves_out(PACKAGE WORDS OPTION...): the configuration succeeds, and no build file has one of the words
function(leaves_out package words)
    configure(${ARGN})
    if(NOT status EQUAL 0)
        message(SEND_ERROR "without ${package}: the configuration ended with ${status}: ${output}")
        return()
    endif()
    file(GLOB files "${OUT}/build.ninja" "${OUT}/Makefile")
    set(found "")
    if(files)
        file(STRINGS "${files}" found REGEX "${words}")
    endif()
    if(found OR NOT files)
        message(SEND_ERROR "without ${package}: the build files speak of it: ${found}")
        return()
    endif()
    message(STATUS "passed: without ${package}")
endfunction()

# names(PACKAGE DEBIAN_PACKAGE OPTION...): the configuration is refused
function(names package debian)
    configure("-DCMAKE_DISABLE_FIND_PACKAGE_${package}=ON" ${ARGN})
    if(status EQUAL 0 OR NOT output MATCHES "was not found \\(Debian and Ubuntu: ${debian}\\)")
        message(SEND_ERROR "without ${package}: the configuration ended with ${status} and does not name ${debian}: ${output}")
        return()
    endif()
    message(STATUS "passed: without ${package}")
endfunction()

set(programs -DMDKV_CUDA=OFF -DMDKV_BUILD_BENCH=OFF)
set(none -DMDKV_BUILD_TESTS=OFF -DMDKV_BUILD_BENCH=OFF -DMDKV_BUILD_EXAMPLES=OFF)

# With a compiler that is none, CMake's module of MPI finds nothing where there is one, too, and leaves its targets behind.
leaves_out(MPI "mdkv_mpi_tests|example_ranks" ${programs} -DMPI_CXX_COMPILER=${CMAKE_COMMAND})
leaves_out("any package" "doctest|Eigen|CLI11|benchmark" ${none} -DCMAKE_DISABLE_FIND_PACKAGE_doctest=ON
    -DCMAKE_DISABLE_FIND_PACKAGE_CLI11=ON -DCMAKE_DISABLE_FIND_PACKAGE_Eigen3=ON -DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON
    -DCMAKE_DISABLE_FIND_PACKAGE_PkgConfig=ON -DCMAKE_DISABLE_FIND_PACKAGE_Python3=ON)
names(doctest doctest-dev ${programs})
names(CLI11 libcli11-dev ${programs})
names(Eigen3 libeigen3-dev ${programs})
names(nlohmann_json nlohmann-json3-dev ${programs})
names(PkgConfig pkg-config ${programs})
names(Python3 python3 ${programs} -DMDKV_BUILD_EXAMPLES=OFF)
names(benchmark libbenchmark-dev ${none} -DMDKV_BUILD_BENCH=ON)
