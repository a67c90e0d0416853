/// \file replayed_losses.hpp: losses of a layer's tokens by the prompt's own queries, replayed chunk by chunk while it is read
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/replay/replay.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention_node.hpp"
#include "cell_list.hpp"
#include "gathered_cells.hpp"
#include "last_queries.hpp"
#include "rotary_of_node.hpp"
#include "shared.hpp"

namespace mdkv_ggml
{

/// Losses of the first places of one sequence, without a gap.
class replayed_losses
{
public:
    /// Scores the tokens of a prompt's part by their own queries; the part begins at place `before`.
    void add(attention_node const& node, cell_list const& cells, index_t before, shared& with)
    {
        cut(before);
        if (tokens() != before) { return; }
        auto const timer             = with.counts.replay.start();
        mdkv::preset const& p        = with.chosen.preset;
        rows_                        = node.heads() * static_cast<index_t>(p.ratios.size());
        node_rotation const rotation = rotation_of(node);
        for (index_t i = 0; i < node.tokens(); i += p.replayed->chunk)
        {
            index_t const place = before + i;
            index_t const count = std::min(p.replayed->chunk, node.tokens() - i);
            gathered_cells const chunk{with.threads, node, cells, place, count};
            gathered_cells const sinks{with.threads, node, cells, 0, std::min(place, p.replayed->sinks)};
            std::vector<float> const logits = sink_logits(node, count);
            chunk_.resize(static_cast<std::size_t>(rows_ * count));
            with.lend([&](mdkv::cpu::backend on) {
                auto options  = p.replay<mdkv::cpu::backend>(rotation.encoding(on));
                options.scale = node.scale();
                if (rotation.none()) { options.ahead = 0; }
                if (!logits.empty()) { options.lse_elsewhere = mdkv::in(on, logits.data(), node.query_heads(), count); }
                mdkv::replay(on, node.queries(on, i, count), chunk.keys(on), chunk.values(on), sinks.keys(on), p.ratios,
                    options, mdkv::out(on, chunk_.data(), node.heads(), rows_ / node.heads(), count));
            });
            for (index_t t = 0; t < count; ++t)
            {
                for (index_t row = 0; row < rows_; ++row)
                {
                    losses_.push_back(chunk_[static_cast<std::size_t>(row * count + t)]);
                }
                words_.push_back(node.word(cells[place + t]));
            }
        }
    }

    void cut(index_t places)
    {
        if (places >= tokens()) { return; }
        losses_.resize(static_cast<std::size_t>(places * rows_));
        words_.resize(static_cast<std::size_t>(places));
    }

    void clear() noexcept
    {
        losses_ = {};
        words_  = {};
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

    /// \param to   [H, R, count], losses of the first places
    void write(index_t count, float* to) const noexcept
    {
        for (index_t row = 0; row < rows_; ++row)
        {
            for (index_t t = 0; t < count; ++t) { *to++ = losses_[static_cast<std::size_t>(t * rows_ + row)]; }
        }
    }

private:
    std::vector<float> losses_;        // [tokens, H, R]
    std::vector<std::uint64_t> words_; // words of the tokens' cells
    std::vector<float> chunk_;         // [H, R, count]
    index_t rows_ = 0;                 // H * R
};

} // namespace mdkv_ggml
