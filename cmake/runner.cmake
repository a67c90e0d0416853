# What everything that includes examples/runner needs: the file reader, the tokenizer, the model (whose matrix products are Eigen's).
find_package(Eigen3 3.4 REQUIRED NO_MODULE)
find_package(PkgConfig REQUIRED)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
find_package(nlohmann_json REQUIRED)

# --backend cuda of mdkv_run takes nvcc minutes, so only -DMDKV_CUDA=ON builds it; other builds tell whoever asks for it.
set(mdkv_runner_layers "${PROJECT_SOURCE_DIR}/examples/runner/no_cuda_layers.cpp")
set(mdkv_runner_libraries "")
if(MDKV_NVCC AND MDKV_CUDA STREQUAL "ON")
    get_filename_component(nvcc_folder "${MDKV_NVCC}" REALPATH)
    get_filename_component(nvcc_folder "${nvcc_folder}" DIRECTORY)
    find_library(MDKV_CUDART cudart_static HINTS "${nvcc_folder}/.." PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib REQUIRED)
    mark_as_advanced(MDKV_CUDART)
    find_package(Threads REQUIRED)
    set(mdkv_runner_libraries "${MDKV_CUDART}" ${CMAKE_DL_LIBS} rt Threads::Threads)

    set(mdkv_runner_layers "${CMAKE_CURRENT_BINARY_DIR}/cuda_layers.o")
    set(source "${PROJECT_SOURCE_DIR}/examples/runner/cuda_layers.cu")
    set(gencode "")
    foreach(architecture IN LISTS MDKV_CUDA_ARCHITECTURES)
        list(APPEND gencode "-gencode=arch=compute_${architecture},code=sm_${architecture}")
    endforeach()
    add_custom_command(OUTPUT "${mdkv_runner_layers}"
        COMMAND "${MDKV_NVCC}" ${mdkv_nvcc_flags} -O2 ${gencode} --threads 0
            -MD -MT "${mdkv_runner_layers}" -MF "${mdkv_runner_layers}.d" -c -o "${mdkv_runner_layers}" "${source}"
        DEPENDS "${source}" DEPFILE "${mdkv_runner_layers}.d" VERBATIM COMMENT "The CUDA backend of mdkv_run")
    add_custom_target(mdkv_cuda_layers DEPENDS "${mdkv_runner_layers}") # one object, whatever the rest is compiled for
endif()

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

# mdkv_add_runner(NAME FLAGS): all of the runner but main.cpp; FLAGS is the library of its compile options
function(mdkv_add_runner name flags)
    add_library(${name} STATIC "${PROJECT_SOURCE_DIR}/examples/runner/sequence_cache.cpp" "${mdkv_runner_layers}")
    target_include_directories(${name} PUBLIC "${PROJECT_SOURCE_DIR}/examples" "${PROJECT_SOURCE_DIR}/examples/runner")
    target_link_libraries(${name} PRIVATE ${flags} ${mdkv_runner_libraries}
        PUBLIC mdkv::mdkv Eigen3::Eigen PkgConfig::PCRE2 nlohmann_json::nlohmann_json)
    if(TARGET mdkv_cuda_layers)
        add_dependencies(${name} mdkv_cuda_layers)
    endif()
endfunction()
mdkv_add_runner(mdkv_runner mdkv_build_flags)
foreach(variant IN LISTS mdkv_runner_variants)
    string(REPLACE "-vnni" ";-mavx512vnni" march "-march=${variant}")
    add_library(mdkv_flags-${variant} INTERFACE)
    target_link_libraries(mdkv_flags-${variant} INTERFACE mdkv_warnings)
    target_compile_options(mdkv_flags-${variant} INTERFACE ${march} $<$<BOOL:${MDKV_UNOPTIMISED_BENCH}>:-O0>)
    mdkv_add_runner(mdkv_runner-${variant} mdkv_flags-${variant})
endforeach()

# Sources of a program that ends, saying why, where the processor lacks what it is compiled for.
add_library(mdkv_needs_processor OBJECT "${PROJECT_SOURCE_DIR}/examples/runner/needs_processor.cpp")
target_link_libraries(mdkv_needs_processor PRIVATE mdkv_warnings)
target_compile_options(mdkv_needs_processor PRIVATE ${mdkv_any_processor})
set(mdkv_processor_check $<TARGET_OBJECTS:mdkv_needs_processor> "${PROJECT_SOURCE_DIR}/examples/runner/compiled_for.cpp")
