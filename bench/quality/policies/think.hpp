/// \file think.hpp: ThinK: whole tokens are chosen by another policy, and the keys of the older ones lose their weakest channels
#pragma once

#include <mdkv/append.hpp>
#include <mdkv/attend.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/merge.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "runner/scratch_memory.hpp"
#include "layer_cache.hpp"
#include "packed_cache.hpp"
#include "prompt_layer.hpp"

namespace runner
{

// Facts: ThinK_eager/src/kv_pruning_utils.py (key_pruner_query_driven) of the authors' repository ThinK.
struct think_options
{
    double ratio                 = 0.4; // share of the channels that go, rounded down to whole channels
    std::int64_t recent          = 32;  // last kept tokens, whose keys stay whole
    std::int64_t scoring_queries = 32;  // last queries that score the channels, at most
};

/// Channels of key_dim that stay.
/// \throws mdkv::invalid_argument   the ratio is outside [0, 1), or no count is a window
[[nodiscard]] inline std::int64_t think_channels(std::int64_t key_dim, think_options const& options)
{
    mdkv::expects(options.ratio >= 0.0 && options.ratio < 1.0, "think: the ratio ", options.ratio,
        " of dropped channels is not within 0 and 1");
    mdkv::expects(options.recent >= 0, "think: recent is ", options.recent, "; it must not be negative");
    mdkv::expects(
        options.scoring_queries >= 1, "think: scoring_queries is ", options.scoring_queries, "; it must be at least 1");
    mdkv::expects(key_dim <= UINT16_MAX, "think: the key dimension ", key_dim, " is above the limit of ", UINT16_MAX);
    return key_dim - static_cast<std::int64_t>(static_cast<double>(key_dim) * options.ratio);
}

/// Bytes of a layer with `chosen` past tokens a head beside its window.
template <mdkv::element T>
[[nodiscard]] std::int64_t think_bytes(prompt_layer<T> const& layer, std::int64_t chosen, think_options const& options)
{
    std::int64_t const channels = think_channels(layer.key_dim, options);
    std::int64_t const whole    = std::min(options.recent, chosen + layer.window);
    std::int64_t const thin     = chosen + layer.window - whole;
    std::int64_t const elements = thin * (channels + layer.value_dim) + whole * (layer.key_dim + layer.value_dim);
    auto const element_bytes    = static_cast<std::int64_t>(sizeof(T));
    auto const channel_bytes    = static_cast<std::int64_t>(sizeof(std::uint16_t));
    return layer.heads * (elements * element_bytes + channels * channel_bytes);
}

/// The most past tokens a head that a layer may choose within `limit` bytes; -1 if not even the window fits.
template <mdkv::element T>
[[nodiscard]] std::int64_t think_tokens(prompt_layer<T> const& layer, std::int64_t limit, think_options const& options)
{
    std::int64_t most = -1;
    for (std::int64_t step = std::int64_t{1} << 40; step > 0; step /= 2)
    {
        std::int64_t const chosen = most + step;
        if (chosen <= layer.past() && think_bytes(layer, chosen, options) <= limit) { most = chosen; }
    }
    return most;
}

namespace detail
{

/// sum[d] += row[d]^2
template <mdkv::element T>
void add_squares(T const* row, std::span<double> sum)
{
    for (std::size_t d = 0; d < sum.size(); ++d)
    {
        double const x = double{mdkv::widen(row[d])};
        sum[d] += x * x;
    }
}

/// Form in which a token of a head is held.
enum class think_form : std::uint8_t
{
    gone,
    thin,
    whole
};

/// [heads, tokens]: the last `recent` of the tokens that stay are whole, the others thin.
template <mdkv::element T>
[[nodiscard]] std::vector<think_form> think_forms(
    prompt_layer<T> const& layer, std::span<std::uint8_t const> kept, std::int64_t recent)
{
    std::vector<think_form> forms(static_cast<std::size_t>(layer.heads * layer.tokens), think_form::gone);
    for (std::int64_t h = 0; h < layer.heads; ++h)
    {
        std::int64_t later = 0; // tokens that stay and come after t
        for (std::int64_t t = layer.tokens - 1; t >= 0; --t)
        {
            bool const stays = t >= layer.past() || kept[static_cast<std::size_t>(h * layer.past() + t)] != 0;
            if (!stays) { continue; }
            forms[static_cast<std::size_t>(h * layer.tokens + t)] =
                later < recent ? think_form::whole : think_form::thin;
            ++later;
        }
    }
    return forms;
}

} // namespace detail

/// The channels of each head's keys that stay, ascending: [heads, think_channels]. A channel's score is the mean square of
/// the last queries along it (over all query heads that share the keys) times the mean square of the keys that the token
/// selection kept, window included. Among equal channels the later one goes.
///
/// \param kept   [heads, past], 1 for tokens that stay
template <mdkv::element T>
[[nodiscard]] std::vector<std::uint16_t> think_kept_channels(
    prompt_layer<T> const& layer, std::span<std::uint8_t const> kept, think_options const& options)
{
    std::int64_t const channels = think_channels(layer.key_dim, options);
    std::int64_t const scoring  = std::min(options.scoring_queries, layer.query_tokens);
    auto const dim              = static_cast<std::size_t>(layer.key_dim);
    std::vector<std::uint16_t> all;
    for (std::int64_t h = 0; h < layer.heads; ++h)
    {
        // Sums instead of means: the counts are the same for all channels of a head.
        std::vector<double> of_queries(dim, 0.0);
        std::vector<double> of_keys(dim, 0.0);
        for (std::int64_t g = 0; g < layer.group; ++g)
        {
            T const* const last =
                layer.queries + ((h * layer.group + g + 1) * layer.query_tokens - scoring) * layer.key_dim;
            for (std::int64_t q = 0; q < scoring; ++q) { detail::add_squares(last + q * layer.key_dim, of_queries); }
        }
        for (std::int64_t t = 0; t < layer.tokens; ++t)
        {
            bool const stays = t >= layer.past() || kept[static_cast<std::size_t>(h * layer.past() + t)] != 0;
            if (stays) { detail::add_squares(layer.keys + (h * layer.tokens + t) * layer.key_dim, of_keys); }
        }
        std::vector<std::uint16_t> order(dim);
        std::iota(order.begin(), order.end(), std::uint16_t{0});
        std::stable_sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return of_queries[a] * of_keys[a] > of_queries[b] * of_keys[b]; });
        order.resize(static_cast<std::size_t>(channels));
        std::sort(order.begin(), order.end());
        all.insert(all.end(), order.begin(), order.end());
    }
    return all;
}

