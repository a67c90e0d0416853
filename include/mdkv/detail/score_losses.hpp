/// \file score_losses.hpp: losses from the totals of attention that score's sweeps leave, and from what each rung would change in a token's key and value (arXiv 2603.20616, section 4.2, algorithm 1).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/quantiser.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/score_prepare.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/detail/tile_codec.hpp>

#include <cmath>

namespace MDKV_NAMESPACE::detail
{

/// Writes the loss of every token at every rung. An item is a strip of a head's tokens.
template <element T, backend B>
struct score_losses
{
    static constexpr char const* name = "score_losses";
    static constexpr int threads      = 128;
    static constexpr int tile         = tile_tokens;
    static constexpr int group        = score_plan::group;
    static constexpr index_t strip    = 4 * tile;
    /// Members of a team that share out a token's coordinates; each has sums of its own, [parts, tile].
    static constexpr int parts = B::memory_space == space::host ? 1 : threads / tile;
    static constexpr int sums  = parts * tile;

    in_view<T, 3, B> keys;            // [H, N, D]
    in_view<T, 3, B> values;          // [H, N, Dv]
    in_view<float, 3, B> key_basis;   // [H, D, D]    read only if a rung is projected
    in_view<float, 3, B> value_basis; // [H, Dv, Dv]
    score_plan plan;
    out_view<float, 3, B> loss; // [H, R, N]

    struct scratch
    {
        carver& cut;
        score_plan const& plan;
        int codes   = plan.codes ? plan.count : 0;
        int latents = plan.latent > 0 ? plan.count : 0;
        int dim     = plan.dim < plan.value_dim ? plan.value_dim : plan.dim;

        float* columns  = cut.take<float>(dim * tile);                         // [D or Dv, 16]
        float* x        = cut.take<float>(plan.latent > 0 ? group * tile : 0); // [group, 16]  coordinates in a basis
        float* least    = cut.take<float>(sums);                               // bounds of a group
        float* most     = cut.take<float>(sums);
        float* squares  = cut.take<float>(sums);           // |v|^2
        float* distance = cut.take<float>(sums);           // |v - centre|^2
        float* rounding = cut.take<float>(codes * sums);   // |v - v'|^2 by codes
        float* kept     = cut.take<float>(latents * sums); // |v'|^2 before rounding
        float* rest     = cut.take<float>(latents * sums); // |v|^2 - |v'|^2, found by itself if that would cancel
        float* spread   = cut.take<float>(codes * tile);   // variance of a logit, if codes were a whole range apart
        float* end      = cut.take<float>(0);
    };

    [[nodiscard]] MDKV_HD index_t strips() const noexcept { return (plan.past + strip - 1) / strip; }
    [[nodiscard]] index_t items() const noexcept { return keys.extent(0) * strips(); }
    [[nodiscard]] index_t scratch_bytes() const noexcept { return bytes_of<scratch>(plan); }

    MDKV_HD void operator()(team auto const& t, index_t item) const
    {
        carver cut = t.scratch();
        scratch const memory{cut, plan};
        index_t const h   = item / strips();
        index_t const end = (item % strips() + 1) * strip < plan.past ? (item % strips() + 1) * strip : plan.past;
        for (index_t first = item % strips() * strip; first < end; first += tile)
        {
            auto const count = static_cast<int>(end - first < tile ? end - first : tile);
            t.sync(); // sums of the tile before may still be read
            for (float* at = memory.squares + t.rank(); at < memory.end; at += t.size()) { *at = 0.0F; }
            if (plan.codes) { measure(t, memory, h, first, count, true); }
            measure(t, memory, h, first, count, false);
            t.sync();
            for (int i = member(t); i < count; i += members(t)) { write(memory, h, first + i, i); }
        }
    }

private:
    /// Calls body(begin, part) for a vector of tokens from `begin` on and the coordinates part, part + parts, ...
    template <team Team, class Body>
    MDKV_HD static void for_parts(Team const& t, Body const& body)
    {
        constexpr int lanes = Team::register_lanes;
        for (int k = member(t) * lanes; k < sums; k += members(t) * lanes) { body(k % tile, k / tile); }
    }
    /// Adds to each token's sums the squares of its coordinates x from `begin` to `end` - 1, or of their differences from a centre,
    /// or of the errors of their codes, whose bounds are known.
    template <team Team>
    MDKV_OUTLINE MDKV_HD static void add_squares(Team const& t, scratch const& memory, float const* x, int begin,
        int end, float* to, float const* centre = nullptr, storage kind = storage::plain)
    {
        constexpr int lanes = Team::register_lanes;
        using floats        = lane_floats<lanes>;
        auto const most     = static_cast<float>(most_code(kind));
        for_parts(t, [&](int i, int part) {
            quantiser<lanes> codes;
            if (kind != storage::plain) { codes = bounds_at<lanes>(memory, i).fitted(kind); }
            floats sum = load_lanes<floats>(to + part * tile + i);
            for (int d = begin + part; d < end; d += parts)
            {
                floats one = load_lanes<floats>(x + d * tile + i);
                if (centre != nullptr) { one = one - centre[d]; }
                if (kind != storage::plain) { one = one - codes.values(codes.codes(one, most)); }
                sum += one * one;
            }
            store_lanes(to + part * tile + i, sum);
        });
    }
    [[nodiscard]] MDKV_HD static float joined(float const* of, int i)
    {
        float sum = 0;
        for (int part = 0; part < parts; ++part) { sum += of[part * tile + i]; }
        return sum;
    }

