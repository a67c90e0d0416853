/// \file steps.hpp: what prompt, reader and recompress share: progress, the choice of storage, and steps between two stages (arXiv 2603.20616, sections 4, 5).
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/replay/refit.hpp>
#include <mdkv/stages/allocate.hpp>

#include <algorithm>
#include <vector>

namespace MDKV_NAMESPACE::detail
{

/// The progress of a prompt's layers.
struct prompt_progress
{
    static constexpr index_t most_layers = 256;

    mdkv::array<index_t, std::size_t{most_layers}> read{}; ///< tokens of each layer that were replayed; -1: finished
    mdkv::array<index_t, std::size_t{most_layers}> furthest{}; ///< the most of them so far: parts may be read again
    index_t finished = 0;                                      ///< number of finished layers

    [[nodiscard]] index_t& of(index_t layer) noexcept { return read[static_cast<std::size_t>(layer)]; }
    [[nodiscard]] index_t of(index_t layer) const noexcept { return read[static_cast<std::size_t>(layer)]; }

    [[nodiscard]] index_t most(index_t layer) const noexcept { return furthest[static_cast<std::size_t>(layer)]; }
    void advance(index_t layer, index_t to) noexcept
    {
        of(layer)      = to;
        index_t& reach = furthest[static_cast<std::size_t>(layer)];
        reach          = reach < to ? to : reach;
    }

    MDKV_OUTLINE static void expects_layer(char const* stage, index_t layer, index_t layers)
    {
        expects(layer >= 0 && layer < layers, stage, ": layer is ", layer, "; it must be from 0 to ", layers - 1);
    }
    MDKV_OUTLINE void expects_open(char const* stage, index_t layer, index_t layers) const
    {
        expects_layer(stage, layer, layers);
        expects(of(layer) >= 0, stage, ": layer ", layer, " is finished");
    }
    MDKV_OUTLINE void expects_alike(char const* stage, index_t layers) const
    {
        for (index_t l = 1; l < layers; ++l)
        {
            expects(of(l) == of(0), stage, ": layer ", l, " has ", of(l), " tokens of the chunk, layer 0 has ", of(0));
        }
    }
};

/// How the tokens of a prompt are stored.
struct prompt_choice
{
    index_t budget       = -1;    ///< bytes of an average layer
    index_t stand_ins    = 0;     ///< most stand-ins of each head
    bool all_full        = false; ///< every token has the full rung
    bool coded_window    = false; ///< the window is stored in codes, as tokens with a rung
    bool coded_stand_ins = false; ///< stand-ins are stored in codes
    double multiplier    = 0;     ///< see allocation

    /// Bytes of each layer's arena.
    mdkv::array<index_t, std::size_t{prompt_progress::most_layers}> arena_bytes{};
};

/// How the budget of an average layer is spent before rungs are chosen.
struct spending
{
    preset const& settings;
    rung_costs const& costs;
    layer_shape layer; ///< with the heads of all ranks

    /// Finds out whether everything fits, how the window is stored, and the most stand-ins.
    [[nodiscard]] prompt_choice plan(char const* stage, index_t bytes) const
    {
        prompt_choice next{.budget = bytes};
        std::size_t const best = costs.size() - 1;
        index_t const exact    = layer.window_bytes();
        index_t const coded    = coded_window_bytes();
        next.all_full = settings.ratios[best].full() && bytes - exact >= layer.heads * layer.tokens * costs.bytes[best];
        next.coded_window    = !next.all_full && coded < exact && settings.window_part > bytes / exact;
        index_t const window = next.coded_window ? coded : exact;
        expects(bytes >= window, stage, ": a budget of ", bytes, " bytes a layer cannot hold the window of ",
            layer.window, " tokens; at least ", window, " bytes are needed");
        if (next.all_full || !settings.ratios.can_drop()) { return next; }
        plan_stand_ins(next, true);
        return next;
    }

    /// Sets how stand-ins are stored, and the most of a head: fewer if they are uncompressed against the preset's wish.
    /// \param codes  whether they may be in codes
    void plan_stand_ins(prompt_choice& next, bool codes) const
    {
        bool const coded     = codes && settings.coded_stand_ins && settings.ratios.any_rotated();
        index_t const most   = settings.most_stand_ins(coded, next.budget, layer.heads, stand_in_bytes(coded));
        index_t const head   = most * stand_in_bytes(coded) + (coded || next.coded_window ? costs.channels : 0);
        next.coded_stand_ins = coded;
        next.stand_ins       = layer.heads * head <= next.budget - window_bytes(next) ? most : 0;
        if (coded && next.stand_ins == 0) { plan_stand_ins(next, false); }
    }

    /// Whether a choice gives the set's cheapest codes to most of the tokens that it keeps: their noise costs little then,
    /// and that of window and stand-ins, too, which are in no loss.
    [[nodiscard]] bool codes_are_cheap(allocation const& chosen) const
    {
        std::size_t const codes = settings.ratios.cheapest_rotated();
        index_t more            = 0;
        for (std::size_t r = codes + 1; r < settings.ratios.size(); ++r) { more += chosen.tokens[r]; }
        return chosen.tokens[codes] >= more;
    }

