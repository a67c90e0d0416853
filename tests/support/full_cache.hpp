/// \file full_cache.hpp: the plainest KV cache: every token's key and value, attended by the definition; for tests and benches
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <mdkv/core/types.hpp>

#include "runner/language_model.hpp"
#include "runner/prefill.hpp"

namespace support
{

template <mdkv::element T>
class full_cache
{
public:
    explicit full_cache(runner::model_shape const& shape)
        : shape_{shape}
        , keys_(static_cast<std::size_t>(shape.layers * shape.kv_heads))
        , values_(static_cast<std::size_t>(shape.layers * shape.kv_heads))
    {}

    /// Takes over what a layer's prefill hands out.
    void load(runner::layer_kv<T> const& layer)
    {
        for (std::int64_t h = 0; h < shape_.kv_heads; ++h)
        {
            T const* const k = layer.keys + h * layer.tokens * shape_.key_dim;
            T const* const v = layer.values + h * layer.tokens * shape_.value_dim;
            keys(layer.layer, h).assign(k, k + layer.tokens * shape_.key_dim);
            values(layer.layer, h).assign(v, v + layer.tokens * shape_.value_dim);
        }
    }

    /// Appends one token's key and value, then attends; the shape of decode_step's callback.
    void attend(std::int64_t layer, float const* query, float const* key, float const* value, float* out)
    {
        for (std::int64_t h = 0; h < shape_.kv_heads; ++h)
        {
            for (std::int64_t d = 0; d < shape_.key_dim; ++d)
            {
                keys(layer, h).push_back(mdkv::narrow<T>(key[h * shape_.key_dim + d]));
            }
            for (std::int64_t d = 0; d < shape_.value_dim; ++d)
            {
                values(layer, h).push_back(mdkv::narrow<T>(value[h * shape_.value_dim + d]));
            }
        }
        std::int64_t const group = shape_.query_heads / shape_.kv_heads;
        for (std::int64_t h = 0; h < shape_.query_heads; ++h)
        {
            attend_head(keys(layer, h / group), values(layer, h / group), query + h * shape_.key_dim,
                out + h * shape_.value_dim);
        }
    }

private:
    void attend_head(std::vector<T> const& k, std::vector<T> const& v, float const* query, float* out) const
    {
        auto const tokens = static_cast<std::int64_t>(k.size()) / shape_.key_dim;
        std::vector<float> weights;
        for (std::int64_t t = 0; t < tokens; ++t)
        {
            float logit = 0;
            for (std::int64_t d = 0; d < shape_.key_dim; ++d)
            {
                float const q = mdkv::widen(mdkv::narrow<T>(query[d]));
                logit += q * mdkv::widen(k[static_cast<std::size_t>(t * shape_.key_dim + d)]);
            }
            weights.push_back(logit / std::sqrt(static_cast<float>(shape_.key_dim)));
        }
        float const largest = *std::max_element(weights.begin(), weights.end());
        float total         = 0;
        for (float& weight : weights) { total += weight = std::exp(weight - largest); }
        std::fill(out, out + shape_.value_dim, 0.0F);
        for (std::int64_t t = 0; t < tokens; ++t)
        {
            float const share = weights[static_cast<std::size_t>(t)] / total;
            for (std::int64_t d = 0; d < shape_.value_dim; ++d)
            {
                out[d] += share * mdkv::widen(v[static_cast<std::size_t>(t * shape_.value_dim + d)]);
            }
        }
    }

    std::vector<T>& keys(std::int64_t layer, std::int64_t head)
    {
        return keys_[static_cast<std::size_t>(layer * shape_.kv_heads + head)];
    }
    std::vector<T>& values(std::int64_t layer, std::int64_t head)
    {
        return values_[static_cast<std::size_t>(layer * shape_.kv_heads + head)];
    }

    runner::model_shape shape_;
    std::vector<std::vector<T>> keys_;   // [layers * kv_heads] of [tokens, key_dim]
    std::vector<std::vector<T>> values_; // [layers * kv_heads] of [tokens, value_dim]
};

} // namespace support
