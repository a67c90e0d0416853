/// \file sparse_memory.hpp: a huge range of addresses of which only the touched pages cost memory, for offsets beyond 32 bits
#pragma once

#include <cstddef>
#include <new>

#include <sys/mman.h>

namespace support
{

class sparse_memory
{
public:
    explicit sparse_memory(std::size_t bytes)
        : bytes_{bytes}
        , data_{mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)}
    {
        if (data_ == MAP_FAILED) { throw std::bad_alloc{}; }
    }
    ~sparse_memory() { munmap(data_, bytes_); }
    sparse_memory(sparse_memory const&)            = delete;
    sparse_memory& operator=(sparse_memory const&) = delete;

    template <class T>
    [[nodiscard]] T* as() const
    {
        return static_cast<T*>(data_);
    }

private:
    std::size_t bytes_;
    void* data_;
};

} // namespace support