    /// The bounds of n coordinates of every token: bounds_at(memory, i) then has them.
    template <team Team>
    MDKV_OUTLINE MDKV_HD static void find_bounds(Team const& t, scratch const& memory, float const* x, int n)
    {
        t.sync(); // bounds may still be read
        for_parts(t, [&](int i, int part) {
            int const begin = part < n ? part : 0;
            column_bounds<Team::register_lanes> const b{
                x + begin * tile + i, (n - begin + parts - 1) / parts, parts * tile};
            store_lanes(memory.least + part * tile + i, b.least);
            store_lanes(memory.most + part * tile + i, b.most);
        });
        t.sync();
    }
    template <int Lanes>
    [[nodiscard]] MDKV_HD static column_bounds<Lanes> bounds_at(scratch const& memory, int i)
    {
        column_bounds<Lanes> all{memory.least + i, parts, tile};
        all.most = column_bounds<Lanes>{memory.most + i, parts, tile}.most;
        return all;
    }

    /// Adds what rung r's codes of coordinates c to c + n - 1, x, do, whose bounds are known: squared ranges of keys times their
    /// weight to the spread of every token, or squared errors of values.
    template <team Team>
    MDKV_HD void add_codes(
        Team const& t, scratch const& memory, index_t h, float const* x, int c, int n, int r, bool of_keys) const
    {
        constexpr int lanes = Team::register_lanes;
        using floats        = lane_floats<lanes>;
        if (!of_keys)
        {
            return add_squares(t, memory, x, 0, n, memory.rounding + r * sums, nullptr, plan.rungs[r].kind);
        }
        float const weight = plan.head(h).weights[r * plan.groups() + c / group];
        for (int i = member(t) * lanes; i < tile; i += members(t) * lanes)
        {
            float* const spread          = memory.spread + r * tile + i;
            column_bounds<lanes> const b = bounds_at<lanes>(memory, i);
            floats const range           = b.most - b.least;
            store_lanes(spread, load_lanes<floats>(spread) + range * range * weight);
        }
    }

    /// Goes over the first `all` coordinates of a tile's columns in the basis: for every projected rung it adds what codes do, and
    /// the squares of values' coordinates that the rung keeps, or, if `left_out`, only of those that it does not keep.
    MDKV_OUTLINE MDKV_HD void measure_latents(
        team auto const& t, scratch const& memory, index_t h, int all, bool of_keys, bool left_out) const
    {
        for (int c = 0; c < all; c += group)
        {
            int const n = all - c < group ? all - c : group;
            turn_columns(t, memory.columns, tile, of_keys ? plan.dim : plan.value_dim,
                of_keys ? key_basis : value_basis, h, false, c, n, memory.x);
            for (int r = 0; r < plan.count; ++r)
            {
                score_rung const& u = plan.rungs[r];
                int const left      = (of_keys ? u.keys : u.values) - c;
                int const stored    = left < 0 ? 0 : left < n ? left : n;
                if (!u.projected) { continue; }
                if (left_out) { add_squares(t, memory, memory.x, stored, n, memory.rest + r * sums); }
                else if (!of_keys) { add_squares(t, memory, memory.x, 0, stored, memory.kept + r * sums); }
                if (left_out || !u.quantised() || stored == 0) { continue; }
                find_bounds(t, memory, memory.x, stored);
                add_codes(t, memory, h, memory.x, c, stored, r, of_keys);
            }
        }
    }

    /// Adds what rungs change in the keys or the values of a tile of `count` tokens, which become columns; the last one stands for
    /// those behind it. Columns are rotated the way pack does. Rotation keeps lengths: values are not rotated back.
    MDKV_OUTLINE MDKV_HD void measure(
        team auto const& t, scratch const& memory, index_t h, index_t first, int count, bool of_keys) const
    {
        score_head const head        = plan.head(h);
        in_view<T, 3, B> const& rows = of_keys ? keys : values;
        int const dim                = of_keys ? plan.dim : plan.value_dim;
        float const* const means     = of_keys ? head.channels : head.means;
        t.sync(); // columns may still be read
        widen_columns(
            t, tile, dim, [&](int i) { return rows.row(h, first + (i < count ? i : count - 1)); }, memory.columns);
        t.sync();
        if (!of_keys) { add_squares(t, memory, memory.columns, 0, dim, memory.squares); }
        if (!of_keys && plan.rotates) { add_squares(t, memory, memory.columns, 0, dim, memory.distance, head.centre); }
        measure_latents(t, memory, h, of_keys ? plan.coded : plan.value_latent, of_keys, false);
        if (!of_keys && plan.latent > 0)
        {
            index_t found = 0; // differences that cancel
            t.sync();
            for (int k = member(t); k < plan.count * tile; k += members(t))
            {
                found += cancels(memory, k / tile, k % tile) ? 1 : 0;
            }
            if (t.sum(found) > 0) { measure_latents(t, memory, h, dim, false, true); }
        }
        if (!plan.rotates) { return; }
        t.sync(); // columns may still be read
        for (int c = 0; c < dim; c += group)
        {
            int const n    = dim - c < group ? dim - c : group;
            float* const x = memory.columns + c * tile;
            rotate(t, x, n, means + c, of_keys ? means + dim + c : nullptr);
            find_bounds(t, memory, x, n);
            for (int r = 0; r < plan.count; ++r)
            {
                if (plan.rungs[r].rotated()) { add_codes(t, memory, h, x, c, n, r, of_keys); }
            }
        }
    }

