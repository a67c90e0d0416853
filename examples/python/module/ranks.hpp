/// \file ranks.hpp: ranks over which the heads of prompts are spread, as prompts see them; Python's functions are in ranks.cpp
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
    mdkv::workspace none{std::span<std::byte>{}};
    mdkv::ranks const all{group, group.place(1)};
    mdkv::detail::agreement const ends_without_a_call{mdkv::cpu::backend{&none, {}, &all}};
}

} // namespace mdkv_python