/// The last `recent` of the tokens that stay and all appended tokens are held whole; older tokens have the keys' strong
/// channels only. A query meets both parts with the one factor 1/sqrt(key_dim), and the attentions of both are merged. A
/// window longer than `recent` is thinned at its old end. A shorter window is filled up with the latest of the tokens
/// chosen before it (there the authors' code takes the last tokens of its own order, which is by score).
template <mdkv::element T>
class think_cache : public layer_cache
{
public:
    /// \param kept   [heads, past], 1 for tokens that stay, 0 for tokens that go
    /// \throws mdkv::invalid_argument   kept has another size, or an option is out of its range
    think_cache(mdkv::cpu::executor_ref executor, scratch_memory& scratch, prompt_layer<T> const& layer,
        std::span<std::uint8_t const> kept, think_options const& options = {}, std::int64_t tail_tokens = 0)
        : heads_{layer.heads}
        , query_heads_{layer.heads * layer.group}
        , key_dim_{layer.key_dim}
        , value_dim_{layer.value_dim}
        , channel_count_{think_channels(layer.key_dim, options)}
        , thin_query_(static_cast<std::size_t>(query_heads_ * channel_count_))
        , thin_output_(static_cast<std::size_t>(query_heads_ * value_dim_))
        , thin_lse_(static_cast<std::size_t>(query_heads_))
        , whole_lse_(static_cast<std::size_t>(query_heads_))
    {
        mdkv::expects(std::ssize(kept) == layer.heads * layer.past(), "think: kept has ", std::ssize(kept),
            " entries; [heads, past] is [", layer.heads, ", ", layer.past(), "]");
        channels_        = think_kept_channels(layer, kept, options);
        auto const forms = detail::think_forms(layer, kept, options.recent);
        whole_           = packed_part(executor, scratch, layer, forms, detail::think_form::whole);

        auto const keys     = thin_keys(layer, forms);
        prompt_layer<T> old = layer;
        old.keys            = keys.data();
        old.key_dim         = channel_count_;
        thin_               = packed_part(executor, scratch, old, forms, detail::think_form::thin);
        whole_.reserve_tail(tail_tokens);
    }

