/// \file refit_rows.hpp: rows of refit, a prompt's own queries in the place of later ones, and their outputs over the whole and the packed cache.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>
#include <cstddef>

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
    bool beside;                   // a row sees its block up to itself, and no other tokens
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
        index_t begin = beside ? keys.extent(1) : 0;
        index_t end   = beside ? 0 : counts.empty() ? keys.extent(1) : counts(h);
        for (int r = 0; beside && r < rows; ++r)
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
        if (!beside) { return {0, counts.empty() ? keys.extent(1) : counts(h)}; }
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

    in_view<float, 3, B> whole, packed, beside;             // [H, R, Dv]
    in_view<float, 2, B> whole_lse, packed_lse, beside_lse; // [H, R]
    out_view<float, 4, B> missing;                          // [H, Dv / 16, R, 16]
    out_view<float, 2, B> lse;                              // [H, R]
    out_view<float, 2, B> shares_of;                        // [H, R]  of the packed cache in a row's softmax

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        index_t const out = whole.extent(2);
        for (index_t r = t.rank(); r < whole.extent(1); r += t.size())
        {
            auto const all  = merge(whole_lse(h, r), beside_lse(h, r));
            auto const kept = merge(packed_lse(h, r), beside_lse(h, r));
            lse(h, r)       = kept.total;
            shares_of(h, r) = kept.first;
            for (index_t d = 0; d < out; ++d)
            {
                missing(h, d / tile_tokens, r, d % tile_tokens) = all.first * whole(h, r, d)
                                                                  - kept.first * packed(h, r, d)
                                                                  + (all.second - kept.second) * beside(h, r, d);
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

} // namespace MDKV_NAMESPACE::detail
