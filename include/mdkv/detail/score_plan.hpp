/// \file score_plan.hpp: score's part that every backend shares: which rungs need which sums and products, the causal mask, where operands lie (arXiv 2603.20616, section 4.2, algorithm 1).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/score_options.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>
#include <type_traits>

namespace MDKV_NAMESPACE::detail
{

/// The total of two subsets of a token's rows, one number or a vector of them; a row of `euclidean` counts with its square. A NaN
/// stays a NaN.
template <class V>
[[nodiscard]] MDKV_HD V joined_rows(row_norm norm, V const& a, V const& b) noexcept
{
    return norm == row_norm::maximum ? (a < b ? b : a) + b * 0.0F : a + b;
}

/// Calls body with the norm as a constant (std::integral_constant).
MDKV_HD void with_norm(row_norm norm, auto const& body)
{
    using enum row_norm;
    if (norm == maximum) { body(std::integral_constant<row_norm, maximum>{}); }
    else if (norm == euclidean) { body(std::integral_constant<row_norm, euclidean>{}); }
    else { body(std::integral_constant<row_norm, sum>{}); }
}

/// The coordinates that a rung stores of a key and a value: none if it is dropped.
struct score_rung
{
    int keys;
    int values;
    storage kind;
    bool projected; ///< the coordinates are in the basis
    int softmax;    ///< number of the softmax that is its P'; 0 unless it is projected

    [[nodiscard]] MDKV_HD bool quantised() const noexcept { return kind != storage::plain; }
    [[nodiscard]] MDKV_HD bool rotated() const noexcept { return quantised() && !projected; }
};

/// The rungs; the sizes that follow; the last token that each query sees; and where operands lie. Softmax 0 is the exact one; the
/// others are of keys that are cut to their first coordinates in the basis, one for each number of coordinates that a projected
/// rung stores, ascending: each holds the coordinates of the one before it.
struct score_plan
{
    score_rung rungs[max_rungs]{};
    int columns[max_rungs + 1]{};   ///< coordinates of each softmax's keys; entry 0 stands before the first
    int total_row[max_rungs + 1]{}; ///< rung in whose row of losses a softmax has its totals first; -1: in `spare`
    int count     = 0;
    int softmaxes = 1;

    int dim          = 0;
    int value_dim    = 0;
    int latent       = 0; ///< coordinates in the key basis that are multiplied with queries
    int value_latent = 0;
    int coded        = 0;     ///< coordinates in the key basis of which some rung holds codes
    bool rotates     = false; ///< some rung holds codes of rotated coordinates
    bool codes       = false; ///< some rung holds codes

    int per_head   = 0; ///< Q
    int query_rows = 0; ///< G*Q
    int rows       = 0; ///< G*Q rounded up to whole panels; rows that pad weigh nothing
    int panel      = 0; ///< rows that are multiplied together
    float to_log2  = 0; ///< products become logits in units of log2 by this factor, the scale in it
    row_norm norm  = row_norm::sum;
    float uniform  = 0; ///< total of the rows with uniform attention (uniform_queries), as `norm` adds rows up

    index_t first_query = 0;       ///< position of query 0
    index_t splits      = 0;       ///< parts of a head's tokens in sweep one
    index_t more        = 0;       ///< floats of a head's operands that are a backend's own
    index_t head_bytes  = 0;       ///< bytes of a head's operands
    std::byte* memory   = nullptr; ///< operands of all heads, one after another
    float* states       = nullptr; ///< see state()
    float* totals       = nullptr; ///< rows of total()
    index_t rung_step   = 0;       ///< floats from row to row
    index_t head_step   = 0;       ///< floats from head to head
    float* spare        = nullptr; ///< [H, N]  the exact softmax's row if all of `totals` belong to others
    float* sums         = nullptr; ///< see value_sums()
    index_t past        = 0;       ///< N

    /// A plan for the queries [query_group, queries] of each KV head; `tokens` includes the window.
    template <backend B>
    score_plan(ratio_set const& ratios, head_dims dims, index_t query_group, index_t queries, index_t tokens,
        score_options<B> const& options, int panel_)
        : count{static_cast<int>(ratios.size())}
        , dim{narrowed(dims.keys, "D")}
        , value_dim{narrowed(dims.values, "Dv")}
        , per_head{narrowed(queries, "Q")}
        , query_rows{narrowed(checked_multiply(query_group, queries), "G*Q")}
        , rows{round_up(query_rows, panel_)}
        , panel{panel_}
        , to_log2{scale_in_base_two(options.scale, dim)}
        , norm{options.norm}
        , first_query{options.first_query.value_or(tokens - queries)}
    {
        first_query = first_query < tokens ? first_query : tokens;
        if (options.uniform_queries > 0)
        {
            float const each = 1.0F / static_cast<float>(tokens);
            float const all  = options.uniform_queries * static_cast<float>(query_group);
            uniform          = norm == row_norm::maximum ? each : all * each * (norm == row_norm::sum ? 1.0F : each);
        }
        total_row[0] = -1;
        for (int r = 0; r < count; ++r)
        {
            auto const i  = static_cast<std::size_t>(r);
            rung const& u = ratios[i];
            rungs[r]      = {static_cast<int>(ratios.coordinates(i, dim)),
                     static_cast<int>(ratios.coordinates(i, value_dim)), u.kind, u.projected(), 0};
            rotates       = rotates || u.rotated();
            codes         = codes || u.quantised();
            if (!u.projected()) { total_row[0] = r; }
            else if (value_latent < rungs[r].values) { value_latent = rungs[r].values; }
            if (u.projected() && u.quantised()) { coded = rungs[r].keys; }
        }
        for (int width = 1; width <= dim; ++width)
        {
            for (int r = 0; r < count; ++r)
            {
                if (!rungs[r].projected || rungs[r].keys != width) { continue; }
                bool const next = latent < width;
                softmaxes += next ? 1 : 0;
                rungs[r].softmax                    = softmaxes - 1;
                total_row[next ? softmaxes - 1 : 0] = r; // the row of a second rung is free
                columns[softmaxes - 1] = latent = width;
            }
        }
    }