    /// Whether |v|^2 - |v'|^2, which is |v - v'|^2 because a basis is orthonormal, cancels too far (a thousandth leaves four
    /// digits of float's seven), so that |v - v'|^2 must be found from the coordinates that are left out.
    [[nodiscard]] MDKV_HD bool cancels(scratch const& memory, int r, int i) const
    {
        float const squared = joined(memory.squares, i);
        return plan.rungs[r].projected && !(squared - joined(memory.kept + r * sums, i) > 1e-3F * squared);
    }

    /// Variance of a token's weight by the codes of its key, times key_noise^2, from its logit's variance at a step of one range:
    /// e^x (e^x - 1), the variance of e^y for a normal y of variance x and mean 0. An x above 20 counts as 20: the loss is then far
    /// above the loss of dropping, and still finite.
    [[nodiscard]] MDKV_HD static float noise_of(storage kind, float spread) noexcept
    {
        auto const steps = static_cast<float>(most_code(kind));
        float const x    = spread / (steps * steps);
        float const e    = exp2f((x < 20.0F ? x : 20.0F) * log2_e);
        float const near = x * (1 + x * (1.5F + x * (1.1666667F + x * (0.625F + x * 0.25833333F))));
        return key_noise * key_noise * (x < 0.125F ? near : e * (e - 1));
    }

    /// Writes the losses of token i of the tile.
    MDKV_HD void write(scratch const& memory, index_t h, index_t token, int i) const
    {
        float const squared = joined(memory.squares, i);
        float const length  = sqrtf(plan.rotates ? joined(memory.distance, i) : squared);
        float const mass    = plan.mass_of(plan.total(h, 0)[token]);
        float moved[max_rungs + 1]{}; // by softmax; losses are written over the totals
        for (int s = 1; s < plan.softmaxes; ++s) { moved[s] = plan.norm_of(plan.total(h, s)[token]) * length; }
        for (int r = 0; r < plan.count; ++r)
        {
            score_rung const& u = plan.rungs[r];
            if (!u.quantised() && !u.projected)
            {
                loss(h, r, token) = u.keys == 0 ? 2 * mass * length : 0.0F;
                continue;
            }
            float missing = 0.0F;
            float noise   = 0.0F;
            if (u.quantised())
            {
                missing = joined(memory.rounding + r * sums, i);
                noise   = noise_of(u.kind, memory.spread[r * tile + i]);
            }
            if (u.projected)
            {
                missing += cancels(memory, r, i) ? joined(memory.rest + r * sums, i)
                                                 : squared - joined(memory.kept + r * sums, i);
            }
            loss(h, r, token) = moved[u.softmax] + mass * sqrtf(missing + noise * length * length);
        }
    }
};

/// All of score but its sweeps, which are a backend's: first() leaves states, unless they are known, and second() totals.
template <backend B, element T, element U, class First, class Second>
void score_by(B const& on, score_losses<T, B> const& last, in_view<U, 3, B> queries, score_options<B> const& options,
    First const& first, Second const& second)
{
    score_plan const& plan = last.plan;
    index_t const heads    = last.keys.extent(0);
    index_t const centred  = plan.rotates ? heads : 0;
    score_queries<B, U> const panels{queries, last.key_basis, plan};
    run(on, panels, heads * panels.panels());
    run(on,
        score_channels<T, U, B>{
            options.channels.value_or(in_view<float, 3, B>{}), queries, last.keys, last.values, plan},
        plan.codes ? heads : 0);
    if (!options.lse || plan.softmaxes > 1) { first(); }
    run(on,
        score_join<B>{options.lse.value_or(in_view<float, 2, B>{}),
            options.lse_elsewhere.value_or(in_view<float, 2, B>{}), options.early_weight, options.question, plan},
        heads * plan.softmaxes);
    second();
    run(on, score_centre<T, B>{last.values, plan, false}, centred * plan.value_pieces());
    run(on, score_centre<T, B>{last.values, plan, true}, centred);
    run(on, last);
}

} // namespace MDKV_NAMESPACE::detail
