/// \file score_memory.hpp: what score works on: the rungs by kind, a head's prepared operands, a thread's working set (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/score.hpp>

#include <mdkv/basis.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/block.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <numbers>

namespace mdkv::cpu
{

namespace detail
{

/// A rung that is neither dropped nor full, as the kernels see it.
struct score_rung
{
    std::size_t index = 0; ///< in the ratio set
    index_t keys      = 0; ///< coordinates
    index_t values    = 0;
    storage kind      = storage::plain;
    bool projected    = false; ///< its coordinates are those in the basis
    index_t softmax   = 0;     ///< which of the softmaxes is its P'; 0: its loss needs none

    [[nodiscard]] bool turned() const noexcept { return kind != storage::plain && !projected; }
};

/// All of them: plain ones first, each holding the coordinates of the one before it.
struct score_rungs
{
    std::array<score_rung, max_rungs> all{};
    index_t count     = 0;
    index_t plain     = 0;
    index_t softmaxes = 1; ///< the exact one, then those of the rungs

    [[nodiscard]] score_rung const& operator[](index_t j) const noexcept { return all[static_cast<std::size_t>(j)]; }

    /// Coordinates in the key basis that are multiplied with the queries.
    [[nodiscard]] index_t widest_key() const noexcept
    {
        index_t widest = 0;
        for (score_rung const& u : all) { widest = std::max(widest, u.projected && u.softmax > 0 ? u.keys : 0); }
        return widest;
    }
    [[nodiscard]] index_t widest_value() const noexcept
    {
        index_t widest = 0;
        for (score_rung const& u : all) { widest = std::max(widest, u.projected ? u.values : 0); }
        return widest;
    }
    [[nodiscard]] bool turn() const noexcept
    {
        return std::any_of(all.begin(), all.end(), [](score_rung const& u) { return u.turned(); });
    }
};

template <std::size_t R>
[[nodiscard]] score_rungs score_rungs_of(
    ratio_set<R> const& ratios, index_t key_dim, index_t value_dim, quantisation_loss rule) noexcept
{
    score_rungs rungs;
    for (bool const quantised : {false, true}) // plain rungs ascend among themselves, whatever stands between them
    {
        for (std::size_t r = 0; r < ratios.size(); ++r)
        {
            rung const& u = ratios[r];
            if (u.dropped() || u.full() || u.quantised() != quantised) { continue; }
            bool const values_only = quantised && u.num == u.den && rule == quantisation_loss::value_only;
            rungs.all[static_cast<std::size_t>(rungs.count++)] = {r, ratios.coordinates(r, key_dim),
                ratios.coordinates(r, value_dim), u.kind, u.projected(), values_only ? 0 : rungs.softmaxes};
            rungs.softmaxes += values_only ? 0 : 1;
            rungs.plain += quantised ? 0 : 1;
        }
    }
    return rungs;
}

/// Sizes of one call, and where things lie in a head's share of the scratch.
struct score_sizes
{
    static constexpr index_t block = block_rows;

    index_t dim, value_dim, latent, value_latent, query_rows, rows, panels, softmaxes, quantised, quantised_keys;
    bool turned; ///< some rung is

    score_sizes(index_t dim_, index_t value_dim_, index_t query_rows_, score_rungs const& rungs) noexcept
        : dim{dim_}
        , value_dim{value_dim_}
        , latent{tile::round_up(rungs.widest_key(), simd::lanes)}
        , value_latent{tile::round_up(rungs.widest_value(), simd::lanes)}
        , query_rows{query_rows_}
        , rows{tile::round_up(query_rows_, tile::width)}
        , panels{rows / tile::width}
        , softmaxes{rungs.softmaxes}
        , quantised{rungs.count - rungs.plain}
        , quantised_keys{softmaxes - 1 - rungs.plain}
        , turned{rungs.turn()}
    {}

    // Prepared once a head: queries and their latents by panel, transposed bases, visibility, log-sum-exps.
    [[nodiscard]] index_t query_floats() const noexcept { return rows * dim; }
    [[nodiscard]] index_t latent_floats() const noexcept { return rows * latent; }
    [[nodiscard]] index_t key_basis_floats() const noexcept { return dim * latent; }
    [[nodiscard]] index_t value_basis_floats() const noexcept { return value_dim * value_latent; }
    [[nodiscard]] index_t head_floats() const noexcept
    {
        return tile::round_up(
            query_floats() + latent_floats() + key_basis_floats() + value_basis_floats() + softmaxes * rows,
            simd::lanes);
    }

