/// \file layer_state.hpp: one layer of one sequence: its compressed cache, and whether it fits the engine's cells
#pragma once

#include <mdkv/append.hpp>
#include <mdkv/attend.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/recompress.hpp>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <string>

#include "attention_node.hpp"
#include "cell_watch.hpp"
#include "freed_cells.hpp"
#include "joint_prompt.hpp"
#include "last_queries.hpp"
#include "layer_prompt.hpp"
#include "memory_plan.hpp"
#include "prompt_reading.hpp"
#include "rotary_of_node.hpp"
#include "sequence.hpp"
#include "settings.hpp"
#include "shared.hpp"

namespace mdkv_ggml
{

enum class outcome
{
    served, ///< the node's output was written
    passed, ///< the engine's own code must compute the node, from its own cells
    refused ///< the node cannot be computed: cells that it needs were given back
};

/// The compressed part holds the first `base` tokens of the sequence, the tail the tokens after them; while the prompt is read,
/// both are its prompt_reading's. A program may overwrite
/// cells between two steps (it loads a state, or shifts positions): their keys then differ from the keys that were compressed.
class layer_state
{
public:
    /// \param number   the layer's number in the order in which the layers of its sequence are computed
    /// \param cells    number of cells of the layer's cache
    /// \param freed    freed cells of the layer, for all of its sequences
    layer_state(index_t number, sequence& of, index_t cells, freed_cells& freed)
        : of_{of}
        , freed_{freed}
        , watch_{number, of}
        , number_{number}
        , cells_{cells}
    {}

    /// Computes one part of a node; `node` has the part's tokens alone. `why` is the reason if the part is not served;
    /// empty for a prompt.
    /// \param alone    whether the engine's node had no other part
    /// \param layers   gives the layer_prompt of all layers of the sequence, in order
    template <class Layers>
    outcome step(attention_node const& node, batch_part const& part, bool alone, shared& with, Layers const& layers,
        std::string& why)
    {
        why.clear();
        ++steps_;
        // A prompt beside other sequences comes in pieces, and a piece may be one token.
        index_t const before = part.before;
        bool const decoding  = node.tokens() == 1 && (alone || last_tokens_ == 1);
        last_tokens_         = node.tokens();
        if (!made() && cells_ < with.most_cells)
        {
            why = "a sliding window (its cache is smaller than that of other layers)";
            return outcome::passed;
        }
        if (before < given_up_at_ || before > 2 * given_up_at_) { given_up_.clear(); } // the reason may be gone
        if (reads() && !prompt_.read->stopped.empty())
        {
            why = prompt_.read->stopped;
            drop(before, why);
        }
        if (before < compressed())
        {
            why = "the sequence was cut within the compressed part";
            drop(before, why);
        }
        if (base_ > 0 && !watch_.untouched(node, before))
        {
            why = "its cells were overwritten (a state was loaded, or positions were shifted)";
            drop(0, why);
        }
        if (freed_.any_of(of_.cells, part.why == nullptr ? tokens() : 0, before + node.tokens()))
        {
            if (why.empty()) { why = "its cells had been given back"; }
            return outcome::refused;
        }
        if (base_ == 0 && some_blank(node, of_.cells, before))
        {
            why = "its cells hold zeros (a state was saved after they had been given back)";
            return outcome::refused;
        }
        if (part.why != nullptr)
        {
            why = part.why;
            return outcome::passed;
        }
        prompt_.cut(before);
        if (compressed() == 0 && !prompt_.queries.is_of(node, of_.cells)) { prompt_.clear(); }
        try
        {
            if (!made())
            {
                bool const ends = wanted(decoding, before, with, why);
                if (with.chosen.reading && !reads() && (ends || !decoding)) { begin(before, with, layers, why); }
                if (reads() && decoding && !ends) { drop(before, why); }
                if (reads())
                {
                    keep_up(node, with);
                    if (!ends && part.only && prompt_.read->takes(before, node.tokens()))
                    {
                        read(node, before, with);
                        return outcome::served;
                    }
                    take(node, before, with);
                }
                else if (ends) { compress(node, before, with, layers); }
                else
                {
                    pass(node, before, decoding, with);
                    return outcome::passed;
                }
                settled(node, with);
            }
            serve(node, before, with);
            return outcome::served;
        }
        catch (std::exception const& error)
        {
            why = error.what();
        }
        drop(0, why);
        given_up_    = why;
        given_up_at_ = before;
        return freed_.any_of(of_.cells, 0, before) ? outcome::refused : outcome::passed;
    }

