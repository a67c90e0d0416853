/// \file sequence_table.hpp: the sequences of a batch, found from its mask alone; they may share a cache, in any order
#pragma once

#include <mdkv/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "attention_node.hpp"
#include "cell_list.hpp"
#include "known_mask.hpp"
#include "sequence.hpp"

namespace mdkv_ggml
{

/// A row of the mask says which cells a token sees: its sequence's cells up to its own. A sequence is therefore known by
/// the cells that it has had: a row that sees all of them and one more continues it. The cell that no row has shown before
/// is the newest, so the order of tokens follows from watching every batch.
///
/// Two promises hold, even if the engine changes cells between two masks:
/// - A part's tokens see just the first `before` cells of its sequence's list and the part's own up to themselves: each row
///   is compared with the list, cell by cell. cell_watch compares the cells' contents.
/// - If cells come without their batches (a state was loaded, positions were shifted), their order cannot be known. They
///   are listed by number, which may make other tokens the last ones, and changes no set of cells.
class sequence_table
{
public:
    sequence_table()                                 = default;
    sequence_table(sequence_table const&)            = delete;
    sequence_table& operator=(sequence_table const&) = delete;

    /// The parts of a node of one cache, in the order of its tokens. Layers of a graph usually have the same mask: it is
    /// analysed for the first layer and remembered for the others.
    std::vector<batch_part> const& parts(attention_node const& node)
    {
        known_mask& last = known_[node.mask().data];
        if (last.is_of(node)) { return last.parts; }
        ++masks_;
        changed_ = false;
        std::vector<batch_part> parts;
        try
        {
            parts = split(node);
        }
        catch (...)
        {
            known_.clear();
            throw;
        }
        if (changed_) { known_.clear(); } // known masks name sequences that may be forgotten
        return known_.insert_or_assign(node.mask().data, known_mask{node, std::move(parts)}).first->second.parts;
    }

    /// Sequences whose later tokens were overwritten since the last call: by number, the number of tokens that stay, or 0
    /// if the sequence is forgotten.
    [[nodiscard]] std::map<index_t, index_t> take_cut() { return std::exchange(cut_, {}); }

    /// Number of the first cells that hold just the first tokens of a sequence, and no tokens of other sequences seen.
    [[nodiscard]] index_t own_first_cells(sequence const& of) const noexcept
    {
        index_t end = of.cells.size() > 0 && of.cells[0] == 0 ? of.cells.run() : 0;
        for (auto const& other : all_)
        {
            if (other.get() == &of) { continue; }
            for (index_t place = 0; place < other->cells.size(); ++place) { end = std::min(end, other->cells[place]); }
        }
        return end;
    }

private:
    static constexpr std::uint16_t visible = 0, hidden = 0xFC00; // minus infinity
    static constexpr std::size_t most = 256;                     // llama.cpp has 256, too
    using mask_row                    = std::span<std::uint16_t const>;

    /// Relation of a row to a list of cells, worst first.
    enum class relation
    {
        none,
        grown,     ///< unseen tokens are between the list and the row's token
        forked,    ///< the row shares the list's first cells, and goes on with another cell
        continued, ///< the row has the list's cells and one more
        again      ///< the row has the list's own cells: another mask of the same batch, or a reused cell
    };

    std::vector<batch_part> split(attention_node const& node)
    {
        std::vector<batch_part> parts;
        for (index_t i = 0; i < node.tokens(); ++i)
        {
            if (parts.empty() || !goes_on(parts.back(), node.mask_row(i - 1), node.mask_row(i)))
            {
                finish(parts);
                batch_part const part = begin(i, node.mask_row(i));
                bool const as_last    = !parts.empty() && parts.back().of == nullptr && parts.back().why == part.why;
                if (as_last && part.of == nullptr) { ++parts.back().tokens; }
                else { parts.push_back(part); }
            }
        }
        finish(parts);
        for (batch_part& part : parts)
        {
            part.only =
                std::count_if(parts.begin(), parts.end(), [&](auto const& one) { return one.of == part.of; }) == 1;
        }
        return parts;
    }

