/// \file crc32c.hpp: CRC-32C, the checksum of iSCSI (RFC 3720).
#pragma once

#include <mdkv/core/types.hpp>

#include <cstddef>
#include <cstdint>

namespace MDKV_NAMESPACE::detail
{

/// Table k continues a checksum over a byte and k bytes of zeros.
inline constexpr auto crc32c_tables = [] {
    array<array<std::uint32_t, 256>, 8> all{};
    for (std::uint32_t i = 0, x = 0; i < 256 * all.size(); ++i)
    {
        x = i < 256 ? i : all[i / 256 - 1][i % 256];
        for (int bit = 0; bit < 8; ++bit) { x = x >> 1U ^ (x % 2 != 0 ? 0x82f63b78U : 0U); }
        all[i / 256][i % 256] = x;
    }
    return all;
}();

/// The checksum of all bytes so far, from the checksum `before` of the bytes before these; 0 of no bytes.
[[nodiscard]] inline std::uint32_t crc32c(std::uint32_t before, std::byte const* bytes, std::size_t size) noexcept
{
    auto const& table  = crc32c_tables;
    std::uint64_t x    = ~before;
    std::size_t number = 0;
    for (; number + 8 <= size; number += 8)
    {
        auto const eight = load_bytes<std::uint64_t>(bytes + number);
#if defined(__SSE4_2__) && defined(__x86_64__)
        x = __builtin_ia32_crc32di(x, eight);
#else
        std::uint64_t const y = x ^ eight;
        x                     = 0;
        for (unsigned k = 0; k < 8; ++k) { x ^= table[7 - k][y >> 8U * k & 0xffU]; }
#endif
    }
    auto last = static_cast<std::uint32_t>(x);
    for (; number < size; ++number)
    {
        last = last >> 8U ^ table[0][(last ^ static_cast<std::uint32_t>(bytes[number])) & 0xffU];
    }
    return ~last;
}

} // namespace MDKV_NAMESPACE::detail