    /// Frees memory after the sequence was cut to its first `tokens`; the next step would find out anyway.
    void cut(index_t tokens)
    {
        if (tokens < compressed()) { drop(tokens, "the sequence was cut within the compressed part"); }
    }

    [[nodiscard]] layer_prompt& prompt() noexcept { return prompt_; }
    [[nodiscard]] bool made() const noexcept { return cache_.layout().heads > 0; }

    /// Bytes that stay from one token to the next.
    [[nodiscard]] index_t bytes() const noexcept
    {
        return made() ? cache_.arena_bytes() + cache_.tail_bytes() + cache_.directory_bytes() + prompt_.queries.bytes()
                      : 0;
    }
    /// Bytes of a prompt that is being read, at the last step.
    [[nodiscard]] index_t read_bytes() const noexcept { return read_bytes_; }
    [[nodiscard]] index_t tokens() const noexcept { return compressed() + cache_.appended(); }

private:
    static constexpr index_t growth       = 64; ///< tokens by which an unfolded tail grows
    static constexpr index_t most_at_once = 16; ///< tokens of a batch that one pass over the cache serves

    [[nodiscard]] bool reads() const noexcept { return prompt_.read != nullptr; }
    [[nodiscard]] index_t compressed() const noexcept { return reads() ? prompt_.read->tokens() : base_; }

    /// \param why   for the other layers, if the prompt is being read
    void drop(index_t before, std::string const& why)
    {
        cache_      = {};
        base_       = 0;
        read_bytes_ = 0;
        if (reads()) { prompt_.read->stopped = why; }
        prompt_.read.reset();
        prompt_.joint.reset();
        prompt_.cut(before);
        watch_.end();
    }

    /// Whether the compressed cache is to be made now.
    [[nodiscard]] bool wanted(bool decoding, index_t before, shared const& with, std::string& why) const
    {
        settings const& chosen = with.chosen;
        if (why.empty()) { why = given_up_; }
        if (!why.empty()) { return false; }
        if (before < std::max(chosen.least, chosen.at))
        {
            if (decoding) { why = "it has fewer tokens than MDKV_MIN or MDKV_AT"; }
            return false;
        }
        if (chosen.at == 0 && !decoding) { return false; }
        if (reads()) { return true; }
        // All layers must have been seen, and there must be queries to score by, which a prompt leaves.
        index_t const seen = prompt_.queries.count_before(before, most_fold_queries);
        if (steps_ > 1 && seen == most_fold_queries) { return true; }
        if (decoding)
        {
            why = "few of its queries were seen yet (a state was loaded, or it shares another one's cells)";
        }
        return false;
    }

    /// Leaves a part to the engine's own code.
    void pass(attention_node const& node, index_t before, bool decoding, shared& with)
    {
        settings const& chosen = with.chosen;
        bool const first       = before == 0;
        if (first)
        {
            prompt_.queries.limit(
                chosen.reading ? std::max(chosen.preset.queries, node.tokens()) : chosen.preset.queries);
        }
        remember_last(node, before, chosen.reading && first ? node.tokens() : chosen.preset.queries);
        if (!chosen.preset.replayed || (chosen.reading ? !first : decoding)) { return; }
        prompt_.node.keep(node);
        if (!chosen.reading) { return prompt_.replayed.add(node, of_.cells, before, with); }
        prompt_.rotation = rotation_of(node);
        if (chosen.free_cells) { with.counts.freed += node.give_back_zeros(); }
    }

    /// Begins to compress the prompt while it is read, if its tokens so far can be read.
    template <class Layers>
    void begin(index_t before, shared& with, Layers const& layers, std::string& why)
    {
        if (before == 0 || !why.empty()) { return; }
        if (with.two_masks.contains(cells_))
        {
            why = "a prompt is held to its end: its layers have masks of two kinds";
        }
        else if (!prompt_reading::can_begin(prompt_, before))
        {
            why = "a prompt is held to its end: its first tokens came without queries (a state was loaded or cut)";
        }
        else
        {
            auto const timer = with.counts.read.start();
            prompt_reading::begin(prompt_, layers, of_.cells, before, with);
        }
    }

