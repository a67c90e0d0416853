/// \file digest.hpp: SHA-256 (FIPS 180-4), and CRC-32C, the checksum of iSCSI (RFC 3720).
#pragma once

#include <mdkv/core/types.hpp>

#include <cstddef>
#include <cstdint>

namespace MDKV_NAMESPACE::detail
{

/// Eight tables of 256 entries: table k continues a checksum over a byte and k bytes of zeros.
struct crc32c_tables
{
    std::uint32_t entries[8][256]{};

    constexpr crc32c_tables() noexcept
    {
        for (std::uint32_t i = 0; i < 256; ++i)
        {
            std::uint32_t x = i;
            for (int bit = 0; bit < 8; ++bit) { x = x >> 1U ^ (x % 2 != 0 ? 0x82f63b78U : 0U); }
            entries[0][i] = x;
        }
        for (int k = 1; k < 8; ++k)
        {
            for (int i = 0; i < 256; ++i)
            {
                entries[k][i] = entries[k - 1][i] >> 8U ^ entries[0][entries[k - 1][i] % 256];
            }
        }
    }
};
inline constexpr crc32c_tables crc32c_by_byte{};

/// The checksum of all bytes so far, from the checksum `before` of the bytes before these; 0 of no bytes.
[[nodiscard]] inline std::uint32_t crc32c(std::uint32_t before, std::byte const* bytes, std::size_t size) noexcept
{
    auto const& table  = crc32c_by_byte.entries;
    std::uint64_t x    = ~before;
    std::size_t number = 0;
    for (; number + 8 <= size; number += 8)
    {
        auto const eight = load_at<std::uint64_t>(static_cast<void const*>(bytes + number));
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

/// A message's SHA-256, as its bytes come.
class sha256
{
public:
    using digest = array<std::uint8_t, 32>;

    void add(void const* message, std::size_t size) noexcept
    {
        auto const* const bytes = static_cast<unsigned char const*>(message);
        for (std::size_t i = 0; i < size; ++i)
        {
            block_[size_++ % sizeof block_] = bytes[i];
            if (size_ % sizeof block_ == 0) { mix(); }
        }
    }

    [[nodiscard]] digest finish() noexcept
    {
        std::uint64_t const bits       = 8 * size_;
        unsigned char const padding[1] = {0x80};
        add(padding, 1);
        for (unsigned char const zero = 0; size_ % sizeof block_ != 56;) { add(&zero, 1); }
        for (unsigned shift = 64; shift > 0;)
        {
            shift -= 8;
            auto const byte = static_cast<unsigned char>(bits >> shift);
            add(&byte, 1);
        }
        digest made{};
        for (std::size_t i = 0; i < made.size(); ++i)
        {
            made[i] = static_cast<std::uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
        }
        return made;
    }

private:
    [[nodiscard]] static constexpr std::uint32_t turned(std::uint32_t x, unsigned by) noexcept
    {
        return x >> by | x << (32 - by);
    }

    void mix() noexcept
    {
        std::uint32_t w[64];
        for (unsigned i = 0; i < 16; ++i)
        {
            w[i] = std::uint32_t{block_[4 * i]} << 24U | std::uint32_t{block_[4 * i + 1]} << 16U
                   | std::uint32_t{block_[4 * i + 2]} << 8U | block_[4 * i + 3];
        }
        for (unsigned i = 16; i < 64; ++i)
        {
            w[i] = w[i - 16] + (turned(w[i - 15], 7) ^ turned(w[i - 15], 18) ^ w[i - 15] >> 3U) + w[i - 7]
                   + (turned(w[i - 2], 17) ^ turned(w[i - 2], 19) ^ w[i - 2] >> 10U);
        }
        std::uint32_t s[8];
        for (unsigned i = 0; i < 8; ++i) { s[i] = state_[i]; }
        for (unsigned i = 0; i < 64; ++i)
        {
            std::uint32_t const one = s[7] + (turned(s[4], 6) ^ turned(s[4], 11) ^ turned(s[4], 25))
                                      + ((s[4] & s[5]) ^ (~s[4] & s[6])) + constants[i] + w[i];
            std::uint32_t const two = (turned(s[0], 2) ^ turned(s[0], 13) ^ turned(s[0], 22))
                                      + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
            for (unsigned j = 7; j > 0; --j) { s[j] = s[j - 1]; }
            s[4] += one;
            s[0] = one + two;
        }
        for (unsigned i = 0; i < 8; ++i) { state_[i] += s[i]; }
    }

    static constexpr std::uint32_t constants[64]{0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1,
        0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7,
        0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
        0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
        0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c,
        0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
        0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

    std::uint32_t state_[8]{
        0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    unsigned char block_[64]{};
    std::uint64_t size_ = 0;
};

} // namespace MDKV_NAMESPACE::detail
