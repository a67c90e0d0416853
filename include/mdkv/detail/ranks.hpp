/// \file ranks.hpp: steps of a stage over ranks: the agreement before its work, the numbers of its heads, and its exchanges.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/ranks.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/team.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>

namespace MDKV_NAMESPACE::detail
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

/// One more number in a hash.
[[nodiscard]] constexpr std::uint64_t mixed(std::uint64_t hash, std::uint64_t number) noexcept
{
    hash = (hash ^ number) * 0x9e3779b97f4a7c15U;
    return hash ^ hash >> 29U;
}

/// A hash of real numbers in the backend's memory; on a GPU waits for the device.
template <backend B, class V>
[[nodiscard]] std::uint64_t hash_of(B const& on, view<V const, 1, B::memory_space> const& numbers)
{
    std::uint64_t hash = 0;
    V some[64]{};
    for (index_t first = 0; first < numbers.extent(0); first += index_t{std::size(some)})
    {
        index_t const n = (std::min)(index_t{std::size(some)}, numbers.extent(0) - first);
        fetch(on, numbers.data_handle() + first, some, n);
        for (index_t i = 0; i < n; ++i) { hash = mixed(hash, __builtin_bit_cast(std::uint64_t, double{some[i]})); }
    }
    return hash;
}

/// A hash of a ratio set's rungs.
[[nodiscard]] inline std::uint64_t hash_of(ratio_set const& ratios) noexcept
{
    std::uint64_t hash = 0;
    for (rung const& one : ratios)
    {
        hash = mixed(hash, static_cast<std::uint64_t>(one.num));
        hash = mixed(hash, static_cast<std::uint64_t>(one.den) << 8U | static_cast<std::uint64_t>(one.kind));
    }
    return hash;
}

/// A number that must be the same on all ranks, or the hash of several.
struct shared_number
{
    enum class form : std::uint8_t
    {
        whole,
        real,
        unshown
    };
    char const* name   = "";
    std::uint64_t bits = 0;
    form shown         = form::whole;

    constexpr shared_number() noexcept = default;
    /// \param value   a whole number or a real one, or a truth value or an enumeration's, which messages do not show
    template <class V>
    constexpr shared_number(char const* name_, V value) noexcept
        : name{name_}
    {
        if constexpr (std::is_floating_point_v<V>)
        {
            bits  = __builtin_bit_cast(std::uint64_t, static_cast<double>(value) + 0.0); // -0 is 0
            shown = form::real;
        }
        else
        {
            bits  = static_cast<std::uint64_t>(value);
            shown = std::is_same_v<V, bool> || std::is_enum_v<V> ? form::unshown : form::whole;
        }
    }
    [[nodiscard]] static constexpr shared_number hash(char const* name, std::uint64_t hash) noexcept
    {
        shared_number made{name, hash};
        made.shown = form::unshown;
        return made;
    }
};

/// Preset, sizes and encoding of a prompt whose call agrees, causes before the numbers that follow from them.
using prompt_numbers = array<shared_number, 37>;

/// A call's part in the agreement of all ranks. It is made before arguments are checked. A call that ends without `settle` or
/// `leave` reports failure: every other rank's next `settle` throws. Does nothing in a dry run or on one rank.
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

    /// Returns once every rank takes part with the same numbers. One exchange compares a hash; if it differs, others find the
    /// first number that does.
    /// \param prompt   null: the call is no prompt's
    /// \throws invalid_argument   a rank has refused its arguments, makes another call, or has another number; on every rank
    template <std::size_t N>
    void settle(char const* stage, array<shared_number, N> const& numbers, prompt_numbers const* prompt = nullptr)
    {
        static_assert(5 + prompt_numbers::size() + N <= call_numbers::size());
        if (!open()) { return; }
        rank_heads const& own = all_->own();
        call_numbers all{{{"number of ranks", all_->size()}, {"number of all heads", own.heads},
            {"number of all layers", own.layers}, shared_number::hash("call", prompt == nullptr ? 0 : 1)}};
        std::size_t next = 4;
        if (prompt != nullptr)
        {
            for (shared_number const& one : *prompt) { all[next++] = one; }
        }
        std::uint64_t text = 0;
        for (char const* c = stage; *c != '\0'; ++c) { text = mixed(text, static_cast<unsigned char>(*c)); }
        all[next++] = shared_number::hash("call", text);
        for (shared_number const& one : numbers) { all[next++] = one; }
        compare(stage, all);
    }

