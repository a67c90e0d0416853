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
#include <variant>
#include <vector>

#include "byte_level_model.hpp"
#include "file_error.hpp"
#include "gguf.hpp"
#include "sentence_piece_model.hpp"
#include "special_tokens.hpp"
#include "vocabulary.hpp"

namespace runner
{

/// Byte-level pairs ("gpt2") or SentencePiece ("llama"), as the file says. Holds copies of all it needs of the file;
/// const operations are safe from many threads.
///
/// SentencePiece models learnt from texts with a space put before each. So here: `encode` puts one before every text, as
/// SentencePiece does, and behind every control token it finds there, as llama.cpp does, and transformers with
/// legacy = true: of its two rules the one that makes mistral_common's tokens of "<s>[INST] ...". `decode` takes that
/// space off again; `decode_one` cannot know, and leaves it. A text that comes in several pieces is encoded in one, or
/// from the second on by `encode_continued`. Byte-level models know no such space.
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
            pieces_.push_back(std::visit(
                [&](auto const& model) { return model.piece(known_.written(id), known_.kind(id)); }, model_));
        }
        read_special_tokens(file);
    }

    [[nodiscard]] std::int64_t size() const noexcept { return known_.size(); }

    /// The token ids of `text`, without a beginning-of-sequence token.
    ///
    /// \param text            any bytes. Where they are not UTF-8, each byte is encoded alone, as if the text before
    ///                        ended there and the text behind began there (without the space). What the vocabulary has
    ///                        no token for is left out or unknown, as in the reference; `bytes_without_token` counts it.
    /// \param parse_special   take the texts of control tokens for these tokens; off for text from outside, in which
    ///                        "<|im_end|>" then is just text. Tokens the model's maker defined as plain text
    ///                        ("user-defined") are found either way.
    [[nodiscard]] std::vector<std::int32_t> encode(std::string_view text, bool parse_special = false) const
    {
        std::vector<std::int32_t> out;
        std::size_t done              = 0;
        special_tokens const& special = parse_special ? all_special_ : user_defined_;
        special.each_match(text, [&](special_tokens::match const& match) {
            encode_plain(text.substr(done, match.begin - done), true, out);
            out.push_back(match.id);
            done = match.end;
        });
        encode_plain(text.substr(done), true, out);
        return out;
    }

    /// The token ids of text that goes on where other text ended: `encode` without the space.
    [[nodiscard]] std::vector<std::int32_t> encode_continued(std::string_view text) const
    {
        if (!has_sentence_pieces()) { return encode(text); }
        std::vector<std::int32_t> out;
        encode_plain(text, false, out);
        return out;
    }

    /// What `encode` puts before a text that is not empty: one space, or nothing.
    [[nodiscard]] std::string_view space_prefix() const noexcept
    {
        auto const* const pieces = std::get_if<sentence_piece_model>(&model_);
        return pieces == nullptr ? std::string_view() : pieces->space_prefix();
    }

    [[nodiscard]] bool has_sentence_pieces() const noexcept
    {
        return std::holds_alternative<sentence_piece_model>(model_);
    }

    /// How many bytes of `text` the tokens of `encode` do not stand for: of byte-level models control characters mostly,
    /// of SentencePiece what is unknown.
    [[nodiscard]] std::size_t bytes_without_token(std::string_view text) const
    {
        if (auto const* const bytes = std::get_if<byte_level_model>(&model_))
        {
            return bytes->bytes_without_token(text);
        }
        if (std::get<sentence_piece_model>(model_).keeps_all(text)) { return 0; }
        std::size_t kept = 0;
        for (std::int32_t const id : encode_continued(text)) { kept += decode_one(id).size(); }
        return text.size() - std::min(kept, text.size());
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

    /// The bytes of all, less the space that `encode` puts before a text, where the first token begins with one.
    [[nodiscard]] std::string decode(std::span<std::int32_t const> ids) const
    {
        std::string out;
        for (std::int32_t const id : ids) { out += decode_one(id); }
        bool const has_prefix = !ids.empty() && decode_one(ids[0]).starts_with(space_prefix());
        if (has_prefix) { out.erase(0, space_prefix().size()); }
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
    using any_model = std::variant<byte_level_model, sentence_piece_model>;

    static any_model make_model(gguf_file const& file, vocabulary const& known)
    {
        constexpr std::string_view key = "tokenizer.ggml.model";
        std::string_view const name    = file.text(key);
        if (name == "gpt2") { return byte_level_model(file, known); }
        if (name == "llama") { return sentence_piece_model(file, known); }
        file.refuse(key, "is not supported", quoted(name), "\"gpt2\" or \"llama\"");
    }

    void read_special_tokens(gguf_file const& file)
    {
        bool const wants_bos = std::visit([&](auto const& model) { return model.wants_bos(file); }, model_);
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
            // SentencePiece looks for user-defined pieces itself, in the text as it writes it.
            bool const user_defined = known_.kind(id) == token_kind::user_defined && !has_sentence_pieces();
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

    void encode_plain(std::string_view text, bool begins, std::vector<std::int32_t>& out) const
    {
        if (auto const* const bytes = std::get_if<byte_level_model>(&model_)) { bytes->encode(known_, text, out); }
        else { std::get<sentence_piece_model>(model_).encode(text, begins, out); }
    }

    vocabulary known_;
    any_model model_;
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
