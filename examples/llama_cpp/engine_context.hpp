/// \file engine_context.hpp: all layers of one of the engine's contexts: nodes served and passed on, and a report of both
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention_node.hpp"
#include "ggml-backend.h"
#include "ggml.h"
#include "layer_prompt.hpp"
#include "layer_state.hpp"
#include "own_code.hpp"
#include "sequence.hpp"
#include "sequence_table.hpp"
#include "settings.hpp"
#include "shared.hpp"

namespace mdkv_ggml
{

inline std::atomic<bool> any_contexts = false, any_work = false; // in this process

/// Tells a program at its end if it made contexts and never brought a node here.
struct last_words
{
    ~last_words()
    {
        if (any_contexts && !any_work)
        {
            std::fprintf(stderr,
                "mdkv: no attention was computed here: flash attention is off (run with -fa on), or on "
                "another device than the CPU\n");
        }
    }
};
inline last_words const at_exit;

/// All layers of one of the engine's contexts.
class context
{
public:
    explicit context(settings from)
        : with_{std::move(from)}
    {}
    context(context const&)            = delete;
    context& operator=(context const&) = delete;
    ~context()
    {
        with_.counts.shares.end_graph();
        if (with_.chosen.verbosity > 0 && served_ + passed_ > 0) { report(); }
    }

    void set_threads(int threads)
    {
        with_.threads.resize(threads);
        own_code_.set_threads(threads);
    }

    [[nodiscard]] index_t served() const noexcept { return served_; }

    [[nodiscard]] ggml_status compute(ggml_tensor* node)
    {
        if (with_.chosen.verbosity > 0 && served_ + passed_ == 0) { announce(); }
        any_work = true;
        attention_node const attention{node};
        if (node->src[1] != nullptr)
        {
            with_.most_cells  = std::max(with_.most_cells, attention.cells());
            with_.most_tokens = std::max(with_.most_tokens, attention.tokens());
            with_.counts.shares.begin(attention);
        }
        char const* const reason = attention.why_not();
        if (reason == nullptr) { return compute_parts(attention); }
        outcome const end = reads_freed(attention) ? outcome::refused : outcome::passed;
        return count(attention, end, reason) ? own_code_.compute(node) : GGML_STATUS_FAILED;
    }

private:
    /// One of the model's layers in one of the engine's caches.
    struct layer
    {
        index_t number;
        index_t cells;
        index_t stream;
        freed_cells freed{};
        std::map<index_t, layer_state> states{}; ///< by the sequence's number
    };

    /// State that the layers of one of the engine's caches share.
    struct engine_cache
    {
        sequence_table sequences;
        std::map<void const*, int> visits{}; ///< visits of keys in the last graph
        void const* mask = nullptr;          ///< first mask in the last graph
        int place        = -1;               ///< the last node's place in its graph
        index_t tokens   = 0;
    };

    /// Computes a node of any number of sequences, each of which is served or passed on by itself.
    [[nodiscard]] ggml_status compute_parts(attention_node const& all)
    {
        struct rows
        {
            index_t stream, first, tokens;
        };
        std::vector<rows> passed;
        index_t served = 0;
        for (index_t stream = 0; stream < all.streams(); ++stream)
        {
            part_of_node of_stream{all, stream, 0, all.tokens()};
            attention_node const batch{of_stream.get()};
            layer& here       = layer_of(batch);
            auto const& parts = caches_[{here.cells, here.stream}].sequences.parts(batch);
            forget(here);
            for (batch_part const& part : parts)
            {
                part_of_node of_part{all, stream, part.first, part.tokens};
                attention_node const node{of_part.get()};
                std::string why;
                outcome const end = step(node, part, here, all.streams() == 1 && parts.size() == 1, why);
                if (!count(node, end, why)) { return GGML_STATUS_FAILED; }
                if (end == outcome::served) { ++served; }
                else if (!passed.empty() && passed.back().stream == stream
                         && passed.back().first + passed.back().tokens == part.first)
                {
                    passed.back().tokens += part.tokens;
                }
                else { passed.push_back({stream, part.first, part.tokens}); }
            }
        }
        if (served == 0) { return own_code_.compute(all.node); }
        for (rows const& one : passed)
        {
            part_of_node part{all, one.stream, one.first, one.tokens};
            ggml_status const status = own_code_.compute(part.get());
            if (status != GGML_STATUS_SUCCESS) { return status; }
        }
        return GGML_STATUS_SUCCESS;
    }

