/// \file evicting_cache.hpp: H2O by its authors' rule: the cache goes on dropping its least attended token while decoding
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <vector>

#include "runner/eigen.hpp"
#include "runner/element_rows.hpp"
#include "runner/scratch_memory.hpp"
#include "layer_cache.hpp"
#include "prompt_layer.hpp"

namespace runner
{

/// Tokens a head may hold. The authors' defaults give both halves the same (h2o_hf/run_summarization.py: 1024 and 1024).
struct heavy_hitters
{
    std::int64_t heavy  = 0; // most attended tokens
    std::int64_t recent = 0; // last tokens

    [[nodiscard]] static constexpr heavy_hitters of_size(std::int64_t kv_size) noexcept
    {
        return {kv_size - kv_size / 2, kv_size / 2};
    }
    [[nodiscard]] constexpr std::int64_t tokens() const noexcept { return heavy + recent; }
};

/// Every head holds at most heavy + recent tokens, for any number of tokens appended. After the prompt, and after each
/// token that came in, the tokens older than the last `recent` go, except for the `heavy` highest sums of attention. A
/// token's sum adds up the probabilities that all queries so far gave it, over the query heads that share it. Positions do
/// not change. Among equal sums the older token goes.
///
/// Facts: h2o_hf/utils_real_drop/modify_llama.py (H2OKVCache_LayerWise) of the authors' repository H2O. Their code rounds
/// the probabilities to the model's element type and has no shared heads; here probabilities are floats, summed over the
/// group.
template <mdkv::element T>
class evicting_cache : public layer_cache
{
public:
    /// \param sums   [heads, tokens]: over the queries of all prompt tokens (and the group) the probability each token got,
    ///               the window's tokens included. The layer's own window plays no part.
    /// \throws mdkv::invalid_argument   sums has another size, a limit is negative or no token may stay
    evicting_cache(prompt_layer<T> const& layer, std::span<float const> sums, heavy_hitters limit)
        : limit_{limit}
        , heads_{layer.heads}
        , group_{layer.group}
        , key_dim_{layer.key_dim}
        , value_dim_{layer.value_dim}
        , capacity_{limit.tokens() + 1}
    {
        mdkv::expects(limit.heavy >= 0 && limit.recent >= 0 && limit.tokens() >= 1, "evicting_cache: ", limit.heavy,
            " heavy and ", limit.recent, " recent tokens; neither may be negative, nor both 0");
        mdkv::expects(std::ssize(sums) == heads_ * layer.tokens, "evicting_cache: sums has ", std::ssize(sums),
            " entries; [heads, tokens] is [", heads_, ", ", layer.tokens, "]");
        keys_.resize(static_cast<std::size_t>(heads_ * capacity_ * key_dim_));
        values_.resize(static_cast<std::size_t>(heads_ * capacity_ * value_dim_));
        sums_.resize(static_cast<std::size_t>(heads_ * capacity_));
        probabilities_.resize(static_cast<std::size_t>(heads_ * group_ * padded(capacity_)));
        rows_.resize(static_cast<std::size_t>(heads_ * (group_ + 1) * padded(std::max(key_dim_, value_dim_))));
        count_ = std::min(layer.tokens, limit.tokens());
        for (std::int64_t h = 0; h < heads_; ++h) { take_prompt(layer, h, sums.data() + h * layer.tokens); }
    }

    void attend(mdkv::cpu::executor_ref executor, scratch_memory&, float const* query, float const* key,
        float const* value, float* output) override
    {
        ++count_; // the new token's row; there is always room for one beyond the limit
        bool const little = resident_bytes() < serial_bytes;
        (little ? mdkv::cpu::executor_ref{} : executor).parallel_for(heads_, [&](std::int64_t h) {
            narrow_row(key + h * key_dim_, key_dim_, key_row(h, count_ - 1));
            narrow_row(value + h * value_dim_, value_dim_, value_row(h, count_ - 1));
            sum(h, count_ - 1) = 0.0F;
            attend_head(h, query + h * group_ * key_dim_, output + h * group_ * value_dim_);
            if (count_ > limit_.tokens()) { drop(h, lightest(h)); }
        });
        count_ = std::min(count_, limit_.tokens());
    }

    /// Rows held and their sums, appended tokens included.
    [[nodiscard]] std::int64_t resident_bytes() const noexcept override
    {
        auto const element_bytes = static_cast<std::int64_t>(sizeof(T));
        auto const sum_bytes     = static_cast<std::int64_t>(sizeof(float));
        return heads_ * count_ * ((key_dim_ + value_dim_) * element_bytes + sum_bytes);
    }

    /// Tokens every head holds.
    [[nodiscard]] std::int64_t tokens() const noexcept { return count_; }
    /// Sums of the tokens that head h holds, oldest first.
    [[nodiscard]] std::span<float const> sums(std::int64_t h) const noexcept
    {
        return {sums_.data() + h * capacity_, static_cast<std::size_t>(count_)};
    }

private:
    /// Below this many bytes another thread would take longer to wake than it saves; the library's attend has such a
    /// limit, too.
    static constexpr std::int64_t serial_bytes = std::int64_t{1} << 20;

    [[nodiscard]] T* key_row(std::int64_t h, std::int64_t i) noexcept
    {
        return keys_.data() + (h * capacity_ + i) * key_dim_;
    }
    [[nodiscard]] T* value_row(std::int64_t h, std::int64_t i) noexcept
    {
        return values_.data() + (h * capacity_ + i) * value_dim_;
    }
    [[nodiscard]] float& sum(std::int64_t h, std::int64_t i) noexcept
    {
        return sums_[static_cast<std::size_t>(h * capacity_ + i)];
    }

