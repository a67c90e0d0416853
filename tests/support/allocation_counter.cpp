#include "support/allocation_counter.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace
{

thread_local bool counting          = false;
thread_local std::int64_t allocated = 0;

void* allocate(std::size_t bytes, std::size_t alignment)
{
    if (counting) { ++allocated; }
    std::size_t const rounded = (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment;
    void* const memory        = std::aligned_alloc(alignment, rounded);
    if (memory == nullptr) { throw std::bad_alloc{}; }
    return memory;
}

} // namespace

namespace support
{

allocation_counter::allocation_counter() noexcept
{
    allocated = 0;
    counting  = true;
}

allocation_counter::~allocation_counter()
{
    counting = false;
}

std::int64_t allocation_counter::count() const noexcept
{
    return allocated;
}

} // namespace support

// All forms that the tests or the standard library use: a sanitizer brings its own of those left out, and then finds
// memory given back to another allocator than it came from.
void* operator new(std::size_t bytes)
{
    return allocate(bytes, alignof(std::max_align_t));
}
void* operator new[](std::size_t bytes)
{
    return allocate(bytes, alignof(std::max_align_t));
}
void* operator new(std::size_t bytes, std::align_val_t alignment)
{
    return allocate(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment)
{
    return allocate(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, std::nothrow_t const&) noexcept
{
    try
    {
        return allocate(bytes, alignof(std::max_align_t));
    }
    catch (std::bad_alloc const&)
    {
        return nullptr;
    }
}
void operator delete(void* memory) noexcept
{
    std::free(memory);
}
void operator delete[](void* memory) noexcept
{
    std::free(memory);
}
void operator delete(void* memory, std::nothrow_t const&) noexcept
{
    std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept
{
    std::free(memory);
}
void operator delete[](void* memory, std::size_t) noexcept
{
    std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept
{
    std::free(memory);
}
void operator delete[](void* memory, std::align_val_t) noexcept
{
    std::free(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept
{
    std::free(memory);
}
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept
{
    std::free(memory);
}
