/// \file score_plan.hpp: score's part that every backend shares: which rungs need which sums and products, the causal mask, where operands lie, the formula of a loss (arXiv 2603.20616, section 4.2, algorithm 1).
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/score_options.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/quantiser.hpp>
#include <mdkv/detail/softmax.hpp>

#include <cmath>
#include <cstddef>
#include <type_traits>

namespace MDKV_NAMESPACE::detail
{

/// A rung that is neither dropped nor full. If it is not projected, it holds codes of rotated coordinates.
struct score_rung
{
    int index;   ///< number in the ratio set
    int keys;    ///< coordinates of a key that it stores
    int values;  ///< coordinates of a value that it stores
    int softmax; ///< number of the softmax that is its P'; 0 unless it is projected
    storage kind;
    bool projected; ///< its coordinates are in the basis

    [[nodiscard]] MDKV_HD bool quantised() const noexcept { return kind != storage::plain; }
};

/// A head's prepared operands.
struct score_head
{
    float* queries;   // [rows / panel, dim, panel]     scaled, in units of log2
    float* latents;   // [rows / panel, key_columns, panel]  queries in the key basis, scaled alike
    float* key_basis; // [dim, key_columns]             transposed, zero-padded
    float* lse;       // [softmaxes, rows]              log2, query weights folded in; the exact softmax first
    float* channels;  // [3, dim], [groups]             means of keys, 1 / scales, scratch; weights of squared ranges
    float* noise;     // [rungs, groups]                weights of squared ranges of projected coordinates
    float* means;     // [value_dim]                    means of values, which codes lack
    float* centre;    // [value_dim]                    mean of values by ||P||, near the rows' outputs
    float* more;      // operands of the backend's own
};

/// The states of every softmax after sweep one, for each split of each head's tokens: the largest logit of every row, then
/// the sum of 2^(logit - largest) of every row: [H, splits, softmaxes, 2, rows].
struct score_states
{
    float* memory;
    index_t splits; // splits of a head's tokens
    int softmaxes;
    int rows;

    [[nodiscard]] MDKV_HD index_t per_split() const noexcept { return index_t{2} * softmaxes * rows; }
    [[nodiscard]] MDKV_HD float* largest(index_t head, index_t split, int softmax) const noexcept
    {
        return memory + (head * splits + split) * per_split() + index_t{2} * softmax * rows;
    }
    [[nodiscard]] MDKV_HD float* sum(index_t head, index_t split, int softmax) const noexcept
    {
        return largest(head, split, softmax) + rows;
    }
};

/// The rungs, plain ones first, each holding the coordinates of the one before it; the sizes that follow; the last token
/// that each query sees; and where operands lie. Softmax 0 is the exact one; the others are of keys that are cut to their
/// first coordinates in the basis, one for each number of coordinates that a projected rung stores, ascending.
struct score_plan
{
    score_rung rungs[max_rungs]{};
    int columns[max_rungs + 1]{};   ///< coordinates of each softmax's keys; entry 0 stands before the first
    int total_row[max_rungs + 1]{}; ///< rung in whose row of losses a softmax has its totals first; -1: in `spare`
    int count     = 0;
    int softmaxes = 1;
    int dropped   = -1; ///< index in the ratio set, or none
    int full      = -1;

    int dim          = 0;
    int value_dim    = 0;
    int latent       = 0; ///< coordinates in the key basis that are multiplied with queries
    int value_latent = 0;
    bool rotates     = false; ///< some rung holds codes of rotated coordinates
    bool codes       = false; ///< some rung holds codes of coordinates in the basis

    int per_head   = 0; ///< Q
    int query_rows = 0; ///< G*Q
    int rows       = 0; ///< G*Q rounded up to whole panels; rows that pad weigh nothing
    int panel      = 0; ///< rows that are multiplied together
    int unit       = 0; ///< copies of bases are padded to whole units of coordinates
    float to_log2  = 0; ///< products become logits in units of log2 by this factor, the scale in it
    row_norm norm  = row_norm::sum;
    float uniform  = 0; ///< total of the rows with uniform attention (uniform_queries), as `norm` adds rows up

    index_t first_query = 0;       ///< position of query 0
    index_t more        = 0;       ///< floats of a head's operands that are a backend's own
    float* memory       = nullptr; ///< operands of all heads, one after another
    float* totals       = nullptr; ///< rows of total()
    index_t rung_step   = 0;       ///< floats from row to row
    index_t head_step   = 0;       ///< floats from head to head
    float* spare        = nullptr; ///< [H, N]  the exact softmax's row if all of `totals` belong to others
    float* sums         = nullptr; ///< see value_sums()
    index_t past        = 0;       ///< N

