/// \file assign.hpp: rungs at the multiplier, the report, and allocate's jobs in their order (arXiv 2603.20616, sections 4.3, 4.4).
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/float_environment.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/allocate/search.hpp>
#include <mdkv/detail/allocate/work.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/ranks.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/detail/threshold.hpp>

#include <cstddef>
#include <cstdint>

namespace MDKV_NAMESPACE::detail::dual
{

/// Gives every token its rung at the multiplier; ties that fit get their rung at a multiplier just below. Counts tokens by
/// rung, and adds up their losses.
template <space S>
struct assign
{
    static constexpr char const* name = "allocate_assign";

    work<S> w;
    bool stores; ///< false: rungs are only tried

    [[nodiscard]] index_t items() const { return w.own_pieces(); }
    [[nodiscard]] static index_t scratch_bytes() { return index_t{sizeof(open_piece)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        piece const range          = w.own_piece(item);
        limit_search const& search = w.searches[range.limit];
        if (!search.active) { return; }
        open_piece& opened = open_piece::of(t, w, range);
        index_t ties       = range.number < search.tie_piece ? range.count : 0;
        if (range.number == search.tie_piece)
        {
            opened.clear(t, opened.sums, range.count);
            for_thresholds(t, opened, search,
                [&](index_t token, std::uint32_t, index_t step) { t.add(opened.sums + token, step); });
            t.sync();
            ties = first_over::find(t, range.count, search.left, [&](index_t i) { return opened.sums[i]; }).at;
        }
        opened.clear(t, opened.losses, columns);
        choose_rungs(t, opened, range, ties);
        double const loss = tree_sum(t, opened.losses);
        if (t.rank() == 0) { w.piece_losses[range.number] = loss; }
    }

private:
    /// \param ties  tokens before which ties take the costlier rung
    template <team Team>
    MDKV_HD void choose_rungs(Team const& t, open_piece& opened, piece const& range, index_t ties) const
    {
        constexpr int lanes      = Team::register_lanes;
        using floats             = lane_floats<lanes>;
        using ints               = lane_ints<lanes>;
        std::uint32_t const bits = w.searches[range.limit].multiplier;
        rung_table const& rungs  = opened.rungs;
        float const multiplier   = float_of_bits(bits);
        float const below        = float_of_bits(bits == 0 ? 0U : bits - 1);
        std::uint8_t* const to   = w.of.rungs_of(range.own) + range.first;
        ints const one           = ints{} + 1;
        ints reached[max_rungs]{}; // tokens at a rung or above
        ints non_finite{};
        neighbours<lanes> some;
        for (index_t i = t.rank() * lanes; i < range.count; i += t.size() * lanes)
        {
            some.read(opened, i);
            non_finite += some.non_finite;
            float bars[std::size_t{lanes}];
            MDKV_FOR_LANES(l, lanes) { bars[l] = i + l < ties ? below : multiplier; }
            auto const bar = load_lanes<floats>(bars);
            floats chosen  = some.loss[0];
            ints rung      = ints{} + std::int32_t{rungs.index[0]};
            for (std::size_t j = 1; j < rungs.count; ++j)
            {
                reached[j] += some.theta[j] > bar ? one : ints{};
                chosen = some.theta[j] > bar ? some.loss[j] : chosen;
                rung   = some.theta[j] > bar ? ints{} + std::int32_t{rungs.index[j]} : rung;
            }
            float losses[std::size_t{lanes}];
            std::int32_t numbers[std::size_t{lanes}];
            store_lanes(losses, chosen);
            __builtin_memcpy(numbers, &rung, sizeof numbers);
            double* const sums = opened.losses + (i & (columns - 1));
            MDKV_FOR_LANES(l, lanes) { sums[l] += double{losses[l]}; }
            if (!stores) { continue; }
            index_t const tokens = range.count - i < lanes ? range.count - i : index_t{lanes};
            std::uint8_t bytes[std::size_t{lanes}];
            MDKV_FOR_LANES(l, lanes) { bytes[l] = static_cast<std::uint8_t>(numbers[l]); }
            if (tokens == lanes) { __builtin_memcpy(to + i, bytes, sizeof bytes); }
            for (int l = 0; tokens < lanes && l < tokens; ++l) { to[i + l] = bytes[l]; }
        }
        count_rungs(t, range, rungs, reached, non_finite);
    }

    template <team Team>
    MDKV_HD void count_rungs(Team const& t, piece const& range, rung_table const& rungs,
        lane_ints<Team::register_lanes> const (&reached)[max_rungs],
        lane_ints<Team::register_lanes> const& non_finite) const
    {
        auto const over_lanes = [&](lane_ints<Team::register_lanes> const& x) {
            index_t sum = 0;
            for (int l = 0; l < Team::register_lanes; ++l) { sum += lane(x, l); }
            return t.sum(sum);
        };
        index_t const unusable     = over_lanes(non_finite);
        index_t above              = 0;
        std::int64_t* const counts = w.counts + range.head * index_t{max_rungs};
        for (std::size_t j = rungs.count; j-- > 0;)
        {
            index_t const up_to = j == 0 ? range.count : over_lanes(reached[j]);
            if (t.rank() == 0 && up_to > above) { t.add_across(counts + rungs.index[j], up_to - above); }
            above = up_to;
        }
        if (t.rank() == 0 && unusable > 0) { t.add_across(w.non_finite + range.limit, unusable); }
    }
};

/// Reports on each limit that was searched; on a limit that was searched again, only if that loses less. An item is a limit.
template <space S>
struct conclude
{
    static constexpr char const* name = "allocate_conclude";

