/// \file prompt_state.hpp: a prompt's state: how far each layer is, how its tokens are stored, and which presets it takes (arXiv 2603.20616, sections 4, 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/replay/refit.hpp>

#include <cstddef>
#include <cstdint>

namespace MDKV_NAMESPACE::detail
{

/// The progress of a prompt's layers.
struct prompt_progress
{
    static constexpr index_t most_layers = 256;

    mdkv::array<index_t, std::size_t{most_layers}> read{}; ///< tokens of each layer that were replayed; -1: finished
    mdkv::array<index_t, std::size_t{most_layers}> furthest{}; ///< the most of them so far: parts may be read again
    index_t finished = 0;                                  ///< number of finished layers

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
    MDKV_OUTLINE void expects_next(char const* stage, index_t layer, index_t first) const
    {
        expects(first <= of(layer), stage, ": first is ", first, "; of layer ", layer, " only ", of(layer),
            " tokens were read");
    }
    MDKV_OUTLINE void expects_read(char const* stage, index_t layer, index_t tokens) const
    {
        expects(of(layer) >= tokens, stage, ": of layer ", layer, " only ", of(layer), " tokens were read, not all ",
            tokens, " before the window (read_chunk)");
    }
    MDKV_OUTLINE void expects_alike(char const* stage, index_t layers) const
    {
        for (index_t l = 1; l < layers; ++l)
        {
            expects(of(l) == of(0), stage, ": layer ", l, " has ", of(l), " tokens of the chunk, layer 0 has ", of(0));
        }
    }
    MDKV_OUTLINE void expects_all_finished(char const* stage, index_t layers) const
    {
        for (index_t l = 0; l < layers && finished < layers; ++l)
        {
            expects(of(l) < 0, stage, ": layer ", l, " is not finished");
        }
    }
};

/// How the tokens of a prompt are stored.
struct prompt_choice
{
    index_t budget    = -1;    ///< bytes of an average layer
    index_t stand_ins = 0;     ///< most stand-ins of each head
    bool all_full        = false; ///< every token has the full rung
    bool coded_window    = false; ///< the window is stored in codes, as tokens with a rung
    bool coded_stand_ins = false; ///< stand-ins are stored in codes
    double multiplier = 0;     ///< see allocation

    /// Bytes of each layer's arena.
    mdkv::array<index_t, std::size_t{prompt_progress::most_layers}> arena_bytes{};
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

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t l) const
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

/// Gives the last tokens of each head one rung. An item is a head of a layer.
template <backend B>
struct fill_last_rungs
{
    static constexpr char const* name = "fill_last_rungs";

    out_view<std::uint8_t, 3, B> rungs; // [L, H, N]
    index_t first;
    std::uint8_t rung;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const heads = rungs.extent(1);
        for (index_t i = first + t.rank(); i < rungs.extent(2); i += t.size())
        {
            rungs(item / heads, item % heads, i) = rung;
        }
    }
};

} // namespace MDKV_NAMESPACE::detail
