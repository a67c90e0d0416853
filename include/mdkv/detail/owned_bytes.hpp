/// \file owned_bytes.hpp: bytes that are given back to the memory they came from.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <cstddef>
#include <utility>

namespace mdkv::inline MDKV_MACHINE::detail
{

/// Bytes of a backend's memory, which has `allocate(bytes)` and `release(data, bytes)`. 0 bytes allocate nothing.
template <class Memory>
class owned_bytes
{
public:
    owned_bytes() noexcept = default;

    /// \throws invalid_argument   the size is negative
    /// \throws the memory's exceptions
    owned_bytes(index_t size, Memory const& memory)
        : memory_{memory}
    {
        expects(size >= 0, "bytes of a backend's memory: size is ", size, "; it must not be negative");
        if (size > 0) { data_ = static_cast<std::byte*>(memory_.allocate(static_cast<std::size_t>(size))); }
        size_ = size;
    }

    owned_bytes(owned_bytes&& other) noexcept
        : memory_{other.memory_}
        , data_{std::exchange(other.data_, nullptr)}
        , size_{std::exchange(other.size_, 0)}
    {}
    owned_bytes& operator=(owned_bytes&& other) noexcept
    {
        owned_bytes taken{std::move(other)};
        std::swap(memory_, taken.memory_);
        std::swap(data_, taken.data_);
        std::swap(size_, taken.size_);
        return *this;
    }
    ~owned_bytes()
    {
        if (size_ > 0) { memory_.release(data_, static_cast<std::size_t>(size_)); }
    }

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] index_t size() const noexcept { return size_; }

private:
    Memory memory_{};
    std::byte* data_ = nullptr;
    index_t size_    = 0;
};

} // namespace mdkv::inline MDKV_MACHINE::detail
