/// \file dequantise.hpp: weights from a file's blocks to float, bit for bit as the reference converter gives them
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "dequantise_steps.hpp"
#include "ggml_type.hpp"

// Every product in these formulas (a half times one or two small integers) is exact in float, so there is one
// rounding at most, and contracting a product and a sum into one instruction changes no bit.

namespace runner
{

namespace detail
{

template <class Steps>
void f16_to_float(std::byte const* in, std::int64_t count, float* out) noexcept
{
    float* const end = out + count;
    for (; end - out >= 8; out += 8, in += 16) { Steps::eight_halves(in, out); }
    for (; out != end; ++out, in += 2) { *out = Steps::half(in); }
}

inline void bf16_to_float(std::byte const* __restrict in, std::int64_t count, float* __restrict out) noexcept
{
    for (float* const end = out + count; out != end; ++out, in += 2)
    {
        std::uint16_t bits;
        std::memcpy(&bits, in, sizeof bits);
        *out = std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
    }
}

// One block each: first its small integers, one to a byte, then all of them to float. The comment names the fields.

template <class Steps>
void q4_0_block(std::byte const* in, float* out) noexcept
{ // d, nibbles[16]
    std::int8_t q[32];
    Steps::template unpack_nibbles<16>(in + 2, q);
    Steps::template add<32>(-8, q);
    Steps::template scale<32>(q, Steps::half(in), out);
}

template <class Steps>
void q4_1_block(std::byte const* in, float* out) noexcept
{ // d, m, nibbles[16]
    std::int8_t q[32];
    Steps::template unpack_nibbles<16>(in + 4, q);
    Steps::template scale_and_add<32>(q, Steps::half(in), Steps::half(in + 2), out);
}

template <class Steps>
void q5_0_block(std::byte const* in, float* out) noexcept
{ // d, high[4], nibbles[16]
    std::int8_t q[32];
    Steps::template unpack_nibbles<16>(in + 6, q);
    Steps::add_fifth_bits(in + 2, q);
    Steps::template add<32>(-16, q);
    Steps::template scale<32>(q, Steps::half(in), out);
}

template <class Steps>
void q5_1_block(std::byte const* in, float* out) noexcept
{ // d, m, high[4], nibbles[16]
    std::int8_t q[32];
    Steps::template unpack_nibbles<16>(in + 8, q);
    Steps::add_fifth_bits(in + 4, q);
    Steps::template scale_and_add<32>(q, Steps::half(in), Steps::half(in + 2), out);
}

template <class Steps>
void q8_0_block(std::byte const* in, float* out) noexcept
{ // d, q[32]
    std::int8_t q[32];
    std::memcpy(q, in + 2, sizeof q);
    Steps::template scale<32>(q, Steps::half(in), out);
}

/// Six-bit scale and minimum of the eight 32-element parts of a Q4_K or Q5_K block, as packed in 12 bytes: bytes 0..3
/// hold scales 0..3, bytes 4..7 minima 0..3, bytes 8..11 the low nibbles of scales and minima 4..7, whose two high
/// bits are the top bits of the first eight bytes.
struct k_scales
{
    int scale[8];
    int minimum[8];

