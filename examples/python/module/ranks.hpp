/// \file ranks.hpp: ranks over which heads are spread, as prompts and layers see them; Python's functions are in ranks.cpp
#pragma once

#include <mdkv/core/ranks.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/detail/ranks.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace mdkv_python
{

using mdkv::index_t;

/// An mdkv::communicator in host memory, and this rank's place among all heads and layers.
class rank_group
{
public:
    static constexpr mdkv::space memory_space = mdkv::space::host;

    rank_group()                             = default;
    rank_group(rank_group const&)            = delete;
    rank_group& operator=(rank_group const&) = delete;
    virtual ~rank_group()                    = default;

    [[nodiscard]] virtual int rank() const noexcept             = 0;
    [[nodiscard]] virtual int size() const noexcept             = 0;
    virtual void sum(std::int64_t* numbers, index_t n) const    = 0;
    virtual void least(std::uint64_t* numbers, index_t n) const = 0;
    /// The place of a prompt that has so many layers on this rank.
    [[nodiscard]] virtual mdkv::rank_heads place(index_t layers) const noexcept = 0;
};

/// Tells the other ranks, in their next call that agrees on arguments, that this rank does not make the call.
inline void refuse(rank_group const& group)
{
    mdkv::workspace none{mdkv::cpu::host_memory{}};
    mdkv::ranks const all{group, group.place(1)};
    mdkv::detail::agreement const ends_without_a_call{mdkv::cpu::backend{&none, {}, &all}};
}

/// Calls call(), which exchanges nothing, before a call over ranks; an exception of it is told to the other ranks.
/// \param group   null: there are none
template <class Call>
auto before_exchange(rank_group const* group, Call const& call)
{
    try
    {
        return call();
    }
    catch (...)
    {
        if (group != nullptr) { refuse(*group); }
        throw;
    }
}

/// The greatest of all ranks' numbers, which are not negative.
/// \throws invalid_argument   another rank refuses to make the call
[[nodiscard]] inline index_t greatest(rank_group const& group, char const* stage, index_t own)
{
    mdkv::workspace none{mdkv::cpu::host_memory{}};
    mdkv::ranks const all{group, group.place(1)};
    if (all.size() == 1) { return own; }
    mdkv::detail::agreement agreed{mdkv::cpu::backend{&none, {}, &all}};
    agreed.settle(stage, mdkv::array<mdkv::detail::shared_number, 0>{});
    auto least = ~static_cast<std::uint64_t>(own); // the least of complements is the complement of the greatest
    all.agree(&least, 1);
    return static_cast<index_t>(~least);
}

} // namespace mdkv_python
