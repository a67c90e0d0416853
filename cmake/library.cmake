# The library: mdkv::mdkv, header-only, for host code.
file(GLOB_RECURSE mdkv_headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/include/mdkv/*.hpp")
list(SORT mdkv_headers)

add_library(mdkv INTERFACE)
add_library(mdkv::mdkv ALIAS mdkv)
target_compile_features(mdkv INTERFACE cxx_std_20)
target_include_directories(mdkv INTERFACE "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>")
target_link_libraries(mdkv INTERFACE Threads::Threads)

# For CUDA sources. CMake before 3.28 or so does not know C++20 for nvcc and drops it in silence, so the flag is given.
add_library(mdkv_cuda INTERFACE)
add_library(mdkv::cuda ALIAS mdkv_cuda)
set_target_properties(mdkv_cuda PROPERTIES EXPORT_NAME cuda)
target_link_libraries(mdkv_cuda INTERFACE mdkv)
target_compile_options(mdkv_cuda INTERFACE $<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-std=c++20>)
