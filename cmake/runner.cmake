# What everything that includes examples/runner needs: the file reader, the tokenizer, the model.
find_package(PkgConfig REQUIRED)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
find_package(nlohmann_json REQUIRED)

add_library(mdkv_runner STATIC "${PROJECT_SOURCE_DIR}/examples/runner/sequence_cache.cpp")
target_include_directories(mdkv_runner PUBLIC "${PROJECT_SOURCE_DIR}/examples" "${PROJECT_SOURCE_DIR}/examples/runner")
target_link_libraries(mdkv_runner PRIVATE mdkv_build_flags
    PUBLIC mdkv::mdkv PkgConfig::PCRE2 nlohmann_json::nlohmann_json)
