/// \file message.hpp: what a call throws, as text, and what a text must say
#pragma once

#include <doctest/doctest.h>

#include <exception>
#include <string>
#include <string_view>

namespace support
{

/// The message of whatever std::exception the call throws.
template <class Call>
[[nodiscard]] std::string message_of(Call const& call)
{
    try
    {
        call();
    }
    catch (std::exception const& error)
    {
        return error.what();
    }
    return "(nothing was thrown)";
}

/// Checks that the message has the part, and shows both where it has not.
inline void says(std::string const& message, std::string_view part)
{
    CAPTURE(message);
    CAPTURE(part);
    bool const found = message.find(part) != std::string::npos;
    CHECK(found);
}

} // namespace support
