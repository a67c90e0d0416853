/// \file sentence_pieces.hpp: SentencePiece's byte pair encoding: merging neighbours by the score of what they make
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "utf8.hpp"

namespace runner
{

/// The pieces of a vocabulary, found by text. Of several with one text the first added stands.
class sentence_pieces
{
public:
    static constexpr std::int32_t none = -1;

    void add(std::string_view text, float score, std::int32_t id)
    {
        if (text.empty()) { return; } // would be found everywhere
        pieces_.try_emplace(std::string(text), piece{score, id});
    }

    /// Calls `found(text, id)` for every part of `text`, from left to right; `none` is the id of a single character
    /// that is no piece.
    ///
    /// At first every character is a part of its own, and so is a byte that belongs to no valid character. Then always
    /// the two neighbours whose joined text is the piece of highest score become one part, the leftmost of several,
    /// until no neighbours make a piece. O(n log n), since a text is one stretch of characters however long.
    template <class Found>
    void split(std::string_view text, Found const& found) const
    {
        std::vector<part> parts = characters(text);
        std::priority_queue<candidate, std::vector<candidate>, std::greater<>> queue;
        for (std::size_t i = 0; i + 1 < parts.size(); ++i) { consider(text, parts, i, queue); }
        while (!queue.empty())
        {
            candidate const best = queue.top();
            queue.pop();
            part& left             = parts[best.left];
            std::size_t const next = left.next;
            // Stale when one of the two was merged meanwhile: taken out, or longer than it was.
            if (left.bytes == 0 || next == parts.size() || left.bytes + parts[next].bytes != best.bytes) { continue; }
            left.bytes        = best.bytes;
            left.id           = best.id;
            left.next         = parts[next].next;
            parts[next].bytes = 0;
            if (left.next != parts.size()) { parts[left.next].previous = best.left; }
            consider(text, parts, best.left, queue);
            if (best.left != 0) { consider(text, parts, left.previous, queue); }
        }
        for (std::size_t i = 0; i < parts.size(); i = parts[i].next)
        {
            found(text.substr(parts[i].begin, parts[i].bytes), parts[i].id);
        }
    }

private:
    struct piece
    {
        float score;
        std::int32_t id;
    };

    /// A stretch of the text in the list of those there are: a merge keeps its left one and takes the right one out.
    struct part
    {
        std::size_t begin;
        std::size_t bytes; // 0: taken out
        std::size_t next;
        std::size_t previous; // of the first: never used
        std::int32_t id;
    };

    struct candidate
    {
        float score;
        std::size_t left;
        std::size_t bytes; // of both
        std::int32_t id;

        /// Comes later.
        friend bool operator>(candidate const& a, candidate const& b) noexcept
        {
            return a.score != b.score ? a.score < b.score : a.left > b.left;
        }
    };

    /// Lets texts be looked up without a copy.
    struct text_hash
    {
        using is_transparent = void;
        std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>{}(text); }
    };

    [[nodiscard]] piece const* find(std::string_view text) const
    {
        auto const at = pieces_.find(text);
        return at == pieces_.end() ? nullptr : &at->second;
    }

    [[nodiscard]] std::vector<part> characters(std::string_view text) const
    {
        std::vector<part> parts;
        for (std::size_t at = 0; at < text.size(); at += parts.back().bytes)
        {
            std::size_t const valid = first_utf8_char(text.substr(at)).bytes;
            std::size_t const bytes = valid == 0 ? 1 : valid;
            piece const* const one  = find(text.substr(at, bytes));
            std::size_t const i     = parts.size();
            parts.push_back({at, bytes, i + 1, i == 0 ? 0 : i - 1, one == nullptr ? none : one->id});
        }
        return parts;
    }

    template <class Queue>
    void consider(std::string_view text, std::vector<part> const& parts, std::size_t left, Queue& queue) const
    {
        std::size_t const next = parts[left].next;
        if (next == parts.size()) { return; }
        std::size_t const bytes = parts[left].bytes + parts[next].bytes;
        if (piece const* const joined = find(text.substr(parts[left].begin, bytes)))
        {
            queue.push({joined->score, left, bytes, joined->id});
        }
    }

    std::unordered_map<std::string, piece, text_hash, std::equal_to<>> pieces_;
};

} // namespace runner
