# Finds the CUDA headers that compile on the host without nvcc: cuda/std/mdspan (CCCL), cuda_fp16.h and cuda_bf16.h.
#
# Used by our own build and by the installed package. Looks, in this order, at
#   1. MDKV_CUDA_HEADERS_DIR: a folder into which the wheels named in the remedy below were unpacked,
#   2. CCCL_DIR, CCCL_ROOT and CUDAToolkit_ROOT, CUDA_PATH, CUDA_HOME: a CCCL package or a toolkit named by the user,
#   3. the toolkit nvcc on the PATH belongs to, a CCCL package below CMAKE_PREFIX_PATH, /usr/local/cuda, /opt/cuda.
# A project that already has a target CCCL::libcudacxx keeps it: two versions of libcu++ must not meet in one program.
# The toolkit's own headers are enough: no compiler and no driver are asked for, and no target but our own is made.

set(mdkv_cuda_headers_remedy
    "mdkv needs CUDA's host headers (cuda/std/mdspan, cuda_fp16.h, cuda_bf16.h); no GPU and no toolkit are needed. Either
  install a CUDA toolkit and pass -DCUDAToolkit_ROOT=<its folder>, or take the headers alone:
    python3 -m pip download --no-deps --only-binary=:all: -d wheels nvidia-cuda-cccl nvidia-cuda-runtime nvidia-cuda-crt
    for w in wheels/*.whl; do python3 -m zipfile -e \"$w\" cuda-headers; done
  and pass -DMDKV_CUDA_HEADERS_DIR=\"$PWD/cuda-headers\".")

# Folders below which an include tree may lie, best first, into the variable named by `out`.
function(mdkv_cuda_header_roots out)
    set(roots "")
    # What the user named comes first, then what can be found.
    if(CCCL_DIR)
        list(APPEND roots "${CCCL_DIR}/../../..") # <root>/lib/cmake/cccl
    endif()
    foreach(root IN ITEMS "${CCCL_ROOT}" "${CUDAToolkit_ROOT}" "$ENV{CUDAToolkit_ROOT}" "$ENV{CUDA_PATH}" "$ENV{CUDA_HOME}")
        if(root)
            list(APPEND roots "${root}")
        endif()
    endforeach()
    find_program(nvcc nvcc NO_CACHE)
    if(nvcc)
        get_filename_component(nvcc "${nvcc}" REALPATH)
        get_filename_component(bin "${nvcc}" DIRECTORY)
        list(APPEND roots "${bin}/..")
    endif()
    find_path(cccl_package cccl-config.cmake
              PATH_SUFFIXES lib/cmake/cccl lib64/cmake/cccl cmake/cccl share/cmake/cccl NO_CACHE)
    if(cccl_package)
        list(APPEND roots "${cccl_package}/../../..")
    endif()
    file(GLOB versioned LIST_DIRECTORIES true "/usr/local/cuda-[0-9]*")
    list(SORT versioned COMPARE NATURAL ORDER DESCENDING)
    list(APPEND roots /usr/local/cuda /opt/cuda ${versioned})
    set(${out} "${roots}" PARENT_SCOPE)
endfunction()

# Looks below `roots`; on success sets mdkv_cuda_include_dirs in the caller.
function(mdkv_search_cuda_headers roots)
    set(suffixes "")
    foreach(root IN LISTS roots)
        file(GLOB wheel_trees LIST_DIRECTORIES true RELATIVE "${root}" "${root}/nvidia/cu[0-9]*/include")
        list(SORT wheel_trees COMPARE NATURAL ORDER DESCENDING)
        list(APPEND suffixes ${wheel_trees})
    endforeach()
    # libcu++ moved from include/ to include/cccl/ with CUDA 13; a loose CCCL checkout has it in libcudacxx/include.
    set(cccl_suffixes include/cccl include libcudacxx/include cccl .)
    set(cuda_suffixes include targets/x86_64-linux/include .)
    foreach(suffix IN LISTS suffixes)
        list(PREPEND cccl_suffixes "${suffix}/cccl" "${suffix}")
        list(PREPEND cuda_suffixes "${suffix}")
    endforeach()
    find_path(cccl_dir cuda/std/mdspan PATHS ${roots} PATH_SUFFIXES ${cccl_suffixes} NO_DEFAULT_PATH NO_CACHE)
    find_path(fp16_dir cuda_fp16.h PATHS ${roots} PATH_SUFFIXES ${cuda_suffixes} NO_DEFAULT_PATH NO_CACHE)
    find_path(bf16_dir cuda_bf16.h PATHS ${roots} PATH_SUFFIXES ${cuda_suffixes} NO_DEFAULT_PATH NO_CACHE)
    find_path(crt_dir crt/host_defines.h PATHS ${roots} PATH_SUFFIXES ${cuda_suffixes} NO_DEFAULT_PATH NO_CACHE)
    if(TARGET CCCL::libcudacxx AND NOT MDKV_CUDA_HEADERS_DIR)
        set(cccl_dir "${fp16_dir}")
    endif()
    if(cccl_dir AND fp16_dir AND bf16_dir AND crt_dir)
        set(dirs "")
        foreach(dir IN ITEMS "${cccl_dir}" "${fp16_dir}" "${bf16_dir}" "${crt_dir}")
            get_filename_component(dir "${dir}" ABSOLUTE)
            list(APPEND dirs "${dir}")
        endforeach()
        list(REMOVE_DUPLICATES dirs)
        set(mdkv_cuda_include_dirs "${dirs}" PARENT_SCOPE)
    endif()
endfunction()

# Makes the imported target mdkv::cuda_headers, or sets mdkv_cuda_headers_error to what is missing and what to do.
function(mdkv_find_cuda_headers)
    set(mdkv_cuda_headers_error "" PARENT_SCOPE)
    if(TARGET mdkv::cuda_headers)
        return()
    endif()
    set(mdkv_cuda_include_dirs "")
    if(MDKV_CUDA_HEADERS_DIR)
        mdkv_search_cuda_headers("${MDKV_CUDA_HEADERS_DIR}")
        set(looked_in "MDKV_CUDA_HEADERS_DIR=${MDKV_CUDA_HEADERS_DIR}")
    else()
        mdkv_cuda_header_roots(roots)
        foreach(root IN LISTS roots) # one root at a time: headers of two toolkits must not mix
            mdkv_search_cuda_headers("${root}")
            if(mdkv_cuda_include_dirs)
                break()
            endif()
        endforeach()
        string(REPLACE ";" ", " looked_in "${roots}")
    endif()
    if(NOT mdkv_cuda_include_dirs)
        set(mdkv_cuda_headers_error "CUDA's host headers were not found in ${looked_in}.\n${mdkv_cuda_headers_remedy}"
            PARENT_SCOPE)
        return()
    endif()
    add_library(mdkv::cuda_headers INTERFACE IMPORTED GLOBAL)
    set_target_properties(mdkv::cuda_headers PROPERTIES
        INTERFACE_INCLUDE_DIRECTORIES "${mdkv_cuda_include_dirs}"
        INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${mdkv_cuda_include_dirs}")
    if(TARGET CCCL::libcudacxx AND NOT MDKV_CUDA_HEADERS_DIR)
        set_target_properties(mdkv::cuda_headers PROPERTIES INTERFACE_LINK_LIBRARIES CCCL::libcudacxx)
    endif()
endfunction()
