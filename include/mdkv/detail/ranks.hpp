/// \file ranks.hpp: steps of a stage over ranks: the agreement before its work, the numbers of its heads, and its exchanges.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/ranks.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/team.hpp>

#include <cstddef>
#include <cstdint>

namespace mdkv::inline MDKV_MACHINE::detail
{

/// The ranks of a backend, or null if there is one.
template <backend B>
[[nodiscard]] constexpr ranks<B::memory_space> const* ranks_of([[maybe_unused]] B const& on) noexcept
{
    if constexpr (requires { on.ranks; }) { return on.ranks != nullptr && on.ranks->size() > 1 ? on.ranks : nullptr; }
    else { return nullptr; }
}

/// The same backend without ranks.
template <backend B>
[[nodiscard]] B alone(B on) noexcept
{
    if constexpr (requires { on.ranks; }) { on.ranks = nullptr; }
    return on;
}

/// A number that must be the same on all ranks.
struct shared_number
{
    char const* name;
    index_t value;
};

/// A call's part in the agreement of all ranks. It is made before arguments are checked. A call that ends without `settle` or
/// `leave` has thrown, and the other ranks then throw, too, in their `settle`, of whatever stage it is. Does nothing in a dry
/// run or on one rank.
template <space S>
class agreement
{
public:
    template <backend B>
    explicit agreement(B const& on)
        : all_{dry_run(on) ? nullptr : ranks_of(on)}
    {}
    agreement(agreement const&)            = delete;
    agreement& operator=(agreement const&) = delete;
    ~agreement()
    {
        if (all_ != nullptr) { refuse(); }
    }

    /// Whether there are other ranks to agree with.
    [[nodiscard]] bool open() const noexcept { return all_ != nullptr; }

    /// The stage that is called next agrees instead.
    void leave() noexcept { all_ = nullptr; }

    /// Returns once every rank takes part with the same numbers.
    /// \throws invalid_argument   a rank has refused its arguments, or has another number; on every rank
    void settle(char const* stage, array<shared_number, 6> const& numbers)
    {
        if (open()) { compare(stage, numbers); }
    }

private:
    static constexpr index_t count = 13;
    static constexpr auto none     = ~std::uint64_t{0};
    using words                    = array<std::uint64_t, std::size_t{count}>;

    [[gnu::cold, gnu::noinline]] void compare(char const* stage, array<shared_number, 6> const& numbers)
    {
        auto const& all = *all_;
        leave(); // an exception from here on is every rank's
        words least{};
        least[0] = none;
        for (std::size_t i = 0; i < numbers.size(); ++i)
        {
            least[1 + 2 * i] = static_cast<std::uint64_t>(numbers[i].value);
            least[2 + 2 * i] = ~least[1 + 2 * i];
        }
        all.agree(least.data(), count);
        expects(least[0] == none, stage, ": rank ", least[0], " refuses its arguments");
        for (std::size_t i = 0; i < numbers.size(); ++i)
        {
            if (least[1 + 2 * i] != ~least[2 + 2 * i]) { differs(all, stage, numbers[i]); }
        }
    }

    /// Tells the other ranks that this one has refused its arguments.
    [[gnu::cold, gnu::noinline]] void refuse() const noexcept
    {
        words own{};
        for (std::uint64_t& word : own) { word = none; }
        own[0] = static_cast<std::uint64_t>(all_->rank());
#if defined(__cpp_exceptions)
        try
        {
            all_->agree(own.data(), count);
        }
        catch (...) // the call's own exception is on its way
        {}
#else
        all_->agree(own.data(), count);
#endif
    }

    /// Finds the first rank whose number is not that of rank 0.
    static void differs(ranks<S> const& all, char const* stage, shared_number const& own)
    {
        std::uint64_t first = all.rank() == 0 ? static_cast<std::uint64_t>(own.value) : none;
        all.agree(&first, 1);
        bool const other = static_cast<std::uint64_t>(own.value) != first;
        std::uint64_t at = other ? static_cast<std::uint64_t>(all.rank()) : none;
        all.agree(&at, 1);
        expects(false, stage, ": ", own.name, " of rank ", at, " is not that of rank 0, ", static_cast<index_t>(first),
            "; it must be the same on all ranks");
    }

    ranks<S> const* all_;
};
template <backend B>
agreement(B const&) -> agreement<B::memory_space>;

/// The numbers of a call's heads among the heads of all ranks.
struct head_numbers
{
    rank_heads place;     ///< on one rank: all heads are here
    index_t own;          ///< this rank's heads
    index_t own_in_layer; ///< this rank's heads of a layer, which have neighbouring numbers
    index_t all;          ///< heads on all ranks
    index_t first;        ///< number of this rank's first head

