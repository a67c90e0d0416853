#include <cstdio>

#include <doctest/doctest.h>

#if __has_include(<nccl.h>)
#    include <mdkv/comm/nccl.cuh>
static_assert(mdkv::communicator<mdkv::nccl_communicator>);
#else
TEST_CASE("ranks over NCCL")
{
    std::printf("SKIPPED: gpu/nccl: there is no nccl.h\n");
}
#endif
