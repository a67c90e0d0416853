/// \file packed.hpp: random layers to pack, the packed layout read back by its description, and attention over that by the definition
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/stages/basis.hpp>
#include <mdkv/stages/pack.hpp>

#include "support/host.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory_resource>
#include <type_traits>
#include <utility>
#include <vector>

namespace support
{

/// Value of coordinate c of token t of a run, in the basis of the run.
template <class T>
float stored_value(mdkv::detail::run_rows const& rows, index_t t, int c)
{
    using namespace mdkv;
    if (rows.kind == storage::plain) { return widen(detail::load_at<T>(rows.begin + rows.coordinate(t, c))); }
    detail::coded_group const group = rows.group(t, c / int{quantised_group});
    auto const at                   = [&](int place) { return rows.begin + rows.tile(t) + place; };
    auto const half_at              = [&](int place) { return widen(detail::load_at<mdkv::half>(at(place))); };
    auto const i                    = static_cast<int>(t % tile_tokens);
    int const j                     = c % int{quantised_group};
    auto const byte                 = static_cast<int>(*at(group.code(i, j % group.bytes)));
    int const code                  = rows.kind == storage::int8 ? byte : j >= group.bytes ? byte >> 4 : byte & 15;
    return half_at(group.minimum(i)) + half_at(group.scale(i)) * static_cast<float>(code);
}

struct packed_sizes
{
    index_t heads  = 2;
    index_t tokens = 50;
    index_t window = 4;
    mdkv::head_dims dims{16, 16};
    std::vector<mdkv::rung> rungs{mdkv::drop, mdkv::fraction(1, 8), mdkv::fraction(1, 4), mdkv::full};
    double common        = 0;     ///< added to every third coordinate of all keys
    float scale          = 0;     ///< cache_layout::scale
    index_t stand_ins    = 0;     ///< most stand-ins of a head, random ones
    bool coded_stand_ins = false; ///< they end the run of the cheapest rotated rung
};

/// Keys, values, orthonormal bases and a rung for every token: a random one, or the one given. Queries have a basis of
/// their own, which is at first that of the keys.
template <class T>
struct packed_layer
{
    packed_sizes sizes;
    mdkv::ratio_set ratios;
    mdkv::cache_layout layout;
    tensor<T, 3> keys;
    tensor<T, 3> values;
    tensor<T, 3> window_keys;
    tensor<T, 3> window_values;
    tensor<float, 3> key_basis;
    tensor<float, 3> value_basis;
    tensor<std::uint8_t, 2> rung;
    tensor<float, 3> stand_in_keys;
    tensor<float, 3> stand_in_values;

    explicit packed_layer(packed_sizes const& s, int every_rung = -1, placement how = {})
        : sizes{s}
        , ratios{s.rungs, mdkv::rounding::down}
        , layout{ratios, s.heads, s.window, s.dims, s.scale}
        , keys{{s.heads, s.tokens, s.dims.keys}, how}
        , values{{s.heads, s.tokens, s.dims.values}, how}
        , window_keys{{s.heads, s.window, s.dims.keys}, how}
        , window_values{{s.heads, s.window, s.dims.values}, how}
        , key_basis{{s.heads, s.dims.keys, s.dims.keys}}
        , value_basis{{s.heads, s.dims.values, s.dims.values}}
        , rung{{s.heads, s.tokens}}
        , stand_in_keys{{s.heads, s.stand_ins, s.dims.keys}}
        , stand_in_values{{s.heads, s.stand_ins, s.dims.values}}
    {
        if (s.coded_stand_ins) { layout.stand_in_run = ratios.cheapest_rotated(); }
        source random{"packed layer", s.tokens + 1000 * s.dims.keys};
        fill(random, keys, s.common);
        fill(random, values);
        fill(random, window_keys, s.common);
        fill(random, window_values);
        fill_basis(random, key_basis);
        fill_basis(random, value_basis);
        for (index_t h = 0; h < s.heads; ++h)
        {
            for (index_t t = 0; t < s.tokens; ++t)
            {
                index_t const r = every_rung >= 0 ? every_rung : random.below(static_cast<index_t>(s.rungs.size()));
                rung.set(static_cast<std::uint8_t>(r), h, t);
            }
        }
        fill(random, stand_in_keys, s.common);
        fill(random, stand_in_values);
    }

