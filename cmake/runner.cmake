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
endif()

add_library(mdkv_runner STATIC "${PROJECT_SOURCE_DIR}/examples/runner/sequence_cache.cpp" "${mdkv_runner_layers}")
target_include_directories(mdkv_runner PUBLIC "${PROJECT_SOURCE_DIR}/examples" "${PROJECT_SOURCE_DIR}/examples/runner")
target_link_libraries(mdkv_runner PRIVATE mdkv_build_flags ${mdkv_runner_libraries}
    PUBLIC mdkv::mdkv Eigen3::Eigen PkgConfig::PCRE2 nlohmann_json::nlohmann_json)
