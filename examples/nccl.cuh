/// \file nccl.cuh: the sums of `mdkv::ranks` over an ncclComm_t, for an engine to copy.
///
///     nccl_sums state{comm, stream, words, 1 << 16};
///     mdkv::ranks const all{.first_head = first, .heads = heads, .sum = sum_over_nccl, .state = &state};
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/gpu/backend.cuh>

#include <cstddef>
#include <cstdint>

#include <driver_types.h>
#include <nccl.h>

struct nccl_sums
{
    ncclComm_t comm;
    cudaStream_t stream;
    std::int64_t* words; ///< [most]  device memory
    mdkv::index_t most;  ///< numbers of one exchange
};

/// \param state  a nccl_sums
inline void sum_over_nccl(void* state, std::int64_t* numbers, mdkv::index_t count)
{
    auto const& with = *static_cast<nccl_sums const*>(state);
    mdkv::gpu::backend const on{with.stream};
    for (; count > 0; count -= with.most, numbers += with.most)
    {
        mdkv::index_t const n = count < with.most ? count : with.most;
        mdkv::gpu::copy(on, numbers, with.words, n * mdkv::index_t{sizeof *numbers});
        ncclResult_t const code = ncclAllReduce(
            with.words, with.words, static_cast<std::size_t>(n), ncclInt64, ncclSum, with.comm, with.stream);
        mdkv::expects<mdkv::error>(code == ncclSuccess, "sum_over_nccl: ", ncclGetErrorString(code));
        mdkv::gpu::copy(on, with.words, numbers, n * mdkv::index_t{sizeof *numbers}); // waits
    }
}
