/// \file tokenizer.hpp: text to token ids and back, by the vocabulary in a GGUF file
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "byte_level_model.hpp"
#include "file_error.hpp"
#include "gguf.hpp"
#include "special_tokens.hpp"
#include "vocabulary.hpp"

namespace runner
{

/// Byte-level pairs ("gpt2"). Holds copies of all it needs of the file; const operations are safe from many threads.
class tokenizer
{
public:
    /// \throws file_error   another kind of tokenizer, or ids, merges, scores or array lengths that contradict each
    ///                      other
    explicit tokenizer(gguf_file const& file)
        : known_(file)
        , model_(make_model(file, known_))
    {
        for (std::int32_t id = 0; id < known_.size(); ++id)
        {
            pieces_.push_back(model_.piece(known_.written(id), known_.kind(id)));
        }
        read_special_tokens(file);
    }

    [[nodiscard]] std::int64_t size() const noexcept { return known_.size(); }

    /// The token ids of `text`, without a beginning-of-sequence token.
    ///
    /// \param text            any bytes. Where they are not UTF-8, each byte is encoded alone, as if the text before
    ///                        ended there and the text behind began there. What the vocabulary has no token for is
    ///                        left out, as in the reference; `bytes_without_token` counts it.
    /// \param parse_special   take the texts of control tokens for these tokens; off for text from outside, in which
    ///                        "<|im_end|>" then is just text. Tokens the model's maker defined as plain text
    ///                        ("user-defined") are found either way.
    [[nodiscard]] std::vector<std::int32_t> encode(std::string_view text, bool parse_special = false) const
    {
        std::vector<std::int32_t> out;
        std::size_t done              = 0;
        special_tokens const& special = parse_special ? all_special_ : user_defined_;
        special.each_match(text, [&](special_tokens::match const& match) {
            model_.encode(known_, text.substr(done, match.begin - done), out);
            out.push_back(match.id);
            done = match.end;
        });
        model_.encode(known_, text.substr(done), out);
        return out;
    }

    /// How many bytes of `text` the tokens of `encode` do not stand for: control characters mostly.
    [[nodiscard]] std::size_t bytes_without_token(std::string_view text) const
    {
        return model_.bytes_without_token(text);
    }

    /// The bytes one token stands for; they may be a part of a character. A control token's are its name.
    /// \throws std::out_of_range   no such id
    [[nodiscard]] std::string_view decode_one(std::int32_t id) const
    {
        if (id < 0 || id >= size())
        {
            throw std::out_of_range(
                joined("tokenizer: id is ", std::to_string(id), ", not in [0, ", std::to_string(size()), ")"));
        }
        return pieces_[static_cast<std::size_t>(id)];
    }

    [[nodiscard]] std::string decode(std::span<std::int32_t const> ids) const
    {
        std::string out;
        for (std::int32_t const id : ids) { out += decode_one(id); }
        return out;
    }

    [[nodiscard]] std::optional<std::int32_t> bos() const noexcept { return bos_; }
    [[nodiscard]] std::optional<std::int32_t> eos() const noexcept { return eos_; }

    /// Whether this model expects `bos` before a text.
    [[nodiscard]] bool add_bos() const noexcept { return add_bos_; }

    /// Ids after which a model has nothing more to say; ascending.
    [[nodiscard]] std::span<std::int32_t const> end_of_generation() const noexcept { return ends_; }
    [[nodiscard]] bool is_end_of_generation(std::int32_t id) const noexcept
    {
        return std::binary_search(ends_.begin(), ends_.end(), id);
    }

    /// The id of the control token of this name.
    [[nodiscard]] std::optional<std::int32_t> find_control(std::string_view name) const noexcept
    {
        std::int32_t const id = known_.find(name);
        bool const found      = id != vocabulary::none && known_.kind(id) == token_kind::control;
        return found ? std::optional(id) : std::nullopt;
    }

    /// The file's template for conversations, in a language this program does not interpret; empty if there is none.
    [[nodiscard]] std::string const& chat_template() const noexcept { return chat_template_; }

private:
    static byte_level_model make_model(gguf_file const& file, vocabulary const& known)
    {
        constexpr std::string_view key = "tokenizer.ggml.model";
        std::string_view const name    = file.text(key);
        if (name == "gpt2") { return byte_level_model(file, known); }
        file.refuse(key, "is not supported", quoted(name), "\"gpt2\"");
    }

    void read_special_tokens(gguf_file const& file)
    {
        bool const wants_bos = model_.wants_bos(file);
        bos_                 = known_.find_id(file, "tokenizer.ggml.bos_token_id");
        eos_                 = known_.find_id(file, "tokenizer.ggml.eos_token_id");
        add_bos_             = file.find_boolean("tokenizer.ggml.add_bos_token").value_or(wants_bos);
        if (add_bos_ && !bos_)
        {
            file.refuse("tokenizer.ggml.bos_token_id", "is absent, but the model wants this token before a text");
        }
        chat_template_ = file.find_text("tokenizer.chat_template").value_or("");

        std::vector<std::pair<std::string, std::int32_t>> plain;
        std::vector<std::pair<std::string, std::int32_t>> all;
        for (std::int32_t id = 0; id < known_.size(); ++id)
        {
            bool const user_defined = known_.kind(id) == token_kind::user_defined;
            if (known_.kind(id) != token_kind::control && !user_defined) { continue; }
            all.emplace_back(known_.written(id), id);
            if (user_defined) { plain.push_back(all.back()); }
        }
        all_special_  = special_tokens(std::move(all));
        user_defined_ = special_tokens(std::move(plain));
        read_ends(file);
    }

    void read_ends(gguf_file const& file)
    {
        for (std::string_view const key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"})
        {
            if (auto const id = known_.find_id(file, key)) { ends_.push_back(*id); }
        }
        // Files name one or two ids; models end a turn, a message or a text by others too.
        for (std::string_view const name :
            {"<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"})
        {
            if (auto const id = find_control(name)) { ends_.push_back(*id); }
        }
        std::sort(ends_.begin(), ends_.end());
        ends_.erase(std::unique(ends_.begin(), ends_.end()), ends_.end());
    }

    vocabulary known_;
    byte_level_model model_;
    bool add_bos_ = false;
    std::vector<std::string> pieces_; // [vocabulary] the bytes each stands for
    special_tokens all_special_;
    special_tokens user_defined_;
    std::optional<std::int32_t> bos_;
    std::optional<std::int32_t> eos_;
    std::vector<std::int32_t> ends_;
    std::string chat_template_;
};

} // namespace runner
