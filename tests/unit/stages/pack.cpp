#include <mdkv/stages/pack.hpp>

#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/detail/stored_slots.hpp>
#include <mdkv/stages/basis.hpp>

#include "support/compare.hpp"
#include "support/guarded_buffer.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::index_t;
using support::packed_layer;
using support::packed_sizes;
using support::tensor;

template <class T>
std::vector<std::byte> arena_of(cpu::cache<T> const& cache)
{
    auto const view = cache.view();
    return {view.arena, view.arena + cache.arena_bytes()};
}

template <class T>
std::vector<head_entry> directory_of(cpu::cache<T> const& cache)
{
    auto const view = cache.view();
    return {view.heads, view.heads + cache.layout().heads};
}

template <class T>
std::vector<T> row_of(tensor<T, 3> const& from, index_t h, index_t t)
{
    std::vector<T> row;
    for (index_t d = 0; d < from.extent(2); ++d) { row.push_back(from.get(h, t, d)); }
    return row;
}

/// Unit in the last place of T at x.
template <class T>
double spacing(double x)
{
    int const digits = std::same_as<T, float> ? 24 : std::same_as<T, half> ? 11 : 8;
    int const least  = std::same_as<T, half> ? -24 : -140;
    return std::ldexp(1.0, x == 0.0 ? least : std::max(std::ilogb(x) + 1 - digits, least));
}

/// The first n coordinates of a vector, its own or (with a basis) its products with the basis' rows, and how far float
/// sums may be from them. `rotate` makes them what codes of a vector's own coordinates stand for.
struct exact_coordinates
{
    std::vector<double> at;
    std::vector<double> doubt;

    explicit exact_coordinates(std::vector<double> const& numbers)
        : at{numbers}
        , doubt(numbers.size())
    {}

    template <class T>
    exact_coordinates(std::vector<T> const& original, tensor<float, 3> const* basis, index_t h, std::size_t n)
        : at(n)
        , doubt(n)
    {
        for (std::size_t c = 0; c < n; ++c)
        {
            double size = 0;
            for (std::size_t d = 0; basis != nullptr && d < original.size(); ++d)
            {
                double const term = static_cast<double>(widen(original[d])) * static_cast<double>(basis->get(h, c, d));
                at[c] += term;
                size += std::fabs(term);
            }
            if (basis == nullptr) { at[c] = static_cast<double>(widen(original[c])); }
            doubt[c] = static_cast<double>(original.size()) * 0x1p-24 * size;
        }
    }

    /// Less the means of its head's channels, a key over their scales, too.
    template <class T>
    void centre(cpu::cache<T> const& cache, index_t h, bool of_values)
    {
        for (std::size_t c = 0; c < at.size(); ++c)
        {
            auto const channel = static_cast<index_t>(c);
            at[c]              = of_values ? at[c] - support::value_mean<T>(cache.view(), h, channel)
                                           : (at[c] - support::key_mean<T>(cache.view(), h, channel))
                                    / support::key_scale<T>(cache.view(), h, channel);
        }
    }

    void rotate()
    {
        double size = 0;
        for (double const x : at) { size += std::fabs(x); }
        at = support::rotated(at);
        doubt.assign(at.size(), 7 * 0x1p-24 * size); // six sums and a product
    }
};

/// Stored as elements: one rounding to T.
template <class T>
void add_errors(support::worst_error& error, std::vector<double> const& stored, exact_coordinates const& want)
{
    for (std::size_t c = 0; c < stored.size(); ++c)
    {
        error.add(stored[c], want.at[c], 0.51 * spacing<T>(want.at[c]) + want.doubt[c], static_cast<index_t>(c));
    }
}

/// Stored as codes: at most half a step from the coordinate that was coded, where the step is the group's range over the codes; besides,
/// the minimum is rounded to half, and a scale to no better than half's smallest number.
void add_code_errors(
    support::worst_error& error, std::vector<double> const& stored, exact_coordinates const& want, storage kind)
{
    double const most_code = kind == storage::int8 ? 255.0 : 15.0;
    for (std::size_t first = 0; first < stored.size(); first += 64)
    {
        std::size_t const last = std::min(first + 64, stored.size());
        auto const [low, high] = std::minmax_element(
            want.at.begin() + static_cast<std::ptrdiff_t>(first), want.at.begin() + static_cast<std::ptrdiff_t>(last));
        double const step  = (*high - *low) / most_code;
        double const doubt = *std::max_element(want.doubt.begin() + static_cast<std::ptrdiff_t>(first),
            want.doubt.begin() + static_cast<std::ptrdiff_t>(last));
        double const limit = 0.501 * step + 0x1p-11 * std::fabs(*low) + most_code * 0x1p-25 + 3 * doubt;
        for (std::size_t c = first; c < last; ++c) { error.add(stored[c], want.at[c], limit, static_cast<index_t>(c)); }
    }
}

/// Every storage at several sizes; those that a dimension rounds to the same number of coordinates are left out.
std::vector<rung> storage_rungs(head_dims dims)
{
    std::vector<rung> rungs{drop};
    if (std::min(dims.keys, dims.values) >= 4)
    {
        rungs.insert(rungs.end(), {fraction(1, 8), fraction(1, 4).as(storage::int8), fraction(3, 4).as(storage::int8)});
    }
    rungs.insert(rungs.end(), {full_int4, full_int8, full});
    return rungs;
}

