/// \file sentence_piece_model.hpp: text to tokens as SentencePiece has it: pieces merged by score, bytes for the rest
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "file_error.hpp"
#include "gguf.hpp"
#include "sentence_pieces.hpp"
#include "special_tokens.hpp"
#include "vocabulary.hpp"

namespace runner
{

/// The tokenizers a file calls "llama": those of Llama 1 and 2 and of Mistral.
///
/// Pieces are written with U+2581 for a space, and so is a text before it is cut: U+2581 in a text becomes a space. The
/// text is not changed otherwise (SentencePiece's identity normalisation). A character that is part of no piece becomes
/// the tokens of its bytes; if one of them is missing, the unknown token stands for it and for such characters next to
/// it. Unused tokens make no pieces.
class sentence_piece_model
{
public:
    /// \throws file_error   kinds or scores missing or wrong, no token for a byte and no unknown token, or a
    ///                      normalisation that is not supported
    sentence_piece_model(gguf_file const& file, vocabulary const& known)
        : space_prefix_(file.find_boolean("tokenizer.ggml.add_space_prefix").value_or(true) ? " " : "")
    {
        constexpr std::string_view normalisation = "tokenizer.ggml.remove_extra_whitespaces";
        if (file.find_boolean(normalisation).value_or(false))
        {
            file.refuse(normalisation, "is not supported", "true", "false");
        }
        constexpr std::string_view kinds = "tokenizer.ggml.token_type";
        if (!file.has(kinds)) { file.refuse(kinds, "is absent, but tells which tokens stand for bytes"); }
        read_pieces(file, known);
        read_unknown(file, known);
    }

    [[nodiscard]] static bool wants_bos(gguf_file const&) noexcept { return true; }

    /// What stands before a text that begins: one space, or nothing.
    [[nodiscard]] std::string_view space_prefix() const noexcept { return space_prefix_; }

    /// The bytes a token stands for. For the unknown token nobody knows them: none.
    [[nodiscard]] static std::string piece(std::string const& written, token_kind kind)
    {
        if (kind == token_kind::control) { return written; }
        if (kind == token_kind::unknown) { return {}; }
        auto const byte = kind == token_kind::byte ? named_byte(written) : std::nullopt;
        return byte ? std::string(1, static_cast<char>(*byte)) : replaced(written, space, " ");
    }

    /// \param begins   the text stands at the beginning or behind a control token, and gets the space prefix
    void encode(std::string_view text, bool begins, std::vector<std::int32_t>& out) const
    {
        if (text.empty()) { return; }
        std::string const whole     = (begins ? replaced(space_prefix_, " ", space) : "") + replaced(text, " ", space);
        std::string_view const rest = whole;
        std::size_t done            = 0;
        user_defined_.each_match(rest, [&](special_tokens::match const& match) {
            encode_stretch(rest.substr(done, match.begin - done), out);
            out.push_back(match.id);
            done = match.end;
        });
        encode_stretch(rest.substr(done), out);
    }

    /// Whether every byte of the text stands in its tokens; if not, some may still.
    [[nodiscard]] bool keeps_all(std::string_view text) const noexcept
    {
        return has_all_bytes() && text.find(space) == std::string_view::npos;
    }

private:
    static constexpr std::string_view space = "\u2581";

    [[nodiscard]] static std::string replaced(std::string_view text, std::string_view from, std::string_view to)
    {
        std::string out;
        while (true)
        {
            std::size_t const at = text.find(from);
            out += text.substr(0, at);
            if (at == std::string_view::npos) { return out; }
            out += to;
            text.remove_prefix(at + from.size());
        }
    }

    // ---- reading the file ---------------------------------------------------------------------------------------

