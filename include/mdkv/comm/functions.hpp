/// \file functions.hpp: ranks over three C functions, for transports of other languages and of engines: torch.distributed, gloo, Rust.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/ranks.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>

#include <cstdint>

namespace MDKV_NAMESPACE
{

/// A communicator of functions that return 0, or another number that is thrown as an error. Numbers are in memory of space S, `agree`'s in
/// the host's; host transports leave `agree_of` null.
template <space S>
struct communicator_of_functions
{
    static constexpr space memory_space = S;

    void* context                                                       = nullptr; ///< first argument of the functions
    int number                                                          = 0;       ///< this rank's, from 0
    int count                                                           = 1;       ///< ranks
    int (*sum_of)(void* context, std::int64_t* numbers, std::int64_t n) = nullptr; ///< see communicator
    int (*least_of)(void* context, std::uint64_t* numbers, std::int64_t n) = nullptr; ///< see communicator
    int (*agree_of)(void* context, std::uint64_t* numbers, std::int64_t n) = nullptr; ///< see communicator

    [[nodiscard]] int rank() const noexcept { return number; }
    [[nodiscard]] int size() const noexcept { return count; }
    /// \throws error   the function has returned one, or is null
    void sum(std::int64_t* numbers, index_t n) const { call(sum_of, "sum_of", numbers, n); }
    /// \throws error   the function has returned one, or is null
    void least(std::uint64_t* numbers, index_t n) const { call(least_of, "least_of", numbers, n); }
    /// \throws error   the function has returned one, or is null
    void agree(std::uint64_t* numbers, index_t n) const
    {
        bool const own = S == space::device || agree_of != nullptr;
        call(own ? agree_of : least_of, own ? "agree_of" : "least_of", numbers, n);
    }

private:
    template <class V>
    void call(int (*function)(void*, V*, std::int64_t), char const* name, V* numbers, index_t n) const
    {
        expects<error>(function != nullptr, "communicator_of_functions: ", name, " is null");
        int const code = function(context, numbers, n);
        expects<error>(code == 0, "communicator_of_functions: ", name, " returned ", code);
    }
};

} // namespace MDKV_NAMESPACE