/// Every stored token against the layer it was packed from.
template <class T>
void check_contents(packed_layer<T> const& layer, cpu::cache<T> const& cache)
{
    support::worst_error error;
    auto const full_rung = static_cast<int>(layer.layout.full_rung);
    for (index_t h = 0; h < layer.sizes.heads; ++h)
    {
        auto const stored       = support::stored_tokens(cache.view(), h);
        std::size_t next        = 0;
        auto const expect_whole = [&](std::vector<T> const& key, std::vector<T> const& value) {
            REQUIRE(next < stored.size());
            CHECK(stored[next].rung == -1);
            CHECK(support::same_bits(stored[next].key, key));
            CHECK(support::same_bits(stored[next].value, value));
            ++next;
        };
        for (int r = 0; r < static_cast<int>(layer.sizes.rungs.size()); ++r)
        {
            for (index_t t = 0; t < layer.sizes.tokens; ++t)
            {
                rung const& u = layer.ratios[static_cast<std::size_t>(r)];
                if (layer.rung.get(h, t) != r || u.dropped() || u.full()) { continue; }
                REQUIRE(next < stored.size());
                auto const& token = stored[next++];
                CHECK(token.rung == r);
                CHECK(std::ssize(token.key_numbers) == layer.layout.key_coordinates[static_cast<std::size_t>(r)]);
                CHECK(std::ssize(token.value_numbers) == layer.layout.value_coordinates[static_cast<std::size_t>(r)]);
                exact_coordinates key{
                    row_of(layer.keys, h, t), u.projected() ? &layer.key_basis : nullptr, h, token.key_numbers.size()};
                exact_coordinates value{row_of(layer.values, h, t), u.projected() ? &layer.value_basis : nullptr, h,
                    token.value_numbers.size()};
                if (u.quantised() && !u.projected())
                {
                    for (bool const of_values : {false, true})
                    {
                        exact_coordinates coded{of_values ? token.value_numbers : token.key_numbers};
                        exact_coordinates& want = of_values ? value : key;
                        coded.centre(cache, h, of_values);
                        want.centre(cache, h, of_values);
                        want.rotate();
                        add_code_errors(error, support::rotated(coded.at), want, u.kind);
                    }
                    continue;
                }
                if (u.quantised())
                {
                    add_code_errors(error, token.key_numbers, key, u.kind);
                    add_code_errors(error, token.value_numbers, value, u.kind);
                    continue;
                }
                add_errors<T>(error, token.key_numbers, key);
                add_errors<T>(error, token.value_numbers, value);
            }
        }
        for (index_t t = 0; t < layer.sizes.tokens; ++t)
        {
            if (layer.rung.get(h, t) == full_rung)
            {
                expect_whole(row_of(layer.keys, h, t), row_of(layer.values, h, t));
            }
        }
        for (index_t t = 0; t < layer.sizes.window; ++t)
        {
            expect_whole(row_of(layer.window_keys, h, t), row_of(layer.window_values, h, t));
        }
        CHECK(next == stored.size());
    }
    if (error.compared() > 0)
    {
        INFO(error);
        CHECK(error.within(1.0));
    }
}

} // namespace

TEST_CASE_TEMPLATE(
    "full tokens and window are stored bit for bit, projected ones to rounding, in order", T, float, half, bfloat16)
{
    for (index_t const dim : {8, 40, 56, 64, 80, 96, 128, 192, 256, 576})
    {
        packed_layer<T> const layer{{.heads = 2, .tokens = 75, .window = 5, .dims = {dim, dim}}};
        check_contents(layer, layer.packed());
    }
    for (head_dims const dims : {head_dims{192, 128}, {40, 96}, {8, 9}, {512, 8}})
    {
        packed_layer<T> const layer{{.heads = 2, .tokens = 75, .window = 5, .dims = dims}};
        check_contents(layer, layer.packed());
    }
}

TEST_CASE("every token at one rung, none, or a few around a tile's edge")
{
    for (index_t const tokens : {0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100})
    {
        for (int const every : {0, 1, 2, 3})
        {
            for (index_t const window : {0, 1, 16})
            {
                packed_layer<half> const layer{
                    {.heads = 1, .tokens = tokens, .window = window, .dims = {32, 16}}, every};
                check_contents(layer, layer.packed());
            }
        }
    }
}

TEST_CASE("ratio sets without drop, without full, and with many rungs are packed")
{
    for (std::vector<rung> const& rungs :
        {std::vector<rung>{fraction(1, 4), full}, {drop, fraction(3, 4)}, {full}, {drop}, {fraction(1, 2)},
            {drop, fraction(1, 16), fraction(2, 16), fraction(3, 16), fraction(4, 16), fraction(5, 16), fraction(6, 16),
                fraction(7, 16), fraction(8, 16), fraction(9, 16), fraction(10, 16), fraction(11, 16), fraction(12, 16),
                fraction(13, 16), fraction(14, 16), full}})
    {
        packed_layer<bfloat16> const layer{{.heads = 2, .tokens = 120, .window = 3, .dims = {64, 32}, .rungs = rungs}};
        check_contents(layer, layer.packed());
    }
}

