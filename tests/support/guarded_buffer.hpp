/// \file guarded_buffer.hpp: memory that ends where a page begins which nobody may touch, or begins where one ends: a read
/// or write one byte too far ends the program
#pragma once

#include <cstddef>
#include <new>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

namespace support
{

enum class guard
{
    after, ///< the last byte is the last before a forbidden page
    before ///< the first byte is the first after one
};

class guarded_buffer
{
public:
    guarded_buffer(std::size_t bytes, guard where)
    {
        auto const page        = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        std::size_t const body = (bytes + page - 1) / page * page;
        mapped_                = body + 2 * page;
        void* const base       = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base == MAP_FAILED) { throw std::bad_alloc{}; }
        base_ = static_cast<std::byte*>(base);
        if (body > 0 && mprotect(base_ + page, body, PROT_READ | PROT_WRITE) != 0)
        {
            munmap(base_, mapped_);
            throw std::bad_alloc{};
        }
        data_ = where == guard::after ? base_ + page + (body - bytes) : base_ + page;
    }

    guarded_buffer(guarded_buffer&& other) noexcept
        : base_{std::exchange(other.base_, nullptr)}
        , data_{std::exchange(other.data_, nullptr)}
        , mapped_{std::exchange(other.mapped_, 0)}
    {}
    guarded_buffer(guarded_buffer const&)            = delete;
    guarded_buffer& operator=(guarded_buffer const&) = delete;
    guarded_buffer& operator=(guarded_buffer&& other) noexcept
    {
        std::swap(base_, other.base_);
        std::swap(data_, other.data_);
        std::swap(mapped_, other.mapped_);
        return *this;
    }
    ~guarded_buffer()
    {
        if (base_ != nullptr) { munmap(base_, mapped_); }
    }

    [[nodiscard]] std::byte* data() const { return data_; }

private:
    std::byte* base_    = nullptr;
    std::byte* data_    = nullptr;
    std::size_t mapped_ = 0;
};

} // namespace support
