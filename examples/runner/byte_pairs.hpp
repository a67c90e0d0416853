/// \file byte_pairs.hpp: byte pair encoding of one word: merging neighbours by rank, in token ids
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace runner
{

/// Two neighbours that may become one token; the lower the rank, the sooner.
struct merge_rule
{
    std::int32_t left;
    std::int32_t right;
    std::int32_t rank;
    std::int32_t merged;
};

/// The rules of a vocabulary, found by pair.
class merge_table
{
public:
    merge_table() = default;

    /// Of several rules for one pair the one of lowest rank stands.
    explicit merge_table(std::vector<merge_rule> rules)
        : rules_(std::move(rules))
    {
        std::sort(rules_.begin(), rules_.end(), [](merge_rule const& a, merge_rule const& b) {
            return key(a) != key(b) ? key(a) < key(b) : a.rank < b.rank;
        });
        auto const same = [](merge_rule const& a, merge_rule const& b) { return key(a) == key(b); };
        rules_.erase(std::unique(rules_.begin(), rules_.end(), same), rules_.end());
    }

    [[nodiscard]] merge_rule const* find(std::int32_t left, std::int32_t right) const noexcept
    {
        std::uint64_t const wanted = key({left, right, 0, 0});
        auto const at              = std::lower_bound(rules_.begin(), rules_.end(), wanted,
                         [](merge_rule const& rule, std::uint64_t k) { return key(rule) < k; });
        return at != rules_.end() && key(*at) == wanted ? &*at : nullptr;
    }

    /// Replaces the tokens of one word by what the rules make of them: always the pair of lowest rank first, the
    /// leftmost of several. O(n log n), since a text without spaces is a single word however long.
    void apply(std::vector<std::int32_t>& word) const
    {
        std::size_t const size = word.size();
        if (size < 2) { return; }
        // The word as a list: a merge keeps its left place and takes the right one out.
        std::vector<std::size_t> next(size);
        std::vector<std::size_t> previous(size);
        for (std::size_t i = 0; i < size; ++i)
        {
            next[i]     = i + 1;
            previous[i] = i == 0 ? 0 : i - 1; // of the first: never used
        }
        std::priority_queue<candidate, std::vector<candidate>, std::greater<>> queue;
        auto const consider = [&](std::size_t left) {
            if (next[left] == size) { return; }
            if (merge_rule const* const rule = find(word[left], word[next[left]]))
            {
                queue.push({rule->rank, left, rule});
            }
        };
        for (std::size_t i = 0; i + 1 < size; ++i) { consider(i); }
        while (!queue.empty())
        {
            candidate const best = queue.top();
            queue.pop();
            std::size_t const left  = best.left;
            std::size_t const right = next[left];
            // Stale when one of the two was merged meanwhile; a place taken out holds no token any more.
            if (right == size || word[left] != best.rule->left || word[right] != best.rule->right) { continue; }
            word[left]  = best.rule->merged;
            word[right] = gone;
            next[left]  = next[right];
            if (next[left] != size) { previous[next[left]] = left; }
            consider(left);
            if (left != 0) { consider(previous[left]); }
        }
        word.erase(std::remove(word.begin(), word.end(), gone), word.end());
    }

private:
    static constexpr std::int32_t gone = -1;

    struct candidate
    {
        std::int32_t rank;
        std::size_t left;
        merge_rule const* rule;

        friend bool operator>(candidate const& a, candidate const& b) noexcept
        {
            return a.rank != b.rank ? a.rank > b.rank : a.left > b.left;
        }
    };

    [[nodiscard]] static std::uint64_t key(merge_rule const& rule) noexcept
    {
        return static_cast<std::uint64_t>(static_cast<std::uint32_t>(rule.left)) << 32
               | static_cast<std::uint32_t>(rule.right);
    }

    std::vector<merge_rule> rules_; // sorted by pair
};

} // namespace runner
