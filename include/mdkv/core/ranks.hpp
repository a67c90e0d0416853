/// \file ranks.hpp: processes or threads whose heads share one budget: which heads each of them has, and how they exchange whole numbers.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>

#include <concepts>
#include <cstdint>

namespace MDKV_NAMESPACE
{

/// The caller's transport between ranks: MPI, NCCL, an engine's own. All ranks call the same functions in the same order with
/// the same counts. Memory is the backend's; on a GPU the functions take their place in the order of its stream.
/// Exceptions of a transport leave the call as an executor's do. `comm/` has some transports.
///
///     c.rank(), c.size()     number of this rank, from 0, and of ranks
///     c.sum(numbers, n)      each of n numbers becomes its sum over all ranks
///     c.least(numbers, n)    each becomes the least over all ranks
///     c.agree(numbers, n)    as least, for at most 32 numbers in the host's memory, and returns when done; a transport of the
///                            host's memory may leave it out
template <class C>
concept communicator = requires(C const& c, std::int64_t* sums, std::uint64_t* least, index_t n) {
    space{C::memory_space};
    {
        c.rank()
    } -> std::convertible_to<int>;
    {
        c.size()
    } -> std::convertible_to<int>;
    c.sum(sums, n);
    c.least(least, n);
};

/// The heads of one rank among the heads of all ranks. Heads of a layer and layers are numbered from 0. A rank holds heads
/// [first_head, first_head + n) of each of its layers [first_layer, ...); n differs between ranks, and may be 0.
struct rank_heads
{
    index_t first_head  = 0; ///< number of this rank's first head
    index_t heads       = 0; ///< heads of a layer, on all ranks together
    index_t first_layer = 0; ///< number of this rank's first layer
    index_t layers      = 1; ///< layers on all ranks together

    /// Another rank has the same heads, with keys, values and queries that are bitwise the same. This rank's losses do not count,
    /// and its heads get the same rungs.
    bool replica = false;
};

/// A backend's member `ranks` points to one of these if heads are spread over ranks; all stages that give heads a shared
/// budget then choose as one rank with all heads does, bit for bit. Arguments of a call mean this rank's heads, and its limit
/// is that of all ranks. If arguments of one rank are refused, or differ where they must not, the call throws on every rank
/// before work starts. A rank that ends without a call leaves the others to their transport's limit of time.
///
///     mdkv::ranks const all{transport, {.first_head = 2, .heads = 8}};
///     mdkv::cpu::backend const on{&scratch, threads, &all};
template <space S>
class ranks
{
public:
    /// \param with  outlives this object
    /// \param own   this rank's heads; copied
    template <communicator C>
        requires(C::memory_space == S && (S == space::host || requires(C const& c) { c.agree(nullptr, index_t{}); }))
    ranks(C const& with, rank_heads const& own)
        : own_{own}
        , target_{&with}
        , exchange_{[](void const* target, kind what, void* numbers, index_t n) {
            auto const& c = *static_cast<C const*>(target);
            if (what == kind::sum) { c.sum(static_cast<std::int64_t*>(numbers), n); }
            else if constexpr (requires { c.agree(nullptr, n); })
            {
                auto* const words = static_cast<std::uint64_t*>(numbers);
                what == kind::least ? c.least(words, n) : c.agree(words, n);
            }
            else { c.least(static_cast<std::uint64_t*>(numbers), n); }
        }}
        , rank_{with.rank()}
        , size_{with.size()}
    {}
    /// No transport that ends with the expression.
    template <communicator C>
    ranks(C const&&, rank_heads const&) = delete;

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] int size() const noexcept { return size_; }
    [[nodiscard]] rank_heads const& own() const noexcept { return own_; }
    /// The same ranks for a call on one layer, whose heads count alone.
    [[nodiscard]] ranks of_one_layer() const noexcept
    {
        ranks one            = *this;
        one.own_.first_layer = 0;
        one.own_.layers      = 1;
        return one;
    }

    /// See communicator; nothing is called for no numbers.
    void sum(std::int64_t* numbers, index_t n) const { exchange(kind::sum, numbers, n); }
    void least(std::uint64_t* numbers, index_t n) const { exchange(kind::least, numbers, n); }
    void agree(std::uint64_t* numbers, index_t n) const { exchange(kind::agree, numbers, n); }

private:
    enum class kind : std::uint8_t
    {
        sum,
        least,
        agree
    };
    void exchange(kind what, void* numbers, index_t n) const
    {
        if (n > 0) { exchange_(target_, what, numbers, n); }
    }

    rank_heads own_;
    void const* target_;
    void (*exchange_)(void const*, kind, void*, index_t);
    int rank_;
    int size_;
};
/// The transport says in which memory heads lie.
template <communicator C>
ranks(C const&, rank_heads const&) -> ranks<C::memory_space>;

} // namespace MDKV_NAMESPACE