    /// Copies the rows of head h that outlive the prompt, in their order.
    void take_prompt(prompt_layer<T> const& layer, std::int64_t h, float const* sums)
    {
        std::int64_t const older = layer.tokens - std::min(limit_.recent, layer.tokens);
        std::vector<std::int64_t> stay(static_cast<std::size_t>(layer.tokens));
        std::iota(stay.begin(), stay.end(), std::int64_t{0});
        if (count_ < layer.tokens)
        {
            // Heaviest first, the later of equal sums first: tokens after the first `heavy` go.
            std::sort(stay.begin(), stay.begin() + older,
                [&](std::int64_t a, std::int64_t b) { return sums[a] > sums[b] || (sums[a] == sums[b] && a > b); });
            stay.erase(stay.begin() + limit_.heavy, stay.begin() + older);
            std::sort(stay.begin(), stay.end());
        }
        for (std::int64_t i = 0; i < count_; ++i)
        {
            std::int64_t const t = stay[static_cast<std::size_t>(i)];
            copy_rows(layer.keys + (h * layer.tokens + t) * key_dim_, key_dim_, key_row(h, i));
            copy_rows(layer.values + (h * layer.tokens + t) * value_dim_, value_dim_, value_row(h, i));
            sum(h, i) = sums[t];
        }
    }

    /// Rounds up, so that a row begins and ends at a register's border: otherwise Eigen's results for the row's first and
    /// last elements may differ in the last bit, and an answer must not depend on the place of memory.
    [[nodiscard]] static constexpr std::int64_t padded(std::int64_t floats) noexcept { return (floats + 15) / 16 * 16; }
    using aligned_floats = std::vector<float, Eigen::aligned_allocator<float>>;

    /// Attention of the group's queries, whose probabilities are added to the tokens' sums.
    void attend_head(std::int64_t h, float const* query, float* output)
    {
        float const scale        = 1.0F / std::sqrt(static_cast<float>(key_dim_));
        std::int64_t const width = padded(std::max(key_dim_, value_dim_));
        std::int64_t const span  = padded(capacity_);
        float* const row         = rows_.data() + h * (group_ + 1) * width;
        float* const sum_of      = row + width;                               // [group, width]
        float* const weight      = probabilities_.data() + h * group_ * span; // [group, span]
        for (std::int64_t i = 0; i < count_; ++i)
        {
            widen_row(key_row(h, i), key_dim_, row);
            for (std::int64_t g = 0; g < group_; ++g)
            {
                const_row_view const q(query + g * key_dim_, key_dim_);
                weight[g * span + i] = scale * (const_row_view(row, key_dim_) * q).sum();
            }
        }
        row_view sums(&sum(h, 0), count_);
        for (std::int64_t g = 0; g < group_; ++g)
        {
            row_view w(weight + g * span, count_);
            w = (w - w.maxCoeff()).exp();
            w /= w.sum();
            sums += w;
        }
        std::fill_n(sum_of, group_ * width, 0.0F);
        for (std::int64_t i = 0; i < count_; ++i)
        {
            widen_row(value_row(h, i), value_dim_, row);
            for (std::int64_t g = 0; g < group_; ++g)
            {
                row_view(sum_of + g * width, value_dim_) += weight[g * span + i] * const_row_view(row, value_dim_);
            }
        }
        for (std::int64_t g = 0; g < group_; ++g)
        {
            std::copy_n(sum_of + g * width, value_dim_, output + g * value_dim_);
        }
    }

    /// The token to go: the oldest with the least sum among the tokens older than the last `recent`.
    [[nodiscard]] std::int64_t lightest(std::int64_t h) const noexcept
    {
        float const* const first = sums_.data() + h * capacity_;
        return std::min_element(first, first + count_ - limit_.recent) - first;
    }

    void drop(std::int64_t h, std::int64_t i) noexcept
    {
        std::int64_t const later = count_ - 1 - i;
        move_rows(key_row(h, i + 1), later * key_dim_, key_row(h, i));
        move_rows(value_row(h, i + 1), later * value_dim_, value_row(h, i));
        move_rows(&sum(h, i) + 1, later, &sum(h, i));
    }

    template <class E>
    static void copy_rows(E const* from, std::int64_t count, E* to) noexcept
    {
        std::memcpy(static_cast<void*>(to), from, static_cast<std::size_t>(count) * sizeof(E));
    }
    /// Moves `count` rows; source and destination may overlap.
    template <class E>
    static void move_rows(E const* from, std::int64_t count, E* to) noexcept
    {
        std::memmove(static_cast<void*>(to), from, static_cast<std::size_t>(count) * sizeof(E));
    }

    heavy_hitters limit_;
    std::int64_t heads_, group_, key_dim_, value_dim_;
    std::int64_t capacity_;        // rows of a head: the limit and the token that is coming in
    std::int64_t count_ = 0;       // rows of a head that are held
    std::vector<T> keys_;          // [heads, capacity, key_dim], in order of position
    std::vector<T> values_;        // [heads, capacity, value_dim]
    std::vector<float> sums_;      // [heads, capacity]
    aligned_floats probabilities_; // [heads, group, padded capacity], in one step
    aligned_floats rows_;          // [heads, 1 + group, padded dimension]: a key or value, and the group's sums
};

} // namespace runner
