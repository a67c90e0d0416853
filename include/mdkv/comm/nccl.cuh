/// \file nccl.cuh: ranks over the caller's ncclComm_t, for heads in GPUs' memory; needs <nccl.h>, and nothing else includes it.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/ranks.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>

#include <cstddef>
#include <cstdint>

#include <driver_types.h>
#include <nccl.h>

namespace MDKV_NAMESPACE
{

/// A communicator of the backend's stream. `sum` and `least` are enqueued; `agree` waits for the stream.
struct nccl_communicator
{
    static constexpr space memory_space = space::device;

    ncclComm_t comm;      ///< the caller's
    cudaStream_t stream;  ///< the backend's
    std::uint64_t* words; ///< [32]  device memory for `agree`

    [[nodiscard]] int rank() const
    {
        int number = 0;
        expects_success(ncclCommUserRank(comm, &number));
        return number;
    }
    [[nodiscard]] int size() const
    {
        int number = 0;
        expects_success(ncclCommCount(comm, &number));
        return number;
    }
    /// \throws error   NCCL has returned one
    void sum(std::int64_t* numbers, index_t n) const { reduce(numbers, n, ncclInt64, ncclSum); }
    /// \throws error   NCCL has returned one
    void least(std::uint64_t* numbers, index_t n) const { reduce(numbers, n, ncclUint64, ncclMin); }
    /// \throws error   NCCL or CUDA has returned one
    void agree(std::uint64_t* numbers, index_t n) const
    {
        gpu::backend const on{stream};
        gpu::copy(on, numbers, words, n * index_t{sizeof *words});
        least(words, n);
        gpu::copy(on, words, numbers, n * index_t{sizeof *words});
    }

private:
    static void expects_success(ncclResult_t code)
    {
        expects<error>(code == ncclSuccess, "nccl_communicator: ", ncclGetErrorString(code));
    }
    void reduce(void* numbers, index_t n, ncclDataType_t type, ncclRedOp_t op) const
    {
        expects_success(ncclAllReduce(numbers, numbers, static_cast<std::size_t>(n), type, op, comm, stream));
    }
};
static_assert(communicator<nccl_communicator>);

} // namespace MDKV_NAMESPACE