TEST_CASE("every storage, in the original basis and in the head's, is within half a step of the token")
{
    for (head_dims const dims : {head_dims{64, 64}, {40, 20}, {5, 33}, {1, 2}, {100, 7}, {192, 128}})
    {
        for (index_t const tokens : {1, 15, 16, 49, 210})
        {
            packed_layer<half> const layer{
                {.heads = 2, .tokens = tokens, .window = 3, .dims = dims, .rungs = storage_rungs(dims)}};
            check_contents(layer, layer.packed());
        }
    }
    // elements of another size, and a whole run in each storage
    packed_layer<float> const wide{{.tokens = 75, .dims = {40, 33}, .rungs = storage_rungs({40, 33})}};
    check_contents(wide, wide.packed());
    for (int every = 1; every < static_cast<int>(storage_rungs({64, 40}).size()); ++every)
    {
        packed_layer<bfloat16> const layer{
            {.tokens = 21, .window = 0, .dims = {64, 40}, .rungs = storage_rungs({64, 40})}, every};
        check_contents(layer, layer.packed());
    }
}

TEST_CASE("the arena holds exactly what the budget is charged, in every storage")
{
    for (std::vector<rung> const& rungs : {std::vector<rung>{drop, fraction(1, 8), fraction(1, 4), full},
             {drop, fraction(1, 8).as(storage::int8), fraction(1, 4).as(storage::int8), full_int4,
                 fraction(3, 4).as(storage::int8), full},
             {drop, full_int4, full_int8}})
    {
        for (int const every : {-1, 0, 1, 2})
        {
            packed_layer<half> const layer{
                {.heads = 3, .tokens = 64, .window = 2, .dims = {64, 40}, .rungs = rungs}, every};
            index_t bytes = 0;
            for (index_t h = 0; h < 3; ++h)
            {
                index_t projections = 0, channels = 0;
                for (index_t t = 0; t < 64; ++t)
                {
                    auto const r = std::size_t{layer.rung.get(h, t)};
                    bytes += layer.ratios.bytes(r, {64, 40}, 2);
                    projections = std::max(projections, projection_bytes(layer.ratios, r, {64, 40}, 2));
                    channels    = layer.ratios[r].rotated() ? (2 * 64 + 40) * 2 : channels;
                }
                bytes += 2 * (64 + 40) * 2 + projections + channels;
            }
            CHECK(layer.bytes() == bytes);
        }
    }
    packed_layer<half> const kept{{.heads = 3, .tokens = 64, .window = 2, .dims = {64, 32}}, 3};
    CHECK(kept.bytes() == 3 * 66 * 96 * 2); // full budget: no projection
    packed_layer<half> const codes{{.heads = 1, .tokens = 10, .window = 0, .dims = {40, 5}, .rungs = {full_int4}}};
    CHECK(codes.bytes() == (2 * 40 + 5) * 2 + 10 * ((20 + 4) + (3 + 4)));
}

TEST_CASE("projections hold only the columns of the widest projected rung in use, rounded to the element type")
{
    packed_layer<half> layer{{.heads     = 2,
                                 .tokens = 20,
                                 .window = 0,
                                 .dims   = {32, 64},
                                 .rungs  = {drop, fraction(1, 8), fraction(1, 4).as(storage::int8), full_int8}},
        1};
    layer.rung.set(2, 1, 7);
    layer.rung.set(3, 0, 3);
    auto const cache = layer.packed();
    for (index_t h = 0; h < 2; ++h)
    {
        auto const& entry = cache.view().heads[h];
        CHECK(entry.key_columns == (h == 0 ? 4 : 8));
        CHECK(entry.value_columns == (h == 0 ? 8 : 16));
        for (index_t c = 0; c < entry.key_columns; ++c)
        {
            for (index_t d = 0; d < 32; ++d)
            {
                auto const stored =
                    support::element_at<half>(cache.view().arena, entry.key_projection, d * entry.key_columns + c);
                CHECK(widen(stored) == widen(narrow<half>(layer.key_basis.get(h, c, d))));
            }
        }
        for (index_t c = 0; c < entry.value_columns; ++c)
        {
            for (index_t d = 0; d < 64; ++d)
            {
                auto const stored = support::element_at<half>(cache.view().arena, entry.value_projection, c * 64 + d);
                CHECK(widen(stored) == widen(narrow<half>(layer.value_basis.get(h, c, d))));
            }
        }
    }
}

TEST_CASE("an arena between two forbidden pages, at odd addresses, is written from its first to its last byte")
{
    packed_layer<half> const layer{{.heads = 2,
        .tokens                            = 75,
        .window                            = 0,
        .dims                              = {40, 33},
        .rungs                             = {drop, full_int4, fraction(3, 4).as(storage::int8), full_int8}}};
    auto const want = layer.packed();
    for (support::guard const fence : {support::guard::before, support::guard::after})
    {
        support::guarded_buffer arena{static_cast<std::size_t>(layer.bytes()), fence};
        cpu::cache<half> cache{layer.layout, 0};
        auto view        = cache.view();
        view.arena       = arena.data();
        view.arena_bytes = layer.bytes();
        std::memset(view.arena, 0xFF, static_cast<std::size_t>(view.arena_bytes));
        support::run([&](cpu::backend const& on) { layer.pack(on, view); });
        CHECK(std::vector<std::byte>(view.arena, view.arena + view.arena_bytes) == arena_of(want));
    }
}

