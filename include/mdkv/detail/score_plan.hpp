/// \file score_plan.hpp: score's part that every backend shares: which rungs need which sums, the causal mask, where prepared operands lie, the formula of a loss (arXiv 2603.20616, section 4.2, algorithm 1).
#pragma once

#include <mdkv/score.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/softmax.hpp>

#include <cmath>
#include <cstddef>

namespace mdkv::detail
{

/// A rung that is neither dropped nor full.
struct score_rung
{
    int index;   ///< in the ratio set
    int keys;    ///< coordinates
    int values;  ///< coordinates
    int softmax; ///< which of the softmaxes is its P'; 0: its loss has no first term
    int again;   ///< of a quantised rung with a softmax: key coordinates of such rungs before it
    storage kind;
    bool projected; ///< its coordinates are those in the basis

    // |v - v'|: the squares of its coordinates from kept_from on are added to those of the rung before it, unless that is 0.
    int kept_from   = 0;
    bool leaves_out = false; ///< it leaves out coordinates, and not only rounds them

    [[nodiscard]] MDKV_HD bool quantised() const noexcept { return kind != storage::plain; }
    /// Its coordinates are rotated, group by group, before they become codes (detail/hadamard.hpp).
    [[nodiscard]] MDKV_HD bool rotated() const noexcept { return quantised() && !projected; }
};

/// The rungs, plain ones first, each holding the coordinates of the one before it; and the sizes that follow.
struct score_plan
{
    score_rung rungs[max_rungs];
    int count     = 0;
    int plain     = 0;
    int softmaxes = 1;  ///< the exact one, then one of each rung that needs P'
    int dropped   = -1; ///< index in the ratio set, or none
    int full      = -1;

    int dim          = 0;
    int value_dim    = 0;
    int latent       = 0; ///< coordinates in the key basis that are multiplied with queries
    int value_latent = 0;
    int again        = 0; ///< coordinates of quantised keys, of all rungs together
    int rotated      = 0; ///< the most coordinates of a value that are rotated

    int per_head   = 0; ///< Q
    int query_rows = 0; ///< G*Q
    int rows       = 0; ///< the same in whole panels; those beyond weigh nothing
    int panel      = 0; ///< rows that are multiplied together
    int unit       = 0; ///< copies of bases are padded to whole units of coordinates
    float to_log2  = 0; ///< products become logits in units of log2 by this factor, the scale in it

    template <backend B>
    score_plan(ratio_set const& ratios, head_dims dims, index_t group, index_t queries, score_options<B> const& options,
        int panel_, int unit_)
        : dim{narrowed(dims.keys, "D")}
        , value_dim{narrowed(dims.values, "Dv")}
        , per_head{narrowed(queries, "Q")}
        , query_rows{narrowed(checked_multiply(group, queries), "G*Q")}
        , rows{round_up(query_rows, panel_)}
        , panel{panel_}
        , unit{unit_}
        , to_log2{(options.scale > 0.0F ? options.scale : 1.0F / std::sqrt(static_cast<float>(dim))) * log2_e}
    {
        for (bool const quantised : {false, true}) // plain rungs ascend among themselves, whatever stands between them
        {
            for (std::size_t r = 0; r < ratios.size(); ++r)
            {
                rung const& u = ratios[r];
                if (u.dropped()) { dropped = static_cast<int>(r); }
                if (u.full()) { full = static_cast<int>(r); }
                if (u.dropped() || u.full() || u.quantised() != quantised) { continue; }
                bool const values_only =
                    quantised && !u.projected() && options.quantisation == quantisation_loss::value_only;
                add({static_cast<int>(r), static_cast<int>(ratios.coordinates(r, dim)),
                    static_cast<int>(ratios.coordinates(r, value_dim)), values_only ? 0 : softmaxes, again, u.kind,
                    u.projected()});
            }
        }
    }

    [[nodiscard]] MDKV_HD int padded(int n) const noexcept { return round_up(n, unit); }
    [[nodiscard]] MDKV_HD int key_columns() const noexcept { return padded(latent); }
    [[nodiscard]] MDKV_HD int value_columns() const noexcept { return padded(value_latent); }

private:
    int kept_ = 0; ///< coordinates of values that the last rung keeps, of those that leave some out

    [[nodiscard]] MDKV_HD static constexpr int round_up(int n, int step) noexcept
    {
        return (n + step - 1) / step * step;
    }

    [[nodiscard]] static int narrowed(index_t n, char const* name)
    {
        expects(n <= (1 << 24), "score: ", name, " is ", n, "; it must not exceed ", 1 << 24);
        return static_cast<int>(n);
    }

