/// \file ranks.hpp: calls over ranks that end before their first exchange; Python's functions are in ranks.cpp
#pragma once

#include <mdkv/core/ranks.hpp>
#include <mdkv/detail/ranks.hpp>

namespace mdkv_python
{

/// Tells the other ranks, in their next call that agrees on arguments, that this rank does not make the call.
inline void refuse(mdkv::ranks const& with)
{
    mdkv::detail::agreement const ends_without_a_call{&with};
}

/// Calls call(), which exchanges nothing, before a call over ranks; an exception of it is told to the other ranks.
/// \param with   null: there are none
template <class Call>
auto before_exchange(mdkv::ranks const* with, Call const& call)
{
    try
    {
        return call();
    }
    catch (...)
    {
        if (with != nullptr) { refuse(*with); }
        throw;
    }
}

} // namespace mdkv_python
