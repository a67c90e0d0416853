/// \file refit.hpp: jobs of refit: rows of later text, their outputs over the whole and the packed cache, and the values that make these alike.
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace MDKV_NAMESPACE::detail
{

/// The rows of refit: blocks of tokens by all query heads of a KV head, a block's rows after those of the block before, by query
/// head, then by token.
struct refit_rows
{
    index_t begin  = 0; ///< the first token of the first block
    index_t apart  = 1; ///< tokens from one block to the next
    index_t blocks = 0;
    index_t last   = 0; ///< the first token of the last block
    index_t group  = 1; ///< G
    index_t each   = 1; ///< tokens of a block that have rows
    index_t step   = 1; ///< tokens from one of these to the next

    [[nodiscard]] MDKV_HD constexpr index_t of_block() const noexcept { return group * each; }
    /// The first token of a block.
    [[nodiscard]] MDKV_HD constexpr index_t first(index_t block) const noexcept
    {
        return block == blocks - 1 ? last : begin + block * apart;
    }
    [[nodiscard]] MDKV_HD constexpr index_t token(index_t r) const noexcept
    {
        return first(r / of_block()) + r % each * step;
    }
    /// Query head of a row in its group, and its query among those of the blocks.
    [[nodiscard]] MDKV_HD constexpr index_t head(index_t r) const noexcept { return r / each % group; }
    [[nodiscard]] MDKV_HD constexpr index_t query(index_t r) const noexcept { return r / of_block() * each + r % each; }
};

/// Queries as rows of floats, times a factor. An item is a KV head.
template <backend B, element U>
struct scale_rows
{
    static constexpr char const* name = "refit_queries";

    in_view<U, 3, B> queries; // [H*G, blocks * each, D]
    refit_rows shape;
    float factor;
    out_view<float, 3, B> scaled; // [H, R, D]

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        auto const mine = share_rows(t, scaled.extent(2));
        for (index_t r = mine.row; r < scaled.extent(1); r += mine.rows)
        {
            U const* const from = queries.row(h * shape.group + shape.head(r), shape.query(r));
            for (index_t d = mine.column; d < scaled.extent(2); d += t.size())
            {
                scaled(h, r, d) = factor * widen(load_at<U>(from + d));
            }
        }
    }
};

/// Outputs of rows over some keys, and the log-sum-exps of their logits in base 2. An item is a panel of rows of a head.
template <backend B, element T, element V>
struct attend_rows
{
    static constexpr char const* name = "refit_attend";
    static constexpr int threads      = 128;
    static constexpr int tile         = tile_tokens;
    static constexpr int block        = 2 * tile;   ///< keys at a time
    static constexpr int panel        = 64;         ///< rows of an item
    static constexpr int sums         = 8;          ///< rows whose products are found side by side
    static constexpr float lowest     = -1e30F;     ///< below any logit; their differences are numbers
    static constexpr float hidden     = 2 * lowest; ///< logit of a key that is not seen

    in_view<T, 3, B> keys;         // [H, S, D]
    in_view<V, 3, B> values;       // [H, S, Dv]
    in_view<float, 3, B> queries;  // [H, R, D]  from scale_rows
    in_view<index_t, 1, B> counts; // [H]  keys of each head; or empty: all
    refit_rows shape;
    bool near;                     // a row sees its block up to itself, and no other tokens
    out_view<float, 3, B> outputs; // [H, R, Dv]  zeros if a row sees no key
    out_view<float, 2, B> lse;     // [H, R]

    struct scratch
    {
        carver& cut;
        index_t dim, value_dim;
        float* columns = cut.take<float>(dim * block);                                  // [2, D, 16]  keys
        float* lines   = cut.take<float>((value_dim + tile - 1) / tile * tile * block); // [Dv / 16, 32, 16]  values
        float* weights = cut.take<float>(panel * block);                                // [64, 32]  logits, then powers
        float* largest = cut.take<float>(panel);                                        // [64]
        float* sum     = cut.take<float>(panel);                                        // [64]
        float* factor  = cut.take<float>(panel);                                        // [64]
    };