    /// Bytes of the window in codes, and of the channels that they need; those of the exact window if the set has no codes.
    [[nodiscard]] index_t coded_window_bytes() const
    {
        std::size_t const codes = settings.ratios.costliest_rotated();
        if (codes == settings.ratios.size()) { return layer.window_bytes(); }
        return layer.heads * (layer.window * costs.bytes[codes] + costs.channels);
    }
    /// Bytes of the window by a choice, without the channels, which `allocate` sets aside.
    [[nodiscard]] index_t window_bytes(prompt_choice const& by) const
    {
        return by.coded_window ? coded_window_bytes() - layer.heads * costs.channels : layer.window_bytes();
    }
    [[nodiscard]] index_t stand_in_bytes(bool coded) const
    {
        return coded ? costs.bytes[settings.ratios.cheapest_rotated()] : layer.token_bytes();
    }
};

/// Finds the bytes of each layer's arena. An item is a layer.
template <element T, backend B>
struct size_arenas
{
    static constexpr char const* name = "size_arenas";

    in_view<std::uint8_t, 3, B> rungs; // [L, H, N]
    cache_layout layout;
    index_t stand_ins;
    index_t* bytes; // [L]

    MDKV_HD void operator()(team auto const& t, index_t l) const
    {
        index_t end = 0;
        head_entry entry;
        for (index_t h = 0; h < layout.heads; ++h)
        {
            mdkv::array<index_t, max_rungs> tokens{};
            for (index_t i = t.rank(); i < rungs.extent(2); i += t.size()) { ++tokens[rungs(l, h, i)]; }
            for (std::size_t r = 0; r < layout.rungs; ++r) { tokens[r] = t.sum(tokens[r]); }
            end = lay_out_head<T>(layout, tokens, end, entry, layout.stand_ins(tokens[0], stand_ins));
        }
        if (t.rank() == 0) { bytes[l] = end; }
    }
};

/// \throws invalid_argument   a member is out of its range, or two do not go together
MDKV_OUTLINE inline void expects_prompt_preset(preset const& p)
{
    expects(p.window >= 0, "prompt: preset.window is ", p.window, "; it must not be negative");
    expects(p.queries >= 1, "prompt: preset.queries is ", p.queries, "; it must be at least 1");
    expects(p.question >= 0, "prompt: preset.question is ", p.question, "; it must not be negative");
    replay_part const how = p.replayed.value_or(replay_part{});
    expects(how.chunk >= 1, "prompt: preset.replayed.chunk is ", how.chunk, "; it must be at least 1");
    expects(how.sinks >= 0, "prompt: preset.replayed.sinks is ", how.sinks, "; it must not be negative");
    expects(p.stand_ins >= 0, "prompt: preset.stand_ins is ", p.stand_ins, "; it must not be negative");
    expects(p.stand_in_part >= 1, "prompt: preset.stand_in_part is ", p.stand_in_part, "; it must be at least 1");
    expects(p.window_part >= 0, "prompt: preset.window_part is ", p.window_part, "; it must not be negative");
    expects_refit("prompt", "preset.refitted", p.refitted.value_or(refit_part{}));
    expects(!p.replayed || !p.ratios.any_projected(), "prompt: preset.ratios has a projected rung, whose basis is not "
                                                      "known before the prompt's end; such a preset cannot replay");
    expects_not_negative("prompt", "preset.early_weight", p.early_weight);
    expects_not_negative("prompt", "preset.uniform", p.uniform);
    expects_not_negative("prompt", "preset.replayed.join", how.join);
    expects_depth("prompt: preset.shared.depth", p.shared.value_or(sharing_part{}).depth);
    expects_width("prompt: preset.pooling.width", p.pooling.width);
    expects_not_negative("prompt", "preset.shared.leverage_power", p.leverage_power());
    expects_not_negative("prompt", "preset.scale", p.scale);
}

/// Waits for the stream of a GPU's backend.
/// \throws cuda_error   work before it failed
template <backend B>
void wait(B const& on)
{
    fetch(on, static_cast<std::byte const*>(nullptr), static_cast<std::byte*>(nullptr), 0);
}

/// Chooses rungs within limits, and returns the sum of the reports; waits.
template <backend B>
[[nodiscard]] allocation allocate_within(B const& on, char const* stage, std::vector<index_t> const& bytes,
    rung_costs const& costs, allocate_options options, list_losses<B::memory_space> const& of)
{
    index_t const count = std::ssize(bytes);
    workspace::frame frame{on.scratch};
    auto const limits  = scratch_view<index_t>(on, frame, count);
    auto const reports = scratch_view<allocation>(on, frame, count);
    copy(on, bytes.data(), limits.data_handle(), count * index_t{sizeof(index_t)});
    mdkv::allocate(on, of, costs, as_input(limits), options, reports);
    std::vector<allocation> found(bytes.size());
    fetch(on, reports.data_handle(), found.data(), count);
    allocation total;
    for (allocation const& one : found)
    {
        total.status     = (std::max)(total.status, one.status);
        total.multiplier = (std::max)(total.multiplier, one.multiplier);
        total.loss += one.loss;
        total.dual += one.dual;
        total.limit += one.limit;
        total.token_bytes += one.token_bytes;
        total.charged_bytes += one.charged_bytes;
        for (std::size_t r = 0; r < max_rungs; ++r) { total.tokens[r] += one.tokens[r]; }
    }
    expects<non_finite_input>(total.status != allocation_status::non_finite_loss, stage,
        ": a loss is NaN or infinite; queries, keys, values, lse or lse_elsewhere are not finite, or too large to "
        "multiply");
    return total;
}

} // namespace MDKV_NAMESPACE::detail
