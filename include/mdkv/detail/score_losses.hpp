/// \file score_losses.hpp: losses from the totals of attention that score's sweeps leave, and from what each rung would change in a token's key and value (arXiv 2603.20616, section 4.2, algorithm 1).
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/quantiser.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/score_prepare.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/detail/tile_codec.hpp>

#include <cmath>
#include <cstddef>

namespace MDKV_NAMESPACE::detail
{

/// Writes the loss of every token at every rung. An item is a strip of a head's tokens.
template <element T, backend B>
struct score_losses
{
    static constexpr char const* name = "score_losses";
    static constexpr int threads      = 128;
    static constexpr int tile         = tile_tokens;
    static constexpr int group        = int{quantised_group};
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
        float* columns =
            cut.take<float>((plan.dim < plan.value_dim ? plan.value_dim : plan.dim) * tile); // [D or Dv, 16]
        float* x        = cut.take<float>(plan.latent > 0 ? group * tile : 0); // [group, 16]  coordinates in a basis
        float* least    = cut.take<float>(sums);                               // bounds of a group
        float* most     = cut.take<float>(sums);
        float* squares  = cut.take<float>(sums);              // |v|^2
        float* distance = cut.take<float>(sums);              // |v - centre|^2
        float* rounding = cut.take<float>(plan.count * sums); // |v - v'|^2 by codes
        float* kept     = cut.take<float>(plan.count * sums); // |v'|^2 before rounding
        float* rest     = cut.take<float>(plan.count * sums); // |v|^2 - |v'|^2, found by itself if that would cancel
        float* spread =
            cut.take<float>((plan.count + 1) * tile); // variance of a logit, if codes were a whole range apart
        float* end = cut.take<float>(0);
    };

    [[nodiscard]] MDKV_HD index_t strips() const noexcept { return (plan.past + strip - 1) / strip; }
    [[nodiscard]] index_t items() const noexcept { return keys.extent(0) * strips(); }
    [[nodiscard]] index_t scratch_bytes() const noexcept { return bytes_of<scratch>(plan); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
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
            find_spreads(t, memory, h, first, count);
            find_errors(t, memory, h, first, count);
            t.sync();
            for (int i = member(t); i < count; i += members(t)) { write(memory, h, first + i, i); }
        }
    }

