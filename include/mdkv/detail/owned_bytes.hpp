/// \file owned_bytes.hpp: bytes that are given back to the memory they came from.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <cstddef>
#include <memory>

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
        : data_{nullptr, give_back{memory, size}}
    {
        expects(size >= 0, "bytes of a backend's memory: size is ", size, "; it must not be negative");
        if (size > 0) { data_.reset(static_cast<std::byte*>(memory.allocate(static_cast<std::size_t>(size)))); }
    }

    [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }
    [[nodiscard]] index_t size() const noexcept { return data_ ? data_.get_deleter().size : 0; }

private:
    struct give_back
    {
        Memory memory{};
        index_t size = 0;

        void operator()(std::byte* data) const noexcept { memory.release(data, static_cast<std::size_t>(size)); }
    };

    std::unique_ptr<std::byte, give_back> data_;
};

} // namespace mdkv::inline MDKV_MACHINE::detail