private:
    static constexpr index_t count           = 3;  // words of the first exchange
    static constexpr std::size_t most_agreed = 16; // numbers in one exchange, of two words each
    static constexpr auto none               = ~std::uint64_t{0};
    using call_numbers                       = array<shared_number, 4 * most_agreed>;

    [[gnu::cold, gnu::noinline]] void compare(char const* stage, call_numbers const& numbers)
    {
        auto const& all = *all_;
        leave(); // an exception from here on is every rank's
        std::uint64_t hash = 0;
        for (shared_number const& one : numbers) { hash = mixed(hash, one.bits); }
        std::uint64_t call[count]{none, hash, ~hash};
        all.agree(call, count);
        expects(call[0] == none, stage, ": rank ", call[0], " refuses its arguments");
        if (call[1] == ~call[2]) { return; }
        for (std::size_t first = 0; first < numbers.size(); first += most_agreed)
        {
            std::uint64_t least[2 * most_agreed];
            for (std::size_t i = 0; i < most_agreed; ++i)
            {
                least[2 * i]     = numbers[first + i].bits;
                least[2 * i + 1] = ~numbers[first + i].bits;
            }
            all.agree(least, 2 * index_t{most_agreed});
            for (std::size_t i = 0; i < most_agreed; ++i)
            {
                if (least[2 * i] != ~least[2 * i + 1]) { differs(all, stage, numbers[first + i]); }
            }
        }
    }

    /// Tells the other ranks that this one has refused its arguments.
    [[gnu::cold, gnu::noinline]] void refuse() const noexcept
    {
        std::uint64_t own[count]{static_cast<std::uint64_t>(all_->rank()), none, none};
#if defined(__cpp_exceptions)
        try
        {
            all_->agree(own, count);
        }
        catch (...) // the call's own exception is on its way
        {}
#else
        all_->agree(own, count);
#endif
    }

    /// Finds the first rank whose number is not that of rank 0.
    static void differs(ranks<S> const& all, char const* stage, shared_number const& own)
    {
        std::uint64_t first = all.rank() == 0 ? own.bits : none;
        all.agree(&first, 1);
        std::uint64_t at = own.bits != first ? static_cast<std::uint64_t>(all.rank()) : none;
        all.agree(&at, 1);
        message value;
        if (own.shown != shared_number::form::unshown) { value.add(", "); }
        if (own.shown == shared_number::form::whole) { value.add_number(static_cast<index_t>(first)); }
        if (own.shown == shared_number::form::real)
        {
            value.add_number(static_cast<float>(__builtin_bit_cast(double, first)));
        }
        expects(false, stage, ": ", own.name, " of rank ", at, " is not that of rank 0", value.text,
            "; it must be the same on all ranks");
    }

    ranks<S> const* all_;
};
template <backend B>
agreement(B const&) -> agreement<B::memory_space>;

/// The numbers of a call's heads among the heads of all ranks.
struct head_numbers
{
    rank_heads shard;     ///< on one rank: all heads are here
    index_t own;          ///< this rank's heads
    index_t own_in_layer; ///< this rank's heads of a layer, which have neighbouring numbers
    index_t all;          ///< heads on all ranks
    index_t first;        ///< number of this rank's first head

    [[nodiscard]] constexpr index_t number(index_t h) const noexcept
    {
        return first + h / own_in_layer * shard.heads + h % own_in_layer;
    }
};

