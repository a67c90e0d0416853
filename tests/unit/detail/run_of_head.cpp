#include <mdkv/detail/run_of_head.hpp>

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/detail/hadamard.hpp>

#include "support/packed.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

namespace
{

using namespace mdkv;
using support::index_t;
using support::packed_layer;

std::vector<rung> rungs()
{
    return {drop, fraction(1, 4), fraction(1, 4).as(storage::int8), fraction(3, 4).as(storage::int8), full_int4,
        full_int8, full};
}

template <class T>
packed_layer<T> layer_of(head_dims dims)
{
    return packed_layer<T>{{.heads = 2, .tokens = 170, .window = 5, .dims = dims, .rungs = rungs()}};
}

/// Calls body(pointer, bytes) for all that token t stores.
template <class Body>
void for_bytes_of(detail::run_rows const& rows, index_t t, Body const& body)
{
    if (rows.kind == storage::plain)
    {
        for (int c = 0; c < rows.coordinates; ++c) { body(rows.begin + rows.coordinate(t, c), rows.unit); }
        return;
    }
    auto const i = static_cast<int>(t % tile_tokens);
    for (int k = 0; k < rows.groups(); ++k)
    {
        detail::coded_group const group = rows.group(t, k);
        std::byte const* const tile     = rows.begin + rows.tile(t);
        body(tile + group.scale(i), int{sizeof(half)});
        body(tile + group.minimum(i), int{sizeof(half)});
        for (int b = 0; b < group.bytes; ++b) { body(tile + group.code(i, b), 1); }
    }
}

} // namespace

TEST_CASE_TEMPLATE("every coordinate is where the description of the layout has it", T, float, half)
{
    for (head_dims const dims : {head_dims{64, 64}, {40, 20}, {100, 132}})
    {
        auto cache             = layer_of<T>(dims).packed(21);
        auto const view        = cache.view();
        *cache.view().appended = 3;
        for (index_t i = 0; i < cache.tail_bytes(); ++i) { cache.view().tail[i] = static_cast<std::byte>(i % 50); }
        for (index_t h = 0; h < 2; ++h)
        {
            auto const stored = support::stored_tokens(view, h);
            for (index_t slot = 0; slot < static_cast<index_t>(stored.size()); ++slot)
            {
                detail::stored_token const at = detail::token_at(view, h, slot);
                auto const& want              = stored[static_cast<std::size_t>(slot)];
                bool const own                = at.rung < view.layout.rungs;
                CHECK(want.rung == (own ? static_cast<int>(at.rung) : at.rung == view.layout.rungs ? -1 : -2));
                bool right = true;
                for (bool const of_values : {false, true})
                {
                    detail::run_rows const& rows = at.run.rows(of_values);
                    auto const& numbers          = of_values ? want.value_numbers : want.key_numbers;
                    REQUIRE(rows.coordinates == static_cast<int>(numbers.size()));
                    std::vector<double> got;
                    for (int c = 0; c < rows.coordinates; ++c)
                    {
                        got.push_back(static_cast<double>(support::stored_value<T>(rows, at.index, c)));
                    }
                    if (at.run.basis == detail::run_basis::rotated) { got = support::rotated(got); }
                    for (index_t c = 0; at.run.basis == detail::run_basis::rotated && c < rows.coordinates; ++c)
                    {
                        double& x = got[static_cast<std::size_t>(c)];
                        x         = of_values ? x + support::value_mean<T>(view, h, c)
                                              : x * support::key_scale<T>(view, h, c) + support::key_mean<T>(view, h, c);
                    }
                    for (std::size_t c = 0; c < got.size(); ++c)
                    {
                        right = right && got[c] == doctest::Approx(numbers[c]).epsilon(1e-6);
                    }
                }
                CHECK(right);
            }
        }
    }
}

TEST_CASE("every byte of arena and tail belongs to one byte of one token, to a projection or to channels")
{
    for (head_dims const dims : {head_dims{64, 64}, {40, 20}, {100, 132}})
    {
        auto cache      = layer_of<half>(dims).packed(21);
        auto const view = cache.view();
        std::vector<int> arena(static_cast<std::size_t>(cache.arena_bytes()));
        std::vector<int> tail(static_cast<std::size_t>(cache.tail_bytes()));
        *cache.view().appended = 30; // more than it has room for
        for (index_t h = 0; h < 2; ++h)
        {
            head_entry const& entry = view.heads[h];
            for (index_t i = 0; i < dims.keys * entry.key_columns * 2; ++i)
            {
                ++arena[static_cast<std::size_t>(entry.key_projection + i)];
            }
            for (index_t i = 0; i < dims.values * entry.value_columns * 2; ++i)
            {
                ++arena[static_cast<std::size_t>(entry.value_projection + i)];
            }
            for (index_t i = 0; detail::has_channels(view.layout, view, h) && i < channel_bytes(dims, 2); ++i)
            {
                ++arena[static_cast<std::size_t>(entry.channels + i)];
            }
            for (std::size_t i = 0; i < detail::most_runs(view.layout); ++i)
            {
                detail::stored_run const run = detail::run_of_head(view, h, i);
                CHECK(run.keys.stored == run.tokens);
                for (detail::run_rows const& rows : {run.keys, run.values})
                {
                    for (index_t t = 0; t < run.tokens; ++t)
                    {
                        for_bytes_of(rows, t, [&](std::byte const* at, int bytes) {
                            bool const exact_tail = i == view.layout.rungs + 1;
                            auto& counts          = exact_tail ? tail : arena;
                            auto const first      = at - (exact_tail ? view.tail : view.arena);
                            for (int j = 0; j < bytes; ++j) { ++counts[static_cast<std::size_t>(first + j)]; }
                        });
                    }
                }
            }
        }
        CHECK(arena == std::vector<int>(arena.size(), 1));
        CHECK(tail == std::vector<int>(tail.size(), 1));
    }
}