    /// Notes that the part before was compressed.
    void keep_up(attention_node const& node, shared& with)
    {
        if (base_ == prompt_.read->tokens()) { return; }
        base_ = prompt_.read->tokens();
        watch_.cut_tail(0);
        settled(node, with);
    }

    void read(attention_node const& node, index_t before, shared& with)
    {
        auto const timer = with.counts.read.start();
        prompt_.read->attend(prompt_.place, node, of_.cells, with);
        remember_last(node, before, with.chosen.preset.queries);
        give_back(node, before + node.tokens(), with);
        watch_.cut_tail(0); // rows of a graph that was not computed to its end
        for (index_t i = 0; i < node.tokens(); ++i) { watch_.append(node, before + i); }
        read_bytes_ = prompt_.read->bytes(prompt_.place);
    }

    /// Takes the layer's cache of a prompt that was read.
    void take(attention_node const& node, index_t before, shared& with)
    {
        auto const timer = with.counts.read.start();
        memory_plan const now{node, before, 1.0, with};
        cache_      = prompt_.read->take(prompt_.place, with);
        share_      = prompt_.read->share(cache_);
        base_       = prompt_.read->tokens();
        read_bytes_ = 0;
        with.log("read", node, base_, cache_.arena_bytes());
        prompt_.read.reset();
        begin_tail(node, before, now);
    }

    /// Remembers the last `most` queries of a batch.
    void remember_last(attention_node const& node, index_t before, index_t most)
    {
        for (index_t i = std::max<index_t>(0, node.tokens() - most); i < node.tokens(); ++i)
        {
            prompt_.queries.add(node, i, before + i, of_.cells[before + i]);
        }
    }

    /// Begins an empty tail behind a compressed part that is new, with room for the tokens before a batch.
    void begin_tail(attention_node const& node, index_t before, memory_plan const& now)
    {
        watch_.cut_tail(0);
        cache_.reserve_tail(std::max(now.rows > 0 ? now.rows : growth, before - base_));
        keep_ = now.keep;
        prompt_.queries.limit(fold_queries(node));
    }

    template <class Layers>
    void compress(attention_node const& node, index_t before, shared& with, Layers const& layers)
    {
        auto const timer = with.counts.compress.start();
        memory_plan const now{node, before, 1.0, with};
        prompt_.node.keep(node);
        if (!prompt_.joint || prompt_.joint->tokens() != before)
        {
            joint_prompt::choose(prompt_, layers, of_.cells, before, with);
        }
        prompt_.joint->pack(node, prompt_, of_.cells, with, cache_);
        bool const shares = prompt_.joint->shares();
        share_            = shares ? static_cast<double>(cache_.arena_bytes()) / static_cast<double>(now.arena) : 1.0;
        base_             = before;
        with.log("compressed", node, before, cache_.arena_bytes());
        begin_tail(node, before, now);
        prompt_.joint.reset();
        prompt_.replayed.clear();
    }

    /// Folds the tail into the compressed part, all but its last tokens. Returns false if nothing can be folded.
    bool fold(attention_node const& node, shared& with)
    {
        mdkv::preset const& p = with.chosen.preset;
        memory_plan const now{node, tokens(), share_, with};
        index_t const folded = cache_.appended() - keep_; // the remembered queries end before the tokens kept
        last_queries const by{node, prompt_.queries, base_ + folded, fold_queries(node)};
        if (now.rows == 0 || folded <= 0 || by.count() == 0) { return false; }
        auto const timer        = with.counts.fold.start();
        index_t const all       = tokens();
        auto options            = mdkv::fold_options<mdkv::cpu::backend>(p, now.limit(), by.count());
        *cache_.view().appended = folded; // later tokens are in the engine's cells, too
        try
        {
            with.lend([&](mdkv::cpu::backend on) {
                options.lse_elsewhere = node.sink_logits(on);
                return mdkv::recompress(on, by.queries(on), p.ratios, options, cache_);
            });
        }
        catch (...)
        {
            *cache_.view().appended = all - base_;
            throw;
        }
        base_ += folded;
        keep_ = now.keep;
        prompt_.queries.clear();
        watch_.cut_tail(0);
        cache_.reserve_tail(now.rows);
        for (index_t place = base_; place < all; ++place) { append(node, place); }
        settled(node, with);
        with.log("folded", node, all, cache_.arena_bytes());
        return true;
    }