    [[nodiscard]] MDKV_HD index_t panels() const noexcept { return (queries.extent(1) + panel - 1) / panel; }
    [[nodiscard]] index_t items() const noexcept { return queries.extent(0) * panels(); }
    [[nodiscard]] index_t scratch_bytes() const noexcept
    {
        return bytes_of<scratch>(queries.extent(2), outputs.extent(2));
    }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const h     = item / panels();
        index_t const first = item % panels() * panel;
        auto const rows     = static_cast<int>(queries.extent(1) - first < panel ? queries.extent(1) - first : panel);
        auto const dim      = static_cast<int>(queries.extent(2));
        auto const out      = static_cast<int>(outputs.extent(2));
        carver cut          = t.scratch();
        scratch const mine{cut, dim, out};
        for (int r = member(t); r < rows; r += members(t))
        {
            mine.largest[r] = lowest;
            mine.sum[r]     = 0;
        }
        for (int i = member(t); i < rows * out; i += members(t)) { outputs(h, first + i / out, i % out) = 0; }
        for (int i = member(t); i < dim * block; i += members(t)) { mine.columns[i] = 0; }
        index_t begin = near ? keys.extent(1) : 0;
        index_t end   = near ? 0 : counts.empty() ? keys.extent(1) : counts(h);
        for (int r = 0; near && r < rows; ++r)
        {
            auto const [from, to] = seen(h, first + r);
            begin                 = from < begin ? from : begin;
            end                   = to > end ? to : end;
        }
        for (index_t at = begin; at < end; at += block)
        {
            attend(t, mine, h, first, rows, at, static_cast<int>(end - at < block ? end - at : block));
        }
        t.sync();
        for (int r = member(t); r < rows; r += members(t))
        {
            bool const any    = mine.sum[r] > 0;
            mine.factor[r]    = any ? 1 / mine.sum[r] : 0.0F;
            lse(h, first + r) = any ? mine.largest[r] + log2f(mine.sum[r]) : empty_lse;
        }
        t.sync();
        for (int i = member(t); i < rows * out; i += members(t))
        {
            outputs(h, first + i / out, i % out) *= mine.factor[i / out];
        }
    }

