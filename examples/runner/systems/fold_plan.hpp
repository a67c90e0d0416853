/// \file fold_plan.hpp: a sequence's cache within fixed memory: every layer's share of memory, and the count of bytes held
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <string>

#include "runner/language_model.hpp"
#include "runner/policies.hpp"

namespace runner
{

/// Last appended queries that a fold scores by; they take memory of the cache.
inline constexpr std::int64_t most_fold_queries = 8;

/// A layer's limits, and the number of appended tokens at which it folds.
struct fold_plan
{
    std::int64_t arena   = 0; // most bytes of its compressed part
    std::int64_t every   = 0; // appended tokens that are folded into it at a time
    std::int64_t queries = 0; // last queries of these tokens, kept to fold by
    std::int64_t prompt  = 0; // tokens of the prompt, if the arena grows with the text beyond them; 0: it does not
};

/// Counts the bytes that it hands out.
class counted_memory : public std::pmr::memory_resource
{
public:
    [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }
    [[nodiscard]] std::int64_t most_bytes() const noexcept { return most_; } // most bytes at any time

private:
    void* do_allocate(std::size_t bytes, std::size_t alignment) override
    {
        void* const memory = std::pmr::new_delete_resource()->allocate(bytes, alignment);
        bytes_ += static_cast<std::int64_t>(bytes);
        most_ = std::max(most_, bytes_);
        return memory;
    }

    void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override
    {
        std::pmr::new_delete_resource()->deallocate(memory, bytes, alignment);
        bytes_ -= static_cast<std::int64_t>(bytes);
    }

    [[nodiscard]] bool do_is_equal(std::pmr::memory_resource const& other) const noexcept override
    {
        return this == &other;
    }

    std::int64_t bytes_ = 0;
    std::int64_t most_  = 0;
};

/// State that the folding layers of a sequence share: their memory, and the number and time of folds.
struct fold_ledger
{
    counted_memory memory;
    std::int64_t folds = 0; // folds of single layers
    double seconds     = 0;
};

/// Divides the memory of a sequence's cache among the model's layers, all buffers included. One more share is for the layer
/// that is being folded: its new cache is made before the old one goes.
/// \param window   last tokens that stay as they are
/// \param option   the command's option that asks for folds, for messages
/// \throws mdkv::invalid_argument   the policy cannot be folded, or the bytes do not hold the windows, naming what would
template <mdkv::element T>
[[nodiscard]] fold_plan share_memory(std::int64_t max_bytes, std::int64_t every, std::int64_t window,
    policy const& chosen, model_shape const& shape, std::string const& option)
{
    mdkv::expects(chosen.kind == cache_kind::mixed, option, ": policy ", chosen.label,
        " cannot go on compressing while it decodes; those made of rungs can, such as paper and by_window");
    mdkv::expects(chosen.share == sharing::uniform && !chosen.one_budget(), option, ": policy ", chosen.label,
        " shares bytes among the heads of all layers; here every layer gets the same");
    mdkv::expects(chosen.options.ratios.can_drop(), option, ": policy ", chosen.label, " must be able to drop tokens");
    mdkv::expects(chosen.tail == 0, option, ": policy ", chosen.label, " folds into its layers' own bytes");
    mdkv::expects(!chosen.while_reading, option, ": policy ", chosen.label,
        " is compressed while it is read, and its caches do not fold");
    constexpr std::int64_t element = sizeof(T);
    std::int64_t const token       = shape.kv_heads * (shape.key_dim + shape.value_dim) * element;
    fold_plan plan{.every = every, .queries = std::min(most_fold_queries, every)};
    std::int64_t const directory =
        shape.kv_heads * std::int64_t{sizeof(mdkv::head_entry)} + std::int64_t{sizeof(mdkv::index_t)};
    std::int64_t const beside = every * token + directory + plan.queries * shape.query_heads * shape.key_dim * element;
    std::int64_t const shares = shape.layers + 1;
    std::int64_t const least  = chosen.kept_window(window) * token;
    plan.arena                = max_bytes / shares - beside;
    mdkv::expects(plan.arena >= least, option, ": ", max_bytes, " bytes do not hold the windows, the last ", every,
        " tokens and ", plan.queries, " queries of ", shape.layers, " layers; at least ", (least + beside) * shares,
        " are needed");
    return plan;
}

} // namespace runner