private:
    /// columns[d][i] = row(first + i)[d]; the last token stands for those behind it.
    template <team Team>
    MDKV_OUTLINE MDKV_HD static void load(
        Team const& t, in_view<T, 3, B> const& rows, index_t h, index_t first, int count, float* columns)
    {
        t.sync(); // columns may still be read
        widen_columns(
            t, tile, static_cast<int>(rows.extent(2)),
            [&](int i) { return rows.row(h, first + (i < count ? i : count - 1)); }, columns);
        t.sync();
    }

    /// Calls body(begin, part) for a vector of tokens from `begin` on and the coordinates part, part + parts, ...
    template <team Team, class Body>
    MDKV_HD static void for_parts(Team const& t, Body const& body)
    {
        constexpr int lanes = Team::register_lanes;
        for (int k = member(t) * lanes; k < sums; k += members(t) * lanes) { body(k % tile, k / tile); }
    }
    /// Adds to each token's sums what of(x, d) makes of its coordinates x from `begin` to `end` - 1.
    template <team Team, class Of>
    MDKV_HD static void add(Team const& t, float const* x, int begin, int end, float* to, Of const& of)
    {
        using floats = lane_floats<Team::register_lanes>;
        for_parts(t, [&](int i, int part) {
            floats sum = load_lanes<floats>(to + part * tile + i);
            for (int d = begin + part; d < end; d += parts) { sum += of(load_lanes<floats>(x + d * tile + i), d); }
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
        constexpr int lanes = Team::register_lanes;
        t.sync(); // bounds may still be read
        for_parts(t, [&](int i, int part) {
            int const begin = part < n ? part : 0;
            column_bounds<lanes> const b{x + begin * tile + i, (n - begin + parts - 1) / parts, parts * tile};
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

    /// Adds the squared ranges of n coordinates, times their weight, to every token's spread.
    template <team Team>
    MDKV_HD static void add_spread(Team const& t, scratch const& memory, float const* x, int n, float weight, float* to)
    {
        constexpr int lanes = Team::register_lanes;
        using floats        = lane_floats<lanes>;
        find_bounds(t, memory, x, n);
        for (int i = member(t) * lanes; i < tile; i += members(t) * lanes)
        {
            column_bounds<lanes> const b = bounds_at<lanes>(memory, i);
            floats const range           = b.most - b.least;
            store_lanes(to + i, load_lanes<floats>(to + i) + range * range * weight);
        }
    }

    /// Adds the squared errors of the codes of n coordinates, whose bounds are known.
    template <team Team>
    MDKV_OUTLINE MDKV_HD static void add_rounding(
        Team const& t, scratch const& memory, float const* x, int n, storage kind, float* to)
    {
        constexpr int lanes = Team::register_lanes;
        using floats        = lane_floats<lanes>;
        auto const most     = static_cast<float>(most_code(kind));
        for_parts(t, [&](int i, int part) {
            quantiser<lanes> const q = bounds_at<lanes>(memory, i).fitted(kind);
            floats sum               = load_lanes<floats>(to + part * tile + i);
            for (int d = part; d < n; d += parts)
            {
                floats const one   = load_lanes<floats>(x + d * tile + i);
                floats const error = one - q.values(q.codes(one, most));
                sum += error * error;
            }
            store_lanes(to + part * tile + i, sum);
        });
    }

    /// Spreads of keys rotated the way pack rotates them, and of their coordinates in the basis.
    template <team Team>
    MDKV_HD void find_spreads(Team const& t, scratch const& memory, index_t h, index_t first, int count) const
    {
        if (!plan.rotates && !plan.codes) { return; }
        score_head const head = plan.head(h);
        load(t, keys, h, first, count, memory.columns);
        for (int c = 0; plan.codes && c < plan.latent; c += group)
        {
            turn_columns(t, memory.columns, tile, plan.dim, key_basis, h, false, c,
                plan.latent - c < group ? plan.latent - c : group, memory.x);
            for (int r = 0; r < plan.count; ++r)
            {
                score_rung const& u = plan.rungs[r];
                if (!u.projected || !u.quantised() || u.keys <= c) { continue; }
                add_spread(t, memory, memory.x, u.keys - c < group ? u.keys - c : group,
                    head.noise[r * plan.groups() + c / group], memory.spread + r * tile);
            }
        }
        if (!plan.rotates) { return; }
        float const* const mean   = head.channels;
        float const* const weight = mean + 3 * plan.dim;
        t.sync(); // columns may still be read
        for (int c = 0; c < plan.dim; c += group)
        {
            int const n    = plan.dim - c < group ? plan.dim - c : group;
            float* const x = memory.columns + c * tile;
            rotate(t, x, n, mean + c, mean + plan.dim + c);
            add_spread(t, memory, x, n, weight[c / group], memory.spread + plan.count * tile);
        }
    }

    /// Lengths of values, and what every rung would change in them. Rotation keeps lengths: rotated values are compared without
    /// being rotated back.
    template <team Team>
    MDKV_HD void find_errors(Team const& t, scratch const& memory, index_t h, index_t first, int count) const
    {
        score_head const head = plan.head(h);
        int const dim         = plan.value_dim;
        load(t, values, h, first, count, memory.columns);
        add(t, memory.columns, 0, dim, memory.squares, [](auto const& x, int) { return x * x; });
        if (plan.rotates)
        {
            add(t, memory.columns, 0, dim, memory.distance,
                [&](auto const& x, int d) { return (x - head.centre[d]) * (x - head.centre[d]); });
        }
        for (int c = 0; c < plan.value_latent; c += group) { add_projected(t, memory, h, c, plan.value_latent, false); }
        bool const cancelled = plan.value_latent > 0 && any_cancels(t, memory);
        for (int c = 0; cancelled && c < dim; c += group) { add_projected(t, memory, h, c, dim, true); }
        if (!plan.rotates) { return; }
        t.sync(); // columns may still be read
        for (int c = 0; c < dim; c += group)
        {
            int const n    = dim - c < group ? dim - c : group;
            float* const x = memory.columns + c * tile;
            rotate(t, x, n, head.means + c, nullptr);
            find_bounds(t, memory, x, n);
            for (int r = 0; r < plan.count; ++r)
            {
                if (!plan.rungs[r].projected)
                {
                    add_rounding(t, memory, x, n, plan.rungs[r].kind, memory.rounding + r * sums);
                }
            }
        }
    }

    /// Adds what projected rungs keep of the coordinates in the basis from c on, or what they leave out.
    template <team Team>
    MDKV_OUTLINE MDKV_HD void add_projected(
        Team const& t, scratch const& memory, index_t h, int c, int all, bool left_out) const
    {
        int const some = all - c < group ? all - c : group;
        turn_columns(t, memory.columns, tile, plan.value_dim, value_basis, h, false, c, some, memory.x);
        for (int r = 0; r < plan.count; ++r)
        {
            score_rung const& u = plan.rungs[r];
            int const stored    = u.values < c ? 0 : u.values - c < some ? u.values - c : some;
            auto const square   = [](auto const& x, int) { return x * x; };
            if (!u.projected) { continue; }
            if (left_out)
            {
                add(t, memory.x, stored, some, memory.rest + r * sums, square);
                continue;
            }
            add(t, memory.x, 0, stored, memory.kept + r * sums, square);
            if (!u.quantised() || stored == 0) { continue; }
            find_bounds(t, memory, memory.x, stored);
            add_rounding(t, memory, memory.x, stored, u.kind, memory.rounding + r * sums);
        }
    }

    /// Whether |v|^2 - |v'|^2, which is |v - v'|^2 because a basis is orthonormal, cancels too far (a thousandth leaves four
    /// digits of float's seven), so that |v - v'|^2 must be found from the coordinates that are left out.
    [[nodiscard]] MDKV_HD bool cancels(scratch const& memory, int r, int i) const
    {
        float const squared = joined(memory.squares, i);
        return plan.rungs[r].projected && !(squared - joined(memory.kept + r * sums, i) > 1e-3F * squared);
    }
    template <team Team>
    [[nodiscard]] MDKV_HD bool any_cancels(Team const& t, scratch const& memory) const
    {
        index_t found = 0;
        t.sync();
        for (int k = member(t); k < plan.count * tile; k += members(t))
        {
            found += cancels(memory, k / tile, k % tile) ? 1 : 0;
        }
        return t.sum(found) > 0;
    }

    /// Writes the losses of token i of the tile.
    MDKV_HD void write(scratch const& memory, index_t h, index_t token, int i) const
    {
        float const squared = joined(memory.squares, i);
        float const length  = sqrtf(plan.rotates ? joined(memory.distance, i) : squared);
        float const mass    = mass_of(plan, plan.total(h, 0)[token]);
        float moved[max_rungs + 1]; // by softmax; losses are written over the totals
        for (int s = 1; s < plan.softmaxes; ++s) { moved[s] = norm_of(plan.norm, plan.total(h, s)[token]) * length; }
        moved[0] = 0.0F;
        if (plan.dropped >= 0) { loss(h, plan.dropped, token) = 2 * mass * length; }
        if (plan.full >= 0) { loss(h, plan.full, token) = 0.0F; }
        for (int r = 0; r < plan.count; ++r)
        {
            score_rung const& u = plan.rungs[r];
            float missing       = joined(memory.rounding + r * sums, i);
            if (u.projected)
            {
                missing += cancels(memory, r, i) ? joined(memory.rest + r * sums, i)
                                                 : squared - joined(memory.kept + r * sums, i);
            }
            float const noise       = noise_of(u, memory.spread[(u.projected ? r : plan.count) * tile + i]);
            loss(h, u.index, token) = moved[u.softmax] + mass * sqrtf(missing + noise * length * length);
        }
    }
};

/// The part of score after both sweeps, which every backend shares.
template <backend B, element T>
void score_by_totals(B const& on, score_losses<T, B> const& last)
{
    index_t const centred = last.plan.rotates ? last.keys.extent(0) : 0;
    run(on, score_value_sums<T, B>{last.values, last.plan}, centred * last.plan.value_pieces());
    run(on, score_centre{last.plan}, centred);
    run(on, last);
}

} // namespace MDKV_NAMESPACE::detail