TEST_CASE("NaN in dropped tokens changes no byte")
{
    packed_layer<half> layer{
        {.heads = 2, .tokens = 60, .window = 2, .rungs = {drop, fraction(1, 4).as(storage::int8), full_int4, full}}};
    auto const want = layer.packed();
    for (index_t h = 0; h < 2; ++h)
    {
        for (index_t t = 0; t < 60; ++t)
        {
            if (layer.rung.get(h, t) != 0) { continue; }
            for (index_t d = 0; d < 16; ++d)
            {
                layer.keys.set(narrow<half>(std::numeric_limits<float>::quiet_NaN()), h, t, d);
                layer.values.set(narrow<half>(std::numeric_limits<float>::infinity()), h, t, d);
            }
        }
    }
    CHECK(arena_of(layer.packed()) == arena_of(want));
}

TEST_CASE("a group that holds a NaN or an infinity is read as NaN, and every other group as before")
{
    for (std::vector<rung> const& rungs : {std::vector<rung>{full_int4}, {full_int8}})
    {
        packed_layer<half> layer{{.heads = 1, .tokens = 40, .window = 0, .dims = {80, 134}, .rungs = rungs}};
        layer.keys.set(half{}, 0, 3, 0); // for the means
        layer.keys.set(half{}, 0, 17, 79);
        layer.values.set(half{}, 0, 5, 66);
        layer.values.set(half{}, 0, 39, 133);
        auto const before = support::stored_tokens(layer.packed().view(), 0);
        float const nan   = std::numeric_limits<float>::quiet_NaN();
        float const inf   = std::numeric_limits<float>::infinity();
        layer.keys.set(narrow<half>(nan), 0, 3, 0); // the first, where a comparison would keep it, and the last
        layer.keys.set(narrow<half>(nan), 0, 17, 79);
        layer.values.set(narrow<half>(inf), 0, 5, 66);
        layer.values.set(narrow<half>(-inf), 0, 39, 133);
        auto const after   = support::stored_tokens(layer.packed().view(), 0);
        auto const spoiled = [](std::vector<double> const& was, std::vector<double> const& is, std::size_t bad_group) {
            bool right = true;
            for (std::size_t c = 0; c < was.size(); ++c)
            {
                right = right && (c / 64 == bad_group ? std::isnan(is[c]) : is[c] == was[c]);
            }
            return right;
        };
        std::size_t const none = 99;
        for (std::size_t t = 0; t < 40; ++t)
        {
            CAPTURE(t);
            CHECK(spoiled(before[t].key_numbers, after[t].key_numbers, t == 3 ? 0 : t == 17 ? 1 : none));
            CHECK(spoiled(before[t].value_numbers, after[t].value_numbers, t == 5 ? 1 : t == 39 ? 2 : none));
        }
    }
    // in the basis every coordinate of the token is spoilt, and no other token
    packed_layer<half> layer{{.heads = 1, .tokens = 20, .window = 0, .rungs = {fraction(3, 4).as(storage::int8)}}};
    layer.keys.set(narrow<half>(std::numeric_limits<float>::quiet_NaN()), 0, 7, 2);
    auto const stored = support::stored_tokens(layer.packed().view(), 0);
    for (std::size_t t = 0; t < 20; ++t)
    {
        for (double const x : stored[t].key_numbers) { CHECK(std::isnan(x) == (t == 7)); }
        for (double const x : stored[t].value_numbers) { CHECK_FALSE(std::isnan(x)); }
    }
}

TEST_CASE("constant, tiny and huge groups are stored as well as half can say them")
{
    struct group
    {
        float low, high;
        double error; // what may be lost of sixteen
    };
    double const any = std::numeric_limits<double>::infinity();
    double const ulp = 0x1p-11;
    // Turned, these are one sum of sixteen and zeros. Where it is negative it is the minimum, and what minimum and scale are
    // rounded by is in all sixteen.
    for (auto const& [low, high, error] : {group{0, 0, 0}, {0.5F, 0.5F, 0.5 * ulp}, {-3, -3, 16 * 3 * ulp},
             {16000, 16000, 16000 * ulp}, {-16000, 16000, 16 * 16000 * ulp}, {65504, 65504, any}, {-65504, 65504, any},
             {1e-6F, 2e-6F, 16 * 0x1p-24}, {-1e-5F, 1e-5F, 1e-6}, {-1e30F, 65000, any}, {2e5F, 3e5F, any}})
    {
        for (index_t const dim : {16, 12, 1}) // 12 is turned as 8 and 4, 1 not at all
        {
            packed_layer<float> layer{{.heads = 1, .tokens = 3, .window = 0, .dims = {dim, dim}, .rungs = {full_int4}}};
            for (index_t d = 0; d < dim; ++d)
            {
                for (index_t t = 0; t < 3; ++t) { layer.keys.set(d % 2 == 0 ? low : high, 0, t, d); }
                float const x = d < dim / 2 ? low : high;
                layer.values.set(-x, 0, 0, d); // the mean is 0
                layer.values.set(x, 0, 1, d);
                layer.values.set(0.0F, 0, 2, d);
            }
            auto const stored = support::stored_tokens(layer.packed().view(), 0);
            CAPTURE(low);
            CAPTURE(high);
            CAPTURE(dim);
            std::vector<double> const& got  = stored[1].value_numbers;
            std::vector<double> const coded = support::rotated(got);
            std::vector<double> given;
            for (std::size_t d = 0; d < got.size(); ++d) { given.push_back(double{d < got.size() / 2 ? low : high}); }
            std::vector<double> const turned = support::rotated(given);
            auto const [least, most]         = std::minmax_element(turned.begin(), turned.end());
            double const half_a_step = (*most - *least) / 30 + 2 * ulp * std::max(-*least, *most) + 16 * 0x1p-25;
            for (std::size_t d = 0; d < got.size(); ++d)
            {
                if (dim == 16) { CHECK(std::fabs(got[d] - given[d]) <= error); }
                if (std::max(-*least, *most) <= 65504) { CHECK(std::fabs(coded[d] - turned[d]) <= half_a_step); }
                CHECK(std::fabs(coded[d]) <= 65504 * 1.001); // beyond half's range: cut, never infinite
            }
            for (std::size_t d = 0; d < got.size(); ++d) // keys that are alike are their mean
            {
                auto const all   = static_cast<double>(d % 2 == 0 ? low : high);
                double const key = stored[1].key_numbers[d];
                CHECK(std::fabs(key - all) <= 1e-6 * std::fabs(all));
            }
        }
    }
    // one coordinate beyond half's range is spread over its group and is not cut
    packed_layer<float> layer{{.heads = 1, .tokens = 1, .window = 0, .dims = {32, 32}, .rungs = {full_int8}}};
    for (index_t d = 0; d < 32; ++d) { layer.keys.set(d == 5 ? 3e5F : 0.0F, 0, 0, d); }
    std::vector<double> const key = support::stored_tokens(layer.packed().view(), 0)[0].key_numbers;
    for (std::size_t d = 0; d < 32; ++d) { CHECK(std::fabs(key[d] - (d == 5 ? 3e5 : 0)) <= 3e5 * 0x1p-10); }
}