    void read_pieces(gguf_file const& file, vocabulary const& known)
    {
        std::vector<float> const scores = read_scores(file, known);
        std::vector<std::pair<std::string, std::int32_t>> user_defined;
        bytes_.fill(vocabulary::none);
        for (std::int32_t id = 0; id < known.size(); ++id)
        {
            std::string const& written = known.written(id);
            token_kind const kind      = known.kind(id);
            if (kind == token_kind::normal) { pieces_.add(written, scores[static_cast<std::size_t>(id)], id); }
            else if (kind == token_kind::user_defined) { user_defined.emplace_back(replaced(written, " ", space), id); }
            else if (auto const byte = named_byte(written); kind == token_kind::byte && byte)
            {
                std::int32_t& first = bytes_[*byte];
                if (first == vocabulary::none) { first = id; }
            }
        }
        user_defined_ = special_tokens(std::move(user_defined));
    }

    static std::vector<float> read_scores(gguf_file const& file, vocabulary const& known)
    {
        constexpr std::string_view key = "tokenizer.ggml.scores";
        std::vector<float> scores      = file.floats(key);
        if (std::ssize(scores) != known.size())
        {
            file.refuse(key, "has another length than tokenizer.ggml.tokens", std::to_string(scores.size()),
                std::to_string(known.size()));
        }
        auto const wrong = std::find_if(scores.begin(), scores.end(), [](float score) { return std::isnan(score); });
        if (wrong != scores.end())
        { // without an order among scores, no merge would come first
            file.refuse(key, joined("has no number in entry ", std::to_string(wrong - scores.begin())), "nan");
        }
        return scores;
    }

    void read_unknown(gguf_file const& file, vocabulary const& known)
    {
        constexpr std::string_view key = "tokenizer.ggml.unknown_token_id";
        auto const named               = known.find_id(file, key);
        if (has_all_bytes()) { return; }
        if (named) { unknown_ = *named; }
        for (std::int32_t id = 0; id < known.size() && unknown_ == vocabulary::none; ++id)
        {
            if (known.kind(id) == token_kind::unknown) { unknown_ = id; }
        }
        auto const byte = std::find(bytes_.begin(), bytes_.end(), vocabulary::none) - bytes_.begin();
        if (unknown_ == vocabulary::none)
        {
            file.refuse(key, joined("is absent, but no token stands for the byte ", std::to_string(byte)));
        }
        if (known.kind(unknown_) != token_kind::unknown)
        { // text from outside would become another token than one for unknown text
            file.refuse(key,
                joined("is a token of another kind, and no token stands for the byte ", std::to_string(byte)),
                std::to_string(unknown_));
        }
    }

    [[nodiscard]] bool has_all_bytes() const noexcept
    {
        return std::find(bytes_.begin(), bytes_.end(), vocabulary::none) == bytes_.end();
    }

    // ---- encoding -----------------------------------------------------------------------------------------------

    void encode_stretch(std::string_view text, std::vector<std::int32_t>& out) const
    {
        bool in_unknown = false;
        pieces_.split(text, [&](std::string_view part, std::int32_t id) {
            bool const by_bytes = id == sentence_pieces::none && has_bytes_of(part);
            if (id != sentence_pieces::none) { out.push_back(id); }
            else if (by_bytes)
            {
                for (char const c : bytes_of(part)) { out.push_back(bytes_[static_cast<unsigned char>(c)]); }
            }
            else if (!in_unknown) { out.push_back(unknown_); }
            in_unknown = id == sentence_pieces::none && !by_bytes;
        });
    }

    /// A space that is no piece is its own byte, not those of the character it is written as.
    [[nodiscard]] static std::string_view bytes_of(std::string_view part) noexcept
    {
        return part == space ? " " : part;
    }

    [[nodiscard]] bool has_bytes_of(std::string_view part) const noexcept
    {
        std::string_view const bytes = bytes_of(part);
        return std::all_of(bytes.begin(), bytes.end(),
            [this](char c) { return bytes_[static_cast<unsigned char>(c)] != vocabulary::none; });
    }

    std::string_view space_prefix_;
    sentence_pieces pieces_;
    special_tokens user_defined_;           // as written, matched before pieces are looked for
    std::array<std::int32_t, 256> bytes_{}; // the token of each single byte
    std::int32_t unknown_ = vocabulary::none;
};

} // namespace runner