    explicit k_scales(std::byte const* packed) noexcept
    {
        for (int i = 0; i < 4; ++i)
        {
            int const scales = u8_at(packed, i);
            int const minima = u8_at(packed, i + 4);
            int const both   = u8_at(packed, i + 8);
            scale[i]         = scales & 63;
            minimum[i]       = minima & 63;
            scale[i + 4]     = (both & 15) | ((scales >> 6) << 4);
            minimum[i + 4]   = (both >> 4) | ((minima >> 6) << 4);
        }
    }
};

/// The second half of Q4_K and Q5_K, whose blocks begin alike: d, dmin, scales[12].
template <class Steps>
void scale_k_block(std::byte const* in, std::int8_t const* q, float* out) noexcept
{
    float const d     = Steps::half(in);
    float const least = Steps::half(in + 2);
    k_scales const packed(in + 4);
    for (int part = 0; part < 8; ++part)
    {
        float const minimum = least * static_cast<float>(packed.minimum[part]);
        float const scale   = d * static_cast<float>(packed.scale[part]);
        Steps::template scale_and_add<32>(q + 32 * part, scale, -minimum, out + 32 * part);
    }
}

template <class Steps>
void q4_k_block(std::byte const* in, float* out) noexcept
{ // d, dmin, scales[12], nibbles[128]
    std::int8_t q[256];
    for (int pair = 0; pair < 4; ++pair) { Steps::template unpack_nibbles<32>(in + 16 + 32 * pair, q + 64 * pair); }
    scale_k_block<Steps>(in, q, out);
}

template <class Steps>
void q5_k_block(std::byte const* in, float* out) noexcept
{ // d, dmin, scales[12], high[32], nibbles[128]
    std::int8_t q[256];
    std::byte const* const high = in + 16;
    for (int pair = 0; pair < 4; ++pair) { Steps::template unpack_nibbles<32>(in + 48 + 32 * pair, q + 64 * pair); }
    Steps::template add_high_bits<0>(high, 1, 0, q);
    Steps::template add_high_bits<1>(high, 1, 0, q + 32);
    Steps::template add_high_bits<2>(high, 1, 0, q + 64);
    Steps::template add_high_bits<3>(high, 1, 0, q + 96);
    Steps::template add_high_bits<4>(high, 1, 0, q + 128);
    Steps::template add_high_bits<5>(high, 1, 0, q + 160);
    Steps::template add_high_bits<6>(high, 1, 0, q + 192);
    Steps::template add_high_bits<7>(high, 1, 0, q + 224);
    scale_k_block<Steps>(in, q, out);
}

template <class Steps>
void q6_k_block(std::byte const* in, float* out) noexcept
{ // low[128], high[64], scales[16], d
    std::int8_t q[256];
    for (int half = 0; half < 2; ++half)
    { // 64 low bytes and 32 high bytes make 128 elements
        std::byte const* const high = in + 128 + 32 * half;
        std::int8_t* const to       = q + 128 * half;
        Steps::template unpack_nibbles<64>(in + 64 * half, to);
        Steps::template add_high_bits<0>(high, 3, -32, to);
        Steps::template add_high_bits<2>(high, 3, -32, to + 32);
        Steps::template add_high_bits<4>(high, 3, -32, to + 64);
        Steps::template add_high_bits<6>(high, 3, -32, to + 96);
    }
    float const d = Steps::half(in + 208);
    for (int part = 0; part < 16; ++part)
    {
        float const scale = d * static_cast<float>(i8_at(in, 192 + part));
        Steps::template scale<16>(q + 16 * part, scale, out + 16 * part);
    }
}

template <ggml_type Type, class Block>
void each_block(std::byte const* in, std::int64_t count, float* out, Block const& block) noexcept
{
    constexpr std::int64_t elements = block_elements(Type); // named, or g++ looks them up again for every block
    constexpr std::int64_t bytes    = block_bytes(Type);
    for (std::int64_t i = 0; i < count; i += elements)
    {
        block(in, out + i);
        in += bytes;
    }
}

/// `dequantise` by given steps; tests compare all of them.
template <class Steps>
void dequantise_by(ggml_type type, std::byte const* blocks, std::int64_t count, float* out)
{
    if (count < 0 || count % block_elements(type) != 0)
    {
        throw std::invalid_argument("dequantise: count is " + std::to_string(count) + ", no multiple of "
                                    + std::to_string(block_elements(type)) + ", the block of "
                                    + std::string(name_of(type)));
    }
    using enum ggml_type;
    switch (type)
    {
        case f32:
            if (count != 0) { std::memcpy(out, blocks, static_cast<std::size_t>(count) * sizeof(float)); }
            break;
        case f16:
            f16_to_float<Steps>(blocks, count, out);
            break;
        case bf16:
            bf16_to_float(blocks, count, out);
            break;
        case q4_0:
            each_block<q4_0>(blocks, count, out, q4_0_block<Steps>);
            break;
        case q4_1:
            each_block<q4_1>(blocks, count, out, q4_1_block<Steps>);
            break;
        case q5_0:
            each_block<q5_0>(blocks, count, out, q5_0_block<Steps>);
            break;
        case q5_1:
            each_block<q5_1>(blocks, count, out, q5_1_block<Steps>);
            break;
        case q8_0:
            each_block<q8_0>(blocks, count, out, q8_0_block<Steps>);
            break;
        case q4_k:
            each_block<q4_k>(blocks, count, out, q4_k_block<Steps>);
            break;
        case q5_k:
            each_block<q5_k>(blocks, count, out, q5_k_block<Steps>);
            break;
        case q6_k:
            each_block<q6_k>(blocks, count, out, q6_k_block<Steps>);
            break;
    }
}

} // namespace detail

/// `count` consecutive elements of a tensor, from `blocks`, the beginning of a block.
///
/// \param blocks      count / block_elements(type) blocks of block_bytes(type) bytes, at any alignment
/// \param[out] out    [count], not overlapping `blocks`
/// \throws std::invalid_argument   `count` is negative or no multiple of block_elements(type); nothing is written
inline void dequantise(ggml_type type, std::byte const* blocks, std::int64_t count, float* out)
{
    detail::dequantise_by<detail::fastest_steps>(type, blocks, count, out);
}

} // namespace runner
