/// \file piece_vocabulary.hpp: SentencePiece vocabularies the test makes, as GGUF files have them
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gguf_bytes.hpp"
#include "runner/tokenizer.hpp"
#include "runner/vocabulary.hpp"

/// As in the models of Mistral: unknown, begin and end (ids 0 to 2), the bytes, then pieces; the sooner one is added,
/// the higher its score.
struct piece_vocabulary
{
    std::vector<std::string> tokens;
    std::vector<runner::token_kind> kinds;
    std::vector<float> scores;

    explicit piece_vocabulary(std::vector<std::string> const& pieces = {}, bool bytes = true)
    {
        add("<unk>", runner::token_kind::unknown);
        add("<s>", runner::token_kind::control);
        add("</s>", runner::token_kind::control);
        constexpr std::string_view digits = "0123456789ABCDEF";
        for (std::size_t b = 0; bytes && b < 256; ++b)
        {
            add(std::string("<0x") + digits[b / 16] + digits[b % 16] + ">", runner::token_kind::byte);
        }
        for (std::string const& piece : pieces) { add(piece, runner::token_kind::normal); }
    }

    std::int32_t add(std::string const& token, runner::token_kind kind)
    {
        tokens.push_back(token);
        kinds.push_back(kind);
        scores.push_back(-static_cast<float>(tokens.size()));
        return static_cast<std::int32_t>(tokens.size()) - 1;
    }

    [[nodiscard]] gguf_parts parts(std::string const& chat_template = {}) const
    {
        gguf_parts out;
        out.text("tokenizer.ggml.model", "llama");
        out.texts("tokenizer.ggml.tokens", tokens);
        std::vector<std::int32_t> numbers;
        for (runner::token_kind const kind : kinds) { numbers.push_back(static_cast<std::int32_t>(kind)); }
        out.integers("tokenizer.ggml.token_type", numbers);
        add_scores(out, scores);
        out.integer("tokenizer.ggml.bos_token_id", 1);
        out.integer("tokenizer.ggml.eos_token_id", 2);
        out.text("tokenizer.chat_template", chat_template);
        return out;
    }

    static void add_scores(gguf_parts& out, std::vector<float> const& values)
    {
        std::string all;
        for (float const value : values) { all += field(value); }
        out.pair("tokenizer.ggml.scores", gguf_type::array,
            field(gguf_type::f32) + field<std::uint64_t>(values.size()) + all);
    }

    [[nodiscard]] runner::tokenizer make(std::string const& chat_template = {}) const
    {
        return runner::tokenizer(parse_gguf(parts(chat_template).bytes()));
    }
};