    /// Stand-ins that head h has.
    [[nodiscard]] index_t stand_ins(index_t h) const
    {
        index_t dropped = 0;
        for (index_t t = 0; t < sizes.tokens; ++t) { dropped += rung.get(h, t) == 0 && ratios.can_drop() ? 1 : 0; }
        return std::min(dropped, sizes.stand_ins);
    }

    void pack(mdkv::cpu::backend const& on, mdkv::cache_view<T, mdkv::space::host> const& cache) const
    {
        mdkv::pack(on, keys.in(), values.in(), window_keys.in(), window_values.in(), key_basis.in(), value_basis.in(),
            rung.in(), cache, {}, stand_in_keys.in(), stand_in_values.in());
    }

    [[nodiscard]] index_t bytes() const
    {
        index_t bytes = 0;
        run([&, this](mdkv::cpu::backend const& on) {
            bytes = mdkv::packed_bytes<T>(on, rung.in(), layout, sizes.stand_ins);
        });
        return bytes;
    }

    [[nodiscard]] mdkv::cpu::cache<T> packed(index_t tail = 0, mdkv::cpu::executor_ref threads = {},
        std::pmr::memory_resource* resource = std::pmr::get_default_resource()) const
    {
        mdkv::cpu::cache<T> cache{layout, bytes(), tail, resource};
        // NaN wherever nothing is written
        std::fill_n(cache.view().arena, cache.arena_bytes(), std::byte{0xFF});
        std::fill_n(cache.view().tail, cache.tail_bytes(), std::byte{0xFF});
        run([&, this](mdkv::cpu::backend const& on) { pack(on, cache.view()); }, threads);
        return cache;
    }

private:
    template <class V>
    static void fill(source& random, tensor<V, 3>& to, double common = 0)
    {
        for (index_t h = 0; h < to.extent(0); ++h)
        {
            for (index_t t = 0; t < to.extent(1); ++t)
            {
                for (index_t d = 0; d < to.extent(2); ++d)
                {
                    double const own = random.normal();
                    to.set(mdkv::narrow<V>(static_cast<float>(d % 3 == 0 ? own + common : own)), h, t, d);
                }
            }
        }
    }

    static void fill_basis(source& random, tensor<float, 3>& to)
    {
        for (index_t h = 0; h < to.extent(0); ++h)
        {
            rotation const turn{random, to.extent(1)};
            for (index_t i = 0; i < to.extent(1); ++i)
            {
                std::vector<double> const row = turn.row(i);
                for (index_t d = 0; d < to.extent(2); ++d)
                {
                    to.set(static_cast<float>(row[static_cast<std::size_t>(d)]), h, i, d);
                }
            }
        }
    }
};

/// What a cache says about one token of one head.
template <class T>
struct stored_token
{
    int rung = 0; ///< -1: exact run, -2: tail
    /// The elements as they are stored; empty where the run holds codes.
    std::vector<T> key;
    std::vector<T> value;
    /// The numbers they stand for, in whichever storage: coordinates in the head's basis, or of the vector itself.
    std::vector<double> key_numbers;
    std::vector<double> value_numbers;
    bool projected = false; ///< coordinates in the head's basis
};

/// The element at an address of any alignment.
template <class T>
[[nodiscard]] T element_at(std::byte const* base, index_t bytes, index_t element)
{
    T value;
    std::memcpy(static_cast<void*>(&value), base + bytes + element * index_t{sizeof(T)}, sizeof value);
    return value;
}

/// Which of a token's two vectors.
enum class side
{
    key,
    value
};

/// A vector stored as codes: of coordinate c the code, and of its group (c / 64) a minimum and a scale.
struct coded_vector
{
    std::vector<int> codes;
    std::vector<double> scales;
    std::vector<double> minima;

