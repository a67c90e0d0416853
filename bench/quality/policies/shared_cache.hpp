/// \file shared_cache.hpp: a layer's cache whose heads lie in several caches, each with its own share of the budget
#pragma once

#include <mdkv/compress.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/cpu/executor.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cache_maker.hpp"
#include "layer_cache.hpp"
#include "runner/scratch_memory.hpp"

namespace runner
{

/// Caches of equally many heads each, in the order of the heads.
class shared_cache : public layer_cache
{
public:
    /// \param share   the shape of one of the caches
    shared_cache(std::vector<std::unique_ptr<layer_cache>> parts, mdkv::layer_shape const& share)
        : parts_{std::move(parts)}
        , keys_{share.heads * share.dims.keys}
        , values_{share.heads * share.dims.values}
        , group_{share.group}
    {}

    void attend(mdkv::cpu::executor_ref executor, scratch_memory& scratch, float const* query, float const* key,
        float const* value, float* output) override
    {
        for (auto const& part : parts_)
        {
            part->attend(executor, scratch, query, key, value, output);
            query += keys_ * group_;
            key += keys_;
            value += values_;
            output += values_ * group_;
        }
    }

    [[nodiscard]] std::int64_t resident_bytes() const noexcept override
    {
        std::int64_t bytes = 0;
        for (auto const& part : parts_) { bytes += part->resident_bytes(); }
        return bytes;
    }

private:
    std::vector<std::unique_ptr<layer_cache>> parts_;
    std::int64_t keys_;   // floats of a part's keys of one token
    std::int64_t values_; // floats of its values
    std::int64_t group_;
};

/// The caches of layers whose heads were shared out, each in its parts. Reports are added up, but for the first share's multiplier.
/// \param shares   [shares][layers]
/// \param shape    the shape of a share of a layer
[[nodiscard]] inline std::vector<made_cache> put_together(
    std::vector<std::vector<made_cache>>& shares, mdkv::layer_shape const& shape)
{
    std::vector<made_cache> layers(shares[0].size());
    for (std::size_t i = 0; i < layers.size(); ++i)
    {
        std::vector<std::unique_ptr<layer_cache>> parts;
        mdkv::compress_report all = shares[0][i].report;
        for (std::size_t s = 0; s < shares.size(); ++s)
        {
            mdkv::compress_report const& own = shares[s][i].report;
            parts.push_back(std::move(shares[s][i].cache));
            if (s == 0) { continue; }
            for (std::size_t r = 0; r < all.chosen.tokens.size(); ++r) { all.chosen.tokens[r] += own.chosen.tokens[r]; }
            all.chosen.loss += own.chosen.loss;
            all.chosen.dual += own.chosen.dual;
            all.shape.heads += own.shape.heads;
            all.budget_bytes += own.budget_bytes;
            all.window_bytes += own.window_bytes;
            all.resident_bytes += own.resident_bytes;
            all.full_bytes += own.full_bytes;
        }
        layers[i] = {std::make_unique<shared_cache>(std::move(parts), shape), all};
    }
    return layers;
}

} // namespace runner
