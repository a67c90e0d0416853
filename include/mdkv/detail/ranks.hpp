/// \file ranks.hpp: steps of a prompt over ranks: the agreement before its work, the place of its heads, and its sums.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/ranks.hpp>
#include <mdkv/detail/team.hpp>

#include <type_traits>
#include <vector>

namespace MDKV_NAMESPACE::detail
{

/// This rank's heads among those of all ranks, layer after layer.
struct head_share
{
    ranks const* with; ///< null: all heads are here
    index_t layers;
    index_t own;                                            ///< heads of a layer here
    index_t all   = with == nullptr ? own : with->heads;    ///< heads of a layer on all ranks
    index_t first = with == nullptr ? 0 : with->first_head; ///< number of this rank's first head in a layer
};

/// One number of whole numbers, real ones, truth values and enumerations.
template <class... V>
[[nodiscard]] constexpr std::uint64_t hash_of(V... numbers) noexcept
{
    std::uint64_t hash = 0;
    auto const add     = [&hash](auto number) {
        if constexpr (std::is_floating_point_v<decltype(number)>)
        {
            hash ^= __builtin_bit_cast(std::uint64_t, static_cast<double>(number) + 0.0); // -0 is 0
        }
        else { hash ^= static_cast<std::uint64_t>(number); }
        hash *= 0x9e3779b97f4a7c15U;
        hash ^= hash >> 29U;
    };
    (add(numbers), ...);
    return hash;
}

/// A call's part in the agreement of all ranks. It is made before arguments are checked. A call that ends without `settle` or
/// `leave` says that this rank refuses: every other rank's `settle` throws. Does nothing on one rank.
class agreement
{
public:
    explicit agreement(ranks const* with) noexcept
        : with_{with}
    {}
    agreement(agreement const&)            = delete;
    agreement& operator=(agreement const&) = delete;
    ~agreement()
    {
        if (with_ == nullptr) { return; }
        std::int64_t words[count]{};
        words[refusals] = 1;
        call_without_errors([&] { with_->sum(with_->state, words, count); }); // the call's own exception is on its way
    }

    /// Whether there are other ranks to agree with.
    [[nodiscard]] bool open() const noexcept { return with_ != nullptr; }
    /// The call that comes next agrees instead.
    void leave() noexcept { with_ = nullptr; }

    /// Returns once every rank takes part with the same hash, of which each bit is on all ranks or on none, and has heads that no
    /// other has. Sums alone decide, so that all ranks throw or none does.
    /// \throws invalid_argument   a rank refuses its arguments or has another hash, or a head is on no rank or on several
    void settle(char const* stage, head_share const& heads, std::uint64_t hash)
    {
        if (!open()) { return; }
        auto const of_head = [](index_t h) { return static_cast<std::int64_t>(hash_of(h + 1) >> 24U); };
        std::int64_t words[count]{};
        for (int i = 0; i < 64; ++i) { words[i] = static_cast<std::int64_t>(hash >> i & 1U); }
        words[members] = 1;
        for (index_t h = 0; h < heads.own; ++h) { words[places] += of_head(heads.first + h); }
        ranks const& with = *with_;
        leave(); // an exception from here on is every rank's
        with.sum(with.state, words, count);
        expects(words[refusals] == 0, stage, ": another rank refuses its arguments");
        for (int i = 0; i < 64; ++i)
        {
            expects(words[i] == 0 || words[i] == words[members], stage,
                ": ranks differ in the call, the preset, sizes, element types, the encoding or the limit");
        }
        for (index_t h = 0; h < heads.all; ++h) { words[places] -= of_head(h); }
        expects(words[places] == 0, stage, ": not every one of ", heads.all, " heads is on one rank");
    }

private:
    enum : int
    {
        members = 64, // ranks; bits of the hash come before
        refusals,
        places, // hashes of the heads' numbers
        count
    };

    ranks const* with_;
};

/// Each of n numbers, in the backend's memory, becomes its sum over all ranks. On a GPU waits for the device.
template <backend B>
void sum_over_ranks(B const& on, ranks const* with, std::int64_t* numbers, index_t n)
{
    if (with == nullptr || n == 0) { return; }
    if constexpr (B::memory_space == space::host) { with->sum(with->state, numbers, n); }
    else
    {
        std::vector<std::int64_t> copied(static_cast<std::size_t>(n));
        fetch(on, numbers, copied.data(), n);
        with->sum(with->state, copied.data(), n);
        copy(on, copied.data(), numbers, n * index_t{sizeof(std::int64_t)});
    }
}

/// Fills the sums of all ranks' rows. They travel as bits, each beside zeros of the other ranks.
template <backend B>
void sum_over_ranks(B const& on, ranks const* with, sum_pieces<B> const& of)
{
    if (with != nullptr) { run(on, fill<double>{of.sums, 0, of.room()}); }
    run(on, of);
    sum_over_ranks(on, with, reinterpret_cast<std::int64_t*>(of.sums), of.room());
}

} // namespace MDKV_NAMESPACE::detail
