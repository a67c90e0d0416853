# Other people's projects: one finds the installed package, one fetches the source, one is a parent with settings of its own,
# one asks pkg-config, one is CUDA's.
set(consumer_root "${PROJECT_BINARY_DIR}/consumers")
set(consumer_prefix "${consumer_root}/prefix")

# They expect the project's version of the package and of the header.
set(consumer_options "-DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}" "-DCMAKE_IGNORE_PATH=${CMAKE_IGNORE_PATH}"
    "-DMDKV_EXPECTED_VERSION=${PROJECT_VERSION}")

add_test(NAME consumer/install
    COMMAND "${CMAKE_COMMAND}" --install "${PROJECT_BINARY_DIR}" --prefix "${consumer_prefix}")
set_tests_properties(consumer/install PROPERTIES FIXTURES_SETUP mdkv_installed)

add_test(NAME consumer/find_package
    COMMAND "${CMAKE_CTEST_COMMAND}" --build-and-test "${CMAKE_CURRENT_SOURCE_DIR}/build/consumer/find_package" "${consumer_root}/find_package"
        --build-generator "${CMAKE_GENERATOR}" --build-options ${consumer_options} "-DCMAKE_PREFIX_PATH=${consumer_prefix}"
        --test-command consumer "${PROJECT_VERSION}")
add_test(NAME consumer/fetch_content
    COMMAND "${CMAKE_CTEST_COMMAND}" --build-and-test "${CMAKE_CURRENT_SOURCE_DIR}/build/consumer/fetch_content" "${consumer_root}/fetch_content"
        --build-generator "${CMAKE_GENERATOR}" --build-options ${consumer_options} "-DMDKV_SOURCE=${PROJECT_SOURCE_DIR}"
        --test-command consumer "${PROJECT_VERSION}")
add_test(NAME consumer/parent
    COMMAND "${CMAKE_CTEST_COMMAND}" --build-and-test "${CMAKE_CURRENT_SOURCE_DIR}/build/consumer/parent" "${consumer_root}/parent"
        --build-generator "${CMAKE_GENERATOR}" --build-options ${consumer_options} "-DMDKV_SOURCE=${PROJECT_SOURCE_DIR}"
        --test-command consumer)
add_test(NAME consumer/pkg_config
    COMMAND bash "${CMAKE_CURRENT_SOURCE_DIR}/build/consumer/pkg_config/build.sh" "${CMAKE_CXX_COMPILER}" "${consumer_prefix}"
        "${mdkv_pkgconfig_dir}" "${PROJECT_VERSION}" "${consumer_root}/pkg_config")
if(MDKV_NVCC AND MDKV_BUILD_GPU_PROGRAMS)
    add_test(NAME consumer/cuda
        COMMAND "${CMAKE_CTEST_COMMAND}" --build-and-test "${CMAKE_CURRENT_SOURCE_DIR}/build/consumer/cuda" "${consumer_root}/cuda"
            --build-generator "${CMAKE_GENERATOR}" --build-options ${consumer_options} "-DCMAKE_PREFIX_PATH=${consumer_prefix}"
            "-DCMAKE_CUDA_COMPILER=${MDKV_NVCC}" "-DCMAKE_CUDA_HOST_COMPILER=${CMAKE_CXX_COMPILER}" -DCMAKE_CUDA_ARCHITECTURES=90
            --test-command consumer)
    set_tests_properties(consumer/cuda PROPERTIES FIXTURES_REQUIRED mdkv_installed)
endif()
set_tests_properties(consumer/find_package consumer/pkg_config PROPERTIES FIXTURES_REQUIRED mdkv_installed)