    work<S> w;
    bool again;

    [[nodiscard]] static index_t scratch_bytes() { return columns * index_t{sizeof(double)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t limit) const
    {
        limit_search& search = w.searches[limit];
        if (!search.active) { return; }
        double const* const x = w.piece_losses + limit * w.pieces();
        double* const sums    = t.scratch().template take<double>(columns);
        double loss           = 0; // in the same order for every team
        for (index_t from = 0; from < w.pieces(); from += columns)
        {
            for (index_t c = t.rank(); c < columns; c += t.size())
            {
                sums[c] = from + c < w.pieces() ? x[from + c] : 0.0;
            }
            loss += tree_sum(t, sums);
        }
        t.sync(); // all have seen that the search was active
        if (t.rank() != 0) { return; }
        allocation found     = report_of(limit, search, loss);
        allocation& report   = w.report[limit];
        double const earlier = again && report.dual < found.dual ? report.dual : found.dual; // the bound of both
        search.active        = !again || found.loss < report.loss;
        report               = search.active ? found : report;
        report.dual          = earlier;
    }

private:
    [[nodiscard]] MDKV_HD allocation report_of(index_t limit, limit_search const& search, double loss) const
    {
        allocation report{.status = search.status, .loss = loss, .dual = loss, .limit = w.limit_values[limit]};
        index_t const paid = search.projected && w.of.longest() > 0 ? w.heads * w.charge : 0;
        index_t channels   = 0;
        for (index_t h = limit * w.heads; h < (limit + 1) * w.heads && w.of.longest() > 0; ++h)
        {
            bool rotated = false;
            for (std::size_t r = 0; r < w.costs.rungs; ++r)
            {
                index_t const tokens = w.counts[h * index_t{max_rungs} + static_cast<index_t>(r)];
                report.tokens[r] += tokens;
                report.token_bytes += tokens * w.costs.bytes[r];
                rotated = rotated || (tokens > 0 && w.costs.rotated[r]);
            }
            channels += rotated ? w.costs.channels : 0;
        }
        report.charged_bytes = paid + channels;
        if (search.over()) { return report; }
        if (w.non_finite[limit] > 0) { report.status = allocation_status::non_finite_loss; }
        float const m     = float_of_bits(search.multiplier == infinite_bits ? infinite_bits - 1 : search.multiplier);
        report.multiplier = double{m} / static_cast<double>(w.widest_step);
        // With or without ties, the rungs minimise loss + multiplier * bytes.
        index_t const left = w.bytes_of(limit) - paid - report.token_bytes;
        double const bound = loss - rounded_product(report.multiplier, static_cast<double>(left));
        report.dual        = loss < bound ? loss : bound;
        return report;
    }
};

/// The jobs of one search in their order: at most twelve launches on a GPU, whatever the losses.
/// \param again  without projected rungs; only what loses less than before is kept
template <backend B>
void solve(B const& on, work<B::memory_space> const& w, index_t words, ranks const* with, bool again)
{
    constexpr space S = B::memory_space;
    run(on, begin<S>{w, words, again});
    for (int level = 0; level < 3; ++level)
    {
        run(on, weigh<S>{w, false});
        sum_over_ranks(on, with, w.histogram, w.limits * bins);
        run(on, narrow<S>{w, false}, w.limits);
    }
    run(on, weigh<S>{w, true});
    sum_over_ranks(on, with, w.ties, w.limits * w.pieces());
    run(on, narrow<S>{w, true}, w.limits);
    run(on, assign<S>{w, !again});
    sum_over_ranks(on, with, w.counts, w.limits * (w.heads * index_t{max_rungs} + 1 + w.pieces()));
    run(on, conclude<S>{w, again}, w.limits);
    if (again) { run(on, assign<S>{w, true}); }
}

/// Takes the jobs' memory and solves: `mdkv::allocate` without its checks.
template <backend B>
void allocate(B const& on, list_losses<B::memory_space> const& of, rung_costs const& costs,
    in_view<index_t, 1, B> limits, allocate_options options, head_share const& heads, out_view<allocation, 1, B> report)
{
    index_t const all    = checked_multiply(heads.all, heads.layers);
    index_t const tokens = of.longest();
    // Every sum of bytes is at most this one.
    index_t const most = checked_multiply(checked_multiply(all, tokens), costs.bytes[costs.size() - 1]);
    static_cast<void>(checked_add(most, checked_multiply(all, checked_add(costs.widest_projection(), costs.channels))));
    index_t const widest = costs.bytes[costs.size() - 1] - costs.bytes[0];
    work<B::memory_space> w{};
    w.costs           = costs;
    w.charge          = costs.widest_projection();
    w.widest_step     = widest > 0 ? widest : 1;
    w.of              = of;
    w.limits          = limits.extent(0);
    w.limit_values    = limits.data_handle();
    w.report          = report.data_handle();
    w.heads           = w.limits > 0 ? all / w.limits : 0;
    w.own_in_layer    = heads.own;
    w.layer_stride    = heads.all;
    w.first_head      = heads.first;
    w.pieces_per_head = (tokens + piece_tokens - 1) / piece_tokens;
    for (bool const projected : {false, true})
    {
        float_environment const standard; // for the factors
        std::size_t closed = costs.size();
        for (std::size_t r = 0; r < costs.size(); ++r)
        {
            if (projected || costs.projection[r] == 0) { w.open[projected].add(r, costs.bytes[r], w.widest_step); }
            else { w.open[projected].index[--closed] = static_cast<std::uint8_t>(r); }
        }
    }
    index_t const words = w.limits * (bins + 2 * w.pieces() + w.heads * index_t{max_rungs} + 1); // from `histogram` on
    workspace::frame frame{*on.scratch};
    w.histogram    = frame.template take<std::int64_t>(words);
    w.searches     = frame.template take<limit_search>(w.limits);
    w.ties         = w.histogram + w.limits * bins;
    w.counts       = w.ties + w.limits * w.pieces();
    w.non_finite   = w.counts + all * index_t{max_rungs};
    w.piece_losses = reinterpret_cast<double*>(w.non_finite + w.limits);
    solve(on, w, words, heads.with, false);
    if (options.charge == projection_charge::if_better && w.charge > 0) { solve(on, w, words, heads.with, true); }
}

} // namespace MDKV_NAMESPACE::detail::dual
