#include <mdkv/core/error.hpp>
#include <mdkv/core/ranks.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/stages/allocate.hpp>

#include "gpu/support/device.hpp"
#include "support/allocation.hpp"
#include "support/message.hpp"
#include "support/random.hpp"
#include "support/ranks.hpp"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#if __has_include(<nccl.h>)
#    include <mdkv/comm/nccl.cuh>
#endif
#if !__has_include(<nccl.h>)
TEST_CASE("ranks over NCCL")
{
    std::printf("SKIPPED: gpu/nccl: there is no nccl.h\n");
}
#else
static_assert(mdkv::communicator<mdkv::nccl_communicator>);

#    if defined(MDKV_EMULATED_NCCL)
namespace
{

using namespace support;

allocation allocated(layer const& in, index_t first, index_t heads, thread_rank const* rank)
{
    tensor<float, 3> loss{{heads, in.rungs(), in.tokens}};
    auto const begin = in.loss.begin() + first * in.rungs() * in.tokens;
    loss.assign(std::vector<float>(begin, begin + loss.count()));
    tensor<index_t, 1> limit{{1}};
    limit.set(in.most() / 5, 0);
    device_tensor<float, 3> const losses{loss};
    device_tensor<index_t, 1> const bytes{limit};
    device_tensor<std::uint8_t, 2> rung{{heads, in.tokens}};
    device_tensor<allocation, 1> report{{1}};
    device_memory const words = device_memory::scratch(32 * sizeof(std::uint64_t));
    run_on_device_now([&](mdkv::gpu::backend on) {
        auto const call = [&] {
            mdkv::allocate(on, losses.in(), in.costs(), bytes.in(), {}, rung.out(), report.out());
        };
        if (rank == nullptr) { return call(); }
        mdkv::nccl_communicator const nccl{rank, on.stream, reinterpret_cast<std::uint64_t*>(words.data())};
        mdkv::ranks const all{nccl, {first, in.heads}};
        on.ranks = &all;
        call();
    });
    return report.elements().front();
}

} // namespace

TEST_CASE("ranks over NCCL report what one rank does; an error of NCCL is thrown")
{
    source random{"nccl"};
    layer const in       = heavy_tailed(random, 3, 500, {0, 8, 64});
    allocation const one = allocated(in, 0, 3, nullptr);
    rank_team team{3};
    std::vector<allocation> reports(3);
    auto const errors = on_ranks(
        team, [&](thread_rank const& rank) { reports[at(rank.number)] = allocated(in, rank.number, 1, &rank); });
    for (std::string const& error : errors) { CHECK(error == ""); }
    for (allocation const& report : reports) { CHECK(same(report, one)); }
    says(
        message_of([] { static_cast<void>(mdkv::nccl_communicator{}.rank()); }), "nccl_communicator: invalid argument");
}
#    endif
#endif