TEST_CASE_TEMPLATE(
    "stand-ins lie behind the window, as many as a head drops tokens, and change nothing else", T, float, half)
{
    std::vector<rung> const mixed{drop, fraction(1, 8), full_int4, full};
    for (packed_sizes sizes : {packed_sizes{.heads = 3, .tokens = 50, .window = 5, .rungs = mixed},
             {.heads = 2, .tokens = 9, .window = 0}, {.heads = 2, .tokens = 40, .window = 16, .dims = {24, 9}},
             {.heads = 2, .tokens = 30, .window = 2, .rungs = {drop}},
             {.heads = 2, .tokens = 30, .window = 2, .rungs = {full_int4, full}}})
    {
        for (index_t const most : {1, 5, 20})
        {
            sizes.stand_ins = most;
            packed_layer<T> layer{sizes};
            index_t const few = std::min<index_t>(3, sizes.tokens);
            for (index_t t = few; t < sizes.tokens;
                 ++t) // the last head drops few tokens, head 0 none if there are three
            {
                auto const costly = static_cast<std::uint8_t>(sizes.rungs.size() - 1);
                layer.rung.set(costly, sizes.heads - 1, t);
                if (sizes.heads > 2) { layer.rung.set(costly, 0, t); }
            }
            for (index_t t = 0; t < few && sizes.heads > 2; ++t) { layer.rung.set(1, 0, t); }
            sizes.stand_ins = 0;
            packed_layer<T> without{sizes};
            without.rung.assign(layer.rung.elements());
            auto const got  = layer.packed();
            auto const want = without.packed();
            index_t all     = 0;
            for (index_t h = 0; h < sizes.heads; ++h)
            {
                index_t const count = layer.stand_ins(h);
                auto const stored   = support::stored_tokens(got.view(), h);
                auto const before   = support::stored_tokens(want.view(), h);
                REQUIRE(got.view().heads[h].stand_ins == count);
                REQUIRE(stored.size() == before.size() + static_cast<std::size_t>(count));
                for (std::size_t i = 0; i < before.size(); ++i)
                {
                    CHECK(support::same_bits(stored[i].key, before[i].key));
                    CHECK(support::same_bits(stored[i].value, before[i].value));
                }
                for (index_t j = 0; j < count; ++j)
                {
                    auto const& token = stored[before.size() + static_cast<std::size_t>(j)];
                    CHECK(token.rung == -1);
                    for (index_t d = 0; d < sizes.dims.keys; ++d)
                    {
                        float const x = widen(narrow<T>(layer.stand_in_keys.get(h, j, d)));
                        CHECK(token.key_numbers[static_cast<std::size_t>(d)] == double{x});
                    }
                    for (index_t d = 0; d < sizes.dims.values; ++d)
                    {
                        float const x = widen(narrow<T>(layer.stand_in_values.get(h, j, d)));
                        CHECK(token.value_numbers[static_cast<std::size_t>(d)] == double{x});
                    }
                }
                all += count;
            }
            CHECK(got.arena_bytes()
                  == want.arena_bytes() + all * (sizes.dims.keys + sizes.dims.values) * index_t{sizeof(T)});
            CHECK((all > 0) == layer.ratios.can_drop());
            if (sizes.heads > 2) { CHECK(got.view().heads[0].stand_ins == 0); }
        }
    }
}

