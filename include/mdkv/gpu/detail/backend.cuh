/// \file backend.cuh: the object that is the CUDA backend: which stream to work on and where scratch memory lies.
#pragma once

#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>

#include <driver_types.h>

namespace mdkv::inline MDKV_MACHINE::gpu
{

/// Passed first to every stage. A stage enqueues its kernels on `stream` and returns: views and scratch, all of them device
/// memory, must live until the stream has reached the end of that work. Nothing is allocated, nothing waits for the device
/// and nothing depends on the device's data, so every call can be recorded into a CUDA graph.
struct backend
{
    static constexpr space memory_space = space::device;

    cudaStream_t stream = nullptr;
    workspace* scratch  = nullptr; ///< over device memory; its addresses are only computed with
};

} // namespace mdkv::inline MDKV_MACHINE::gpu
