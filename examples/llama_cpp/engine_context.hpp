/// \file engine_context.hpp: all layers of one of the engine's contexts: which serves a node, what passes on, and what is said of both
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
#include "layer_state.hpp"
#include "settings.hpp"
#include "shared.hpp"

namespace mdkv_ggml
{

inline std::atomic<bool> any_contexts = false, any_work = false; // of this process

/// A program that made contexts and never brought a node here is told so when it ends.
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

/// Computes single nodes with the engine's own code.
class own_code
{
public:
    own_code()
        : backend_{ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr)}
        , context_{ggml_init({ggml_graph_overhead_custom(1, false) + ggml_tensor_overhead(), nullptr, true})}
        , graph_{ggml_new_graph_custom(context_.get(), 1, false)}
    {
        mdkv::expects(backend_ != nullptr, "there is no CPU backend to pass nodes to");
    }

    [[nodiscard]] ggml_status compute(ggml_tensor* node) const
    {
        ggml_graph_clear(graph_);
        ggml_graph_add_node(graph_, node);
        return ggml_backend_graph_compute(backend_.get(), graph_);
    }

    void set_threads(int threads) const
    {
        auto* const registry = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend_.get()));
        auto* const set      = reinterpret_cast<ggml_backend_set_n_threads_t>(
            ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_n_threads"));
        if (set != nullptr) { set(backend_.get(), threads); }
    }

private:
    struct release
    {
        void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); }
        void operator()(ggml_context* context) const { ggml_free(context); }
    };
    std::unique_ptr<ggml_backend, release> backend_;
    std::unique_ptr<ggml_context, release> context_;
    ggml_cgraph* graph_;
};

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
        std::string why;
        outcome end = outcome::passed;
        if (node->src[1] != nullptr) { with_.most_cells = std::max(with_.most_cells, attention.cells()); }
        char const* const reason = attention.why_not();
        if (reason == nullptr && attention.sequences() > 1) { return compute_each(attention); }
        if (reason == nullptr) { end = step(attention, true, why); }
        else
        {
            why = reason;
            end = reads_freed(attention) ? outcome::refused : outcome::passed;
        }
        if (!count(attention, end, why)) { return GGML_STATUS_FAILED; }
        return end == outcome::served ? GGML_STATUS_SUCCESS : own_code_.compute(node);
    }