private:
    struct range
    {
        index_t begin, end;
    };
    [[nodiscard]] MDKV_HD range seen(index_t h, index_t r) const
    {
        if (!near) { return {0, counts.empty() ? keys.extent(1) : counts(h)}; }
        return {shape.first(r / shape.of_block()), shape.token(r) + 1};
    }

    template <team Team>
    MDKV_HD void attend(
        Team const& t, scratch const& mine, index_t h, index_t first, int rows, index_t at, int count) const
    {
        constexpr int lanes = Team::lanes;
        constexpr int parts = tile / lanes; // parts of a column
        auto const dim      = static_cast<int>(queries.extent(2));
        auto const out      = static_cast<int>(outputs.extent(2));
        int const panels_of = (rows + sums - 1) / sums;
        t.sync();
        for (int i = 0; i < block / tile; ++i)
        {
            int const here = count - i * tile < 0 ? 0 : count - i * tile < tile ? count - i * tile : tile;
            widen_columns(
                t, here, dim, [&](int k) { return keys.row(h, at + i * tile + k); }, mine.columns + i * dim * tile);
        }
        int const lines_of = (out + tile - 1) / tile;
        for (int i = member(t); i < block * lines_of * parts; i += members(t))
        {
            int const k     = i / (lines_of * parts);
            int const c     = i % (lines_of * parts) * lanes;
            float* const to = mine.lines + (c / tile * block + k) * tile + c % tile;
            float x[std::size_t{lanes}]{};
            V const* const from = k < count ? values.row(h, at + k) + c : nullptr;
            if (from != nullptr && c + lanes <= out) { widen_lanes(t, from, x); }
            for (int l = 0; from != nullptr && c + lanes > out && c + l < out; ++l)
            {
                x[l] = widen(load_at<V>(from + l));
            }
            for (int l = 0; l < lanes; ++l) { to[l] = x[l]; }
        }
        t.sync();
        for (int i = member(t); i < panels_of * (block / tile) * parts; i += members(t))
        {
            int const r      = i / (block / tile * parts) * sums;
            int const column = i % (block / tile * parts) * lanes;
            float const* row[sums]{};
            for (int k = 0; k < sums; ++k) { row[k] = queries.row(h, first + (r + k < rows ? r + k : r)); }
            float product[sums][std::size_t{lanes}];
            column_products(t, row, mine.columns + column / tile * dim * tile + column % tile, dim, product);
            for (int k = 0; k < sums && r + k < rows; ++k)
            {
                for (int l = 0; l < lanes; ++l) { mine.weights[(r + k) * block + column + l] = product[k][l]; }
            }
        }
        t.sync();
        for (int r = member(t); r < rows; r += members(t)) { weigh(t, mine, h, first, r, at, count); }
        t.sync();
        for (int i = member(t); i < panels_of * lines_of * parts; i += members(t))
        {
            int const r      = i / (lines_of * parts) * sums;
            int const column = i % (lines_of * parts) * lanes;
            float const* row[sums]{};
            for (int k = 0; k < sums; ++k) { row[k] = mine.weights + (r + k < rows ? r + k : r) * block; }
            float product[sums][std::size_t{lanes}];
            column_products(t, row, mine.lines + column / tile * block * tile + column % tile, block, product);
            for (int k = 0; k < sums && r + k < rows; ++k)
            {
                float* const to = outputs.row(h, first + r + k) + column;
                for (int l = 0; l < lanes && column + l < out; ++l)
                {
                    to[l] = to[l] * mine.factor[r + k] + product[k][l];
                }
            }
        }
    }

    /// Makes weights of a row's logits, and the factor of all before them.
    template <team Team>
    MDKV_HD void weigh(Team const& t, scratch const& mine, index_t h, index_t first, int r, index_t at, int count) const
    {
        constexpr int lanes = tile;
        auto const visible  = seen(h, first + r);
        index_t const begin = visible.begin - at;
        index_t const left  = visible.end - at;
        auto const end      = static_cast<int>(left < count ? left : count);
        float* const logits = mine.weights + r * block;
        for (int k = 0; k < block && k < begin; ++k) { logits[k] = hidden; }
        for (int k = end < 0 ? 0 : end; k < block; ++k) { logits[k] = hidden; }
        float part[lanes];
        for (int l = 0; l < lanes; ++l) { part[l] = mine.largest[r]; }
        for (int k = 0; k < block; k += lanes)
        {
            for (int l = 0; l < lanes; ++l) { part[l] = larger(part[l], logits[k + l]); }
        }
        float top = part[0];
        for (int l = 1; l < lanes; ++l) { top = larger(top, part[l]); }
        float sum[lanes]{};
        for (int k = 0; k < block; k += lanes)
        {
            for (int l = 0; l < lanes; l += Team::lanes)
            {
                float x[std::size_t{Team::lanes}];
                for (int i = 0; i < Team::lanes; ++i) { x[i] = logits[k + l + i] - top; }
                powers_of_two(t, x, logits + k + l);
            }
            for (int l = 0; l < lanes; ++l) { sum[l] += logits[k + l]; }
        }
        float all = 0;
        for (float const x : sum) { all += x; }
        mine.factor[r]  = exp2f(mine.largest[r] - top);
        mine.sum[r]     = mine.sum[r] * mine.factor[r] + all;
        mine.largest[r] = top;
    }
};

/// Finds what rows' outputs over the packed cache lack to those over the whole one, tokens beside them included in both, and
/// the log-sum-exps of the former. An item is a head.
template <backend B>
struct miss_rows
{
    static constexpr char const* name = "refit_miss";

    in_view<float, 3, B> whole, packed, near;             // [H, R, Dv]
    in_view<float, 2, B> whole_lse, packed_lse, near_lse; // [H, R]
    out_view<float, 4, B> missing;                        // [H, Dv / 16, R, 16]
    out_view<float, 2, B> lse;                            // [H, R]
    out_view<float, 2, B> shares_of;                      // [H, R]  of the packed cache in a row's softmax

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        index_t const out = whole.extent(2);
        for (index_t r = t.rank(); r < whole.extent(1); r += t.size())
        {
            auto const all  = merge(whole_lse(h, r), near_lse(h, r));
            auto const kept = merge(packed_lse(h, r), near_lse(h, r));
            lse(h, r)       = kept.total;
            shares_of(h, r) = kept.first;
            for (index_t d = 0; d < out; ++d)
            {
                missing(h, d / tile_tokens, r, d % tile_tokens) = all.first * whole(h, r, d)
                                                                  - kept.first * packed(h, r, d)
                                                                  + (all.second - kept.second) * near(h, r, d);
            }
        }
    }

private:
    struct shares
    {
        float first, second, total;
    };
    [[nodiscard]] MDKV_HD static shares merge(float a, float b)
    {
        if (b == empty_lse) { return {1, 0, a}; }
        if (a == empty_lse) { return {0, 1, b}; }
        float const top = a < b ? b : a;
        float const x   = exp2f(a - top);
        float const y   = exp2f(b - top);
        return {x / (x + y), y / (x + y), top + log2f(x + y)};
    }
};

