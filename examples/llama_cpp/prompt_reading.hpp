/// \file prompt_reading.hpp: a prompt's layers, compressed while the engine reads the prompt
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/prompt.hpp>
#include <mdkv/reader.hpp>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attention_node.hpp"
#include "cell_list.hpp"
#include "gathered_cells.hpp"
#include "last_queries.hpp"
#include "layer_prompt.hpp"
#include "memory_plan.hpp"
#include "own_prompt.hpp"
#include "rotary_of_node.hpp"
#include "shared.hpp"

namespace mdkv_ggml
{

/// A reader of the layers of one sequence that are alike. The engine's own code computes a prompt's first part, because the
/// layers are known only after it; the reader takes it from the cells and the remembered queries, and computes the next parts.
class prompt_reading
{
    using host = mdkv::cpu::backend;

public:
    static constexpr index_t least_chunk = 512; ///< llama.cpp's largest batch, unless a program sets another

    /// Reads the first `tokens` tokens of a layer, and of the layers after it that are like it.
    /// \param layers   gives the layer_prompt of all layers of the sequence, in order
    /// \throws mdkv::error   the limit does not hold the window, or a value is NaN or infinite
    template <class Layers>
    static void begin(layer_prompt& one, Layers const& layers, cell_list const& cells, index_t tokens, shared& with)
    {
        std::vector<layer_prompt*> all = layers();
        all.erase(all.begin(), std::find(all.begin(), all.end(), &one));
        std::erase_if(all, [&](layer_prompt* other) { return !is_like(one, *other, cells, tokens); });
        auto const made = std::make_shared<prompt_reading>(one, std::ssize(all), with);
        while (made->tokens() < tokens)
        {
            index_t const n = std::min(made->options_.chunk, tokens - made->tokens());
            for (index_t i = 0; layer_prompt* const layer : all) { made->read_again(i++, *layer, cells, n, with); }
        }
        for (index_t i = 0; layer_prompt* const layer : all)
        {
            layer->read  = made;
            layer->place = i++;
            layer->queries.limit(with.chosen.preset.queries);
        }
    }

    /// Whether the queries of all tokens so far are remembered.
    [[nodiscard]] static bool can_begin(layer_prompt const& layer, index_t tokens) noexcept
    {
        return tokens > 0 && !layer.node.empty() && layer.queries.count_before(tokens, tokens) == tokens;
    }

    prompt_reading(layer_prompt& like, index_t layers, shared const& with)
        : rotation_{like.rotation}
        , caches_(static_cast<std::size_t>(layers))
    {
        attention_node const node = like.node.get();
        mdkv::preset preset       = with.chosen.preset;
        preset.scale              = node.scale();
        preset.stand_ins          = 0; // joint_prompt makes none, either
        if (rotation_.none()) { preset.replayed->ahead = 0; }
        options_ = {.limit = memory_plan{node, node.cells(), 1.0, with}.limit(),
            .chunk         = std::max(least_chunk, with.most_tokens)};
        most_    = node.cells();
        mdkv::prompt_shape<host> const shape{.layers = layers,
            .heads                                   = node.heads(),
            .group                                   = node.query_heads() / node.heads(),
            .dims                                    = node.dims(),
            .tokens                                  = most_,
            .encoding                                = rotation_.encoding(host{})};
        reader_.emplace(preset, shape, options_, std::span{caches_});
    }

    /// Tokens of all parts that were read in all layers.
    [[nodiscard]] index_t tokens() const noexcept { return report_.tokens; }

    /// Whether the next part may be read: `count` tokens after the first `before`.
    [[nodiscard]] bool takes(index_t before, index_t count) const noexcept
    {
        return reader_ && before == tokens() && count <= options_.chunk && before + count <= most_;
    }

    /// Reads a part in a layer, and writes its attention and the sums of its softmax (shared::log_sum); the last layer's call
    /// brings all layers within the limit.
    void attend(index_t place, attention_node const& node, cell_list const& cells, shared& with)
    {
        index_t const n = node.tokens();
        read(
            place, node, cells, n, [&](host on) { return node.queries(on, 0, n); },
            [&](host on) { return node.output(on, 0, n); }, with);
    }