    outcome step(attention_node const& node, batch_part const& part, layer& here, bool alone, std::string& why)
    {
        if (part.of == nullptr)
        {
            why = part.why;
            return here.freed.seen_by(node) || sees_blank(node) ? outcome::refused : outcome::passed;
        }
        for (index_t i = part.known ? 0 : 1; part.why == nullptr && i < part.tokens; ++i)
        {
            here.freed.written(node, part.of->cells[part.before + i]);
        }
        if (with_.chosen.free_cells)
        {
            here.freed.allow(caches_[{here.cells, here.stream}].sequences.own_first_cells(*part.of));
        }
        layer_state& state =
            here.states.try_emplace(part.of->number, here.number, *part.of, here.cells, here.freed).first->second;
        auto const all = [&] { return prompts(here, part.of->number); };
        weigh(state, -1);
        outcome const end = state.step(node, part, alone, with_, all, why);
        weigh(state, 1);
        with_.counts.most = std::max(with_.counts.most, held_);
        if (state.read_bytes() > 0) { with_.counts.most_read = std::max(with_.counts.most_read, held_ + read_); }
        if (end == outcome::served && state.made())
        {
            with_.counts.shares.serve(node, here.stream, part.first, part.tokens, state.tokens(), state.bytes());
        }
        return end;
    }

    /// Prompts of a sequence's uncompressed layers, in order; only of layers with `like`'s number of cells and stream.
    [[nodiscard]] std::vector<layer_prompt*> prompts(layer const& like, index_t sequence)
    {
        std::map<index_t, layer_prompt*> found;
        for (auto& [key, one] : layers_)
        {
            auto const state = one->states.find(sequence);
            if (one->cells != like.cells || one->stream != like.stream || state == one->states.end()) { continue; }
            if (!state->second.made()) { found[one->number] = &state->second.prompt(); }
        }
        std::vector<layer_prompt*> all;
        for (auto const& [number, prompt] : found) { all.push_back(prompt); }
        return all;
    }

    /// Drops what layers hold of tokens that other sequences have overwritten.
    void forget(layer const& like)
    {
        for (auto const& [number, tokens] : caches_[{like.cells, like.stream}].sequences.take_cut())
        {
            for (auto& [key, one] : layers_)
            {
                auto const state = one->states.find(number);
                if (one->cells != like.cells || one->stream != like.stream || state == one->states.end()) { continue; }
                weigh(state->second, -1);
                if (tokens > 0)
                {
                    state->second.cut(tokens);
                    weigh(state->second, 1);
                }
                else { one->states.erase(state); }
            }
        }
    }

    /// Adds a layer's bytes, or takes them away.
    void weigh(layer_state const& state, int sign) noexcept
    {
        held_ += sign * state.bytes();
        read_ += sign * state.read_bytes();
    }

    /// Counts a node's outcome, and returns whether the node can be computed.
    bool count(attention_node const& node, outcome end, std::string const& why)
    {
        if (end != outcome::served && !why.empty())
        {
            auto& reason = with_.counts.reasons[why];
            reason.layers.insert(layer_name(node));
            ++reason.nodes;
        }
        if (end == outcome::refused)
        {
            std::fprintf(stderr,
                "mdkv: error: %s: %s, and its cells were given back to the system (MDKV_FREE=1): this cannot be "
                "computed any more. Start the sequence again, or run with MDKV_FREE=0.\n",
                layer_name(node).c_str(), why.c_str());
            return false;
        }
        ++(end == outcome::served ? served_ : passed_);
        return true;
    }

    /// The layer of a node, found by the address of its keys and, because some layers share keys, by its place in the
    /// graph.
    layer& layer_of(attention_node const& node)
    {
        int place          = -1;
        char const* tag    = node.node->name;
        engine_cache& last = caches_[{node.cells(), node.stream()}];
        if (std::sscanf(node.node->name, "node_%d", &place) == 1)
        {
            tag = "";
            if (place <= last.place || node.tokens() != last.tokens)
            {
                last.visits.clear();
                last.mask = nullptr;
            }
            std::tie(last.place, last.tokens) = std::pair{place, node.tokens()};
        }
        void const* const mask = node.mask().data;
        if (last.mask == nullptr) { last.mask = mask; }
        if (last.mask != mask) { with_.two_masks.insert(node.cells()); }
        void const* const keys = node.k().data;
        int const visit        = last.visits[keys]++;
        if (visit > 0) { with_.shared_keys.insert(keys); }
        auto& one = layers_[{keys, place < 0 ? std::string{tag} : tag + std::to_string(visit)}];
        if (!one)
        {
            one          = std::make_unique<layer>(layer{std::ssize(layers_), node.cells(), node.stream()});
            with_.layers = std::max<index_t>(1, std::count_if(layers_.begin(), layers_.end(), [&](auto const& other) {
                return other.second->cells == with_.most_cells && other.second->stream == node.stream();
            }));
        }
        return *one;
    }