/// Weights of n stored tokens, or of a strip of them, in the softmaxes of R fitting rows: X, whose rows are the tokens if n is at
/// most R, otherwise the fitting rows; and beside it X' in tiles of sixteen columns.
template <space S>
struct weight_matrix
{
    static constexpr index_t strip = 2048; ///< tokens at a time, and the most that can be X's rows

    view<float, 2, S> rows;     // [H, ...]  X, its rows padded to a multiple of sixteen
    view<float, 2, S> columns;  // [H, ...]  [X's rows / 16, length, 16]
    view<index_t, 1, S> fitted; // [H]  n
    index_t all;                // R
    index_t from = 0;           // first token of the strip

    [[nodiscard]] static constexpr index_t padded(index_t n) noexcept
    {
        return (n + tile_tokens - 1) / tile_tokens * tile_tokens;
    }
    [[nodiscard]] MDKV_HD index_t tokens(index_t h) const
    {
        index_t const left = fitted(h) - from;
        return left < 0 ? 0 : left < strip ? left : strip;
    }
    [[nodiscard]] MDKV_HD bool by_token(index_t h) const { return fitted(h) <= all && fitted(h) <= strip; }
    [[nodiscard]] MDKV_HD index_t size(index_t h) const { return by_token(h) ? fitted(h) : all; }
    [[nodiscard]] MDKV_HD index_t length(index_t h) const { return by_token(h) ? all : tokens(h); }
    [[nodiscard]] MDKV_HD index_t stride(index_t h) const
    {
        return (length(h) + tile_tokens - 1) / tile_tokens * tile_tokens;
    }
    [[nodiscard]] MDKV_HD float* row(index_t h, index_t i) const { return rows.row(h) + i * stride(h); }
    /// Element [i, j]; those of rows i + 1, i + 2, ... of its tile follow.
    [[nodiscard]] MDKV_HD float* column(index_t h, index_t i, index_t j) const
    {
        return columns.row(h) + (i / tile_tokens * stride(h) + j) * tile_tokens + i % tile_tokens;
    }
};

/// Finds the weights of a strip's tokens. An item is a tile of tokens of a head.
template <backend B, element T>
struct weigh_stored
{
    static constexpr char const* name = "refit_weights";
    static constexpr int threads      = 128;
    static constexpr int tile         = tile_tokens;
    static constexpr int sums         = 8;

    in_view<T, 3, B> keys;        // [H, S, D]  of stored tokens
    in_view<float, 3, B> queries; // [H, R, D]
    in_view<float, 2, B> lse;     // [H, R]
    weight_matrix<B::memory_space> weights;

    struct scratch
    {
        carver& cut;
        index_t dim;
        float* columns = cut.take<float>(dim * tile); // [D, 16]
    };

    [[nodiscard]] MDKV_HD index_t tiles() const noexcept
    {
        index_t const left = keys.extent(1) - weights.from;
        return ((left < weights.strip ? left : weights.strip) + tile - 1) / tile;
    }
    [[nodiscard]] index_t items() const noexcept { return keys.extent(0) * tiles(); }
    [[nodiscard]] index_t scratch_bytes() const noexcept { return bytes_of<scratch>(queries.extent(2)); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        constexpr int lanes = Team::lanes;
        constexpr int parts = tile / lanes;
        index_t const h     = item / tiles();
        index_t const first = item % tiles() * tile; // counted in the strip
        index_t const left  = weights.tokens(h) - first;
        if (left <= 0) { return; }
        auto const count    = static_cast<int>(left < tile ? left : tile);
        auto const dim      = static_cast<int>(queries.extent(2));
        auto const all      = static_cast<int>(weights.all);
        bool const by_token = weights.by_token(h);
        carver cut          = t.scratch();
        scratch const mine{cut, dim};
        t.sync();
        for (int i = member(t); i < dim * tile; i += members(t)) { mine.columns[i] = 0; }
        t.sync();
        widen_columns(
            t, count, dim, [&](int i) { return keys.row(h, weights.from + first + i); }, mine.columns);
        t.sync();
        for (int i = member(t); i < (all + sums - 1) / sums * parts; i += members(t))
        {
            int const r      = i / parts * sums;
            int const column = i % parts * lanes;
            float const* row[sums]{};
            for (int k = 0; k < sums; ++k) { row[k] = queries.row(h, r + k < all ? r + k : all - 1); }
            float product[sums][std::size_t{lanes}];
            column_products(t, row, mine.columns + column, dim, product);
            for (int k = 0; k < sums && r + k < all; ++k)
            {
                float power[std::size_t{lanes}];
                for (int l = 0; l < lanes; ++l)
                {
                    power[l] = column + l < count ? product[k][l] - lse(h, r + k) : -1000.0F;
                }
                float weight[std::size_t{lanes}];
                powers_of_two(t, power, weight);
                for (int l = 0; l < lanes; ++l)
                {
                    index_t const j          = first + column + l;
                    index_t const a          = by_token ? j : r + k;
                    index_t const b          = by_token ? r + k : j;
                    *weights.column(h, a, b) = weight[l];
                    if (column + l < count) { weights.row(h, a)[b] = weight[l]; }
                }
            }
        }
    }
};