    /// Ends the prompt, in whichever layer first, and gives a layer's cache away.
    [[nodiscard]] mdkv::cpu::cache<mdkv::half> take(index_t place, shared& with)
    {
        if (reader_)
        {
            forget_part(with);
            report_ = with.lend([&](host on) { return (*reader_)->finish(on); });
            reader_.reset();
        }
        mdkv::cpu::cache<mdkv::half> taken = std::move(caches_[static_cast<std::size_t>(place)]);
        if (place + 1 == std::ssize(caches_)) { with.trim(); }
        return taken;
    }

    /// The bytes that a layer has of the mean layer's, after `take`.
    [[nodiscard]] double share(mdkv::cpu::cache<mdkv::half> const& taken) const noexcept
    {
        return static_cast<double>(taken.arena_bytes() * std::ssize(caches_)) / static_cast<double>(report_.held_bytes);
    }

    /// Bytes of a layer: its cache, with room for a part, and its part of the losses.
    [[nodiscard]] index_t bytes(index_t place) const noexcept
    {
        auto const& cache = caches_[static_cast<std::size_t>(place)];
        return cache.arena_bytes() + cache.tail_bytes() + cache.directory_bytes()
               + report_.losses_bytes / std::ssize(caches_);
    }

    std::string stopped; ///< why the layers may not go on, if they may not

private:
    /// Whether the queries of a layer's tokens are remembered, and the layer is like another one.
    [[nodiscard]] static bool is_like(layer_prompt& one, layer_prompt& other, cell_list const& cells, index_t tokens)
    {
        return !other.read && can_begin(other, tokens) && other.queries.is_of(other.node.get(), cells)
               && other.node.get().is_like(one.node.get()) && other.rotation == one.rotation;
    }

    /// Reads the next n tokens of a layer, whose attention the engine has computed.
    void read_again(index_t place, layer_prompt& layer, cell_list const& cells, index_t n, shared& with)
    {
        attention_node const node = layer.node.get();
        last_queries const by{node, layer.queries, tokens() + n, n};
        mdkv::array<index_t, 3> const sizes{{node.query_heads(), n, node.dims().values}};
        std::vector<float> unused(static_cast<std::size_t>(sizes[0] * sizes[1] * sizes[2]));
        read(
            place, node, cells, n, [&](host on) { return by.queries(on); },
            [&](host on) { return mdkv::out(on, unused.data(), sizes[0], sizes[1], sizes[2]); }, with);
    }

    template <class Queries, class Output>
    void read(index_t place, attention_node const& node, cell_list const& cells, index_t n, Queries const& queries,
        Output const& output, shared& with)
    {
        if (place == 0) { forget_part(with); }
        mdkv::expects(place == next_, "the layers of a prompt came in another order than before");
        gathered_cells const part{with.threads, node, cells, tokens(), n};
        with.log_sum.resize(static_cast<std::size_t>(node.query_heads() * n));
        with.lend([&](host on) {
            (*reader_)->attend(on, place,
                {.queries          = queries(on),
                    .keys          = part.keys(on),
                    .values        = part.values(on),
                    .lse_elsewhere = node.sink_logits(on)},
                output(on), mdkv::out(on, with.log_sum.data(), node.query_heads(), n));
        });
        if (++next_ < std::ssize(caches_)) { return; }
        report_ = with.lend([&](host on) { return (*reader_)->end_chunk(on); });
        next_   = 0;
        with.trim();
    }

    /// Takes a part back that only some layers have read, because its graph was not computed to the end.
    void forget_part(shared& with)
    {
        if (std::exchange(next_, 0) > 0)
        {
            with.lend([&](host on) { (*reader_)->forget_chunk(on); });
        }
    }

    node_rotation rotation_; // its frequencies are the reader's, too
    mdkv::reader_options options_{};
    mdkv::reader_report report_{};
    std::vector<mdkv::cpu::cache<mdkv::half>> caches_; // [L]
    std::optional<own_reader> reader_;                 // until the prompt ends
    index_t most_ = 0;                                 // most tokens of a prompt
    index_t next_ = 0;                                 // layer that reads next
};

} // namespace mdkv_ggml