/// \param own     this rank's heads
/// \param layers  their layers; 0: all are heads of one layer, which counts alone
/// \throws invalid_argument   the rank's shard does not hold so many heads
template <backend B>
[[nodiscard]] head_numbers number_heads(B const& on, char const* stage, index_t own, index_t layers)
{
    auto const* const all    = ranks_of(on);
    index_t const own_layers = layers > 0 ? layers : 1;
    index_t const each       = own / own_layers;
    rank_heads const shard   = all == nullptr ? rank_heads{.heads = each, .layers = own_layers} : all->own();
    expects(own == own_layers * each, stage, ": ", own, " heads are not those of ", layers, " layers");
    auto const within = [stage](char const* name, index_t first, index_t n, index_t all_of_them) {
        expects(first >= 0 && n <= all_of_them && first <= all_of_them - n, stage, ": this rank's ", n, " ", name,
            " from ", first, " on are not among the ", all_of_them, " of all ranks");
    };
    within("heads", shard.first_head, each, shard.heads);
    within("layers", shard.first_layer, own_layers, shard.layers);
    return {shard, own, each, checked_multiply(shard.heads, layers > 0 ? shard.layers : 1),
        (layers > 0 ? shard.first_layer * shard.heads : 0) + shard.first_head};
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

/// Copies sums of this rank's rows to their rows among all ranks', for `sum_over_ranks`.
/// \param to  [numbers.all, pieces]
template <backend B>
[[gnu::cold, gnu::noinline]] void scatter_sums(
    B const& on, head_numbers const& numbers, sum_pieces<B> const& own, double* to)
{
    index_t const pieces = own.pieces();
    index_t const layers = own.rows.extent(0);
    index_t const heads  = own.rows.extent(1);
    run(on, fill<double>{to, 0, numbers.all * pieces});
    run(on, copy_rows<B, double>{{own.sums, {layers, heads, pieces}, {heads * pieces, pieces, 1}},
                {to + numbers.first * pieces, {layers, heads, pieces}, {numbers.shard.heads * pieces, pieces, 1}}});
}

/// Checks that every head is on one rank, replicas aside, and that ranks have different numbers; on a GPU waits for the device.
/// Each rank adds hashes of its heads' numbers and of its own.
/// \param words  [2]  in the backend's memory
/// \throws invalid_argument   a head is on no rank or on several, or two ranks have one number; on every rank
template <backend B>
[[gnu::cold, gnu::noinline]] void expects_every_head(
    B const& on, char const* stage, head_numbers const& heads, std::int64_t* words)
{
    auto const* const ranks = ranks_of(on);
    if (ranks == nullptr || dry_run(on)) { return; }
    auto const hash = [](index_t n) {
        return static_cast<std::int64_t>(
            mixed(0, static_cast<std::uint64_t>(n) + 1) >> 24U); // the sum of as many as there may be stays in 64 bits
    };
    std::int64_t own[2]{0, hash(ranks->rank())};
    std::int64_t all[2]{};
    for (index_t h = 0; h < heads.own && !heads.shard.replica; ++h) { own[0] += hash(heads.number(h)); }
    for (index_t h = 0; h < heads.all; ++h) { all[0] += hash(h); }
    for (index_t r = 0; r < ranks->size(); ++r) { all[1] += hash(r); }
    run(on, fill<std::int64_t>{words, own[0], 1});
    run(on, fill<std::int64_t>{words + 1, own[1], 1});
    ranks->sum(words, 2);
    fetch(on, words, own, 2);
    expects(own[1] == all[1], stage, ": two ranks have one number; each of ", ranks->size(),
        " ranks must have another, from 0 on");
    expects(own[0] == all[0], stage, ": not every one of ", heads.all,
        " heads is on one rank; see rank_heads (another rank with the same heads is a replica)");
}

} // namespace MDKV_NAMESPACE::detail