/// X X' summed over the strips, and what it is to be solved for: X E if X's rows are tokens, otherwise E. An item is a panel of X's rows of a head.
template <backend B>
struct multiply_weights
{
    static constexpr char const* name = "refit_gram";
    static constexpr int threads      = 128;
    static constexpr int tile         = tile_tokens;
    static constexpr int sums         = 8;
    static constexpr int piece        = 512; ///< products that are summed in float

    weight_matrix<B::memory_space> weights;
    in_view<float, 4, B> missing;  // [H, Dv / 16, R, 16]
    out_view<double, 3, B> gram;   // [H, R, R]  its upper triangle, and below it to the end of a tile
    out_view<double, 3, B> solved; // [H, R, Dv]

    [[nodiscard]] MDKV_HD index_t panels() const noexcept { return (gram.extent(1) + sums - 1) / sums; }
    [[nodiscard]] index_t items() const noexcept { return gram.extent(0) * panels(); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const h  = item / panels();
        auto const first = static_cast<int>(item % panels() * sums);
        auto const size  = static_cast<int>(weights.size(h));
        if (first >= size || weights.length(h) == 0 || (weights.by_token(h) && weights.from > 0)) { return; }
        bool const more = weights.from > 0;
        int const last  = first + sums < size ? first + sums : size;
        multiply(
            t, h, first, last, [&](int column, int at) { return weights.column(h, column, at); },
            [&](int i, int column, double x) { gram(h, column, i) = more ? gram(h, column, i) + x : x; });
        if (weights.by_token(h))
        {
            multiply(
                t, h, first, static_cast<int>(solved.extent(2)),
                [&](int column, int at) { return missing.row(h, column / tile, at) + column % tile; },
                [&](int i, int column, double x) { solved(h, i, column) = x; });
            return;
        }
        for (int i = member(t); !more && i < sums * static_cast<int>(solved.extent(2)); i += members(t))
        {
            int const r = first + i % sums;
            int const d = i / sums;
            if (r < size) { solved(h, r, d) = double{missing(h, d / tile, r, d % tile)}; }
        }
    }

private:
    template <team Team, class Column, class Take>
    MDKV_HD void multiply(
        Team const& t, index_t h, int first, int columns, Column const& column_at, Take const& take) const
    {
        constexpr int lanes = Team::lanes;
        constexpr int parts = tile / lanes;
        auto const size     = static_cast<int>(weights.size(h));
        auto const length   = static_cast<int>(weights.length(h));
        for (int i = member(t); i < (columns + tile - 1) / tile * parts; i += members(t))
        {
            int const column = i * lanes;
            if (column >= columns) { continue; } // the tile's others were not written
            double total[sums][std::size_t{lanes}]{};
            for (int at = 0; at < length; at += piece)
            {
                float const* row[sums]{};
                for (int k = 0; k < sums; ++k) { row[k] = weights.row(h, first + k < size ? first + k : first) + at; }
                float product[sums][std::size_t{lanes}];
                column_products(t, row, column_at(column, at), length - at < piece ? length - at : piece, product);
                for (int k = 0; k < sums; ++k)
                {
                    for (int l = 0; l < lanes; ++l) { total[k][l] += double{product[k][l]}; }
                }
            }
            for (int k = 0; k < sums && first + k < size; ++k)
            {
                for (int l = 0; l < lanes && column + l < columns; ++l) { take(first + k, column + l, total[k][l]); }
            }
        }
    }
};

