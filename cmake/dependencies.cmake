# What mdkv::mdkv itself needs: Eigen, CUDA's host headers, threads.
set(MDKV_CUDA_HEADERS_DIR "" CACHE PATH "Folder with the unpacked CUDA header wheels (empty: look for CCCL or a toolkit)")

find_package(Eigen3 3.4 REQUIRED NO_MODULE)
find_package(Threads REQUIRED)

include(mdkv_cuda_headers)
mdkv_find_cuda_headers()
if(mdkv_cuda_headers_error)
    message(FATAL_ERROR "${mdkv_cuda_headers_error}")
endif()
get_target_property(mdkv_cuda_include_dirs mdkv::cuda_headers INTERFACE_INCLUDE_DIRECTORIES)
message(STATUS "mdkv: CUDA host headers in ${mdkv_cuda_include_dirs}")
