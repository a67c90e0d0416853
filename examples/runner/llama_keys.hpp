/// \file llama_keys.hpp: the metadata keys below "llama.", and with which values of them the runner computes rightly
#pragma once

#include <algorithm>
#include <array>
#include <iterator>
#include <string>
#include <string_view>

#include "file_error.hpp"
#include "gguf_metadata.hpp"

namespace runner
{

namespace detail
{

struct llama_key
{
    std::string_view name;
    std::array<std::string_view, 2> accepted{}; // values as `value_text` writes them; empty: any value
};

inline constexpr llama_key llama_keys[] = {
    // llama_model reads these keys and checks their values.
    {"llama.attention.head_count"},
    {"llama.attention.head_count_kv"},
    {"llama.attention.key_length"},
    {"llama.attention.layer_norm_rms_epsilon"},
    {"llama.attention.value_length"},
    {"llama.block_count"},
    {"llama.context_length"},
    {"llama.embedding_length"},
    {"llama.feed_forward_length"},
    {"llama.rope.dimension_count"},
    {"llama.rope.freq_base"},
    // These keys change no logit: llama_model takes the vocabulary's size from the embedding, pooling concerns the
    // embeddings of texts, and the others describe the training or YaRN, which is refused by its type and factor.
    {"llama.pooling_type"},
    {"llama.rope.scaling.finetuned"},
    {"llama.rope.scaling.original_context_length"},
    {"llama.rope.scaling.yarn_beta_fast"},
    {"llama.rope.scaling.yarn_beta_slow"},
    {"llama.vocab_size"},
    // These keys change the computation, except with the values here. A scale of 0 stands for none.
    {"llama.attention.causal", {"true"}},
    {"llama.attention.clamp_kqv", {"0"}},
    {"llama.attention.max_alibi_bias", {"0"}},
    {"llama.attention.scale", {"0"}},
    {"llama.attention.sliding_window", {"0"}},
    {"llama.attn_logit_softcapping", {"0"}},
    {"llama.embedding_scale", {"0", "1"}},
    {"llama.expert_count", {"0"}},
    {"llama.expert_feed_forward_length", {"0"}},
    {"llama.expert_shared_count", {"0"}},
    {"llama.expert_used_count", {"0"}},
    {"llama.final_logit_softcapping", {"0"}},
    {"llama.leading_dense_block_count", {"0"}},
    {"llama.logit_scale", {"0", "1"}},
    {"llama.nextn_predict_layers", {"0"}},
    {"llama.residual_scale", {"0", "1"}},
    {"llama.rope.scale_linear", {"0", "1"}},
    {"llama.rope.scaling.attn_factor", {"1"}},
    {"llama.rope.scaling.factor", {"0", "1"}},
    {"llama.rope.scaling.type", {"none", "linear"}}, // linear: by the factor above
    {"llama.rope.scaling.yarn_attn_factor", {"1"}},
    {"llama.rope.scaling.yarn_ext_factor", {"0"}},
    {"llama.rope.scaling.yarn_log_multiplier", {"0"}},
    {"llama.tensor_data_layout", {"Meta AI original pth"}}, // query and key rows in the order that `rotary` expects
    {"llama.use_parallel_residual", {"false"}},
};

} // namespace detail

/// Refuses keys below "llama." that ask for a computation other than llama_model's, and keys that are not known here,
/// because they might.
/// \throws file_error   naming the key, its value and the accepted values
inline void expect_llama_keys(gguf_metadata const& file)
{
    for (std::string_view const key : file.keys_below("llama."))
    {
        auto const known = std::find_if(std::begin(detail::llama_keys), std::end(detail::llama_keys),
            [&](detail::llama_key const& one) { return one.name == key; });
        if (known == std::end(detail::llama_keys))
        {
            file.refuse(key, "is unknown and may change the computation", file.value_text(key), "absent");
        }
        auto const& [first, second] = known->accepted;
        std::string const value     = file.value_text(key);
        if (first.empty() || value == first || (!second.empty() && value == second)) { continue; }
        file.refuse(key, "is not supported", value, second.empty() ? first : joined(first, " or ", second));
    }
}

} // namespace runner