/// Solves (X X' + mu I) Z = B in place, by elimination. An item is a head.
template <backend B>
struct solve_weights
{
    static constexpr char const* name = "refit_solve";

    weight_matrix<B::memory_space> weights;
    float ridge;                   // mu over the mean diagonal of A'A
    out_view<double, 3, B> gram;   // [H, R, R]  overwritten
    out_view<double, 3, B> solved; // [H, R, Dv]
    out_view<float, 3, B> columns; // [H, Dv, R]  Z'

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        index_t const n   = weights.size(h);
        index_t const out = solved.extent(2);
        double trace      = 0;
        for (index_t r = 0; r < n; ++r) { trace += gram(h, r, r); }
        double const mu = n == 0 ? 0.0 : double{ridge} * trace / static_cast<double>(weights.fitted(h));
        t.sync();
        for (index_t r = t.rank(); r < n; r += t.size()) { gram(h, r, r) += mu; }
        auto const share = share_rows(t, out);
        t.sync();
        for (index_t k = 0; k < n; ++k) // row k becomes that of L' times its pivot's root
        {
            double const* const top = gram.row(h, k);
            double const unit       = inverse(top[k], mu);
            auto const part         = share_rows(t, n - k);
            for (index_t i = k + 1 + part.row; i < n; i += part.rows)
            {
                double* const row = gram.row(h, i);
                double const by   = top[i] * unit;
                for (index_t j = i + part.column; j < n; j += t.size()) { row[j] -= by * top[j]; }
            }
            for (index_t i = k + 1 + share.row; i < n; i += share.rows)
            {
                double const by = top[i] * unit;
                for (index_t d = share.column; d < out; d += t.size()) { solved(h, i, d) -= by * solved(h, k, d); }
            }
            t.sync();
        }
        for (index_t k = n; k-- > 0;)
        {
            double const unit = inverse(gram(h, k, k), mu);
            for (index_t d = t.rank(); d < out; d += t.size())
            {
                double const z   = solved(h, k, d) * unit;
                solved(h, k, d)  = z;
                columns(h, d, k) = static_cast<float>(z);
            }
            t.sync();
            for (index_t i = share.row; i < k; i += share.rows)
            {
                double const by = gram(h, i, k);
                for (index_t d = share.column; d < out; d += t.size()) { solved(h, i, d) -= by * solved(h, k, d); }
            }
            t.sync();
        }
    }

private:
    [[nodiscard]] MDKV_HD static double inverse(double pivot, double mu)
    {
        double const used = pivot > mu ? pivot : mu;
        return used > 0 ? 1 / used : 0.0;
    }
};

/// The changes of the values of a strip's tokens, X'Z or Z, and zeros for other stored tokens. An item is a tile of tokens of a
/// head.
template <backend B>
struct find_changes
{
    static constexpr char const* name = "refit_changes";
    static constexpr int threads      = 128;
    static constexpr int tile         = tile_tokens;
    static constexpr int sums         = 8;

    weight_matrix<B::memory_space> weights;
    in_view<float, 3, B> solved;   // [H, Dv, R]
    out_view<float, 3, B> changes; // [H, S, Dv]

    struct scratch
    {
        carver& cut;
        index_t rows;
        float* columns = cut.take<float>(rows * tile); // [R, 16]
    };