    [[nodiscard]] double number(std::size_t c) const
    {
        return minima[c / 64] + scales[c / 64] * static_cast<double>(codes[c]);
    }
};

/// Token t of a quantised run of `tokens` tokens with r coordinates that begins at `run`, as cache.hpp describes it.
[[nodiscard]] inline coded_vector coded_token(
    std::byte const* run, mdkv::storage kind, side which, index_t tokens, index_t r, index_t t)
{
    coded_vector all;
    bool const nibbles      = kind == mdkv::storage::int4;
    index_t const in_tile   = t % 16;
    index_t const width     = std::min<index_t>(16, tokens - (t - in_tile));
    index_t const per_token = (r + 63) / 64 * 4 + (nibbles ? r / 64 * 32 + (r % 64 + 1) / 2 : r);
    std::byte const* group  = run + t / 16 * 16 * per_token;
    for (index_t first = 0; first < r; first += 64)
    {
        index_t const g        = std::min<index_t>(64, r - first);
        index_t const bytes    = nibbles ? (g + 1) / 2 : g; // of one token's codes
        std::byte const* codes = group + 4 * width;
        all.scales.push_back(static_cast<double>(mdkv::widen(element_at<mdkv::half>(group, 0, in_tile))));
        all.minima.push_back(static_cast<double>(mdkv::widen(element_at<mdkv::half>(group, 2 * width, in_tile))));
        for (index_t c = 0; c < g; ++c)
        {
            index_t const b = nibbles ? c % bytes : c;
            // four bytes of a key together, or a byte of four values; those beyond the last whole four behind them
            index_t const i = which == side::key ? (
                                  b < bytes - bytes % 4 ? b / 4 * 4 * width + 4 * in_tile + b % 4 : b * width + in_tile)
                              : in_tile < width - width % 4 ? in_tile / 4 * 4 * bytes + 4 * b + in_tile % 4
                                                            : in_tile * bytes + b;
            int const byte  = std::to_integer<int>(codes[i]);
            all.codes.push_back(!nibbles ? byte : c < bytes ? byte % 16 : byte / 16);
        }
        group = codes + width * bytes;
    }
    return all;
}

/// The first `tokens` tokens of a plain run that is laid out for `stored` tokens, as cache.hpp describes it.
template <class T>
void read_run(std::byte const* base, index_t keys, index_t values, index_t tokens, index_t stored,
    index_t key_coordinates, index_t value_coordinates, int rung, std::vector<stored_token<T>>& into)
{
    for (index_t t = 0; t < tokens; ++t)
    {
        index_t const tile  = t - t % 16;
        index_t const width = std::min<index_t>(16, stored - tile);
        stored_token<T> token;
        token.rung = rung;
        for (index_t c = 0; c < key_coordinates; ++c)
        {
            token.key.push_back(element_at<T>(base, keys, tile * key_coordinates + c * width + t % 16));
            token.key_numbers.push_back(static_cast<double>(mdkv::widen(token.key.back())));
        }
        for (index_t c = 0; c < value_coordinates; ++c)
        {
            token.value.push_back(element_at<T>(base, values, t * value_coordinates + c));
            token.value_numbers.push_back(static_cast<double>(mdkv::widen(token.value.back())));
        }
        into.push_back(std::move(token));
    }
}

/// Groups of 64 numbers, the last one fewer: each, in blocks that are the largest powers of two from its first number on,
/// multiplied with the Hadamard matrix of the block's size over the root of that size. The matrix is symmetric and orthonormal:
/// twice is nothing.
[[nodiscard]] inline std::vector<double> rotated(std::vector<double> const& x)
{
    std::vector<double> y = x;
    std::size_t n         = 0;
    for (std::size_t first = 0; first < x.size(); first += n)
    {
        n = std::bit_floor(std::min(64 - first % 64, x.size() - first));
        for (std::size_t i = 0; i < n; ++i)
        {
            double sum = 0;
            for (std::size_t j = 0; j < n; ++j) { sum += std::popcount(i & j) % 2 == 0 ? x[first + j] : -x[first + j]; }
            y[first + i] = sum / std::sqrt(static_cast<double>(n));
        }
    }
    return y;
}

/// Mean of a head's keys in channel c, and its scale.
template <class T, class V>
[[nodiscard]] double key_mean(mdkv::cache_view<V, mdkv::space::host> const& cache, index_t h, index_t c)
{
    return static_cast<double>(mdkv::widen(element_at<T>(cache.arena, cache.heads[h].channels, c)));
}
template <class T, class V>
[[nodiscard]] double key_scale(mdkv::cache_view<V, mdkv::space::host> const& cache, index_t h, index_t c)
{
    return key_mean<T>(cache, h, cache.layout.dims.keys + c);
}

/// Mean of its values.
template <class T, class V>
[[nodiscard]] double value_mean(mdkv::cache_view<V, mdkv::space::host> const& cache, index_t h, index_t c)
{
    return key_mean<T>(cache, h, 2 * cache.layout.dims.keys + c);
}

/// The tokens of a quantised run of head h. Codes of vectors' own coordinates stand for rotated ones, less the means of their
/// channels, of keys over the scales, too.
template <class T, class V>
void read_coded_run(
    mdkv::cache_view<V, mdkv::space::host> const& cache, index_t h, std::size_t r, std::vector<stored_token<T>>& into)
{
    mdkv::cache_layout const& layout = cache.layout;
    mdkv::run_entry const& run       = cache.heads[h].runs[r];
    for (index_t t = 0; t < run.tokens; ++t)
    {
        coded_vector const key =
            coded_token(cache.arena + run.keys, layout.kinds[r], side::key, run.tokens, layout.key_coordinates[r], t);
        coded_vector const value = coded_token(
            cache.arena + run.values, layout.kinds[r], side::value, run.tokens, layout.value_coordinates[r], t);
        stored_token<T> token;
        token.rung = static_cast<int>(r);
        for (std::size_t c = 0; c < key.codes.size(); ++c) { token.key_numbers.push_back(key.number(c)); }
        for (std::size_t c = 0; c < value.codes.size(); ++c) { token.value_numbers.push_back(value.number(c)); }
        if (!layout.in_basis[r])
        {
            token.key_numbers   = rotated(token.key_numbers);
            token.value_numbers = rotated(token.value_numbers);
            for (std::size_t c = 0; c < token.key_numbers.size(); ++c)
            {
                auto const channel = static_cast<index_t>(c);
                token.key_numbers[c] =
                    token.key_numbers[c] * key_scale<T>(cache, h, channel) + key_mean<T>(cache, h, channel);
            }
            for (std::size_t c = 0; c < token.value_numbers.size(); ++c)
            {
                token.value_numbers[c] += value_mean<T>(cache, h, static_cast<index_t>(c));
            }
        }
        into.push_back(std::move(token));
    }
}

/// Every token of head h, in the order in which they are stored.
template <class V, class T = std::remove_const_t<V>>
[[nodiscard]] std::vector<stored_token<T>> stored_tokens(mdkv::cache_view<V, mdkv::space::host> const& cache, index_t h)
{
    std::vector<stored_token<T>> all;
    mdkv::cache_layout const& layout = cache.layout;
    mdkv::head_entry const& entry    = cache.heads[h];
    for (std::size_t r = 0; r < layout.rungs; ++r)
    {
        if (layout.key_coordinates[r] == 0 || r == layout.full_rung) { continue; } // dropped; in the exact run
        mdkv::run_entry const& run = entry.runs[r];
        std::size_t const before   = all.size();
        if (layout.kinds[r] == mdkv::storage::plain)
        {
            read_run<T>(cache.arena, run.keys, run.values, run.tokens, run.tokens, layout.key_coordinates[r],
                layout.value_coordinates[r], static_cast<int>(r), all);
        }
        else { read_coded_run(cache, h, r, all); }
        for (std::size_t i = before; i < all.size(); ++i) { all[i].projected = layout.in_basis[r]; }
    }
    auto const [dim, value_dim] = layout.dims;
    read_run<T>(cache.arena, entry.exact.keys, entry.exact.values, entry.exact.tokens, entry.exact.tokens, dim,
        value_dim, -1, all);
    index_t const token_bytes = (dim + value_dim) * index_t{sizeof(T)};
    index_t const first       = h * cache.tail_capacity * token_bytes;
    read_run<T>(cache.tail, first, first + cache.tail_capacity * dim * index_t{sizeof(T)}, *cache.appended,
        cache.tail_capacity, dim, value_dim, -2, all);
    return all;
}

/// Moves a head's stand-ins, which end a run, to the end of its tokens; returns how many there are.
template <class V, class Token>
index_t stand_ins_last(mdkv::cache_view<V, mdkv::space::host> const& cache, index_t h, std::vector<Token>& tokens)
{
    mdkv::head_entry const& entry = cache.heads[h];
    index_t end                   = cache.layout.stand_in_run == cache.layout.rungs ? entry.exact.tokens : 0;
    for (std::size_t r = 0; r < cache.layout.rungs && r <= cache.layout.stand_in_run; ++r)
    {
        if (r != cache.layout.full_rung) { end += entry.runs[r].tokens; }
    }
    std::rotate(tokens.begin() + (end - entry.stand_ins), tokens.begin() + end, tokens.end());
    return entry.stand_ins;
}

/// A token as a vector of the original dimension, the stored projection applied backwards.
struct whole_token
{
    std::vector<double> key;
    std::vector<double> value;
};

template <class V, class T = std::remove_const_t<V>>
[[nodiscard]] std::vector<whole_token> reconstructed_tokens(
    mdkv::cache_view<V, mdkv::space::host> const& cache, index_t h)
{
    mdkv::head_entry const& entry = cache.heads[h];
    auto const [dim, value_dim]   = cache.layout.dims;
    std::vector<whole_token> all;
    for (stored_token<T> const& token : stored_tokens(cache, h))
    {
        if (!token.projected)
        {
            all.push_back({token.key_numbers, token.value_numbers});
            continue;
        }
        whole_token whole;
        whole.key.assign(static_cast<std::size_t>(dim), 0.0);
        whole.value.assign(static_cast<std::size_t>(value_dim), 0.0);
        for (std::size_t c = 0; c < token.key_numbers.size(); ++c)
        {
            for (index_t d = 0; d < dim; ++d)
            {
                index_t const at = d * entry.key_columns + static_cast<index_t>(c);
                whole.key[static_cast<std::size_t>(d)] +=
                    token.key_numbers[c]
                    * static_cast<double>(mdkv::widen(element_at<T>(cache.arena, entry.key_projection, at)));
            }
        }
        for (std::size_t c = 0; c < token.value_numbers.size(); ++c)
        {
            for (index_t d = 0; d < value_dim; ++d)
            {
                index_t const at = static_cast<index_t>(c) * value_dim + d;
                whole.value[static_cast<std::size_t>(d)] +=
                    token.value_numbers[c]
                    * static_cast<double>(mdkv::widen(element_at<T>(cache.arena, entry.value_projection, at)));
            }
        }
        all.push_back(std::move(whole));
    }
    return all;
}

/// How far the CPU's products of rounded queries, or weights, and codes may be off, relative to the output: queries and weights have
/// 16 bits where codes have 8, and 8 bits where codes have 4.
[[nodiscard]] inline double integer_rounding(mdkv::cache_layout const& layout)
{
    double error = 0;
    for (std::size_t r = 0; r < layout.rungs; ++r)
    {
        double const of_rung = layout.kinds[r] == mdkv::storage::int4   ? 3e-2
                               : layout.kinds[r] == mdkv::storage::int8 ? 3e-4
                                                                        : 0.0;
        error                = std::max(error, of_rung);
    }
    return error;
}

/// Softmax attention of one query by the definition.
struct naive_attention
{
    std::vector<double> output;
    double lse = -std::numeric_limits<double>::infinity();

    naive_attention(
        std::vector<whole_token> const& tokens, std::vector<double> const& query, index_t value_dim, double scale)
        : output(static_cast<std::size_t>(value_dim), 0.0)
    {
        std::vector<double> logits;
        double largest = -std::numeric_limits<double>::infinity();
        for (whole_token const& token : tokens)
        {
            double dot = 0;
            for (std::size_t d = 0; d < query.size(); ++d) { dot += query[d] * token.key[d]; }
            logits.push_back(dot * scale);
            largest = std::max(largest, logits.back());
        }
        double total = 0;
        for (double& x : logits) { total += x = std::exp(x - largest); }
        if (tokens.empty()) { return; }
        lse = largest + std::log(total);
        for (std::size_t t = 0; t < tokens.size(); ++t)
        {
            for (std::size_t c = 0; c < output.size(); ++c) { output[c] += logits[t] / total * tokens[t].value[c]; }
        }
    }
};

} // namespace support
