/// \file nccl.h: the part of NCCL that comm/nccl.cuh calls, between ranks that are threads (support/ranks.hpp)
#pragma once

#define MDKV_EMULATED_NCCL

#include "support/ranks.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <driver_types.h>

using ncclComm_t = support::thread_rank const*;
enum ncclResult_t
{
    ncclSuccess,
    ncclInvalidArgument
};
enum ncclDataType_t
{
    ncclInt64,
    ncclUint64
};
enum ncclRedOp_t
{
    ncclSum,
    ncclMin
};

inline char const* ncclGetErrorString(ncclResult_t code)
{
    return code == ncclSuccess ? "no error" : "invalid argument";
}
inline ncclResult_t ncclCommUserRank(ncclComm_t comm, int* number)
{
    if (comm == nullptr) { return ncclInvalidArgument; }
    *number = comm->rank();
    return ncclSuccess;
}
inline ncclResult_t ncclCommCount(ncclComm_t comm, int* number)
{
    if (comm == nullptr) { return ncclInvalidArgument; }
    *number = comm->size();
    return ncclSuccess;
}
inline ncclResult_t ncclAllReduce(
    void const* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t)
{
    if (comm == nullptr || from != to) { return ncclInvalidArgument; }
    auto const n = static_cast<std::int64_t>(count);
    if (type == ncclInt64 && op == ncclSum) { comm->sum(static_cast<std::int64_t*>(to), n); }
    else if (type == ncclUint64 && op == ncclMin) { comm->least(static_cast<std::uint64_t*>(to), n); }
    else { return ncclInvalidArgument; }
    return ncclSuccess;
}
