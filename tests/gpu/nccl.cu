#include <cstdio>

#include <doctest/doctest.h>

#if __has_include(<nccl.h>)
#    include <mdkv/core/ranks.hpp>

#    include "examples/nccl.cuh"
static_assert(mdkv::ranks{.sum = sum_over_nccl}.sum != nullptr);
#else
TEST_CASE("ranks over NCCL")
{
    std::printf("SKIPPED: gpu/nccl: there is no nccl.h\n");
}
#endif
