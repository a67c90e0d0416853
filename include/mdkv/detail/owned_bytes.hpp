/// \file owned_bytes.hpp: bytes that are given back to the memory they came from.
#pragma once

#include <mdkv/core/types.hpp>

#include <cstddef>
#include <utility>

namespace mdkv::detail
{

/// Bytes of a backend's memory, which has `allocate(bytes)` and `release(data, bytes)`. None ask for nothing.
template <class Memory>
class owned_bytes
{
public:
    owned_bytes() noexcept = default;

    /// \throws whatever the memory throws
    owned_bytes(index_t size, Memory const& memory)
        : memory_{memory}
        , size_{size}
    {
        if (size > 0) { data_ = static_cast<std::byte*>(memory_.allocate(static_cast<std::size_t>(size))); }
    }
    ~owned_bytes()
    {
        if (data_ != nullptr) { memory_.release(data_, static_cast<std::size_t>(size_)); }
    }

    owned_bytes(owned_bytes&& other) noexcept
        : memory_{other.memory_}
        , data_{std::exchange(other.data_, nullptr)}
        , size_{std::exchange(other.size_, 0)}
    {}
    owned_bytes& operator=(owned_bytes other) noexcept
    {
        std::swap(memory_, other.memory_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] index_t size() const noexcept { return size_; }

private:
    Memory memory_{};
    std::byte* data_ = nullptr;
    index_t size_    = 0;
};

} // namespace mdkv::detail
