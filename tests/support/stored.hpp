/// \file stored.hpp: files of compressed caches in memory: written, aligned, damaged
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/engine/stored.hpp>

#include "support/guarded_buffer.hpp"
#include "support/host.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace support
{

inline constexpr mdkv::cache_identity some_identity{{0x5e, 0xed, 7, 0xff}};

/// The bytes of a file at a multiple of 64; behind them is a page that nobody may touch, if their number is one, too.
class file_in_memory
{
public:
    explicit file_in_memory(std::vector<std::byte> const& bytes)
        : size_{bytes.size()}
        , memory_{(bytes.size() + 63) / 64 * 64, guard::after}
    {
        if (!bytes.empty()) { std::memcpy(memory_.data(), bytes.data(), bytes.size()); }
    }

    [[nodiscard]] std::span<std::byte const> bytes() const { return {memory_.data(), size_}; }
    [[nodiscard]] std::byte& operator[](std::size_t i) { return memory_.data()[i]; }

private:
    std::size_t size_;
    guarded_buffer memory_;
};

/// Layers of one sequence, and what is written of them.
template <class T>
struct layers_to_store
{
    std::vector<mdkv::cpu::cache<T>> caches{};
    std::vector<tensor<std::int32_t, 2>> positions{}; ///< of each layer, or none
    std::vector<std::byte> attachment{std::byte{1}, std::byte{2}, std::byte{3}};
    mdkv::cache_place place{.first_layer = 3, .model_layers = 20, .first_head = 2, .model_heads = 12, .tokens = 600};

    [[nodiscard]] std::vector<mdkv::layer_to_write<T>> layers() const
    {
        std::vector<mdkv::layer_to_write<T>> all;
        for (std::size_t i = 0; i < caches.size(); ++i)
        {
            all.push_back({caches[i].view(), {}});
            if (!positions.empty()) { all.back().positions = positions[i].in(); }
        }
        return all;
    }

    [[nodiscard]] mdkv::cache_place whole_place() const
    {
        mdkv::cache_place all = place;
        all.attachment        = attachment;
        return all;
    }

    [[nodiscard]] std::vector<std::byte> written(mdkv::cache_identity const& identity = some_identity) const
    {
        std::vector<std::byte> file;
        auto const all = layers();
        mdkv::write([&](std::span<std::byte const> part) { file.insert(file.end(), part.begin(), part.end()); },
            identity, whole_place(), std::span{all});
        return file;
    }
};

} // namespace support