TEST_CASE_TEMPLATE("coded stand-ins are the bytes of tokens at their rung, and have no slots", T, float, half, bfloat16)
{
    for (packed_sizes sizes : {packed_sizes{.tokens = 50, .window = 5, .dims = {40, 24}, .stand_ins = 3},
             {.tokens = 70, .window = 0, .dims = {64, 130}, .common = 3, .stand_ins = 17},
             {.tokens = 40, .window = 2, .dims = {9, 16}, .stand_ins = 16}})
    {
        for (std::vector<rung> const& rungs : {std::vector<rung>{bit_ratios.begin(), bit_ratios.end()},
                 {drop, fraction(1, 2).as(storage::int8), full_int4}})
        {
            sizes.rungs           = rungs;
            sizes.coded_stand_ins = true;
            auto const [H, N, M]  = std::array<index_t, 3>{sizes.heads, sizes.tokens, sizes.stand_ins};
            packed_layer<T> layer{sizes};
            for (index_t t = 3; t < 3 + M; ++t) { layer.rung.set(0, 0, t); } // the first head drops at least M
            for (index_t t = 0; t < N; ++t) { layer.rung.set(t < 2 ? 0 : 2, H - 1, t); } // the last one drops two
            std::size_t const codes = layer.ratios.cheapest_rotated();
            packed_sizes more       = sizes; // the stand-ins as tokens
            more.tokens             = N + M;
            more.stand_ins          = 0;
            packed_layer<T> tokens{more};
            tensor<float, 3> channels{{H, 3, sizes.dims.keys}};
            tensor<float, 2> means{{H, sizes.dims.values}};
            support::source random{"channels", N};
            std::vector<float> some(static_cast<std::size_t>(H * 3 * std::max(sizes.dims.keys, sizes.dims.values)));
            for (float& x : some) { x = static_cast<float>(random.uniform(0.5, 1.5)); }
            channels.assign(some);
            means.assign(some);
            for (index_t h = 0; h < H; ++h)
            {
                for (index_t t = 0; t < N + M; ++t)
                {
                    bool const there = t < N;
                    auto const made  = static_cast<std::uint8_t>(t - N < layer.stand_ins(h) ? codes : 0);
                    tokens.rung.set(there ? layer.rung.get(h, t) : made, h, t);
                    for (index_t d = 0; d < sizes.dims.keys; ++d)
                    {
                        tokens.keys.set(
                            there ? layer.keys.get(h, t, d) : narrow<T>(layer.stand_in_keys.get(h, t - N, d)), h, t, d);
                    }
                    for (index_t d = 0; d < sizes.dims.values; ++d)
                    {
                        tokens.values.set(
                            there ? layer.values.get(h, t, d) : narrow<T>(layer.stand_in_values.get(h, t - N, d)), h, t,
                            d);
                    }
                }
            }
            auto const pack_all = [&](packed_layer<T> const& x) {
                cpu::cache<T> cache{x.layout, x.bytes()};
                support::run([&](cpu::backend const& on) {
                    auto const rung = x.rung.in();
                    workspace::frame frame{*on.scratch};
                    auto const positions = detail::scratch_view<std::int32_t>(on, frame, H, rung.extent(1));
                    auto const first =
                        detail::scratch_view<index_t>(on, frame, H, static_cast<index_t>(x.layout.rungs) + 1);
                    run(on, detail::sort_slots<cpu::backend>{rung, positions, first}, H);
                    detail::pack_tokens<cpu::backend, T>(on,
                        {x.keys.in(), x.values.in(), layer.window_keys.in(), layer.window_values.in(),
                            layer.key_basis.in(), layer.value_basis.in(), channels.in(), means.in(),
                            as_input(positions), as_input(first), x.stand_in_keys.in(), x.stand_in_values.in()},
                        cache.view());
                });
                return cache;
            };
            auto got  = pack_all(layer);
            auto want = pack_all(tokens);
            REQUIRE(got.arena_bytes() == want.arena_bytes());
            CHECK(std::equal(got.view().arena, got.view().arena + got.arena_bytes(), want.view().arena));
            for (index_t h = 0; h < H; ++h)
            {
                head_entry entry = got.view().heads[h];
                CHECK(std::exchange(entry.stand_ins, 0) == layer.stand_ins(h));
                CHECK(entry == want.view().heads[h]);
                CHECK(detail::tokens_of_head(got.view(), h)
                      == detail::tokens_of_head(want.view(), h) - layer.stand_ins(h));
            }
            CHECK(layer.stand_ins(0) == M);
            CHECK(layer.stand_ins(H - 1) == std::min<index_t>(M, 2));
        }
    }
    packed_layer<T> wrong{{.rungs = {drop, fraction(1, 2).as(storage::int8), full}, .stand_ins = 2}};
    for (std::size_t const run : {0U, 1U, 2U, 4U})
    {
        wrong.layout.stand_in_run = run;
        cpu::cache<T> cache{wrong.layout, 100000};
        CHECK(error_text<invalid_argument>([&] {
            support::run([&](cpu::backend const& on) { wrong.pack(on, cache.view()); });
        }).find("pack: layout.stand_in_run is " + std::to_string(run) + "; it must be 3 (the exact run) or ")
              == 0);
    }
}

TEST_CASE("an arena without the bytes of stand-ins is too small, and their number is not negative")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 50, .stand_ins = 3}};
    cpu::cache<half> small{layer.layout, layer.bytes() - 1};
    CHECK(error_text<error>([&] {
        support::run([&](cpu::backend const& on) { layer.pack(on, small.view()); });
    }).starts_with("pack: the arena holds "));
    CHECK(error_text<invalid_argument>([&] {
        support::run([&](cpu::backend const& on) {
            static_cast<void>(packed_bytes<half>(on, layer.rung.in(), layer.layout, -1));
        });
    }) == "packed_bytes: stand_ins is -1; it must not be negative");
}