    /// The part that begins with token i.
    batch_part begin(index_t i, mask_row row)
    {
        index_t seen = 0, other = 0;
        for (std::uint16_t const x : row)
        {
            seen += x == visible ? 1 : 0;
            other += x != visible && x != hidden ? 1 : 0;
        }
        batch_part part{.first = i, .tokens = 1, .before = seen - 1};
        if (other > 0) { part.why = "a mask with a bias"; }
        else if (seen == 0) { part.why = "a token that sees nothing"; }
        else { part.why = attribute(part, row); }
        return part;
    }

    /// Finds or makes the part's sequence, and lists its first token's cell. Returns why the part cannot be served, or
    /// null.
    char const* attribute(batch_part& part, mask_row row)
    {
        index_t const seen = part.before + 1;
        sequence* like     = nullptr;
        auto best          = std::tuple{index_t{0}, relation::none, false, index_t{0}};
        for (auto const& one : all_)
        {
            auto [common, kind] = compared(one->cells, row, part.before);
            if (kind == relation::again && one->used == masks_) // another part of the batch relies on the list
            {
                std::tie(common, kind) = std::pair{part.before, part.before > 0 ? relation::forked : relation::none};
            }
            auto const rank = std::tuple{common, kind, one->watcher >= 0, one->used};
            if (kind != relation::none && rank > best) { std::tie(like, best) = std::pair{one.get(), rank}; }
        }
        relation const kind = std::get<relation>(best);
        if (kind == relation::none && seen > 1 && slid(row, seen)) { return "a window that slid"; }
        if (kind == relation::none || kind == relation::forked)
        {
            cell_list shared = kind == relation::forked ? like->cells : cell_list{};
            shared.cut(part.before);
            like = make();
            if (like == nullptr) { return "more sequences in a batch than are told apart"; }
            like->cells = std::move(shared);
        }
        part.of    = like;
        like->used = masks_;
        if (kind == relation::again) { return nullptr; }
        part.known = seen - like->cells.size() == 1;
        list_unlisted(*like, row);
        return nullptr;
    }

    /// Adds the cells that a row shows and the sequence's list lacks.
    void list_unlisted(sequence& of, mask_row row)
    {
        listed_.assign(row.size(), false);
        for (index_t place = 0; place < of.cells.size(); ++place)
        {
            listed_[static_cast<std::size_t>(of.cells[place])] = true;
        }
        for (std::size_t cell = 0; cell < row.size(); ++cell)
        {
            if (row[cell] == visible && !listed_[cell]) { of.cells.add(static_cast<index_t>(cell)); }
        }
        changed_ = true;
    }

    /// How many of a list's first cells a row shows that has `before` tokens before its own; and its relation to the list.
    [[nodiscard]] static std::pair<index_t, relation> compared(
        cell_list const& cells, mask_row row, index_t before) noexcept
    {
        index_t const common = std::min(before, cells.size());
        if (common == 0 && (before > 0 || cells.size() == 0 || !shows(row, cells[0]))) { return {}; }
        if (common > 0 && !shows(row, cells[common - 1])) { return {}; } // rules out most lists
        for (index_t const cell : cells.first(common))
        {
            if (!shows(row, cell)) { return {}; }
        }
        if (cells.size() > before && shows(row, cells[before])) { return {before + 1, relation::again}; }
        return {common, cells.size() > before    ? relation::forked
                        : cells.size() == before ? relation::continued
                                                 : relation::grown};
    }

    /// Whether a row shows a list's cells between two places, and at most one cell more.
    [[nodiscard]] bool slid(mask_row row, index_t seen) const noexcept
    {
        return std::any_of(all_.begin(), all_.end(), [&](auto const& one) {
            cell_list const& cells = one->cells;
            index_t begin          = 0;
            while (begin < cells.size() && !shows(row, cells[begin])) { ++begin; }
            index_t end = begin;
            while (end < cells.size() && shows(row, cells[end])) { ++end; }
            bool const lives = end == cells.size() || one->used + 1 >= masks_;
            return begin > 0 && end > begin && seen - (end - begin) <= 1 && lives;
        });
    }

