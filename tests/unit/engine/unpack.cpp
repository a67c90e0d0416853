#include <mdkv/engine/unpack.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "support/compare.hpp"
#include "support/decoding.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

namespace
{

using namespace mdkv;
using support::index_t;
using support::tensor;

template <class T>
struct unpacked
{
    tensor<T, 3> keys;
    tensor<T, 3> values;
    tensor<index_t, 1> kept;

    unpacked(cache_view<T const, space::host> const& cache, index_t rows, cpu::executor_ref threads = {},
        support::placement how = {})
        : keys{{cache.layout.heads, rows, cache.layout.dims.keys}, how}
        , values{{cache.layout.heads, rows, cache.layout.dims.values}, how}
        , kept{{cache.layout.heads}}
    {
        support::run([&](cpu::backend const& on) { unpack(on, cache, keys.out(), values.out(), kept.out()); }, threads);
    }
};

support::packed_sizes sizes_of(std::vector<rung> rungs)
{
    return {.heads = 3,
        .tokens    = 61,
        .window    = 5,
        .dims      = {24, 16},
        .rungs     = std::move(rungs),
        .common    = 1,
        .stand_ins = 3};
}

} // namespace

TEST_CASE_TEMPLATE("rows are the tokens that the cache stores, then stand-ins, then zeros", T, float, half, bfloat16)
{
    cpu::thread_pool pool{2};
    support::source random{"unpack"};
    auto all = std::vector{sizes_of({drop, fraction(1, 4), fraction(1, 2).as(storage::int8), full_int4, full}),
        sizes_of({drop, full_int4, full_int8, full}), sizes_of({fraction(1, 8), full}), sizes_of({full_int8})};
    for (std::size_t const i : {0U, 1U})
    {
        all.push_back(all[i]);
        all.back().coded_stand_ins = true;
        all.back().stand_ins       = 9;
    }
    for (auto const& sizes : all)
    {
        auto cache = support::packed_layer<T>{sizes}.packed(9);
        support::append_random(cache, random, 7);
        auto const& view   = std::as_const(cache).view();
        index_t const rows = most_rows(view) + 2;
        unpacked<T> const got{view, rows, {}, {.slack = 3}};
        CHECK(support::same_bits(got.keys.elements(), unpacked<T>{view, rows, pool}.keys.elements()));
        double const rounding = std::is_same_v<T, float> ? 1e-5 : std::is_same_v<T, half> ? 4e-3 : 3e-2;
        support::worst_error error;
        for (index_t h = 0; h < 3; ++h)
        {
            auto stored = support::reconstructed_tokens(view, h);
            CHECK((support::stand_ins_last(view, h, stored) > 0) == (sizes.rungs[0] == drop)); // unpack puts them last
            REQUIRE(got.kept.get(h) == std::ssize(stored));
            for (index_t i = 0; i < rows; ++i)
            {
                for (index_t d = 0; d < 24; ++d)
                {
                    bool const there = i < std::ssize(stored);
                    auto const row   = static_cast<std::size_t>(i);
                    auto const at    = static_cast<std::size_t>(d);
                    error.add(
                        static_cast<long double>(widen(got.keys.get(h, i, d))), there ? stored[row].key[at] : 0, 4, i);
                    if (d >= 16) { continue; }
                    error.add(static_cast<long double>(widen(got.values.get(h, i, d))),
                        there ? stored[row].value[at] : 0, 4, i);
                }
            }
        }
        CHECK_MESSAGE(error.within(rounding), error);
    }
}

TEST_CASE("a cache without heads has no rows")
{
    cpu::cache<half> const none;
    CHECK(most_rows(none.view()) == 0);
    CHECK(unpacked<half>{none.view(), 4}.kept.count() == 0);
}
