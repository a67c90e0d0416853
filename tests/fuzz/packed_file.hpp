/// \file packed_file.hpp: files of stored caches without the gaps between sections, so that a fuzzer changes bytes that count
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/stored_format.hpp>
#include <mdkv/engine/stored.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace fuzz
{

using sections = std::array<std::vector<std::byte>, mdkv::detail::section_count>;

inline constexpr mdkv::cache_identity identity{"model", "revision", "tokenizer", "rope", "salt"};

/// Header; then of each section its size, 16 bits, and its bytes.
inline std::vector<std::byte> without_gaps(std::span<std::byte const> file)
{
    mdkv::detail::file_header header;
    std::memcpy(&header, file.data(), sizeof header);
    std::vector<std::byte> packed{file.begin(), file.begin() + sizeof header};
    for (auto const& section : header.table)
    {
        auto const size = static_cast<std::uint16_t>(section.bytes);
        packed.push_back(static_cast<std::byte>(size & 0xffU));
        packed.push_back(static_cast<std::byte>(size >> 8U));
        auto const begin = file.begin() + section.offset;
        packed.insert(packed.end(), begin, begin + size);
    }
    return packed;
}

/// The file again, of any bytes: sections at multiples of 4,096, the size in the header made right.
inline std::vector<std::byte> with_gaps(std::span<std::byte const> packed)
{
    auto const take = [&](std::size_t most) {
        auto const taken = packed.first(std::min(most, packed.size()));
        packed           = packed.subspan(taken.size());
        return taken;
    };
    auto const head = take(sizeof(mdkv::detail::file_header));
    std::vector<std::byte> file{head.begin(), head.end()};
    for (std::size_t i = 0; i < mdkv::detail::section_count; ++i)
    {
        auto const size = take(2);
        if (size.size() < 2) { break; }
        file.resize((file.size() + 4095) / 4096 * 4096);
        auto const bytes = take(std::to_integer<std::size_t>(size[0]) + 256 * std::to_integer<std::size_t>(size[1]));
        file.insert(file.end(), bytes.begin(), bytes.end());
    }
    if (file.size() >= sizeof(mdkv::detail::file_header))
    {
        auto const size = static_cast<mdkv::index_t>(file.size());
        std::memcpy(file.data() + offsetof(mdkv::detail::file_header, bytes), &size, sizeof size);
    }
    return file;
}

} // namespace fuzz