    [[nodiscard]] MDKV_HD index_t tiles() const noexcept
    {
        index_t const left = changes.extent(1) - weights.from;
        return ((left < weights.strip ? left : weights.strip) + tile - 1) / tile;
    }
    [[nodiscard]] index_t items() const noexcept { return changes.extent(0) * tiles(); }
    [[nodiscard]] index_t scratch_bytes() const noexcept { return bytes_of<scratch>(solved.extent(2)); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        constexpr int lanes = Team::lanes;
        constexpr int parts = tile / lanes;
        index_t const h     = item / tiles();
        index_t const at    = item % tiles() * tile; // counted in the strip
        index_t const left  = weights.tokens(h) - at;
        auto const count    = static_cast<int>(left < 0 ? 0 : left < tile ? left : tile);
        auto const rows     = static_cast<int>(solved.extent(2));
        auto const out      = static_cast<int>(changes.extent(2));
        index_t const to    = weights.from + at;
        auto const here     = static_cast<int>(changes.extent(1) - to < tile ? changes.extent(1) - to : tile);
        bool const direct   = weights.by_token(h);
        for (int i = member(t); i < here * out; i += members(t))
        {
            bool const there                  = direct && i / out < count;
            changes(h, to + i / out, i % out) = there ? solved(h, i % out, to + i / out) : 0.0F;
        }
        if (direct || count == 0) { return; }
        carver cut = t.scratch();
        scratch const mine{cut, rows};
        t.sync();
        for (int i = member(t); i < rows * tile; i += members(t))
        {
            mine.columns[i] = i % tile < count ? weights.row(h, i / tile)[at + i % tile] : 0.0F;
        }
        t.sync();
        for (int i = member(t); i < (out + sums - 1) / sums * parts; i += members(t))
        {
            int const d      = i / parts * sums;
            int const column = i % parts * lanes;
            float const* row[sums]{};
            for (int k = 0; k < sums; ++k) { row[k] = solved.row(h, d + k < out ? d + k : d); }
            float product[sums][std::size_t{lanes}];
            column_products(t, row, mine.columns + column, rows, product);
            for (int k = 0; k < sums && d + k < out; ++k)
            {
                for (int l = 0; l < lanes && column + l < count; ++l)
                {
                    changes(h, to + column + l, d + k) = product[k][l];
                }
            }
        }
    }
};

/// The factor, from 0 to 1, with which a head's changes suit the judging rows best. An item is a head.
template <backend B>
struct judge_changes
{
    static constexpr char const* name = "refit_judge";

    in_view<float, 4, B> missing;  // [H, Dv / 16, R, 16]
    in_view<float, 3, B> mended;   // [H, judging rows, Dv]  outputs over the changes alone
    in_view<float, 2, B> shares;   // [H, R]
    index_t fitting;               // rows before the judging ones
    out_view<float, 1, B> factors; // [H]

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        if (t.rank() != 0) { return; }
        double product = 0;
        double square  = 0;
        for (index_t i = 0; i < mended.extent(1); ++i)
        {
            index_t const r = fitting + i;
            for (index_t d = 0; d < mended.extent(2); ++d)
            {
                double const x = double{shares(h, r)} * double{mended(h, i, d)};
                product += x * double{missing(h, d / tile_tokens, r, d % tile_tokens)};
                square += x * x;
            }
        }
        double const best = square > 0 ? product / square : 0.0;
        factors(h)        = static_cast<float>(best > 1 ? 1.0 : best > 0 ? best : 0.0);
    }
};

/// Changes the values of kept tokens. An item is a stored token of a head.
template <backend B, element T>
struct change_values
{
    static constexpr char const* name = "refit_values";
    static constexpr int threads      = 64;

    in_view<float, 3, B> changes;          // [H, S, Dv]
    in_view<float, 1, B> factors;          // [H]
    in_view<index_t, 1, B> fitted;         // [H]
    in_view<std::int32_t, 2, B> positions; // [H, N]  by rung
    in_view<index_t, 2, B> first;          // [H, rungs + 1]
    index_t kept;                          // the first rung that keeps tokens
    in_view<T, 3, B> values;               // [H, N, Dv]
    out_view<T, 3, B> changed;             // [H, N, Dv]

    [[nodiscard]] index_t items() const noexcept { return changes.extent(0) * changes.extent(1); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const h = item / changes.extent(1);
        index_t const j = item % changes.extent(1);
        if (j >= fitted(h)) { return; }
        index_t const token = positions(h, first(h, kept) + j);
        for (index_t d = t.rank(); d < changes.extent(2); d += t.size())
        {
            float const v        = widen(load_at<T>(values.row(h, token) + d));
            changed(h, token, d) = narrow<T>(v + factors(h) * changes(h, j, d));
        }
    }
};

/// Number of tokens of each head whose values are refitted: none if nothing of the head was dropped or coded. An item is a
/// head.
template <backend B>
struct count_fitted
{
    static constexpr char const* name = "refit_count";

    in_view<index_t, 2, B> first; // [H, rungs + 1]
    index_t kept;                 // the first rung that keeps tokens
    index_t full;                 // the full rung
    out_view<index_t, 1, B> fitted;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        if (t.rank() != 0) { return; }
        index_t const rungs = first.extent(1) - 1;
        bool const whole    = full < rungs && first(h, full + 1) - first(h, full) == first(h, rungs);
        fitted(h)           = whole ? 0 : first(h, rungs) - first(h, kept);
    }
};

} // namespace MDKV_NAMESPACE::detail
