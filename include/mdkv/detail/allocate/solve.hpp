/// \file solve.hpp: allocate's jobs in their order, and their memory (arXiv 2603.20616, sections 4.3, 4.4).
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/float_environment.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/allocate/assign.hpp>
#include <mdkv/detail/allocate/choose.hpp>
#include <mdkv/detail/allocate/search.hpp>
#include <mdkv/detail/allocate/work.hpp>
#include <mdkv/detail/ranks.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace MDKV_NAMESPACE::detail::dual
{

/// Each of n numbers, in the backend's memory, becomes the least over all ranks: the sum of numbers that each rank has in the
/// place of its first head.
template <backend B>
void least_over_ranks(B const& on, head_share const& heads, std::uint64_t* numbers, index_t n)
{
    if (dry_run(on)) { return; }
    std::vector<std::int64_t> all(static_cast<std::size_t>(heads.all * n));
    std::vector<std::int64_t> least(static_cast<std::size_t>(n));
    fetch(on, reinterpret_cast<std::int64_t*>(numbers), least.data(), n);
    for (std::size_t i = 0; i < least.size() && heads.own > 0; ++i)
    {
        all[static_cast<std::size_t>(heads.first * n) + i] = ~least[i];
    }
    heads.with->sum(heads.with->state, all.data(), heads.all * n);
    for (std::size_t i = 0; i < all.size(); ++i)
    {
        auto& best = least[i % least.size()];
        if (static_cast<std::uint64_t>(~all[i]) < static_cast<std::uint64_t>(best)) { best = ~all[i]; }
    }
    if constexpr (B::memory_space == space::host)
    {
        std::copy(least.begin(), least.end(), reinterpret_cast<std::int64_t*>(numbers));
    }
    else { copy(on, least.data(), numbers, n * index_t{sizeof(std::int64_t)}); }
}

/// Solves all limits. At most fifteen launches on a GPU, for any losses; one more over ranks.
/// \param words  words of all sums, from `histogram` on
template <backend B>
void solve(B const& on, work const& w, index_t words, head_share const& heads)
{
    auto const sum_over_ranks = [&](std::int64_t* numbers, index_t n) {
        detail::sum_over_ranks(on, heads.with, numbers, n);
    };
    run(on, begin{w, words});
    if (w.chooses())
    {
        run(on, weigh_sets{w});
        index_t const numbers = w.heads * 2 * coarse_bins + w.pieces(); // and least_losses
        sum_over_ranks(w.curve_bins, w.limits * w.sets * numbers);
        run(on, curves{w});
        run(on, choose{w}, w.limits);
    }
    auto const level = [&](index_t every) {
        run(on, weigh{w, every});
        sum_over_ranks(w.histogram, w.all_problems() * (bins + 1));
        run(on, narrow{w, every}, w.all_problems());
    };
    bool const sampled = !w.chooses() && w.heads * w.tokens >= least_sampled;
    int const levels   = w.chooses() ? 2 : sampled ? 4 : 3; // a wrong guess is a level lost
    if (sampled) { level(sample_share); }
    for (int i = 0; i < levels; ++i) { level(1); }
    run(on, weigh_ties{w});
    sum_over_ranks(w.ties, w.all_problems() * w.pieces());
    run(on, find_tie{w}, w.all_problems());
    sum_over_ranks(w.tie, w.all_problems() * 2);
    run(on, assign{w});
    if (w.gains != nullptr)
    {
        index_t const pairs = w.rungs() * w.rungs();
        least_over_ranks(on, heads, w.upgrades, w.all_problems() * pairs);
        run(on, value_upgrades{w}, w.all_problems());
        sum_over_ranks(w.counts, w.all_problems() * (w.heads * index_t{max_rungs} + 1 + w.pieces() + pairs));
    }
    run(on, conclude{w}, w.limits);
    if (w.chooses()) { run(on, copy_best{w}, w.limits * w.own_pieces()); }
}

/// The costs, and the sets of rungs that a head may have: all rungs up to each width of projections or, if all heads pay,
/// the rungs without projections and all rungs.
[[nodiscard]] inline work arrange(rung_costs const& costs, bool by_use, index_t tokens)
{
    float_environment const standard; // for the factors
    work w{};
    w.costs       = costs;
    w.widest_step = costs.bytes[costs.size() - 1] - costs.bytes[0];
    w.widest_step = w.widest_step > 0 ? w.widest_step : 1;
    w.tokens      = tokens;
    w.by_use      = by_use;
    rung_table all;
    for (std::size_t r = 0; r < costs.size(); ++r)
    {
        all.add(r, costs.bytes[r]);
        for (std::size_t a = 0; a < r; ++a) { all.compare(a, r, w.widest_step); }
    }
    w.inverse            = all.inverse;
    index_t const widest = costs.widest_projection();
    for (index_t width = 0;;)
    {
        rung_set set{};
        for (std::size_t r = costs.size(); r-- > 0;)
        {
            if (costs.projection[r] > width) { continue; }
            set.open  = static_cast<std::uint16_t>(set.open | 1 << r);
            set.least = tokens == 0 ? 0 : width + tokens * costs.bytes[r];
        }
        set.charge = width;
        if (set.open != 0) { w.set[static_cast<std::size_t>(w.sets++)] = set; }
        if (width == widest) { return w; }
        index_t next = widest;
        for (std::size_t r = 0; by_use && r < costs.size(); ++r)
        {
            next = costs.projection[r] > width && costs.projection[r] < next ? costs.projection[r] : next;
        }
        width = next;
    }
}

/// Takes the jobs' memory and solves: the body of `mdkv::allocate` on every backend.
/// \param first_token  [H + 1]  where each head's tokens begin, if heads have different numbers of tokens; or null
template <backend B>
void allocate_stage(B const& on, in_view<float, 3, B> loss, rung_costs const& costs, in_view<index_t, 1, B> limits,
    allocate_options options, out_view<std::uint8_t, 2, B> rung, out_view<allocation, 1, B> report,
    index_t const* first_token = nullptr)
{
    index_t const layers = options.ranks == nullptr ? 1 : options.layers;
    head_share const heads{options.ranks, layers, loss.extent(0) / layers};
    index_t const all    = checked_multiply(heads.all, layers);
    index_t const tokens = loss.extent(2);
    // Every sum of bytes is at most this one.
    index_t const most = checked_multiply(checked_multiply(all, tokens), costs.bytes[costs.size() - 1]);
    static_cast<void>(checked_add(most, checked_multiply(all, checked_add(costs.widest_projection(), costs.channels))));
    expects(all * tokens < most_tokens, "allocate: loss has ", all, " heads of ", tokens, " tokens; fewer than ",
        most_tokens, " in all are served");

    work w               = arrange(costs, options.charge == projection_charge::by_use, tokens);
    w.spend_leftover     = options.spend_leftover;
    w.limits             = limits.extent(0);
    w.heads              = w.limits == 1 ? all : 1;
    w.own_heads          = w.limits == 1 ? loss.extent(0) : 1;
    w.own_in_layer       = w.limits == 1 ? heads.own : 1;
    w.layer_stride       = w.limits == 1 && heads.all > 0 ? heads.all : 1;
    w.first_head         = heads.first; // 0 if limits are the heads' own
    w.candidates         = w.by_use && w.sets > 1 && all * tokens > 0 ? w.sets + 1 : 1;
    w.pieces_per_head    = (tokens + piece_tokens - 1) / piece_tokens;
    w.stretches_per_head = (tokens + stretch_tokens - 1) / stretch_tokens;
    while (w.dropped_bits < coarse_bits && most >> (41 + w.dropped_bits) != 0) { ++w.dropped_bits; }
    w.loss         = loss.data_handle();
    w.loss_of_head = loss.stride(0);
    w.loss_of_rung = loss.stride(1);
    w.first_token  = first_token;
    w.limit_values = limits.data_handle();
    w.rung         = rung.data_handle();
    w.rung_of_head = rung.stride(0);
    w.report       = report.data_handle();

    index_t const problems = w.all_problems();
    index_t const chosen   = w.chooses() ? w.limits : 0; // limits whose heads choose
    workspace::frame frame{*on.scratch, "allocate"};
    index_t const pairs      = w.rungs() * w.rungs();
    bool const over_ranks    = heads.with != nullptr;
    index_t const of_problem = bins + 3 + 2 * w.pieces() + w.heads * index_t{max_rungs} + 1 + (over_ranks ? pairs : 0);
    index_t const of_sets    = w.heads * 2 * coarse_bins + w.pieces();
    index_t const words      = problems * of_problem + chosen * w.sets * of_sets;
    w.histogram              = frame.template take<std::int64_t>(words);
    w.problems               = frame.template take<problem>(problems);
    w.set_of                 = frame.template take<std::uint8_t>(problems * w.heads);
    w.seen                   = frame.template take<std::uint8_t>(problems * w.own_stretches() * bins);
    w.upgrades               = frame.template take<std::uint64_t>(problems * pairs);
    w.best_problem           = frame.template take<index_t>(w.limits);
    w.lower_bound            = frame.template take<double>(chosen);
    w.other_rungs            = frame.template take<std::uint8_t>(chosen * w.sets * w.own_heads * tokens);
    if (frame.ready()) // otherwise a dry run
    {
        std::int64_t* at = w.histogram + problems * (bins + 1);
        auto const next  = [&at](index_t n) { return at += n, at - n; };
        w.ties           = next(problems * w.pieces());
        w.tie            = next(problems * 2);
        w.counts         = next(problems * w.heads * index_t{max_rungs});
        w.non_finite     = next(problems);
        w.piece_losses   = reinterpret_cast<double*>(next(problems * w.pieces()));
        w.gains          = over_ranks ? reinterpret_cast<double*>(next(problems * pairs)) : nullptr;
        w.curve_bins     = next(chosen * w.heads * w.sets * 2 * coarse_bins);
        w.least_losses   = reinterpret_cast<double*>(at);
    }
    solve(on, w, words, heads);
}

} // namespace MDKV_NAMESPACE::detail::dual