    void add(score_rung u) noexcept
    {
        auto const raise = [](int& most, int n) { most = most < n ? n : most; };
        u.leaves_out     = !u.quantised() || u.values < value_dim;
        u.kept_from      = u.leaves_out && u.values >= kept_ ? kept_ : 0;
        kept_            = u.leaves_out ? u.values : kept_;
        rungs[count++]   = u;
        plain += u.quantised() ? 0 : 1;
        if (u.projected) { raise(value_latent, u.values); }
        if (u.rotated()) { raise(rotated, u.values); }
        if (u.softmax == 0) { return; }
        ++softmaxes;
        if (u.projected) { raise(latent, u.keys); }
        again += u.quantised() ? u.keys : 0;
    }
};

/// The last token each query sees.
struct causal_mask
{
    index_t first_query; ///< place of query 0
    int per_head;        ///< Q

    template <backend B>
    causal_mask(score_options<B> const& options, index_t queries, index_t tokens) noexcept
        : first_query{options.first_query.value_or(tokens - queries)}
        , per_head{static_cast<int>(queries)}
    {
        first_query = first_query < tokens ? first_query : tokens;
    }

    /// Every row sees tokens up to this one.
    [[nodiscard]] MDKV_HD bool all_see(index_t last_token) const noexcept { return last_token <= first_query; }
    [[nodiscard]] MDKV_HD bool none_sees(index_t first_token) const noexcept
    {
        return first_token > first_query + per_head - 1;
    }
};

/// A head's prepared operands.
struct score_head
{
    float* queries;     // [rows / panel, dim, panel]     scaled, in units of log2
    float* latents;     // [rows / panel, key_columns, panel]  queries in the key basis, likewise
    float* key_basis;   // [dim, key_columns]             transposed, zero-padded
    float* value_basis; // [value_dim, value_columns]
    float* lse;         // [softmaxes, rows]              log2, weights of the queries folded in; the exact one first
    float* more;        // a backend's own
};

/// All heads' operands, one after another.
struct score_operands
{
    float* memory = nullptr;
    index_t latents, key_basis, value_basis, lse, more, per_head; // floats

    explicit score_operands(score_plan const& p, index_t more_floats = 0) noexcept
        : latents{index_t{p.dim} * p.rows}
        , key_basis{latents + index_t{p.key_columns()} * p.rows}
        , value_basis{key_basis + index_t{p.dim} * p.key_columns()}
        , lse{value_basis + index_t{p.value_dim} * p.value_columns()}
        , more{lse + index_t{p.softmaxes} * p.rows}
        , per_head{more + more_floats}
    {}

    [[nodiscard]] MDKV_HD score_head of(index_t head) const noexcept
    {
        float* const at = memory + head * per_head;
        return {at, at + latents, at + key_basis, at + value_basis, at + lse, at + more};
    }
};

/// Largest logit and sum of 2^(logit - largest) of every row.
struct score_state
{
    float* largest; // [rows]
    float* sum;     // [rows]
};

/// What sweep one leaves of every softmax, for each part of each head's tokens: [H, parts, softmaxes, 2, rows].
struct score_states
{
    float* memory;
    index_t parts; // of a head
    int softmaxes;
    int rows;

    [[nodiscard]] MDKV_HD index_t per_part() const noexcept { return index_t{2} * softmaxes * rows; }
    [[nodiscard]] MDKV_HD score_state at(index_t head, index_t part, int softmax) const noexcept
    {
        float* const first = memory + (head * parts + part) * per_part() + index_t{2} * softmax * rows;
        return {first, first + rows};
    }
};

/// Loss of a dropped token: sum of P, and |v|.
[[nodiscard]] MDKV_HD inline float dropped_loss(float mass, float norm) noexcept
{
    return 2 * mass * norm;
}

/// Loss of a stored token: sum |P' - P| (0 where the rule leaves it out), sum P, |v| and |v - v'|.
[[nodiscard]] MDKV_HD inline float stored_loss(float moved, float mass, float norm, float missing) noexcept
{
    return moved * norm + mass * missing;
}

/// |v - v'|^2 is |v|^2 - |v'|^2, because a basis is orthonormal; but where the two nearly cancel (a thousandth leaves four
/// digits of float's seven) it must be found from the difference itself.
[[nodiscard]] MDKV_HD inline bool cancels(float missing, float squared) noexcept
{
    return !(missing > 1e-3F * squared);
}

} // namespace mdkv::detail
