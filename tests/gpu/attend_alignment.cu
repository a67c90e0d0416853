// Attention over runs that begin at any address, of every storage and of head dimensions that fill blocks or do not: each way by
// which kernels bring tokens to shared memory (attend_units.cuh, attend_numbers.cuh) is taken and compared.
#include <mdkv/gpu/attend.cuh>

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/cache.hpp>

#include "gpu/support/attended.hpp"
#include "support/decoding.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"

#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::expects_same;
using support::index_t;
using support::packed_layer;
using support::random_queries;

/// Tokens at rung 1, behind `before` tokens at rung 0, whose keys have three coordinates: they move the run to an address that
/// is a multiple of 2, 4, 8 or 16 bytes.
template <class T>
void check_behind(index_t before, rung const& stored, head_dims dims, index_t tokens)
{
    rung const odd   = fraction(3, static_cast<int>(dims.keys));
    auto const rungs = stored.full() ? std::vector{odd, full} : std::vector{odd, stored, full};
    packed_layer<T> layer{{.heads = 1, .tokens = before + tokens, .window = 3, .dims = dims, .rungs = rungs}, 1};
    for (index_t t = 0; t < before; ++t) { layer.rung.set(std::uint8_t{0}, 0, t); }
    auto const cache = layer.packed();
    CAPTURE(before);
    CAPTURE(tokens);
    expects_same<T, float>(cache, random_queries<float>(2, dims.keys));
}

constexpr head_dims dimensions[]{{64, 64}, {72, 72}, {96, 80}, {128, 128}, {128, 64}, {136, 136}, {192, 192},
    {192, 128}, {200, 120}, {256, 256}, {320, 256}, {576, 512}, {68, 68}, {35, 99}, {130, 190}};

TEST_CASE("runs of codes are attended on the GPU wherever they begin, whatever their dimensions")
{
    bool odd = false;
    for (head_dims const dims : dimensions)
    {
        for (rung const& stored :
            {full_int4, full_int8, fraction(1, 2).as(storage::int8), fraction(3, 4).as(storage::int8)})
        {
            odd = !odd;
            for (index_t const before : {odd ? 1 : 2, odd ? 4 : 8})
            {
                check_behind<half>(before, stored, dims, 152 + before);
            }
        }
        odd = !odd; // the next dimensions get the other alignments
    }
}

TEST_CASE("codes beside bfloat16 and float elements are attended on the GPU wherever they begin")
{
    for (head_dims const dims : {head_dims{64, 64}, {128, 128}, {200, 136}, {256, 256}})
    {
        for (rung const& stored : {full_int4, full_int8, fraction(1, 2).as(storage::int8)})
        {
            for (index_t const before : {1, 4, 8}) { check_behind<bfloat16>(before, stored, dims, 141 + before); }
            check_behind<float>(1, stored, dims, 141);
            check_behind<float>(4, stored, dims, 139);
        }
    }
}

TEST_CASE("runs of plain elements are attended on the GPU wherever they begin, whatever their dimensions")
{
    bool odd = false;
    for (head_dims const dims : dimensions)
    {
        for (rung const& stored : {fraction(1, 2), fraction(3, 4), full})
        {
            odd = !odd;
            for (index_t const before : {odd ? 1 : 2, odd ? 4 : 8})
            {
                check_behind<half>(before, stored, dims, 72 + before);
                check_behind<bfloat16>(9 - before, stored, dims, 24 + before);
            }
            if (dims.keys <= 320)
            {
                check_behind<float>(1, stored, dims, 37);
            } // wider ones exceed what small GPUs give a block
        }
    }
}

TEST_CASE("codes of two kinds, one run behind the other, are attended on the GPU in either order")
{
    for (auto const& rungs : {std::vector<rung>{full_int4, full_int8}, std::vector<rung>{drop, full_int8, full_int4}})
    {
        for (head_dims const dims : {head_dims{64, 64}, {128, 128}, {192, 192}, {256, 136}})
        {
            for (index_t tokens = 200; tokens < 400; tokens += 37)
            {
                packed_layer<half> const layer{
                    {.heads = 1, .tokens = tokens, .window = 0, .dims = dims, .rungs = rungs}, -1};
                expects_same<half, float>(layer.packed(), random_queries<float>(2, dims.keys));
            }
        }
    }
}

TEST_CASE("keys and queries near the limits of half are attended on the GPU")
{
    for (rung const& stored : {full_int4, full_int8, full})
    {
        auto const rungs = stored.full() ? std::vector{drop, full} : std::vector{drop, stored, full};
        packed_layer<half> const layer{
            {.heads = 1, .tokens = 90, .window = 2, .dims = {128, 128}, .rungs = rungs, .common = 6e4}, 1};
        auto const cache = layer.packed();
        auto q           = random_queries<half>(3, 128);
        for (index_t d = 0; d < 128; ++d)
        {
            q.set(
                narrow<half>(widen(q.get(0, d)) * 1e4F), 0, d); // far above half's largest number if scales multiply it
            q.set(narrow<half>(widen(q.get(1, d)) * 1e-3F), 1, d);
        }
        expects_same<half, half>(cache, q, {.scale = 1e-9F});
    }
}

} // namespace
