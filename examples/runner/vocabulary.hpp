/// \file vocabulary.hpp: the tokens of a GGUF file: how each is written and what it is for
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "file_error.hpp"
#include "gguf.hpp"

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

/// The byte a token of the byte kind is named after, as in "<0x0A>"; none where the name has another form.
[[nodiscard]] inline std::optional<unsigned char> named_byte(std::string_view written) noexcept
{
    if (written.size() != 6 || !written.starts_with("<0x") || !written.ends_with(">")) { return std::nullopt; }
    auto const digit = [&](std::size_t i) { return std::string_view("0123456789ABCDEF").find(written[i]); };
    if (digit(3) >= 16 || digit(4) >= 16) { return std::nullopt; }
    return static_cast<unsigned char>(16 * digit(3) + digit(4));
}

/// Holds copies of all it needs of the file.
class vocabulary
{
public:
    static constexpr std::int32_t none = -1;

    /// \throws file_error   no tokens, or kinds that are unknown or of another number
    explicit vocabulary(gguf_file const& file)
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
        }
        std::sort(by_text_.begin(), by_text_.end(), [this](std::int32_t a, std::int32_t b) {
            int const order = written(a).compare(written(b));
            return order != 0 ? order < 0 : a < b;
        });
    }

    [[nodiscard]] std::int32_t size() const noexcept { return static_cast<std::int32_t>(written_.size()); }

    // `id` must be in [0, size()).

    [[nodiscard]] std::string const& written(std::int32_t id) const noexcept { return written_[index(id)]; }
    [[nodiscard]] token_kind kind(std::int32_t id) const noexcept { return kinds_[index(id)]; }

    /// The lowest id of this text, as it is written in the file; or none.
    [[nodiscard]] std::int32_t find(std::string_view text) const noexcept
    {
        auto const at = std::lower_bound(by_text_.begin(), by_text_.end(), text,
            [this](std::int32_t id, std::string_view t) { return written(id) < t; });
        return at != by_text_.end() && written(*at) == text ? *at : none;
    }

    /// The token a key of the file names.
    /// \throws file_error   it is not in the vocabulary
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

private:
    [[nodiscard]] static constexpr std::size_t index(std::int32_t id) noexcept { return static_cast<std::size_t>(id); }

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

    std::vector<std::string> written_;
    std::vector<token_kind> kinds_;
    std::vector<std::int32_t> by_text_; // ids, sorted by `written_`
};

} // namespace runner
