/// \file tokenizer.hpp: text to token ids and back, by the byte-level vocabulary in a GGUF file
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "byte_alphabet.hpp"
#include "byte_pairs.hpp"
#include "file_error.hpp"
#include "gguf.hpp"
#include "pre_tokenizer.hpp"
#include "special_tokens.hpp"
#include "utf8.hpp"

namespace runner
{

/// What a token is for; the values are those of `tokenizer.ggml.token_type`.
enum class token_kind : std::uint8_t
{
    undefined,
    normal,
    unknown,
    control,
    user_defined,
    unused,
    byte
};

/// GPT-2's kind of tokenizer. Holds copies of all it needs of the file; const operations are safe from many threads.
class tokenizer
{
public:
    /// \throws file_error   another kind of tokenizer, or ids, merges or array lengths that contradict each other
    explicit tokenizer(gguf_file const& file)
        : words_(pre_tokenizer_name(file))
    {
        if (auto const model = file.text("tokenizer.ggml.model"); model != "gpt2")
        {
            file.refuse("tokenizer.ggml.model", "is not supported", quoted(model), "\"gpt2\"");
        }
        read_tokens(file);
        for (unsigned byte = 0; byte < 256; ++byte)
        {
            std::int32_t const id = find(alphabet_.written(static_cast<unsigned char>(byte)));
            bytes_[byte]          = id != none && kinds_[index(id)] != token_kind::control ? id : none;
        }
        read_merges(file);
        read_special_tokens(file);
    }

    [[nodiscard]] std::int64_t size() const noexcept { return static_cast<std::int64_t>(written_.size()); }

    /// The token ids of `text`, without a beginning-of-sequence token.
    ///
    /// \param text            any bytes. Where they are not UTF-8, each byte is encoded alone, as if the text before
    ///                        ended there and the text behind began there. A byte for which the vocabulary has no
    ///                        token is left out, as the reference does; `bytes_without_token` counts those.
    /// \param parse_special   take the texts of control tokens for these tokens; off for text from outside, in which
    ///                        "<|im_end|>" then is just text. Tokens the model's maker defined as plain text
    ///                        ("user-defined") are found either way.
    [[nodiscard]] std::vector<std::int32_t> encode(std::string_view text, bool parse_special = false) const
    {
        std::vector<std::int32_t> out;
        std::size_t done              = 0;
        special_tokens const& special = parse_special ? all_special_ : user_defined_;
        special.each_match(text, [&](special_tokens::match const& match) {
            encode_plain(text.substr(done, match.begin - done), out);
            out.push_back(match.id);
            done = match.end;
        });
        encode_plain(text.substr(done), out);
        return out;
    }

    /// How many bytes of `text` `encode` leaves out, since no token stands for them (control characters mostly).
    [[nodiscard]] std::size_t bytes_without_token(std::string_view text) const noexcept
    {
        return static_cast<std::size_t>(std::count_if(
            text.begin(), text.end(), [this](char c) { return bytes_[static_cast<unsigned char>(c)] == none; }));
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
        return pieces_[index(id)];
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
        std::int32_t const id = find(name);
        return id != none && kinds_[index(id)] == token_kind::control ? std::optional(id) : std::nullopt;
    }

    /// The file's template for conversations, in a language this program does not interpret; empty if there is none.
    [[nodiscard]] std::string const& chat_template() const noexcept { return chat_template_; }

private:
    static constexpr std::int32_t none = -1;

    [[nodiscard]] static constexpr std::size_t index(std::int32_t id) noexcept { return static_cast<std::size_t>(id); }

    // ---- reading the file ---------------------------------------------------------------------------------------

    static std::string_view pre_tokenizer_name(gguf_file const& file)
    {
        constexpr std::string_view key = "tokenizer.ggml.pre";
        std::string_view const name    = file.find_text(key).value_or("default");
        if (!pre_tokenizer::knows(name))
        {
            file.refuse(key, "is not supported", quoted(name), "smollm, llama-bpe or default");
        }
        return name;
    }

