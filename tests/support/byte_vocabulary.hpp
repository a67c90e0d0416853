/// \file byte_vocabulary.hpp: a small tokenizer the test makes, for texts that must not depend on a model's file
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runner/byte_alphabet.hpp"
#include "runner/tokenizer.hpp"
#include "support/gguf_bytes.hpp"

/// A token for every byte, one for each merge, and <bos>, which is wanted before a text or is not.
[[nodiscard]] inline runner::tokenizer byte_vocabulary(std::vector<std::string> const& merges = {},
    bool add_bos = false, std::string const& pre = "smollm", std::vector<std::string> const& control = {"<bos>"},
    unsigned bytes = 256)
{
    constexpr std::int32_t normal_kind = 1, control_kind = 3;
    runner::byte_alphabet const alphabet;
    std::vector<std::string> tokens;
    std::vector<std::int32_t> kinds;
    auto const add = [&](std::string const& token, std::int32_t kind) {
        tokens.push_back(token);
        kinds.push_back(kind);
    };
    for (unsigned b = 0; b < bytes; ++b) { add(alphabet.written(static_cast<unsigned char>(b)), normal_kind); }
    for (std::string merge : merges)
    {
        merge.erase(merge.find(' ', 1), 1);
        add(merge, normal_kind);
    }
    auto const first_control = static_cast<std::uint32_t>(tokens.size());
    for (std::string const& name : control) { add(name, control_kind); }

    gguf_parts parts;
    parts.text("tokenizer.ggml.model", "gpt2");
    parts.text("tokenizer.ggml.pre", pre);
    parts.texts("tokenizer.ggml.tokens", tokens);
    parts.integers("tokenizer.ggml.token_type", kinds);
    parts.texts("tokenizer.ggml.merges", merges);
    parts.boolean("tokenizer.ggml.add_bos_token", add_bos);
    if (!control.empty()) { parts.integer("tokenizer.ggml.bos_token_id", first_control); }
    return runner::tokenizer(parse_gguf(parts.bytes()));
}