private:
    /// A node of several sequences, each with cells of its own.
    [[nodiscard]] ggml_status compute_each(attention_node const& all)
    {
        std::vector<index_t> passed;
        for (index_t i = 0; i < all.sequences(); ++i)
        {
            node_of_one one{all, i};
            std::string why;
            outcome const end = step(attention_node{one.get()}, false, why);
            if (!count(attention_node{one.get()}, end, why)) { return GGML_STATUS_FAILED; }
            if (end == outcome::passed) { passed.push_back(i); }
        }
        if (std::ssize(passed) == all.sequences()) { return own_code_.compute(all.node); }
        for (index_t const i : passed)
        {
            node_of_one one{all, i};
            ggml_status const status = own_code_.compute(one.get());
            if (status != GGML_STATUS_SUCCESS) { return status; }
        }
        return GGML_STATUS_SUCCESS;
    }

    outcome step(attention_node const& node, bool alone, std::string& why)
    {
        index_t const before = node.tokens_before();
        layer_state& layer   = layer_of(node, before);
        index_t const bytes  = layer.bytes();
        outcome const end    = layer.step(node, before, alone, with_, why);
        held_ += layer.bytes() - bytes;
        with_.counts.most = std::max(with_.counts.most, held_);
        return end;
    }

    /// Returns whether the node can be computed.
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

    /// Layers are told apart by where their keys lie, and, as some share them, by their place in the graph.
    layer_state& layer_of(attention_node const& node, index_t before)
    {
        int place       = -1;
        char const* tag = node.node->name;
        if (std::sscanf(node.node->name, "node_%d", &place) == 1)
        {
            tag        = "";
            auto& last = last_[node.stream()];
            if (place <= last.place || before != last.before || node.tokens() != last.tokens)
            {
                last.visits.clear();
                last.masks.clear();
            }
            std::tie(last.place, last.before, last.tokens) = std::tuple{place, before, node.tokens()};
        }
        auto& last             = last_[node.stream()];
        void const* const mask = node.mask().data;
        if (last.masks.try_emplace(node.cells(), mask).first->second != mask) { with_.two_masks.insert(node.cells()); }
        void const* const keys = node.k().data;
        int const visit        = last.visits[keys]++;
        std::string const name = tag + std::to_string(visit);
        if (visit > 0) { with_.shared_keys.insert(keys); }
        auto& layer = layers_[{keys, place < 0 ? std::string{tag} : name}];
        if (!layer)
        {
            layer        = std::make_unique<layer_state>(std::ssize(layers_), last.says, node);
            with_.layers = std::max<index_t>(1, std::count_if(layers_.begin(), layers_.end(), [&](auto const& one) {
                return one.second->cells() == with_.most_cells && one.second->stream() == node.stream();
            }));
        }
        return *layer;
    }

    /// Whether a node that no layer is made for reads cells that a layer has given back, as those of several sequences may.
    [[nodiscard]] bool reads_freed(attention_node const& node) const
    {
        if (node.node->src[1] == nullptr) { return false; }
        auto const* const first = static_cast<std::byte const*>(node.k().data);
        return std::any_of(layers_.begin(), layers_.end(), [&](auto const& one) {
            auto const* const keys = static_cast<std::byte const*>(one.first.first);
            return one.second->freed() > 0 && keys >= first && keys < first + ggml_nbytes(&node.k());
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
            s.at > 0 ? ("once " + std::to_string(s.at) + " are there").c_str() : "when the first is decoded",
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
                std::snprintf(text, sizeof text, "%g %% of their bytes, tail included", limit.amount);
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
        std::fprintf(stderr,
            "mdkv: decoded %td steps of layers from compressed caches: %.2f MiB at most, %.1f %% of the engine's cells "
            "in the mean; compressed %td layers in %.3f s, folded %td tails in %.3f s, attended in %.3f s, %.2f MiB of "
            "scratch",
            c.attend.calls(), static_cast<double>(c.most) / 0x1p20,
            c.cell_bytes > 0 ? 100 * c.bytes / c.cell_bytes : 0.0, c.compress.calls(), c.compress.seconds(),
            c.fold.calls(), c.fold.seconds(), c.attend.seconds(),
            static_cast<double>(with_.scratch.size() * sizeof(shared::line)) / 0x1p20);
        if (with_.chosen.free_cells)
        {
            std::fprintf(stderr, ", gave back %.2f MiB of cells", static_cast<double>(c.freed) / 0x1p20);
        }
        std::fprintf(stderr, "\n");
        if (!c.unfolded.empty()) { std::fprintf(stderr, "mdkv: tails grew unfolded: %s\n", c.unfolded.c_str()); }
        for (auto const& [why, passed] : c.reasons)
        {
            std::fprintf(stderr, "mdkv: passed through: %zu layers (%td nodes): %s\n", passed.layers.size(),
                passed.nodes, why.c_str());
        }
    }

    /// A sequence's last step.
    struct last_step
    {
        std::map<void const*, int> visits;    ///< of keys
        std::map<index_t, void const*> masks; ///< by cells
        sequence says;
        int place      = -1;
        index_t before = -1;
        index_t tokens = 0;
    };

    shared with_;
    own_code own_code_;
    std::map<std::pair<void const*, std::string>, std::unique_ptr<layer_state>> layers_;
    std::map<index_t, last_step> last_; // of each sequence with cells of its own
    index_t held_   = 0;                // bytes of all caches
    index_t served_ = 0;
    index_t passed_ = 0;
};

} // namespace mdkv_ggml
