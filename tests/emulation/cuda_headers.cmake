# Finds the CUDA headers that the emulated GPU's tests compile without nvcc, into cuda_include_dirs: in MDKV_CUDA_HEADERS_DIR
# if that is set, else in a toolkit named by CUDAToolkit_ROOT, CUDA_PATH or CUDA_HOME, the one nvcc on the PATH belongs to,
# or one in a usual place. No compiler and no driver are asked for.
set(MDKV_CUDA_HEADERS_DIR "" CACHE PATH "Folder with the unpacked CUDA header wheels (empty: look for a toolkit)")

set(cuda_header_roots "${MDKV_CUDA_HEADERS_DIR}")
if(NOT MDKV_CUDA_HEADERS_DIR)
    file(GLOB versioned LIST_DIRECTORIES true "/usr/local/cuda-[0-9]*")
    list(SORT versioned COMPARE NATURAL ORDER DESCENDING)
    set(cuda_header_roots "${CUDAToolkit_ROOT}" "$ENV{CUDAToolkit_ROOT}" "$ENV{CUDA_PATH}" "$ENV{CUDA_HOME}")
    find_program(nvcc nvcc NO_CACHE)
    if(nvcc)
        get_filename_component(nvcc "${nvcc}" REALPATH)
        get_filename_component(nvcc "${nvcc}" DIRECTORY)
        list(APPEND cuda_header_roots "${nvcc}/..")
    endif()
    list(APPEND cuda_header_roots /usr/local/cuda /opt/cuda ${versioned})
    list(REMOVE_ITEM cuda_header_roots "")
endif()

set(cuda_include_dirs "")
foreach(root IN LISTS cuda_header_roots) # one root at a time: headers of two toolkits must not mix
    file(GLOB wheels LIST_DIRECTORIES true "${root}/nvidia/cu[0-9]*/include")
    list(SORT wheels COMPARE NATURAL ORDER DESCENDING)
    set(places ${wheels} "${root}/include" "${root}/targets/x86_64-linux/include")
    foreach(header IN ITEMS cuda/std/bit cuda_runtime_api.h crt/host_defines.h)
        # CCCL is in include/cccl since CUDA 13.
        find_path(folder ${header} PATHS ${places} PATH_SUFFIXES cccl . NO_DEFAULT_PATH NO_CACHE)
        list(APPEND cuda_include_dirs "${folder}")
        unset(folder)
    endforeach()
    if(NOT cuda_include_dirs MATCHES "NOTFOUND")
        break()
    endif()
    set(cuda_include_dirs "")
endforeach()
list(REMOVE_DUPLICATES cuda_include_dirs)