    // Working set of one thread: a block of keys or values, turned if a rung is, of their coordinates in the basis, of keys
    // read again for every quantised rung, and sums and roundings per token.
    [[nodiscard]] index_t row_floats() const noexcept { return block * std::max(dim, value_dim); }
    [[nodiscard]] index_t turned_floats() const noexcept { return turned ? row_floats() : 0; }
    [[nodiscard]] index_t coordinate_floats() const noexcept { return block * std::max(latent, value_latent); }
    [[nodiscard]] index_t read_again_floats() const noexcept { return block * std::max(dim, latent); } // a rung
    [[nodiscard]] index_t row_width(score_rung const& u) const noexcept { return u.projected ? latent : dim; }
    [[nodiscard]] index_t sums() const noexcept { return softmaxes * block * simd::lanes; }
    [[nodiscard]] index_t slot_floats() const noexcept
    {
        return tile::round_up(row_floats() + turned_floats() + coordinate_floats()
                                  + quantised_keys * read_again_floats() + sums() + quantised * block,
            simd::lanes);
    }
};

/// A head's prepared operands.
struct score_head
{
    float* queries;     // [panels, dim, width]     scaled
    float* latents;     // [panels, latent, width]  queries in the key basis
    float* key_basis;   // [dim, latent]            transposed, zero-padded
    float* value_basis; // [value_dim, value_latent]
    float* lse;         // [softmaxes, rows]        log2; exact first, then each rung that has its own

    score_head(float* memory, score_sizes const& s) noexcept
        : queries{memory}
        , latents{queries + s.query_floats()}
        , key_basis{latents + s.latent_floats()}
        , value_basis{key_basis + s.key_basis_floats()}
        , lse{value_basis + s.value_basis_floats()}
    {}
};

/// One thread's working set.
struct score_slot
{
    float* rows;      // [block, dim or value_dim]
    float* turned;    // [block, dim or value_dim]  the same, turned
    float* latents;   // [block, latent or value_latent]
    float* again;     // [quantised_keys, block, dim or latent]  keys read again
    float* sums;      // [softmaxes, block, lanes]
    float* roundings; // [quantised, block]  squared distance of a value's coordinates from what is read again

    score_slot(float* memory, score_sizes const& s) noexcept
        : rows{memory}
        , turned{rows + s.row_floats()}
        , latents{turned + s.turned_floats()}
        , again{latents + s.coordinate_floats()}
        , sums{again + s.quantised_keys * s.read_again_floats()}
        , roundings{sums + s.sums()}
    {}

    /// [block, s.row_width(u)]  the block's keys as the quantised rung would read them again.
    [[nodiscard]] float* keys_again(score_rung const& u, score_sizes const& s) const noexcept
    {
        return again + (u.softmax - (s.softmaxes - s.quantised_keys)) * s.read_again_floats();
    }
};

/// The leading `count` directions of a head as columns: to [dim, width], zero-padded.
inline void transpose_basis(in_view<float, 3, backend> const& basis, index_t head, index_t count, index_t dim,
    index_t width, float* to) noexcept
{
    std::fill_n(to, dim * width, 0.0F);
    for (index_t c = 0; c < count; ++c)
    {
        for (index_t d = 0; d < dim; ++d) { to[d * width + c] = basis(head, c, d); }
    }
}

template <element T>
void prepare_head(in_view<T, 3, backend> const& queries, key_bases<backend> const& key_basis,
    in_view<float, 3, backend> const& value_basis, index_t head, float scale, score_rungs const& rungs,
    score_sizes const& s, score_head const& h) noexcept
{
    index_t const per_head = queries.extent(1); // Q
    float const to_log2    = scale * std::numbers::log2e_v<float>;
    std::fill_n(h.queries, s.query_floats(), 0.0F);
    index_t const group = s.query_rows / per_head;
    for (index_t row = 0; row < s.query_rows; ++row)
    {
        T const* const q =
            queries.data_handle() + queries.mapping()(head * group + row / per_head, row % per_head, index_t{0});
        float* const panel = h.queries + row / tile::width * s.dim * tile::width + row % tile::width;
        for (index_t d = 0; d < s.dim; ++d)
        {
            T value; // from any address
            std::memcpy(&value, q + d, sizeof value);
            panel[d * tile::width] = widen(value) * to_log2;
        }
    }
    transpose_basis(key_basis.of_queries, head, rungs.widest_key(), s.dim, s.latent, h.key_basis); // overwritten below
    for (index_t p = 0; p < s.panels; ++p)
    {
        float const* const panel = h.queries + p * s.dim * tile::width;
        float* const latent      = h.latents + p * s.latent * tile::width;
        for (index_t c = 0; c < s.latent; c += tile::rows)
        {
            tile::accumulators<tile::vectors> acc;
            tile::clear(acc);
            tile::multiply_add(h.key_basis + c, 1, s.latent, panel, tile::width, s.dim, acc);
            tile::unroll<tile::rows>([&](auto i) {
                tile::unroll<tile::vectors>(
                    [&](auto v) { simd::store(latent + (c + i) * tile::width + v * simd::lanes, acc[i][v]); });
            });
        }
    }
    transpose_basis(key_basis.of_keys, head, rungs.widest_key(), s.dim, s.latent, h.key_basis);
    transpose_basis(value_basis, head, rungs.widest_value(), s.value_dim, s.value_latent, h.value_basis);
}

} // namespace detail

} // namespace mdkv::cpu
