// The computed time of decode attention over small caches, and limits of what it may become: clock.hpp says what is counted.
// 8 KV heads of 4 queries each, D = 128, bfloat16, cold L2. `mdkv_ptx_clock --no-skip` runs the larger caches of
// docs/gpu.md's measurements, too, and prints them.
#include "ptx/clock.hpp"

#include "gpu/support/attended.hpp"
#include "support/packed.hpp"

#include <mdkv/core/ratios.hpp>

#include <array>
#include <cstdio>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using mdkv::index_t;
using element = mdkv::bfloat16;

std::vector<mdkv::rung> const coordinates{mdkv::drop, mdkv::fraction(1, 8), mdkv::fraction(1, 4), mdkv::full};
std::vector<mdkv::rung> const codes{mdkv::drop, mdkv::full_int4, mdkv::full_int8, mdkv::full};

/// What today's kernel needs and some 5 percent more: a change that makes it faster lowers its line.
struct limits
{
    double slices, merge; ///< microseconds
    double before_copy;   ///< cycles
    int chain, merge_chain, barriers;
    std::uint64_t instructions, code; ///< of the slices
};
constexpr limits small_plain{9.3, 2.6, 4320, 3, 4, 5, 2940, 31200};
constexpr limits small_codes{10.9, 2.6, 4820, 3, 4, 5, 3540, 64600};
constexpr limits small_coordinates{13.8, 4.2, 4390, 9, 6, 7, 4630, 40700};
constexpr limits whole_tiles{9.4, 2.6, 4390, 3, 4, 4, 2970, 46300};
constexpr limits many_slices{8.9, 2.8, 5010, 3, 5, 4, 2030, 29400};

/// Attends a cache whose heads have these tokens of rungs 1, 2 and 3, a few more or fewer from head to head unless they are
/// whole tiles, and prints the times of slices and merge.
std::vector<ptx::launch_time> timed(
    char const* name, std::vector<mdkv::rung> const& rungs, std::array<index_t, 3> tokens)
{
    constexpr index_t heads = 8, group = 4, dim = 128;
    bool const whole   = tokens[0] % 16 == 0 && tokens[1] % 16 == 0 && tokens[2] % 16 == 0;
    index_t const most = tokens[0] + tokens[1] + tokens[2] + 3 * heads;
    support::packed_layer<element> layer{
        {.heads = heads, .tokens = most, .window = 0, .dims = {dim, dim}, .rungs = rungs}, 0};
    for (index_t h = 0; h < heads; ++h)
    {
        index_t at = 0;
        for (std::size_t r = 0; r < 3; ++r)
        {
            index_t const count = tokens[r] == 0 ? 0 : tokens[r] + (whole ? 0 : h - heads / 2);
            for (index_t end = at + count; at < end; ++at) { layer.rung.set(static_cast<std::uint8_t>(r + 1), h, at); }
        }
    }
    support::tensor<element, 2> queries{{heads * group, dim}};
    support::source random{"clock", most};
    for (index_t row = 0; row < heads * group; ++row)
    {
        for (index_t d = 0; d < dim; ++d)
        {
            queries.set(mdkv::narrow<element>(static_cast<float>(random.normal())), row, d);
        }
    }
    auto const cache = layer.packed();
    ptx::clock const watch;
    static_cast<void>(support::on_gpu(cache, queries));
    for (ptx::launch_time const& l : watch.launches())
    {
        std::printf("%-34s %-13s %4u blocks %6.1f us, memory %5.1f us; worst block %8.0f cycles, %6.0f before a copy; "
                    "chain %3d, barriers %2d, instructions %6llu, code %6llu bytes\n",
            name, l.name.c_str(), l.blocks, l.microseconds(), l.memory_cycles / 1755, l.block_cycles, l.before_copy,
            l.chain, l.barriers, static_cast<unsigned long long>(l.instructions),
            static_cast<unsigned long long>(l.code));
    }
    return watch.launches();
}

void check(std::vector<ptx::launch_time> const& launches, limits const& most)
{
    REQUIRE(launches.size() == 2);
    ptx::launch_time const &slices = launches[0], &merge = launches[1];
    CHECK(slices.microseconds() <= most.slices);
    CHECK(merge.microseconds() <= most.merge);
    CHECK(slices.before_copy <= most.before_copy);
    CHECK(slices.chain <= most.chain);
    CHECK(merge.chain <= most.merge_chain);
    CHECK(slices.barriers <= most.barriers);
    CHECK(slices.instructions <= most.instructions);
    CHECK(slices.code <= most.code);
}

} // namespace

TEST_CASE("the clock of a small cache of 16 bits")
{
    check(timed("16 bits", codes, {0, 0, 523}), small_plain);
}
TEST_CASE("the clock of codes at .4 %")
{
    check(timed("codes, .4 %", codes, {1092, 241, 77}), small_codes);
}
TEST_CASE("the clock of coordinates at .4 %")
{
    check(timed("coordinates, .4 %", coordinates, {955, 285, 285}), small_coordinates);
}
TEST_CASE("the clock of codes at .4 % in whole tiles")
{
    check(timed("codes, .4 %, whole tiles", codes, {1104, 256, 80}), whole_tiles);
}
TEST_CASE("the clock of a merge of many slices")
{
    check(timed("16 bits, 4,096 tokens", codes, {0, 0, 4096}), many_slices);
}

TEST_CASE("larger caches" * doctest::skip())
{
    timed("codes, 10 %", codes, {27961, 6169, 1965});
    timed("coordinates, 10 %", coordinates, {26151, 7845, 7843});
    timed("4 bits", codes, {131072, 0, 0});
    timed("16 bits, 131,072 tokens", codes, {0, 0, 131072});
}