    void attend(mdkv::cpu::executor_ref executor, scratch_memory& scratch, float const* query, float const* key,
        float const* value, float* output) override
    {
        grow_tail(whole_);
        gather_query(query);
        float const scale = 1.0F / std::sqrt(static_cast<float>(key_dim_));
        scratch.run(executor, [&](mdkv::cpu::backend on) {
            using mdkv::in;
            using mdkv::out;
            std::int64_t const rows = query_heads_;
            mdkv::append(on, in(on, key, heads_, key_dim_), in(on, value, heads_, value_dim_), whole_);
            mdkv::attend(on, in(on, query, rows, key_dim_), whole_, {.scale = scale},
                out(on, output, rows, value_dim_), out(on, whole_lse_.data(), rows));
            mdkv::attend(on, in(on, thin_query_.data(), rows, channel_count_), thin_, {.scale = scale},
                out(on, thin_output_.data(), rows, value_dim_), out(on, thin_lse_.data(), rows));
            // A few rows: less than waking another thread for them costs.
            mdkv::merge_attention(mdkv::cpu::backend{on.scratch}, in(on, output, rows, value_dim_),
                in(on, whole_lse_.data(), rows), in(on, thin_output_.data(), rows, value_dim_),
                in(on, thin_lse_.data(), rows), out(on, output, rows, value_dim_), out(on, whole_lse_.data(), rows));
            return 0;
        });
    }

    /// Bytes of both parts and of the channel lists.
    [[nodiscard]] std::int64_t resident_bytes() const noexcept override
    {
        return whole_.arena_bytes() + thin_.arena_bytes()
               + static_cast<std::int64_t>(channels_.size() * sizeof(std::uint16_t));
    }

private:
    /// The tokens of one form, packed.
    [[nodiscard]] static mdkv::cpu::cache<T> packed_part(mdkv::cpu::executor_ref executor, scratch_memory& scratch,
        prompt_layer<T> const& layer, std::vector<detail::think_form> const& forms, detail::think_form form)
    {
        prompt_layer<T> part = layer;
        part.window          = 0; // `forms` replaces the window
        std::vector<std::uint8_t> rungs(forms.size());
        std::transform(forms.begin(), forms.end(), rungs.begin(),
            [&](detail::think_form one) { return static_cast<std::uint8_t>(one == form ? 1 : 0); });
        return pack_layer(executor, scratch, part, keep_or_drop(), {}, rungs);
    }

    /// [heads, tokens, channels]; rows of tokens that are not thin stay zero.
    [[nodiscard]] std::vector<T> thin_keys(
        prompt_layer<T> const& layer, std::vector<detail::think_form> const& forms) const
    {
        std::vector<T> keys(static_cast<std::size_t>(heads_ * layer.tokens * channel_count_));
        for (std::int64_t row = 0; row < heads_ * layer.tokens; ++row)
        {
            if (forms[static_cast<std::size_t>(row)] != detail::think_form::thin) { continue; }
            std::uint16_t const* const channels = channels_.data() + row / layer.tokens * channel_count_;
            for (std::int64_t c = 0; c < channel_count_; ++c)
            {
                keys[static_cast<std::size_t>(row * channel_count_ + c)] =
                    layer.keys[row * layer.key_dim + channels[c]];
            }
        }
        return keys;
    }

    void gather_query(float const* query)
    {
        for (std::int64_t row = 0; row < query_heads_; ++row)
        {
            std::uint16_t const* const channels = channels_.data() + row * heads_ / query_heads_ * channel_count_;
            for (std::int64_t c = 0; c < channel_count_; ++c)
            {
                thin_query_[static_cast<std::size_t>(row * channel_count_ + c)] = query[row * key_dim_ + channels[c]];
            }
        }
    }

    std::int64_t heads_, query_heads_, key_dim_, value_dim_;
    std::int64_t channel_count_;
    std::vector<std::uint16_t> channels_; // [heads, channel_count]
    mdkv::cpu::cache<T> whole_;           // recent and appended tokens
    mdkv::cpu::cache<T> thin_;            // key_dim: channel_count
    std::vector<float> thin_query_;       // [query_heads, channel_count]
    std::vector<float> thin_output_;      // [query_heads, value_dim]
    std::vector<float> thin_lse_;         // [query_heads]
    std::vector<float> whole_lse_;        // [query_heads]
};

} // namespace runner