    void serve(attention_node const& node, index_t before, shared& with)
    {
        mdkv::workspace none{mdkv::cpu::host_memory{}};
        mdkv::truncate_tail(mdkv::cpu::backend{&none}, before - base_, cache_);
        watch_.cut_tail(cache_.appended());
        for (index_t place = tokens(); place < before; ++place) // tokens of batches that another backend computed
        {
            make_room(node, with);
            append(node, place);
        }
        for (index_t i = 0; i < node.tokens();)
        {
            make_room(node, with);
            index_t const n = std::min({node.tokens() - i, cache_.tail_capacity() - cache_.appended(), most_at_once});
            for (index_t place = before + i; place < before + i + n; ++place)
            {
                remember(node, place - before, place);
                append(node, place);
            }
            auto const timer = with.counts.attend.start();
            with.log_sum.resize(static_cast<std::size_t>(node.query_heads() * n));
            with.lend_reading(cache_.arena_bytes() + cache_.tail_bytes(), [&](mdkv::cpu::backend on) {
                mdkv::attend(on, node.queries(on, i, n), cache_, {.lse_elsewhere = node.sink_logits(on)},
                    node.output(on, i, n), mdkv::out(on, with.log_sum.data(), node.query_heads(), n));
            });
            i += n;
        }
    }

    /// Remembers queries by which the tail will be folded: the last ones before the tokens that a fold keeps.
    void remember(attention_node const& node, index_t i, index_t place)
    {
        index_t const end = base_ + cache_.tail_capacity() - keep_;
        if (place >= end - fold_queries(node) && place < end) { prompt_.queries.add(node, i, place, of_.cells[place]); }
    }

    void make_room(attention_node const& node, shared& with)
    {
        if (cache_.appended() < cache_.tail_capacity()) { return; }
        try
        {
            if (fold(node, with)) { return; }
        }
        catch (mdkv::error const& error) // nothing was changed
        {
            with.counts.unfolded = error.what();
        }
        cache_.reserve_tail(cache_.tail_capacity() + growth);
    }

    void append(attention_node const& node, index_t place)
    {
        mdkv::workspace none{mdkv::cpu::host_memory{}};
        mdkv::cpu::backend const on{&none};
        index_t const cell = of_.cells[place];
        mdkv::append(on, node.key(on, cell), node.value(on, cell), cache_);
        watch_.append(node, place);
    }

    /// Gives back, if settings allow, the compressed part's cells; begins to watch the cells.
    void settled(attention_node const& node, shared& with)
    {
        give_back(node, base_, with);
        watch_.begin(node, base_);
    }

    /// Gives back, if settings allow, the cells of the first `tokens` tokens that no other sequence may need.
    void give_back(attention_node const& node, index_t tokens, shared& with)
    {
        settings const& chosen = with.chosen;
        if (chosen.free_cells && base_ >= std::max(chosen.least, chosen.at) && !with.two_masks.contains(cells_)
            && !with.shared_keys.contains(node.k().data))
        {
            with.counts.freed += freed_.give_back(node, tokens, with.next_stamp);
        }
    }

    sequence& of_;
    freed_cells& freed_;
    mdkv::cpu::cache<mdkv::half> cache_;
    layer_prompt prompt_;
    cell_watch watch_;
    std::string given_up_;
    index_t number_;
    index_t cells_;
    index_t given_up_at_ = 0;
    index_t last_tokens_ = 0; ///< tokens of the step before
    index_t base_        = 0;
    index_t keep_        = 0; ///< tokens that the next fold keeps
    index_t read_bytes_  = 0; ///< bytes of a prompt that is being read
    double share_        = 1; ///< factor of the compressed part's bytes (see memory_plan)
    index_t steps_       = 0;
};

} // namespace mdkv_ggml
