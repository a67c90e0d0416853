/// \file ggml_type.hpp: the weight formats the runner reads: their numbers in a GGUF file, names and block sizes
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace runner
{

/// Format of a tensor's elements; the values are the type numbers of GGUF.
enum class ggml_type : std::uint32_t
{
    f32  = 0,
    f16  = 1,
    q4_0 = 2,
    q4_1 = 3,
    q5_0 = 6,
    q5_1 = 7,
    q8_0 = 8,
    q4_k = 12,
    q5_k = 13,
    q6_k = 14,
    bf16 = 30
};

/// A block is the smallest unit of a format: `elements` consecutive elements of one row in `bytes` bytes.
struct block_layout
{
    std::string_view name;
    std::int64_t elements;
    std::int64_t bytes;
};

/// Layout of a type number as it stands in a file; empty for numbers that are unknown or not supported.
[[nodiscard]] constexpr std::optional<block_layout> find_block_layout(std::uint32_t type_number) noexcept
{
    switch (static_cast<ggml_type>(type_number))
    {
        case ggml_type::f32:
            return block_layout{"F32", 1, 4};
        case ggml_type::f16:
            return block_layout{"F16", 1, 2};
        case ggml_type::q4_0:
            return block_layout{"Q4_0", 32, 18};
        case ggml_type::q4_1:
            return block_layout{"Q4_1", 32, 20};
        case ggml_type::q5_0:
            return block_layout{"Q5_0", 32, 22};
        case ggml_type::q5_1:
            return block_layout{"Q5_1", 32, 24};
        case ggml_type::q8_0:
            return block_layout{"Q8_0", 32, 34};
        case ggml_type::q4_k:
            return block_layout{"Q4_K", 256, 144};
        case ggml_type::q5_k:
            return block_layout{"Q5_K", 256, 176};
        case ggml_type::q6_k:
            return block_layout{"Q6_K", 256, 210};
        case ggml_type::bf16:
            return block_layout{"BF16", 1, 2};
    }
    return std::nullopt;
}

/// \throws std::invalid_argument   `type` is none of the enumerators
[[nodiscard]] constexpr block_layout layout_of(ggml_type type)
{
    if (auto const layout = find_block_layout(static_cast<std::uint32_t>(type))) { return *layout; }
    throw std::invalid_argument("ggml_type: no such format: " + std::to_string(static_cast<std::uint32_t>(type)));
}

[[nodiscard]] constexpr std::string_view name_of(ggml_type type)
{
    return layout_of(type).name;
}
[[nodiscard]] constexpr std::int64_t block_elements(ggml_type type)
{
    return layout_of(type).elements;
}
[[nodiscard]] constexpr std::int64_t block_bytes(ggml_type type)
{
    return layout_of(type).bytes;
}

} // namespace runner