    /// Whether a node without a layer, e.g. one of several sequences, reads cells that a layer has given back.
    [[nodiscard]] bool reads_freed(attention_node const& node) const
    {
        if (node.node->src[1] == nullptr) { return false; }
        auto const* const first = static_cast<std::byte const*>(node.k().data);
        return std::any_of(layers_.begin(), layers_.end(), [&](auto const& one) {
            auto const* const keys = static_cast<std::byte const*>(one.first.first);
            return one.second->freed.any() && keys >= first && keys < first + ggml_nbytes(&node.k());
        });
    }

    [[nodiscard]] static std::string layer_name(attention_node const& node)
    {
        return node.node->src[1] == nullptr ? "a layer" : attention_node::whole(node.k()).name;
    }

    void announce() const
    {
        settings const& s = with_.chosen;
        std::fprintf(stderr, "mdkv: compresses KV caches of at least %td tokens %s to %s, preset %s; %s%s\n", s.least,
            s.reading  ? "while they are read"
            : s.at > 0 ? ("once " + std::to_string(s.at) + " are there").c_str()
                       : "when the first is decoded",
            limit_text().c_str(), s.preset.name,
            s.free_cells ? "the engine's cells are given back" : "the engine's own cells stay",
            s.limit.whole() ? " (everything is kept)" : "");
    }

    [[nodiscard]] std::string limit_text() const
    {
        char text[64];
        memory_limit const& limit = with_.chosen.limit;
        switch (limit.in)
        {
            case memory_limit::unit::percent:
                std::snprintf(text, sizeof text, "%g %% of %s bytes, tail included", limit.amount,
                    with_.chosen.reading ? "all cells'" : "their");
                break;
            case memory_limit::unit::tokens:
                std::snprintf(text, sizeof text, "the bytes of %g tokens, tail included", limit.amount);
                break;
            case memory_limit::unit::bytes:
                std::snprintf(text, sizeof text, "%.1f MiB, tail included", limit.amount / 0x1p20);
                break;
        }
        return text;
    }

    void report() const
    {
        tally const& c = with_.counts;
        if (c.attend.calls() == 0) { std::fprintf(stderr, "mdkv: no token was decoded from a compressed cache\n"); }
        else { report_served(c); }
        if (c.replay.calls() > 0)
        {
            std::fprintf(
                stderr, "mdkv: replayed %td parts of prompts in %.3f s\n", c.replay.calls(), c.replay.seconds());
        }
        if (c.read.calls() > 0)
        {
            std::fprintf(stderr,
                "mdkv: read %td parts of prompts in %.3f s, compressed on the way: %.2f MiB at most, with the parts\n",
                c.read.calls(), c.read.seconds(), static_cast<double>(c.most_read) / 0x1p20);
        }
        if (!c.unfolded.empty()) { std::fprintf(stderr, "mdkv: tails grew unfolded: %s\n", c.unfolded.c_str()); }
        for (auto const& [why, passed] : c.reasons)
        {
            std::fprintf(stderr, "mdkv: passed through: %zu layers (%td nodes): %s\n", passed.layers.size(),
                passed.nodes, why.c_str());
        }
    }

    void report_served(tally const& c) const
    {
        std::fprintf(stderr,
            "mdkv: decoded %td steps of layers from compressed caches: %.2f MiB of these at most; in the mean %.1f %% "
            "of the "
            "cells of all %td layers, %.1f %% of those of the %td served; compressed %td layers in %.3f s, folded %td "
            "tails "
            "in %.3f s, attended in %.3f s, %.2f MiB of scratch",
            c.attend.calls(), static_cast<double>(c.most) / 0x1p20, c.shares.all().percent(), c.shares.caches(),
            c.shares.of_served().percent(), c.shares.served_caches(), c.compress.calls(), c.compress.seconds(),
            c.fold.calls(), c.fold.seconds(), c.attend.seconds(), static_cast<double>(with_.scratch->held()) / 0x1p20);
        if (with_.chosen.free_cells)
        {
            std::fprintf(stderr, ", gave back %.2f MiB of cells", static_cast<double>(c.freed) / 0x1p20);
        }
        std::fprintf(stderr, "\n");
    }

    shared with_;
    own_code own_code_;
    std::map<std::pair<index_t, index_t>, engine_cache> caches_; // by cells and stream
    std::map<std::pair<void const*, std::string>, std::unique_ptr<layer>> layers_;
    index_t held_   = 0; // bytes of all caches
    index_t read_   = 0; // bytes of prompts that are being read
    index_t served_ = 0;
    index_t passed_ = 0;
};

} // namespace mdkv_ggml
