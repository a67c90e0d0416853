# What everything that includes examples/runner needs: the file reader, the tokenizer, the model (whose matrix products are Eigen's).
mdkv_package(Eigen3 libeigen3-dev 3.4 NO_MODULE)
mdkv_package(nlohmann_json nlohmann-json3-dev)
mdkv_package(PkgConfig pkg-config)
pkg_check_modules(PCRE2 QUIET IMPORTED_TARGET libpcre2-8)
if(NOT PCRE2_FOUND)
    message(FATAL_ERROR "libpcre2-8 was not found (Debian and Ubuntu: libpcre2-dev)")
endif()

# --backend cuda of mdkv_run takes nvcc minutes, so only -DMDKV_CUDA=ON builds it; other builds tell whoever asks for it.
set(mdkv_runner_libraries "")
set(mdkv_runner_on_cuda OFF)
if(MDKV_NVCC AND MDKV_CUDA STREQUAL "ON")
    set(mdkv_runner_on_cuda ON)
    get_filename_component(nvcc_folder "${MDKV_NVCC}" REALPATH)
    get_filename_component(nvcc_folder "${nvcc_folder}" DIRECTORY)
    find_library(MDKV_CUDART cudart_static HINTS "${nvcc_folder}/.." PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib REQUIRED)
    mark_as_advanced(MDKV_CUDART)
    find_package(Threads REQUIRED)
    set(mdkv_runner_libraries "${MDKV_CUDART}" ${CMAKE_DL_LIBS} rt Threads::Threads)
endif()

# mdkv_add_cuda_layers(OUTPUT NAME FLAG...): the object of the CUDA backend whose host code has the flags of the runner's
# other sources: mdkv's types have another name for each processor (core/machine.hpp)
function(mdkv_add_cuda_layers output name)
    set(object "${CMAKE_CURRENT_BINARY_DIR}/${name}-cuda_layers.o")
    set(source "${PROJECT_SOURCE_DIR}/examples/runner/cuda_layers.cu")
    set(gencode "")
    foreach(architecture IN LISTS MDKV_CUDA_ARCHITECTURES)
        list(APPEND gencode "-gencode=arch=compute_${architecture},code=sm_${architecture}")
    endforeach()
    set(host "")
    foreach(flag IN LISTS ARGN)
        list(APPEND host -Xcompiler "${flag}")
    endforeach()
    add_custom_command(OUTPUT "${object}"
        COMMAND "${MDKV_NVCC}" ${mdkv_nvcc_flags} -O2 ${host} ${gencode} --threads 0
            -MD -MT "${object}" -MF "${object}.d" -c -o "${object}" "${source}"
        DEPENDS "${source}" DEPFILE "${object}.d" VERBATIM COMMENT "The CUDA backend of ${name}")
    set(${output} "${object}" PARENT_SCOPE)
endfunction()

# What mdkv_run is compiled for: as MDKV_ARCH says, or three times, for the program mdkv_run to choose from at start.
set(MDKV_RUNNER_INSTRUCTIONS native CACHE STRING
    "mdkv_run: native (compiled once, as MDKV_ARCH says) or several (x86-64, AVX2, AVX-512 VNNI; takes three times as long)")
set_property(CACHE MDKV_RUNNER_INSTRUCTIONS PROPERTY STRINGS native several)
set(mdkv_runner_variants "") # of mdkv_run-VARIANT; examples/runner/launcher.cpp knows their names
set(mdkv_any_processor "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
    set(mdkv_any_processor -march=x86-64)
endif()
if(MDKV_RUNNER_INSTRUCTIONS STREQUAL "several")
    if(NOT mdkv_any_processor)
        message(FATAL_ERROR "MDKV_RUNNER_INSTRUCTIONS is several; there are several for x86-64 only")
    endif()
    set(mdkv_runner_variants x86-64 x86-64-v3 x86-64-v4-vnni)
elseif(NOT MDKV_RUNNER_INSTRUCTIONS STREQUAL "native")
    message(FATAL_ERROR "MDKV_RUNNER_INSTRUCTIONS is ${MDKV_RUNNER_INSTRUCTIONS}; it must be native or several")
endif()

# mdkv_add_runner(NAME FLAGS MACHINE...): all of the runner but main.cpp; FLAGS is the library of its compile options, MACHINE
# those of them that choose the processor
function(mdkv_add_runner name flags)
    set(layers "${PROJECT_SOURCE_DIR}/examples/runner/no_cuda_layers.cpp")
    if(mdkv_runner_on_cuda)
        mdkv_add_cuda_layers(layers ${name} ${ARGN})
    endif()
    add_library(${name} STATIC "${PROJECT_SOURCE_DIR}/examples/runner/sequence_cache.cpp" "${layers}")
    target_include_directories(${name} PUBLIC "${PROJECT_SOURCE_DIR}/examples" "${PROJECT_SOURCE_DIR}/examples/runner"
        "${PROJECT_SOURCE_DIR}/bench/quality")
    target_link_libraries(${name} PRIVATE ${flags} ${mdkv_runner_libraries}
        PUBLIC mdkv::mdkv Eigen3::Eigen PkgConfig::PCRE2 nlohmann_json::nlohmann_json)
endfunction()
set(mdkv_runner_machine "")
if(MDKV_ARCH)
    set(mdkv_runner_machine "-march=${MDKV_ARCH}")
endif()
mdkv_add_runner(mdkv_runner mdkv_build_flags ${mdkv_runner_machine})
foreach(variant IN LISTS mdkv_runner_variants)
    string(REPLACE "-vnni" ";-mavx512vnni" march "-march=${variant}")
    add_library(mdkv_flags-${variant} INTERFACE)
    target_link_libraries(mdkv_flags-${variant} INTERFACE mdkv_warnings)
    target_compile_options(mdkv_flags-${variant} INTERFACE ${march} $<$<BOOL:${MDKV_UNOPTIMISED_BENCH}>:-O0>)
    mdkv_add_runner(mdkv_runner-${variant} mdkv_flags-${variant} ${march})
endforeach()

# Sources of a program that ends, saying why, where the processor lacks what it is compiled for.
add_library(mdkv_needs_processor OBJECT "${PROJECT_SOURCE_DIR}/examples/runner/needs_processor.cpp")
target_link_libraries(mdkv_needs_processor PRIVATE mdkv_warnings)
target_compile_options(mdkv_needs_processor PRIVATE ${mdkv_any_processor})
set(mdkv_processor_check $<TARGET_OBJECTS:mdkv_needs_processor> "${PROJECT_SOURCE_DIR}/examples/runner/compiled_for.cpp")