TEST_CASE("packing empties the tail")
{
    packed_layer<half> const layer{{}};
    auto cache             = layer.packed(4);
    *cache.view().appended = 3;
    support::run([&](cpu::backend const& on) { layer.pack(on, cache.view()); });
    CHECK(cache.appended() == 0);
}

TEST_CASE("no heads, no tokens and no window are packed to nothing")
{
    packed_layer<half> const heads{{.heads = 0}};
    CHECK(heads.bytes() == 0);
    CHECK(heads.packed().arena_bytes() == 0);
    packed_layer<half> const tokens{{.heads = 2, .tokens = 0, .window = 0}};
    CHECK(tokens.bytes() == 0);
    CHECK(support::stored_tokens(tokens.packed().view(), 1).empty());
}

TEST_CASE("an unknown rung is refused by head and token, and nothing changes")
{
    packed_layer<half> layer{{.heads = 2, .tokens = 300}};
    auto cache           = layer.packed();
    auto const before    = arena_of(cache);
    auto const directory = directory_of(cache);
    layer.rung.set(4, 1, 268);
    CHECK(error_text<invalid_argument>([&] { static_cast<void>(layer.bytes()); })
          == "packed_bytes: rung of head 1, token 268 is 4; it must be below 4");
    CHECK(error_text<invalid_argument>([&] {
        support::run([&](cpu::backend const& on) { layer.pack(on, cache.view()); });
    }) == "pack: rung of head 1, token 268 is 4; it must be below 4");
    CHECK(arena_of(cache) == before);
    CHECK(directory_of(cache) == directory);
}

TEST_CASE("an arena one byte too small is refused by both sizes, and nothing changes")
{
    packed_layer<half> const layer{{.heads = 2, .tokens = 50}};
    index_t const bytes = layer.bytes();
    cpu::cache<half> cache{layer.layout, bytes - 1};
    std::memset(cache.view().arena, 0x5A, static_cast<std::size_t>(bytes - 1));
    auto const before = arena_of(cache);
    CHECK(error_text<insufficient_workspace>([&] {
        support::run([&](cpu::backend const& on) { layer.pack(on, cache.view()); });
    }) == "pack: the arena holds " + std::to_string(bytes - 1) + " bytes, " + std::to_string(bytes) + " are needed");
    CHECK(arena_of(cache) == before);
    CHECK(directory_of(cache) == std::vector<head_entry>(2));
}

TEST_CASE("bases may be left out when no token is at a projected rung, and only then")
{
    std::vector<rung> const rungs{drop, full_int4, fraction(3, 4).as(storage::int8), full};
    tensor<float, 3> const no_basis{{0, 0, 0}};
    for (int const every : {1, 2, 3})
    {
        packed_layer<half> const layer{{.heads = 2, .tokens = 50, .window = 3, .rungs = rungs}, every};
        auto const want = layer.packed();
        cpu::cache<half> cache{layer.layout, layer.bytes()};
        auto const pack_without = [&] {
            support::run([&](cpu::backend const& on) {
                mdkv::pack(on, layer.keys.in(), layer.values.in(), layer.window_keys.in(), layer.window_values.in(),
                    no_basis.in(), no_basis.in(), layer.rung.in(), cache.view());
            });
        };
        if (every == 2)
        {
            CHECK(error_text<invalid_argument>(pack_without)
                  == "pack: head 0 has 50 tokens at projected rung 2, but key_basis or value_basis is empty");
            continue;
        }
        pack_without();
        CHECK(arena_of(cache) == arena_of(want));
    }
}

TEST_CASE("a head that has rotated tokens stores means and scales of its kept keys, and no other does")
{
    for (index_t const tokens : {5, 127, 128, 129, 600})
    {
        packed_layer<half> layer{
            {.heads = 2, .tokens = tokens, .window = 3, .dims = {40, 24}, .rungs = {drop, full_int4, full_int8, full}},
            0};
        for (index_t t = 0; t < tokens; ++t) { layer.rung.set(static_cast<std::uint8_t>(t % 4), 1, t); }
        auto const cache = layer.packed();
        CHECK(cache.view().heads[0].exact.keys == 0); // nothing before the window
        std::vector<index_t> kept;                    // by rung
        for (int r = 1; r < 4; ++r)
        {
            for (index_t t = r; t < tokens; t += 4) { kept.push_back(t); }
        }
        for (index_t d = 0; d < 40; ++d)
        {
            double sum = 0, squares = 0, count = 0;
            for (index_t const t : kept)
            {
                auto const x = static_cast<double>(widen(layer.keys.get(1, t, d)));
                ++count;
                sum += x;
                squares += x * x;
            }
            double const mean   = sum / count;
            double const spread = std::sqrt(squares / count - mean * mean);
            CHECK(support::key_mean<half>(cache.view(), 1, d) == doctest::Approx(mean).epsilon(1e-3).scale(0.01));
            CHECK(support::key_scale<half>(cache.view(), 1, d) == doctest::Approx(std::sqrt(spread)).epsilon(1e-3));
        }
    }
    packed_layer<half> const exact{{.heads = 1, .tokens = 20, .window = 1, .rungs = {drop, full_int8, full}}, 2};
    CHECK(exact.bytes() == 21 * exact.ratios.bytes(2, exact.sizes.dims, 2));
}

