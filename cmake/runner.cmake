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

set(mdkv_runner_layers "${PROJECT_SOURCE_DIR}/examples/runner/no_cuda_layers.cpp")
if(mdkv_runner_on_cuda)
    set(march "")
    if(MDKV_ARCH)
        set(march "-march=${MDKV_ARCH}")
    endif()
    mdkv_add_cuda_layers(mdkv_runner_layers mdkv_runner ${march})
endif()
# All of the runner but main.cpp.
add_library(mdkv_runner_headers INTERFACE)
target_include_directories(mdkv_runner_headers INTERFACE "${PROJECT_SOURCE_DIR}/examples" "${PROJECT_SOURCE_DIR}/examples/runner")
target_link_libraries(mdkv_runner_headers INTERFACE mdkv::mdkv Eigen3::Eigen PkgConfig::PCRE2 nlohmann_json::nlohmann_json)
add_library(mdkv_runner STATIC "${PROJECT_SOURCE_DIR}/examples/runner/sequence_cache.cpp" "${mdkv_runner_layers}")
target_link_libraries(mdkv_runner PRIVATE mdkv_build_flags ${mdkv_runner_libraries} PUBLIC mdkv_runner_headers)

# Sources of a program that ends, saying why, where the processor lacks what it is compiled for.
add_library(mdkv_needs_processor OBJECT "${PROJECT_SOURCE_DIR}/examples/runner/needs_processor.cpp")
target_link_libraries(mdkv_needs_processor PRIVATE mdkv_warnings)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
    target_compile_options(mdkv_needs_processor PRIVATE -march=x86-64)
endif()
set(mdkv_processor_check $<TARGET_OBJECTS:mdkv_needs_processor> "${PROJECT_SOURCE_DIR}/examples/runner/compiled_for.cpp")