    [[nodiscard]] constexpr index_t number(index_t h) const noexcept
    {
        return first + h / own_in_layer * place.heads + h % own_in_layer;
    }
};

/// \param own     this rank's heads
/// \param layers  their layers; 0: all are heads of one layer, which counts alone
/// \throws invalid_argument   the rank's place does not hold so many heads
template <backend B>
[[nodiscard]] head_numbers number_heads(B const& on, char const* stage, index_t own, index_t layers)
{
    auto const* const all  = ranks_of(on);
    index_t const parts    = layers > 0 ? layers : 1;
    index_t const each     = own / parts;
    rank_heads const place = all == nullptr ? rank_heads{.heads = each, .layers = parts} : all->own();
    expects(own == parts * each, stage, ": ", own, " heads are not those of ", layers, " layers");
    expects(place.first_head >= 0 && place.first_head <= place.heads - each, stage, ": this rank has heads ",
        place.first_head, " to ", place.first_head + each, " of ", place.heads);
    expects(place.first_layer >= 0 && place.first_layer <= place.layers - parts, stage, ": this rank has layers ",
        place.first_layer, " to ", place.first_layer + parts, " of ", place.layers);
    return {place, own, each, checked_multiply(place.heads, layers > 0 ? place.layers : 1),
        (layers > 0 ? place.first_layer * place.heads : 0) + place.first_head};
}

/// Each of n numbers, in the backend's memory, becomes its sum over all ranks. Replicas add nothing.
template <backend B>
[[gnu::cold, gnu::noinline]] void sum_over_ranks(B const& on, std::int64_t* numbers, index_t n)
{
    auto const* const all = ranks_of(on);
    if (all == nullptr || dry_run(on)) { return; }
    if (all->own().replica) { run(on, fill<std::int64_t>{numbers, 0, n}); }
    all->sum(numbers, n);
}

/// Each of n numbers, in the backend's memory, becomes the least over all ranks. Replicas have numbers that others have, too.
template <backend B>
void least_over_ranks(B const& on, std::uint64_t* numbers, index_t n)
{
    auto const* const all = ranks_of(on);
    if (all != nullptr && !dry_run(on)) { all->least(numbers, n); }
}

/// Copies sums of this rank's rows to their places among all ranks', for `sum_over_ranks`.
/// \param to  [numbers.all, pieces]
template <backend B>
[[gnu::cold, gnu::noinline]] void place_sums(
    B const& on, head_numbers const& numbers, sum_pieces<B> const& own, double* to)
{
    index_t const pieces = own.pieces();
    index_t const layers = own.rows.extent(0);
    index_t const heads  = own.rows.extent(1);
    run(on, fill<double>{to, 0, numbers.all * pieces});
    run(on, copy_rows<B, double>{{own.sums, {layers, heads, pieces}, {heads * pieces, pieces, 1}},
                {to + numbers.first * pieces, {layers, heads, pieces}, {numbers.place.heads * pieces, pieces, 1}}});
}

/// Checks that every head is on one rank, replicas aside; on a GPU waits for the device. Each rank adds a hash of its heads'
/// numbers.
/// \param word  [1]  in the backend's memory
/// \throws invalid_argument   a head is on no rank or on several; on every rank
template <backend B>
[[gnu::cold, gnu::noinline]] void expects_every_head(
    B const& on, char const* stage, head_numbers const& heads, std::int64_t* word)
{
    if (ranks_of(on) == nullptr || dry_run(on)) { return; }
    auto const hash = [](index_t n) {
        std::uint64_t const mixed = (static_cast<std::uint64_t>(n) + 1) * 0x9e3779b97f4a7c15U;
        return static_cast<std::int64_t>(
            (mixed ^ mixed >> 29U) >> 24U); // the sum of as many as there may be stays in 64 bits
    };
    std::int64_t own = 0;
    std::int64_t all = 0;
    for (index_t h = 0; h < heads.own; ++h) { own += hash(heads.number(h)); }
    for (index_t h = 0; h < heads.all; ++h) { all += hash(h); }
    run(on, fill<std::int64_t>{word, own, 1});
    sum_over_ranks(on, word, 1);
    fetch(on, word, &own, 1);
    expects(own == all, stage, ": not every one of ", heads.all,
        " heads is on one rank; see rank_heads (another rank with the same heads is a replica)");
}

} // namespace mdkv::inline MDKV_MACHINE::detail