    /// Whether a token is the next one of a part; lists the token's cell if it is.
    bool goes_on(batch_part& part, mask_row last, mask_row row)
    {
        if (part.of == nullptr) { return false; }
        std::size_t const at = difference(last, row, 0);
        if (at == row.size() && part.before > 0) // the same cells, the part's among them
        {
            part.why = "tokens that see those after them";
            --part.before;
            ++part.tokens;
            return true;
        }
        if (at == row.size()) { return false; }
        if (part.why != nullptr || row[at] != visible || last[at] != hidden
            || difference(last, row, at + 1) != row.size())
        {
            return false;
        }
        index_t const place = part.before + part.tokens++;
        cell_list& cells    = part.of->cells;
        if (place == cells.size() || cells[place] != static_cast<index_t>(at))
        {
            cells.cut(place);
            cells.add(static_cast<index_t>(at));
            changed_ = true;
        }
        return true;
    }

    /// Ends the last part: its sequence ends there, and other sequences lose the part's cells.
    void finish(std::vector<batch_part> const& parts)
    {
        if (parts.empty() || parts.back().of == nullptr) { return; }
        batch_part const& part = parts.back();
        cell_list& cells       = part.of->cells;
        changed_               = changed_ || cells.size() > part.before + part.tokens;
        cells.cut(part.before + part.tokens);
        if (!changed_) { return; }
        index_t const from = part.before + (part.known ? 0 : 1);
        listed_.assign(listed_.size(), false);
        for (index_t place = from; place < cells.size(); ++place)
        {
            auto const cell = static_cast<std::size_t>(cells[place]);
            listed_.resize(std::max(listed_.size(), cell + 1), false);
            listed_[cell] = true;
        }
        for (auto const& other : all_)
        {
            if (other->used == masks_) { continue; } // parts of the batch rely on their lists
            auto const all   = other->cells.first(other->cells.size());
            auto const taken = std::find_if(all.begin(), all.end(), [&](std::int32_t cell) {
                return static_cast<std::size_t>(cell) < listed_.size() && listed_[static_cast<std::size_t>(cell)];
            });
            if (taken == all.end()) { continue; }
            other->cells.cut(taken - all.begin());
            cut_[other->number] = other->cells.size();
        }
        std::erase_if(all_, [](auto const& one) { return one->cells.size() == 0; });
    }

    /// Makes a sequence; null if the batch has tokens of the most sequences there may be.
    sequence* make()
    {
        changed_ = true;
        if (all_.size() == most) // forgets a sequence without a compressed cache, if there is one
        {
            auto const one = std::min_element(all_.begin(), all_.end(), [](auto const& a, auto const& b) {
                return std::tuple{a->watcher >= 0, a->used} < std::tuple{b->watcher >= 0, b->used};
            });
            if ((*one)->used == masks_) { return nullptr; }
            cut_[(*one)->number] = 0;
            all_.erase(one);
        }
        all_.push_back(std::make_unique<sequence>());
        all_.back()->number = ++numbers_;
        return all_.back().get();
    }

    [[nodiscard]] static bool shows(mask_row row, index_t cell) noexcept
    {
        return cell < std::ssize(row) && row[static_cast<std::size_t>(cell)] == visible;
    }

    /// The first cell from `at` on that two rows differ in.
    [[nodiscard]] static std::size_t difference(mask_row a, mask_row b, std::size_t at) noexcept
    {
        constexpr std::size_t step = 64;
        while (at + step <= a.size() && std::memcmp(a.data() + at, b.data() + at, step * sizeof a[0]) == 0)
        {
            at += step;
        }
        while (at < a.size() && a[at] == b[at]) { ++at; }
        return at;
    }

    std::vector<std::unique_ptr<sequence>> all_;
    std::map<void const*, known_mask> known_; // by the mask's memory
    std::map<index_t, index_t> cut_;
    std::vector<bool> listed_; // by cell
    index_t numbers_ = 0;
    index_t masks_   = 0;
    bool changed_    = false; // whether the current mask changed a list
};

} // namespace mdkv_ggml