    /// A plan for the queries [query_group, queries] of each KV head; `tokens` includes the window.
    template <backend B>
    score_plan(ratio_set const& ratios, head_dims dims, index_t query_group, index_t queries, index_t tokens,
        score_options<B> const& options, int panel_, int unit_)
        : dim{narrowed(dims.keys, "D")}
        , value_dim{narrowed(dims.values, "Dv")}
        , per_head{narrowed(queries, "Q")}
        , query_rows{narrowed(checked_multiply(query_group, queries), "G*Q")}
        , rows{round_up(query_rows, panel_)}
        , panel{panel_}
        , unit{unit_}
        , to_log2{scale_in_base_two(options.scale, dim)}
        , norm{options.norm}
        , first_query{options.first_query.value_or(tokens - queries)}
    {
        first_query = first_query < tokens ? first_query : tokens;
        if (options.uniform_queries > 0 && tokens > 0)
        {
            float const each = 1.0F / static_cast<float>(tokens);
            float const all  = options.uniform_queries * static_cast<float>(query_group);
            uniform          = norm == row_norm::maximum ? each : all * each * (norm == row_norm::sum ? 1.0F : each);
        }
        for (bool const quantised : {false, true}) // plain rungs ascend among themselves; quantised ones lie between
        {
            for (std::size_t r = 0; r < ratios.size(); ++r)
            {
                rung const& u = ratios[r];
                if (u.dropped()) { dropped = static_cast<int>(r); }
                if (u.full()) { full = static_cast<int>(r); }
                if (u.dropped() || u.full() || u.quantised() != quantised) { continue; }
                add(r, u, static_cast<int>(ratios.coordinates(r, dim)),
                    static_cast<int>(ratios.coordinates(r, value_dim)));
            }
        }
        while (add_softmax()) {}
        bool taken[max_rungs]{};
        for (int r = count - 1; r >= 0; --r) { total_row[rungs[r].softmax] = rungs[r].index; }
        for (int i = 1; i < softmaxes; ++i) { taken[total_row[i]] = true; }
        total_row[0] = -1;
        for (int r = static_cast<int>(ratios.size()) - 1; r >= 0; --r) { total_row[0] = taken[r] ? total_row[0] : r; }
    }

    /// Takes the memory of operands and states. Totals lie in the rows of losses, which take their place.
    template <space S>
    void take_memory(workspace::frame& frame, view<float, 3, S> const& loss, score_states& states)
    {
        index_t const heads = loss.extent(0);
        past                = loss.extent(2);
        memory              = frame.take<float>(checked_multiply(heads, head_floats()));
        states.memory       = frame.take<float>(checked_multiply(heads * states.splits, states.per_split()));
        totals              = loss.data_handle();
        head_step           = loss.stride(0);
        rung_step           = loss.stride(1);
        index_t const own   = total_row[0] < 0 ? heads * past : 0;
        spare               = frame.take<float>(own + (rotates ? heads * value_pieces() * (value_dim + 1) : 0));
        sums                = spare + own;
    }

    /// [N]  Totals over the rows that sweep two leaves of a head's tokens: of P, then of |P' - P| of softmax i.
    [[nodiscard]] MDKV_HD float* total(index_t head, int softmax) const noexcept
    {
        int const row = total_row[softmax];
        return row < 0 ? spare + head * past : totals + head * head_step + row * rung_step;
    }
    /// [value_dim + 1]  Sums that score_value_sums leaves of a piece of a head's tokens.
    [[nodiscard]] MDKV_HD float* value_sums(index_t head, index_t piece) const noexcept
    {
        return sums + (head * value_pieces() + piece) * (value_dim + 1);
    }
    static constexpr index_t value_piece = 512; ///< tokens of a piece
    [[nodiscard]] MDKV_HD index_t value_pieces() const noexcept { return (past + value_piece - 1) / value_piece; }

    [[nodiscard]] MDKV_HD int padded(int n) const noexcept { return round_up(n, unit); }
    [[nodiscard]] MDKV_HD int key_columns() const noexcept { return padded(latent); }

    /// The first token that a row does not see.
    [[nodiscard]] MDKV_HD index_t end_of(int row) const noexcept { return first_query + row % per_head + 1; }
    /// Every row sees tokens up to this one.
    [[nodiscard]] MDKV_HD bool all_see(index_t last_token) const noexcept { return last_token <= first_query; }
    [[nodiscard]] MDKV_HD bool none_sees(index_t first_token) const noexcept
    {
        return first_token >= end_of(per_head - 1);
    }
    /// Whether no row of panel p sees tokens from first_token on.
    [[nodiscard]] MDKV_HD bool none_sees(index_t first_token, index_t p) const noexcept
    {
        index_t const row = p * panel % per_head;
        return row + panel <= per_head ? first_token >= end_of(static_cast<int>(row) + panel - 1)
                                       : none_sees(first_token);
    }

