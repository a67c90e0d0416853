# The CUDA side of our own build: which nvcc, and how kernels and tests are compiled with it. Consumers compile CUDA sources
# in their own way; all mdkv asks of them is C++20 and the include directory of mdkv::mdkv.
set(MDKV_CUDA AUTO CACHE STRING "Compile the kernels with nvcc: AUTO (where it is found), ON, OFF")
set_property(CACHE MDKV_CUDA PROPERTY STRINGS AUTO ON OFF)
set(MDKV_CUDA_ARCHITECTURES "80;90" CACHE STRING "Compute capabilities that the kernels are compiled for")

set(MDKV_CUDA_PROGRAM_ARCHITECTURES "" CACHE STRING
    "Compute capabilities that programs for a GPU are compiled for (empty: to PTX, which shows that they compile and takes half the time)")

set(MDKV_NVCC "")
if(NOT MDKV_CUDA STREQUAL "OFF")
    find_program(mdkv_found_nvcc nvcc HINTS "${CUDAToolkit_ROOT}" "$ENV{CUDAToolkit_ROOT}" "$ENV{CUDA_PATH}" "$ENV{CUDA_HOME}"
        /usr/local/cuda /opt/cuda PATH_SUFFIXES bin NO_CACHE)
    if(mdkv_found_nvcc)
        set(MDKV_NVCC "${mdkv_found_nvcc}")
        message(STATUS "mdkv: kernels are compiled with ${MDKV_NVCC} for compute capabilities ${MDKV_CUDA_ARCHITECTURES}")
    elseif(MDKV_CUDA STREQUAL "ON")
        message(FATAL_ERROR "MDKV_CUDA is ON and there is no nvcc on the PATH or below CUDAToolkit_ROOT, CUDA_PATH, CUDA_HOME")
    else()
        message(STATUS "mdkv: no nvcc; the kernels are not compiled")
    endif()
endif()

# nvcc takes the g++ of the PATH unless it is told of another; clang is left out, of which it knows few versions.
set(mdkv_nvcc_host "")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(mdkv_nvcc_host -ccbin "${CMAKE_CXX_COMPILER}")
endif()

# Warnings are errors where they are in our other sources. (Registers that spill are found by gpu/kernels in any case.)
set(mdkv_nvcc_flags ${mdkv_nvcc_host} -std=c++20 "-I${PROJECT_SOURCE_DIR}/include")
set(mdkv_ptxas_flags -Xptxas --warn-on-spills)
if(MDKV_WARNINGS_AS_ERRORS)
    list(APPEND mdkv_nvcc_flags -Werror all-warnings)
    list(APPEND mdkv_ptxas_flags -Xptxas --warning-as-error)
endif()

# For programs: device code and the host's.
set(mdkv_nvcc_code "")
foreach(architecture IN LISTS MDKV_CUDA_PROGRAM_ARCHITECTURES)
    list(APPEND mdkv_nvcc_code "-gencode=arch=compute_${architecture},code=sm_${architecture}")
endforeach()
if(NOT mdkv_nvcc_code) # as text with the sources' lines, which the executor of PTX reads
    set(mdkv_nvcc_code "-gencode=arch=compute_90,code=compute_90" --no-compress -lineinfo)
endif()

# mdkv_compile_kernels(OUTPUTS SOURCE NAME ARCHITECTURE): device code alone, which takes a second or two
function(mdkv_compile_kernels outputs source name architecture)
    set(cubin "${CMAKE_CURRENT_BINARY_DIR}/kernels/${name}.sm_${architecture}.cubin")
    add_custom_command(OUTPUT "${cubin}"
        COMMAND "${MDKV_NVCC}" ${mdkv_nvcc_flags} -cubin -arch=sm_${architecture} ${mdkv_ptxas_flags}
            -MD -MT "${cubin}" -MF "${cubin}.d" -o "${cubin}" "${source}"
        DEPENDS "${source}" DEPFILE "${cubin}.d" VERBATIM
        COMMENT "Kernels of ${name} for compute capability ${architecture}")
    set(${outputs} ${${outputs}} "${cubin}" PARENT_SCOPE)
endfunction()
