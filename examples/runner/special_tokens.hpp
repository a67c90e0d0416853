/// \file special_tokens.hpp: finding tokens that stand for their own text, such as <|im_end|>, in a longer text
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace runner
{

/// Texts and the ids they stand for. In a text, the match that begins first counts; of those, the longest.
class special_tokens
{
public:
    struct match
    {
        std::size_t begin;
        std::size_t end;
        std::int32_t id;
    };

    special_tokens() = default;

    explicit special_tokens(std::vector<std::pair<std::string, std::int32_t>> tokens)
        : tokens_(std::move(tokens))
    {
        std::erase_if(tokens_, [](auto const& token) { return token.first.empty(); });
        std::sort(tokens_.begin(), tokens_.end());
        for (auto const& token : tokens_) { begins_some_[static_cast<unsigned char>(token.first[0])] = true; }
    }

    /// Calls `found(match)` for every match from left to right; matches do not overlap.
    template <class Found>
    void each_match(std::string_view text, Found const& found) const
    {
        std::size_t at = 0;
        while (at < text.size())
        {
            match const here = longest_at(text, at);
            if (here.end != here.begin) { found(here); }
            at = here.end == here.begin ? at + 1 : here.end;
        }
    }

private:
    using iterator = std::vector<std::pair<std::string, std::int32_t>>::const_iterator;

    /// Empty when none begins here. Narrows the sorted tokens to those that agree with the text, byte by byte.
    [[nodiscard]] match longest_at(std::string_view text, std::size_t at) const
    {
        match best{at, at, -1};
        if (!begins_some_[static_cast<unsigned char>(text[at])]) { return best; }
        iterator first = tokens_.begin();
        iterator last  = tokens_.end();
        for (std::size_t length = 0; at + length < text.size(); ++length)
        {
            auto const wanted = static_cast<unsigned char>(text[at + length]);
            auto const byte   = [length](auto const& token) { // of a token that ends here: less than any byte
                return token.first.size() > length ? int{static_cast<unsigned char>(token.first[length])} : -1;
            };
            first = std::partition_point(first, last, [&](auto const& token) { return byte(token) < wanted; });
            last  = std::partition_point(first, last, [&](auto const& token) { return byte(token) <= wanted; });
            if (first == last) { break; }
            if (first->first.size() == length + 1) { best = {at, at + length + 1, first->second}; }
        }
        return best;
    }

    std::vector<std::pair<std::string, std::int32_t>> tokens_; // sorted
    std::array<bool, 256> begins_some_{};
};

} // namespace runner
