/// \file layer_prefix.hpp: what prefill would have handed over had the prompt ended earlier, taken from a longer prompt
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "runner/language_model.hpp"
#include "runner/prefill.hpp"

namespace runner
{

/// Nothing a token computes depends on what comes after it, so that one prefill serves caches of the whole prompt and of
/// its beginning. The memory is reused for the next layer.
template <mdkv::element T>
class layer_prefix
{
public:
    /// The first `tokens` tokens; of the queries those that are among the layer's.
    /// \pre   the layer's window reaches before `tokens`
    [[nodiscard]] layer_kv<T> of(layer_kv<T> const& kv, std::int64_t tokens, model_shape const& shape)
    {
        if (tokens == kv.tokens) { return kv; }
        std::int64_t const window = std::max(std::int64_t{0}, kv.window - (kv.tokens - tokens));
        take(kv.keys, shape.kv_heads, kv.tokens, tokens, shape.key_dim, keys_);
        take(kv.values, shape.kv_heads, kv.tokens, tokens, shape.value_dim, values_);
        take(kv.queries, shape.query_heads, kv.window, window, shape.key_dim, queries_);
        take(kv.lse, shape.query_heads, kv.window, window, 1, lse_);
        return {kv.layer, tokens, window, keys_.data(), values_.data(), queries_.data(), lse_.data()};
    }

private:
    /// The first `kept` of every head's `rows` rows.
    template <class Number>
    static void take(Number const* from, std::int64_t heads, std::int64_t rows, std::int64_t kept, std::int64_t columns,
        std::vector<Number>& out)
    {
        out.resize(static_cast<std::size_t>(heads * kept * columns));
        for (std::int64_t h = 0; h < heads; ++h)
        {
            std::copy_n(from + h * rows * columns, kept * columns, out.begin() + h * kept * columns);
        }
    }

    std::vector<T> keys_, values_, queries_; // [kv_heads, tokens, D], the same, [query_heads, window, D]
    std::vector<float> lse_;                 // [query_heads, window]
};

} // namespace runner
