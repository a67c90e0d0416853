/// \file architecture.hpp: the architectures that the runner computes, and with which values of their metadata keys
#pragma once

#include <mdkv/replay/replay.hpp>

#include <algorithm>
#include <array>
#include <iterator>
#include <string>
#include <string_view>

#include "file_error.hpp"
#include "gguf_metadata.hpp"

namespace runner
{

/// What tells one of these architectures from another. All else is llama's.
struct architecture
{
    std::string_view name; // in general.architecture, and before its metadata keys
    bool biases;           // of queries, keys and values, added before positions are encoded
    mdkv::rotary_pairs pairs;
    std::string_view layout; // order of query and key rows that makes these pairs, as a file may name it
};

inline constexpr architecture architectures[] = {
    {"llama", false, mdkv::rotary_pairs::neighbours, "Meta AI original pth"},
    {"qwen2", true, mdkv::rotary_pairs::halves, "reference"},
};

namespace detail
{

inline constexpr std::string_view own_layout = "architecture::layout"; // stands for it among accepted values

struct metadata_key
{
    std::string_view name;                      // behind the architecture's
    std::array<std::string_view, 2> accepted{}; // values as `value_text` writes them; empty: any value
};

inline constexpr metadata_key metadata_keys[] = {
    // language_model reads these keys and checks their values.
    {"attention.head_count"},
    {"attention.head_count_kv"},
    {"attention.key_length"},
    {"attention.layer_norm_rms_epsilon"},
    {"attention.value_length"},
    {"block_count"},
    {"context_length"},
    {"embedding_length"},
    {"feed_forward_length"},
    {"rope.dimension_count"},
    {"rope.freq_base"},
    // These keys change no logit: language_model takes the vocabulary's size from the embedding, pooling concerns the
    // embeddings of texts, and the others describe the training or YaRN, which is refused by its type and factor.
    {"pooling_type"},
    {"rope.scaling.finetuned"},
    {"rope.scaling.original_context_length"},
    {"rope.scaling.yarn_beta_fast"},
    {"rope.scaling.yarn_beta_slow"},
    {"vocab_size"},
    // These keys change the computation, except with the values here. A scale of 0 stands for none.
    {"attention.causal", {"true"}},
    {"attention.clamp_kqv", {"0"}},
    {"attention.max_alibi_bias", {"0"}},
    {"attention.scale", {"0"}},
    {"attention.sliding_window", {"0"}},
    {"attn_logit_softcapping", {"0"}},
    {"embedding_scale", {"0", "1"}},
    {"expert_count", {"0"}},
    {"expert_feed_forward_length", {"0"}},
    {"expert_shared_count", {"0"}},
    {"expert_used_count", {"0"}},
    {"final_logit_softcapping", {"0"}},
    {"leading_dense_block_count", {"0"}},
    {"logit_scale", {"0", "1"}},
    {"nextn_predict_layers", {"0"}},
    {"residual_scale", {"0", "1"}},
    {"rope.scale_linear", {"0", "1"}},
    {"rope.scaling.attn_factor", {"1"}},
    {"rope.scaling.factor", {"0", "1"}},
    {"rope.scaling.type", {"none", "linear"}}, // linear: by the factor above
    {"rope.scaling.yarn_attn_factor", {"1"}},
    {"rope.scaling.yarn_ext_factor", {"0"}},
    {"rope.scaling.yarn_log_multiplier", {"0"}},
    {"tensor_data_layout", {own_layout}},
    {"use_parallel_residual", {"false"}},
};

} // namespace detail

/// \throws file_error   the file is of none of `architectures`
[[nodiscard]] inline architecture const& architecture_of(gguf_metadata const& file)
{
    constexpr std::string_view key = "general.architecture";
    std::string_view const name    = file.text(key);
    std::string names;
    for (architecture const& one : architectures)
    {
        if (one.name == name) { return one; }
        names += joined(names.empty() ? "" : " or ", one.name);
    }
    file.refuse(key, "is not supported", printable(name), names);
}

/// Refuses keys of the architecture that ask for a computation other than language_model's, and keys that are not known
/// here, because they might.
/// \throws file_error   naming the key, its value and the accepted values
inline void expect_known_keys(gguf_metadata const& file, architecture const& own)
{
    std::string const prefix = joined(own.name, ".");
    for (std::string_view const key : file.keys_below(prefix))
    {
        std::string_view const name = key.substr(prefix.size());
        auto const known            = std::find_if(std::begin(detail::metadata_keys), std::end(detail::metadata_keys),
                       [&](detail::metadata_key const& one) { return one.name == name; });
        if (known == std::end(detail::metadata_keys))
        {
            file.refuse(key, "is unknown and may change the computation", file.value_text(key), "absent");
        }
        auto const second       = known->accepted[1];
        auto const first        = known->accepted[0] == detail::own_layout ? own.layout : known->accepted[0];
        std::string const value = file.value_text(key);
        if (first.empty() || value == first || (!second.empty() && value == second)) { continue; }
        file.refuse(key, "is not supported", value, second.empty() ? first : joined(first, " or ", second));
    }
}

} // namespace runner