    void read_tokens(gguf_file const& file)
    {
        constexpr std::string_view key             = "tokenizer.ggml.tokens";
        constexpr std::string_view kinds_key       = "tokenizer.ggml.token_type";
        std::vector<std::string_view> const tokens = file.texts(key);
        if (tokens.empty()) { file.refuse(key, "has no entries"); }
        kinds_.assign(tokens.size(), token_kind::normal);
        if (file.has(kinds_key)) { read_kinds(file, kinds_key); }
        for (std::size_t i = 0; i < tokens.size(); ++i)
        {
            written_.emplace_back(tokens[i]);
            by_text_.push_back(static_cast<std::int32_t>(i));
            pieces_.push_back(piece(tokens[i], kinds_[i]));
        }
        std::sort(by_text_.begin(), by_text_.end(), [this](std::int32_t a, std::int32_t b) {
            int const order = written_[index(a)].compare(written_[index(b)]);
            return order != 0 ? order < 0 : a < b;
        });
    }

    void read_kinds(gguf_file const& file, std::string_view key)
    {
        std::vector<std::int64_t> const kinds = file.integers(key);
        if (kinds.size() != kinds_.size())
        {
            file.refuse(key, "has another length than tokenizer.ggml.tokens", std::to_string(kinds.size()),
                std::to_string(kinds_.size()));
        }
        constexpr auto most = static_cast<std::int64_t>(token_kind::byte);
        for (std::size_t i = 0; i < kinds.size(); ++i)
        {
            if (kinds[i] < 0 || kinds[i] > most)
            {
                file.refuse(key, joined("has an unknown type in entry ", std::to_string(i)), std::to_string(kinds[i]),
                    std::to_string(most));
            }
            kinds_[i] = static_cast<token_kind>(kinds[i]);
        }
    }

    /// The bytes a token stands for.
    [[nodiscard]] std::string piece(std::string_view written, token_kind what) const
    {
        if (what == token_kind::control || what == token_kind::user_defined) { return std::string(written); }
        if (what == token_kind::byte && written.size() == 6 && written.starts_with("<0x") && written.ends_with(">"))
        {
            auto const digit = [&](std::size_t i) { return std::string_view("0123456789ABCDEF").find(written[i]); };
            if (digit(3) < 16 && digit(4) < 16) { return std::string(1, static_cast<char>(16 * digit(3) + digit(4))); }
        }
        return alphabet_.read(written);
    }

    void read_merges(gguf_file const& file)
    {
        constexpr std::string_view key             = "tokenizer.ggml.merges";
        std::vector<std::string_view> const merges = file.texts(key);
        std::vector<merge_rule> rules;
        rules.reserve(merges.size());
        for (std::size_t i = 0; i < merges.size(); ++i)
        {
            std::size_t const space = merges[i].find(' ', 1); // a token may begin with a space, and so may a pair
            if (space == std::string_view::npos) { refuse_merge(file, i, merges[i], "has no space"); }
            std::string_view const left  = merges[i].substr(0, space);
            std::string_view const right = merges[i].substr(space + 1);
            merge_rule const rule{
                find(left), find(right), static_cast<std::int32_t>(i), find(std::string(left) + std::string(right))};
            if (rule.left == none || rule.right == none || rule.merged == none)
            {
                refuse_merge(file, i, merges[i], "names a token that is not in the vocabulary");
            }
            if (kinds_[index(rule.merged)] == token_kind::control)
            { // text from outside could become a control token by it
                refuse_merge(file, i, merges[i], "makes a control token");
            }
            rules.push_back(rule);
        }
        merges_ = merge_table(std::move(rules));
    }

    [[noreturn]] static void refuse_merge(
        gguf_file const& file, std::size_t i, std::string_view merge, std::string_view problem)
    {
        file.refuse("tokenizer.ggml.merges", joined("entry ", std::to_string(i), " ", problem), quoted(merge));
    }

