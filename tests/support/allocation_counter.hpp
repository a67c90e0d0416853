/// \file allocation_counter.hpp: how often a piece of code asks the global heap for memory; operator new is replaced in the .cpp
#pragma once

#include <cstdint>

namespace support
{

/// Counts the allocations of this thread while it lives.
class allocation_counter
{
public:
    allocation_counter() noexcept;
    ~allocation_counter();
    allocation_counter(allocation_counter const&)            = delete;
    allocation_counter& operator=(allocation_counter const&) = delete;

    [[nodiscard]] std::int64_t count() const noexcept;
};

} // namespace support
