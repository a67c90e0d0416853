/// \file replayed_losses.hpp: losses of a layer's tokens by the prompt's own queries, replayed while it is read
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/prompt.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "attention_node.hpp"
#include "cell_list.hpp"
#include "gathered_cells.hpp"
#include "last_queries.hpp"
#include "own_prompt.hpp"
#include "rotary_of_node.hpp"
#include "shared.hpp"

namespace mdkv_ggml
{

/// Losses of the first places of one sequence, without a gap. A prompt of one layer replays them, because the number of
/// layers is not known while the first part of a prompt is read.
class replayed_losses
{
public:
    /// Scores the tokens of a prompt's part by their own queries; the part begins at place `before`.
    void add(attention_node const& node, cell_list const& cells, index_t before, shared& with)
    {
        cut(before);
        if (tokens() != before) { return; }
        auto const timer = with.counts.replay.start();
        if (!prompt_) { begin(node, with.chosen.preset); }
        gathered_cells const part{with.threads, node, cells, before, node.tokens()};
        with.lend([&](mdkv::cpu::backend on) {
            (*prompt_)->read_chunk(on, 0, before,
                {.queries          = node.queries(on, 0, node.tokens()),
                    .keys          = part.keys(on),
                    .values        = part.values(on),
                    .lse_elsewhere = node.sink_logits(on)});
        });
        for (index_t t = 0; t < node.tokens(); ++t) { words_.push_back(node.word(cells[before + t])); }
    }

    void cut(index_t places)
    {
        if (places < tokens()) { words_.resize(static_cast<std::size_t>(places)); }
    }

    void clear() noexcept
    {
        prompt_.reset();
        words_ = {};
    }

    [[nodiscard]] index_t tokens() const noexcept { return std::ssize(words_); }

    /// Whether the losses belong to the first `count` tokens in the cells.
    [[nodiscard]] bool are_of(attention_node const& node, cell_list const& cells, index_t count) const noexcept
    {
        index_t place = 0;
        while (place < std::min(count, tokens()) && words_[static_cast<std::size_t>(place)] == node.word(cells[place]))
        {
            ++place;
        }
        return place == count;
    }

    /// [H, R, count]  losses of the first places
    [[nodiscard]] mdkv::in_view<float, 3, mdkv::cpu::backend> first(index_t count) const
    {
        return mdkv::slice<2>((*prompt_)->losses_of(0), 0, count);
    }

private:
    void begin(attention_node const& node, mdkv::preset preset)
    {
        rotation_    = rotation_of(node);
        preset.scale = node.scale();
        preset.shared.reset();
        preset.refitted.reset();
        if (rotation_.none()) { preset.replayed->ahead = 0; }
        mdkv::prompt_shape<mdkv::cpu::backend> const shape{.layers = 1,
            .heads                                                 = node.heads(),
            .group                                                 = node.query_heads() / node.heads(),
            .dims                                                  = node.dims(),
            .tokens                                                = node.cells(),
            .encoding                                              = rotation_.encoding(mdkv::cpu::backend{})};
        prompt_.emplace(preset, shape);
    }

    node_rotation rotation_{};         // its frequencies are the prompt's, too
    std::optional<own_prompt> prompt_; // none before the first part
    std::vector<std::uint64_t> words_; // words of the tokens' cells
};

} // namespace mdkv_ggml