    void read_special_tokens(gguf_file const& file)
    {
        bool const is_llama = file.find_text("tokenizer.ggml.pre").value_or("") == "llama-bpe";
        whole_words_        = is_llama;
        bos_                = find_id(file, "tokenizer.ggml.bos_token_id");
        eos_                = find_id(file, "tokenizer.ggml.eos_token_id");
        add_bos_            = file.find_boolean("tokenizer.ggml.add_bos_token").value_or(is_llama);
        if (add_bos_ && !bos_)
        {
            file.refuse("tokenizer.ggml.bos_token_id", "is absent, but the model wants this token before a text");
        }
        chat_template_ = file.find_text("tokenizer.chat_template").value_or("");

        std::vector<std::pair<std::string, std::int32_t>> plain;
        std::vector<std::pair<std::string, std::int32_t>> all;
        for (std::size_t i = 0; i < written_.size(); ++i)
        {
            if (kinds_[i] != token_kind::control && kinds_[i] != token_kind::user_defined) { continue; }
            all.emplace_back(written_[i], static_cast<std::int32_t>(i));
            if (kinds_[i] == token_kind::user_defined) { plain.push_back(all.back()); }
        }
        all_special_  = special_tokens(std::move(all));
        user_defined_ = special_tokens(std::move(plain));
        read_ends(file);
    }

    void read_ends(gguf_file const& file)
    {
        for (std::string_view const key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"})
        {
            if (auto const id = find_id(file, key)) { ends_.push_back(*id); }
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

    [[nodiscard]] std::optional<std::int32_t> find_id(gguf_file const& file, std::string_view key) const
    {
        auto const id = file.find_integer(key);
        if (!id) { return std::nullopt; }
        if (*id < 0 || *id >= size())
        {
            file.refuse(key, "is no token", std::to_string(*id), std::to_string(size() - 1));
        }
        return static_cast<std::int32_t>(*id);
    }

    // ---- encoding -----------------------------------------------------------------------------------------------

    /// The lowest id of this text, as it is written in the vocabulary.
    [[nodiscard]] std::int32_t find(std::string_view written) const noexcept
    {
        auto const at = std::lower_bound(by_text_.begin(), by_text_.end(), written,
            [this](std::int32_t id, std::string_view w) { return written_[index(id)] < w; });
        return at != by_text_.end() && written_[index(*at)] == written ? *at : none;
    }

    void encode_plain(std::string_view text, std::vector<std::int32_t>& out) const
    {
        while (!text.empty())
        {
            std::size_t const valid = valid_utf8_prefix(text);
            for (std::string_view const word : words_.split(text.substr(0, valid))) { encode_word(word, out); }
            text.remove_prefix(valid);
            while (!text.empty() && first_utf8_char(text).bytes == 0)
            {
                append_byte(text[0], out);
                text.remove_prefix(1);
            }
        }
    }

    void encode_word(std::string_view word, std::vector<std::int32_t>& out) const
    {
        if (whole_words_)
        {
            std::int32_t const id = find(alphabet_.write(word));
            if (id != none && kinds_[index(id)] == token_kind::normal)
            {
                out.push_back(id);
                return;
            }
        }
        std::vector<std::int32_t> tokens;
        tokens.reserve(word.size());
        for (char const c : word) { append_byte(c, tokens); }
        merges_.apply(tokens);
        out.insert(out.end(), tokens.begin(), tokens.end());
    }

    void append_byte(char c, std::vector<std::int32_t>& out) const
    {
        std::int32_t const id = bytes_[static_cast<unsigned char>(c)];
        if (id != none) { out.push_back(id); }
    }

    pre_tokenizer words_;
    byte_alphabet alphabet_;
    bool whole_words_ = false; // a word that is a token is taken whole, whether merges lead there or not
    bool add_bos_     = false;
    std::vector<std::string> written_;      // [vocabulary] as in the file
    std::vector<std::string> pieces_;       // [vocabulary] the bytes each stands for
    std::vector<token_kind> kinds_;         // [vocabulary]
    std::vector<std::int32_t> by_text_;     // ids, sorted by `written_`
    std::array<std::int32_t, 256> bytes_{}; // the token of each single byte
    merge_table merges_;
    special_tokens all_special_;
    special_tokens user_defined_;
    std::optional<std::int32_t> bos_;
    std::optional<std::int32_t> eos_;
    std::vector<std::int32_t> ends_;
    std::string chat_template_;
};

} // namespace runner