    /// Groups of a key's codes.
    [[nodiscard]] MDKV_HD int groups() const noexcept
    {
        return (dim + int{quantised_group} - 1) / int{quantised_group};
    }
    /// Each of a head's operands has whole vectors of 16 bytes, which GPUs load at once.
    [[nodiscard]] MDKV_HD index_t noise_floats() const noexcept { return codes ? round_up(count * groups(), 4) : 0; }
    [[nodiscard]] MDKV_HD index_t channel_floats() const noexcept
    {
        return rotates ? round_up(3 * dim + groups() + 2 * value_dim, 4) : 0;
    }
    [[nodiscard]] MDKV_HD index_t head_floats() const noexcept
    {
        return index_t{rows} * (dim + key_columns() + softmaxes) + index_t{dim} * key_columns() + noise_floats()
               + channel_floats() + more;
    }
    [[nodiscard]] MDKV_HD score_head head(index_t h) const noexcept
    {
        float* const queries   = memory + h * head_floats();
        float* const latents   = queries + index_t{dim} * rows;
        float* const key_basis = latents + index_t{key_columns()} * rows;
        float* const lse       = key_basis + index_t{dim} * key_columns();
        float* const noise     = lse + index_t{softmaxes} * rows;
        float* const channels  = noise + noise_floats();
        float* const means     = channels + 3 * dim + groups();
        return {
            queries, latents, key_basis, lse, channels, noise, means, means + value_dim, channels + channel_floats()};
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

    void add(std::size_t r, rung const& u, int keys, int values) noexcept
    {
        rungs[count++] = {static_cast<int>(r), keys, values, 0, u.kind, u.projected()};
        rotates        = rotates || !u.projected();
        codes          = codes || (u.projected() && u.quantised());
        if (u.projected()) { value_latent = value_latent < values ? values : value_latent; }
    }

    /// Adds the softmax of the next wider projected keys. Returns whether there are such keys.
    bool add_softmax() noexcept
    {
        int wider = 0;
        for (score_rung const& u : rungs)
        {
            if (u.projected && u.keys > latent && (wider == 0 || u.keys < wider)) { wider = u.keys; }
        }
        if (wider == 0) { return false; }
        for (score_rung& u : rungs)
        {
            if (u.projected && u.keys == wider) { u.softmax = softmaxes; }
        }
        columns[softmaxes++] = latent = wider;
        return true;
    }
};

/// The total of a token's rows, one number or a vector of them, with one row more. For `euclidean` its root is the norm. A
/// NaN stays a NaN.
template <row_norm Norm, class V>
[[nodiscard]] MDKV_HD V with_row(V const& total, V const& x) noexcept
{
    if constexpr (Norm == row_norm::euclidean) { return total + x * x; }
    else if constexpr (Norm == row_norm::maximum) { return (total < x ? x : total) + x * 0.0F; }
    else { return total + x; }
}

/// The total of two subsets of a token's rows.
template <class V>
[[nodiscard]] MDKV_HD V joined_rows(row_norm norm, V const& a, V const& b) noexcept
{
    return norm == row_norm::maximum ? with_row<row_norm::maximum>(a, b) : a + b;
}

/// Calls body with the norm as a constant (std::integral_constant).
template <class Body>
MDKV_HD void with_norm(row_norm norm, Body const& body)
{
    using enum row_norm;
    if (norm == maximum) { body(std::integral_constant<row_norm, maximum>{}); }
    else if (norm == euclidean) { body(std::integral_constant<row_norm, euclidean>{}); }
    else { body(std::integral_constant<row_norm, sum>{}); }
}

[[nodiscard]] MDKV_HD inline float norm_of(row_norm norm, float total) noexcept
{
    return norm == row_norm::euclidean ? sqrtf(total) : total;
}

/// ||P|| of a token, from the total of its rows.
[[nodiscard]] MDKV_HD inline float mass_of(score_plan const& plan, float total) noexcept
{
    return norm_of(plan.norm, joined_rows(plan.norm, total, plan.uniform));
}

/// e^x (e^x - 1), the variance of e^y for a normal y of variance x and mean 0. An x above 20 counts as 20: the loss is then
/// far above the loss of dropping, and still finite.
[[nodiscard]] MDKV_HD inline float variance_of_weight(float x) noexcept
{
    if (x < 0.125F) { return x * (1 + x * (1.5F + x * (1.1666667F + x * (0.625F + x * 0.25833333F)))); }
    float const e = exp2f((x < 20.0F ? x : 20.0F) * log2_e);
    return e * (e - 1);
}

/// Variance of a token's weight by the codes of its key at rung u, times key_noise^2, from its logit's variance at a step of one
/// range.
[[nodiscard]] MDKV_HD inline float noise_of(score_rung const& u, float spread) noexcept
{
    if (!u.quantised()) { return 0.0F; }
    auto const steps = static_cast<float>(most_code(u.kind));
    return key_noise * key_noise * variance_of_weight(spread / (steps * steps));
}

} // namespace MDKV_NAMESPACE::detail
