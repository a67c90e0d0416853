/// \file panel.hpp: the products of rows and columns of a head, sixteen columns at a time, of which projections, attention, Gram matrices and means are made.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>

namespace MDKV_NAMESPACE::detail
{

/// Most numbers of a product that are summed in float, and tokens that are looked at together.
inline constexpr index_t panel_depth = 512;

/// The vectors of a head whose products are found: rows of [H, n, K], or columns of [H, K, n] if they lie across.
template <backend B, element T>
struct panel_vectors
{
    in_view<T, 3, B> from;
    bool across = false;

    [[nodiscard]] MDKV_HD index_t count() const noexcept { return from.extent(across ? 2 : 1); }
    [[nodiscard]] MDKV_HD index_t depth() const noexcept { return from.extent(across ? 1 : 2); }
    /// Numbers at, at + 1, ... of all vectors.
    [[nodiscard]] panel_vectors part(index_t at, index_t n) const
    {
        return {across ? slice<1>(from, at, n) : slice<2>(from, at, n), across};
    }
};

/// The tokens that heads have, if not all that there is room for: columns of a product, or, if they are `summed`, its depth.
template <backend B>
struct panel_tokens
{
    in_view<index_t, 1, B> counts{}; // [H]; empty: all
    index_t from = 0;                // number of the first
    bool summed  = false;

    [[nodiscard]] MDKV_HD index_t among(index_t h, index_t n, bool dimension) const
    {
        index_t const left = counts.empty() || dimension != summed ? n : counts(h) - from;
        return left < 0 ? 0 : left < n ? left : n;
    }
};

/// Where products go, and how.
template <backend B, class V>
struct panel_output
{
    out_view<V, 3, B> to; // [H, rows, columns]
    bool add    = false;  ///< products are added to what is there
    bool mirror = false;  ///< rows and columns are the same: products up to the diagonal are written to both triangles
    in_view<float, 2, B> factors{}; ///< [H, rows]  if there are any, what is there is multiplied with them first
};

/// The product of every row and column, a sum in float, in ascending order. An item is sixteen columns of a head.
template <backend B, element T, class V>
struct panel_product
{
    static constexpr char const* name = "panel_product";
    static constexpr int threads      = 128;
    static constexpr int tile         = tile_tokens;

    panel_vectors<B, float> rows;
    panel_vectors<B, T> columns;
    panel_output<B, V> put;
    panel_tokens<B> tokens{};

    [[nodiscard]] MDKV_HD index_t tiles() const noexcept { return (columns.count() + tile - 1) / tile; }
    [[nodiscard]] index_t items() const noexcept { return rows.from.extent(0) * tiles(); }
    [[nodiscard]] index_t scratch_bytes() const noexcept { return columns.depth() * tile * index_t{sizeof(float)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const h     = item / tiles();
        index_t const first = item % tiles() * tile;
        index_t const left  = tokens.among(h, columns.count(), false) - first;
        auto const count    = static_cast<int>(left < tile ? left : tile);
        auto const depth    = static_cast<int>(tokens.among(h, columns.depth(), true));
        if (count <= 0) { return; }
        index_t const step  = rows.across ? rows.from.stride(1) : 1;
        index_t const apart = rows.across ? 1 : rows.from.stride(1);
        auto const all      = static_cast<int>(put.mirror && first + tile < rows.count() ? first + tile : rows.count());
        float* const copied = t.scratch().template take<float>(index_t{depth} * tile); // [K, 16]
        fetch(t, h, first, count, depth, copied);
        t.sync();
        project_columns(
            t, copied, count, depth, all, [&](int r) { return rows.from.row(h, 0) + r * apart; },
            [&](int r, int i, auto const& sums) {
                V* const line       = put.to.row(h, r) + first + i;
                V const by          = put.factors.empty() ? V{1} : V{put.factors(h, r)};
                constexpr int lanes = Team::lanes;
                if (!put.mirror && count - i >= lanes)
                {
                    MDKV_FOR_LANES(l, lanes) { line[l] = put.add ? line[l] * by + V{sums[l]} : V{sums[l]}; }
                    return;
                }
                for (int l = 0; l < lanes && i + l < count; ++l)
                {
                    index_t const column = first + i + l;
                    if (put.mirror && r > column) { continue; }
                    line[l] = put.add ? line[l] * by + V{sums[l]} : V{sums[l]};
                    if (put.mirror) { put.to(h, column, r) = line[l]; }
                }
            },
            step);
    }

private:
    /// Writes columns first, first + 1, ... of a head, and zeros behind the last.
    template <team Team>
    MDKV_HD void fetch(Team const& t, index_t h, index_t first, int count, int depth, float* to) const
    {
        if (count < tile)
        {
            for (int i = member(t); i < depth * tile; i += members(t)) { to[i] = 0; }
            t.sync();
        }
        if (!columns.across)
        {
            widen_columns(
                t, count, depth, [&](int i) { return columns.from.row(h, first + i); }, to);
            return;
        }
        constexpr int lanes = Team::lanes;
        for (int i = member(t); i < depth * (tile / lanes); i += members(t))
        {
            int const k = i / (tile / lanes);
            int const c = i % (tile / lanes) * lanes;
            float x[std::size_t{lanes}]{};
            widen_some(t, columns.from.row(h, k) + first + c, count - c, x);
            for (int l = 0; l < lanes; ++l) { to[k * tile + c + l] = x[l]; }
        }
    }
};

/// Calls body(first, count) for pieces of [0, n), each of at most `most`.
void for_pieces(index_t n, index_t most, auto const& body)
{
    for (index_t at = 0; at < n; at += most) { body(at, n - at < most ? n - at : most); }
}

/// Products of rows and columns of any length, summed in float over panel_depth numbers and then in V.
template <backend B, element T, class V>
void multiply(B const& on, panel_vectors<B, float> const& rows, panel_vectors<B, T> const& columns,
    panel_output<B, V> put, panel_tokens<B> tokens = {})
{
    for_pieces(columns.depth(), panel_depth, [&](index_t at, index_t count) {
        run(on, panel_product<B, T, V>{rows.part(at, count), columns.part(at, count), put, tokens});
        put.add     = true;
        put.factors = {};
        tokens.from += tokens.summed ? count : 0;
    });
}

/// Adds every head's uncentred second moment X'X of samples [H, S, D] to `gram` [H, D, D], both triangles: the chunks of a prompt
/// sum to the whole prompt.
template <backend B, element T>
void accumulate_gram(B const& on, in_view<T, 3, B> samples, out_view<double, 3, B> gram)
{
    workspace::frame frame{on.scratch};
    auto const widened = scratch_view<float>(on, frame, samples.extent(0), panel_depth, samples.extent(2));
    for_pieces(samples.extent(1), panel_depth, [&](index_t at, index_t count) {
        auto const part = slice<1>(samples, at, count);
        auto const rows = slice<1>(widened, 0, count);
        run(on, copy_rows<B, T, float>{part, rows});
        multiply<B, T, double>(on, {as_input(rows), true}, {part, true}, {.to = gram, .add = true, .mirror = true});
    });
}

} // namespace MDKV_NAMESPACE::detail
