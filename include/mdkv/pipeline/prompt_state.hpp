/// \file prompt_state.hpp: parts of a prompt's state: how far each layer is, its checks, and views of one layer.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/presets.hpp>

#include <cstddef>
#include <optional>

namespace mdkv::inline MDKV_MACHINE::detail
{

/// p + n, or null.
template <class V>
[[nodiscard]] constexpr V* after(V* p, index_t n) noexcept
{
    return p == nullptr ? nullptr : p + n;
}

/// Item i of the first dimension.
template <class V, std::size_t Rank, space S>
[[nodiscard]] constexpr view<V, Rank - 1, S> item_of(view<V, Rank, S> const& all, index_t i) noexcept
{
    array<index_t, Rank - 1> extents{};
    array<index_t, Rank - 1> strides{};
    for (std::size_t d = 1; d < Rank; ++d)
    {
        extents[d - 1] = all.extent(d);
        strides[d - 1] = all.stride(d);
    }
    return {after(all.data_handle(), i * all.stride(0)), extents, strides};
}

/// The last n rows of a dimension.
template <std::size_t Dim, class V, std::size_t Rank, space S>
[[nodiscard]] constexpr view<V, Rank, S> last(view<V, Rank, S> const& all, index_t n)
{
    return slice<Dim>(all, all.extent(Dim) - n, n);
}
template <std::size_t Dim, class V, std::size_t Rank, space S>
[[nodiscard]] constexpr std::optional<view<V, Rank, S>> last(std::optional<view<V, Rank, S>> const& all, index_t n)
{
    if (!all) { return std::nullopt; }
    return last<Dim>(*all, n);
}

/// The progress of a prompt's layers.
struct prompt_progress
{
    static constexpr index_t most_layers = 256;

    mdkv::array<index_t, std::size_t{most_layers}> read{}; ///< tokens of each layer that were replayed; -1: finished
    index_t finished = 0;                                  ///< number of finished layers

    [[nodiscard]] index_t& of(index_t layer) noexcept { return read[static_cast<std::size_t>(layer)]; }
    [[nodiscard]] index_t of(index_t layer) const noexcept { return read[static_cast<std::size_t>(layer)]; }

    void finish(index_t layer) noexcept
    {
        of(layer) = -1;
        ++finished;
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
    bool whole        = false; ///< every token has the full rung
    double multiplier = 0;     ///< see allocation
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
    expects(!p.replayed || !p.ratios.any_projected(), "prompt: preset.ratios has a projected rung, whose basis is not "
                                                      "known before the prompt's end; such a preset cannot replay");
    expects_not_negative("prompt", "preset.early_weight", p.early_weight);
    expects_not_negative("prompt", "preset.even", p.even);
    expects_not_negative("prompt", "preset.replayed.join", how.join);
    expects_not_negative("prompt", "preset.shared.odd", p.odd());
    expects_not_negative("prompt", "preset.scale", p.scale);
}

} // namespace mdkv::inline MDKV_MACHINE::detail