    /// Takes the memory of operands and states. Totals lie in the rows of losses, which take their place.
    template <space S>
    void take_memory(workspace::frame& frame, view<float, 3, S> const& loss)
    {
        index_t const heads = loss.extent(0);
        past                = loss.extent(2);
        head_bytes          = operands{{}, *this}.cut.bytes();
        memory              = frame.take<std::byte>(checked_multiply(heads, head_bytes));
        states              = frame.take<float>(checked_multiply(heads * splits, index_t{2} * softmaxes * rows));
        totals              = loss.data_handle();
        head_step           = loss.stride(0);
        rung_step           = loss.stride(1);
        index_t const own   = total_row[0] < 0 ? heads * past : 0;
        spare               = frame.take<float>(own + (rotates ? heads * value_pieces() * (value_dim + 1) : 0));
        sums                = spare + own;
    }

    /// A head's prepared operands, each in whole vectors of 16 bytes, which GPUs load at once.
    struct operands
    {
        carver cut;
        score_plan const& plan;

        int rotated      = plan.rotates ? 1 : 0;
        int coded        = plan.codes ? plan.count : 0;
        float* queries   = cut.take<float>(index_t{plan.rows} * plan.dim);    // [rows / panel, dim, panel]  scaled
        float* latents   = cut.take<float>(index_t{plan.rows} * plan.latent); // [rows / panel, latent, panel]
        float* key_basis = cut.take<float>(index_t{plan.dim} * plan.key_columns()); // transposed, zero-padded
        float* lse       = cut.take<float>(index_t{plan.rows} * plan.softmaxes);    // log2, query weights folded in
        float* weights   = cut.take<float>(coded * plan.groups());    // [rungs, groups]  of squared ranges
        float* channels  = cut.take<float>(rotated * 3 * plan.dim);   // [3, dim]  means of keys, 1 / scales, scratch
        float* means     = cut.take<float>(rotated * plan.value_dim); // means of values, which codes lack
        float* centre    = cut.take<float>(rotated * plan.value_dim); // mean of values by ||P||, near the rows' outputs
        float* more      = cut.take<float>(plan.more);                // the backend's own
    };
    [[nodiscard]] MDKV_HD operands head(index_t h) const noexcept { return {carver{memory + h * head_bytes}, *this}; }

    /// [2, rows]  A softmax after sweep one, for a split of a head's tokens: the largest logit of every row, then the sum of
    /// 2^(logit - largest) of every row.
    [[nodiscard]] MDKV_HD float* state(index_t head, index_t split, int softmax) const noexcept
    {
        return states + ((head * splits + split) * softmaxes + softmax) * 2 * rows;
    }
    /// [N]  Totals over the rows that sweep two leaves of a head's tokens: of P, then of |P' - P| of softmax i.
    [[nodiscard]] MDKV_HD float* total(index_t head, int softmax) const noexcept
    {
        int const row = total_row[softmax];
        return row < 0 ? spare + head * past : totals + head * head_step + row * rung_step;
    }
    /// [value_dim + 1]  Sums that score_centre leaves of a piece of a head's tokens.
    [[nodiscard]] MDKV_HD float* value_sums(index_t head, index_t piece) const noexcept
    {
        return sums + (head * value_pieces() + piece) * (value_dim + 1);
    }
    static constexpr index_t value_piece = 512; ///< tokens of a piece
    [[nodiscard]] MDKV_HD index_t value_pieces() const noexcept { return (past + value_piece - 1) / value_piece; }

    /// The norm of a token's rows, from their total.
    [[nodiscard]] MDKV_HD float norm_of(float total) const noexcept
    {
        return norm == row_norm::euclidean ? sqrtf(total) : total;
    }
    /// ||P|| of a token, from the total of its rows.
    [[nodiscard]] MDKV_HD float mass_of(float total) const noexcept
    {
        return norm_of(joined_rows(norm, total, uniform));
    }

    /// Columns of the copied key basis: whole vectors and panels of either backend.
    [[nodiscard]] MDKV_HD int key_columns() const noexcept { return round_up(latent, 16); }
    /// Groups of a key's codes.
    [[nodiscard]] MDKV_HD int groups() const noexcept { return (dim + group - 1) / group; }
    static constexpr int group = int{quantised_group};

    /// The first token that a row does not see.
    [[nodiscard]] MDKV_HD index_t end_of(int row) const noexcept { return first_query + row % per_head + 1; }
    /// Every row sees tokens up to this one.
    [[nodiscard]] MDKV_HD bool all_see(index_t last_token) const noexcept { return last_token <= first_query; }
    [[nodiscard]] MDKV_HD bool none_sees(index_t first_token) const noexcept
    {
        return first_token >= end_of(per_head - 1);
    }

private:
    [[nodiscard]] MDKV_HD static constexpr int round_up(int n, int step) noexcept
    {
        return (n + step - 1) / step * step;
    }

    [[nodiscard]] static int narrowed(index_t n, char const* name)
    {
        expects(n <= (1 << 24), "score: ", name, " is ", n, "; it must not exceed ", 1 << 24);
        return static_cast<int>(n);
    }
};

using score_head = score_plan::operands;

} // namespace MDKV_NAMESPACE::detail
