/// \file device_memory.hpp: the emulated GPU's memory: the host's, each piece on its own so that a sanitizer sees its ends
#pragma once

#include <emulation/machine.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include <driver_types.h>

namespace support
{

/// Whether kernels round as the host's code does: no product is fused with a sum.
inline constexpr bool rounds_like_host = true;

class device_memory
{
public:
    /// A copy of `bytes`, `shift` bytes past a multiple of 64.
    device_memory(std::vector<std::byte> const& bytes, std::size_t shift)
        : memory_{static_cast<std::byte*>(::operator new (bytes.size() + shift + 1, std::align_val_t{64}))}
        , shift_{shift}
        , size_{bytes.size()}
    {
        if (size_ > 0) { std::memcpy(data(), bytes.data(), size_); }
    }
    [[nodiscard]] static device_memory scratch(std::size_t size)
    {
        return {std::vector<std::byte>(size, std::byte{0xFF}), 0};
    }
    [[nodiscard]] std::byte* data() const { return memory_.get() + shift_; }
    [[nodiscard]] std::vector<std::byte> host() const { return {data(), data() + size_}; }

private:
    struct release
    {
        void operator()(std::byte* memory) const { ::operator delete (memory, std::align_val_t{64}); }
    };
    std::unique_ptr<std::byte, release> memory_;
    std::size_t shift_;
    std::size_t size_;
};

/// Kernels run as they are started; there is nothing to wait for. Returns how many were started.
template <class Call>
std::uint64_t run_on_stream(Call const& call)
{
    std::uint64_t const before = emulation::total().kernels;
    call(nullptr);
    return emulation::total().kernels - before;
}

template <class Call>
void run_on_stream_now(Call const& call)
{
    call(nullptr);
}

} // namespace support