TEST_CASE("a head that drops all its tokens has coded stand-ins with the means of all its keys and values")
{
    packed_layer<float> layer{{.heads              = 2,
                                  .tokens          = 90,
                                  .window          = 3,
                                  .dims            = {40, 24},
                                  .rungs           = {drop, full_int4, full_int8, full},
                                  .stand_ins       = 6,
                                  .coded_stand_ins = true},
        0};
    layer.rung.set(1, 1, 7);                       // head 1 keeps one
    auto const move = [](tensor<float, 3>& rows) { // to numbers that hardly differ
        auto numbers = rows.elements();
        for (float& x : numbers) { x = 30.0F + 0.01F * x; }
        rows.assign(numbers);
    };
    for (auto* const rows : {&layer.keys, &layer.values, &layer.stand_in_keys, &layer.stand_in_values}) { move(*rows); }
    auto const cache = layer.packed();
    for (index_t h = 0; h < 2; ++h)
    {
        auto tokens = support::stored_tokens(cache.view(), h);
        REQUIRE(support::stand_ins_last(cache.view(), h, tokens) == 6);
        for (std::size_t j = 0; j < 6; ++j)
        {
            auto const& stored = tokens[tokens.size() - 6 + j];
            for (std::size_t d = 0; d < 24; ++d)
            {
                CHECK(
                    std::fabs(stored.value_numbers[d]
                              - double{layer.stand_in_values.get(h, static_cast<index_t>(j), static_cast<index_t>(d))})
                    < 0.01);
            }
        }
    }
    CHECK(support::key_mean<float>(cache.view(), 0, 5) == doctest::Approx(30).epsilon(0.001));
}

TEST_CASE_TEMPLATE(
    "what all keys or values of a head have in common costs their codes nothing, beyond half's range, too", T, float,
    bfloat16)
{
    for (auto const& [stored, of_values] :
        {std::pair{full_int4, false}, {full_int8, false}, {full_int4, true}, {full_int8, true}})
    {
        CAPTURE(of_values);
        auto const error_of = [&](float common) {
            packed_layer<T> layer{{.heads = 1, .tokens = 100, .window = 0, .dims = {80, 80}, .rungs = {stored}}};
            auto& rows = of_values ? layer.values : layer.keys;
            for (index_t t = 0; t < 100; ++t)
            {
                for (index_t d = 3; d < 80; d += 7) { rows.set(narrow<T>(d % 2 == 0 ? common : -common), 0, t, d); }
            }
            auto const tokens = support::stored_tokens(layer.packed().view(), 0);
            double error      = 0;
            for (std::size_t t = 0; t < 100; ++t)
            {
                std::vector<double> const& got = of_values ? tokens[t].value_numbers : tokens[t].key_numbers;
                for (std::size_t d = 0; d < 80; ++d)
                {
                    double const off = got[d] - static_cast<double>(widen(rows.get(0, t, d)));
                    error += off * off;
                }
            }
            return error;
        };
        double const small = error_of(1e3F);
        CHECK(small > 0);
        for (float const common : {0.0F, 65504.0F, 66001.3F, 7e4F, 123456.7F, 3e5F})
        {
            CAPTURE(common);
            CHECK(error_of(common) <= 1.02 * small);
        }
    }
}

TEST_CASE("a few huge values cost the codes of other tokens' values nothing")
{
    auto const error_of = [](float huge) { // of the tokens that are not
        packed_layer<float> layer{{.heads = 1, .tokens = 100, .window = 0, .dims = {64, 64}, .rungs = {full_int4}}};
        for (index_t const t : {0, 17, 99})
        {
            for (index_t d = 0; d < 64; d += 5) { layer.values.set(huge, 0, t, d); }
        }
        auto const tokens = support::stored_tokens(layer.packed().view(), 0);
        double error      = 0;
        for (std::size_t t = 18; t < 99; ++t)
        {
            for (index_t d = 0; d < 64; ++d)
            {
                error += std::pow(tokens[t].value_numbers[static_cast<std::size_t>(d)]
                                      - static_cast<double>(layer.values.get(0, static_cast<index_t>(t), d)),
                    2);
            }
        }
        return error;
    };
    double const small = error_of(0.0F);
    for (float const huge : {100.0F, -6e4F, 1e6F}) { CHECK(error_of(huge) <= 1.05 * small); }
}

TEST_CASE_TEMPLATE(
    "a mean key is exact up to its type's largest number, and 0 if differences of keys leave float's range", T, float,
    bfloat16)
{
    float const largest = std::is_same_v<T, float> ? std::numeric_limits<float>::max() : 0x1.FEp127F; // of bfloat16
    for (auto const& [x, tokens, other] :
        {std::array{largest, 1.0F, largest}, std::array{largest, 100.0F, largest}, std::array{-largest, 2.0F, -largest},
            std::array{largest / 256, 128.0F, largest / 256}, std::array{largest, 100.0F, -largest}})
    {
        packed_layer<T> layer{
            {.heads = 1, .tokens = static_cast<index_t>(tokens), .window = 0, .dims = {16, 16}, .rungs = {full_int8}}};
        for (index_t t = 0; t < layer.sizes.tokens; ++t) { layer.keys.set(narrow<T>(t % 2 == 0 ? x : other), 0, t, 5); }
        auto const cache  = layer.packed();
        double const mean = x == other ? x : 0.0F;
        CHECK(support::key_mean<T>(cache.view(), 0, 5) == doctest::Approx(mean).epsilon(1e-2));
        CHECK(std::isfinite(support::key_mean<T>(cache.view(), 0, 4)));
    }
}
