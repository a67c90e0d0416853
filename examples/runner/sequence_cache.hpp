/// \file sequence_cache.hpp: the compressed caches of all layers of one sequence: made layer by layer, read while decoding
#pragma once

#include <mdkv/compress.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>

#include <cstdint>
#include <vector>

#include "llama_model.hpp"
#include "policies.hpp"
#include "prefill.hpp"
#include "scratch_memory.hpp"

namespace runner
{

/// One sequence's cache under one policy.
template <mdkv::element T>
class sequence_cache
{
public:
    /// \param tail_tokens   room made for appended tokens; more of them cost a copy of the tail
    sequence_cache(model_shape const& model, policy chosen, mdkv::budget limit, std::int64_t tail_tokens);

    /// Takes one layer from prefill.
    /// \param rungs   [H, N] receives the rung of every token, or null
    /// \throws interrupted   after Ctrl-C, and what compress throws
    mdkv::compress_report compress_layer(layer_kv<T> const& kv, mdkv::cpu::executor_ref executor,
        scratch_memory& scratch, std::uint8_t* rungs = nullptr);

    /// Appends one token's key [H * D] and value [H * Dv] and attends with its query [Hq * D]; the tail grows as needed.
    void attend(std::int64_t layer, float const* query, float const* key, float const* value, float* output,
        mdkv::cpu::executor_ref executor);

    [[nodiscard]] policy const& chosen() const noexcept { return policy_; }
    [[nodiscard]] std::int64_t resident_bytes() const noexcept
    {
        return resident_bytes_;
    } // of all layers, tails excluded
    [[nodiscard]] std::int64_t full_bytes() const noexcept { return full_bytes_; }
    [[nodiscard]] double compress_seconds() const noexcept { return compress_seconds_; }
    [[nodiscard]] double attend_seconds() const noexcept { return attend_seconds_; }
    [[nodiscard]] std::vector<mdkv::compress_report> const& reports() const noexcept { return reports_; }

private:
    model_shape model_;
    policy policy_;
    mdkv::budget limit_;
    std::int64_t tail_tokens_;
    std::vector<mdkv::cpu::cache<T>> layers_; // [layers]
    std::vector<mdkv::compress_report> reports_;
    std::vector<float> lse_; // [query_heads], not used here
    scratch_memory scratch_;
    std::int64_t resident_bytes_ = 0;
    std::int64_t full_bytes_     = 0;
    double compress_seconds_     = 0;
    double attend_seconds_       = 0;
};

// Compiled once, in sequence_cache.cpp: this is where the library is instantiated.
extern template class sequence_cache<float>;
extern template class sequence_cache<mdkv::half>;
extern template class sequence_cache<mdkv::bfloat16>;

} // namespace runner
