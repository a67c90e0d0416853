/// \file carried_cells.hpp: a layer's packed cache in the place of cells that were given back, for programs that save a state
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/engine/stored.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attention_node.hpp"
#include "cell_list.hpp"
#include "ggml-backend-impl.h"
#include "ggml.h"
#include "shared.hpp"

namespace mdkv_ggml
{

// A state's file has the cells' bytes, which ggml's buffer hands out (get_tensor). Cells that were given back are zeros there.
// The packed cache of their tokens takes fewer bytes than the cells: the buffer hands out its bytes instead, as a stream of 64
// bytes (carried_head) and a stored cache, first over the keys of the cells in order, then over the values. Whichever process
// and cells they are loaded into, the first step of the sequence finds the stream there.
//
// Until then, and where cells are not given back afterwards, the engine's own code may multiply cells that hold a stream, because
// it computes with cells that it masks. All its elements are therefore numbers below 2: 15 bytes become 8 of them.

inline constexpr index_t plain_bytes = 15, block_bytes = 16;
inline constexpr mdkv::array<char, 8> carried_magic{{'m', 'd', 'k', 'v', 'c', 'e', 'l', 'l'}};

/// The beginning of a stream; the stored cache's attachment is its copy, and has a checksum.
struct carried_head
{
    mdkv::array<char, 8> magic;
    index_t bytes;  ///< size of the stored cache
    index_t tokens; ///< number of compressed tokens, whose cells hold the stream
    double share;   ///< layer_state's factor of the compressed part's bytes
    std::byte zero[32];

    /// Bytes of the stream in cells.
    [[nodiscard]] index_t stream_bytes() const noexcept
    {
        return (index_t{sizeof *this} + bytes + plain_bytes - 1) / plain_bytes * block_bytes;
    }
};
static_assert(sizeof(carried_head) == mdkv::workspace::alignment);
inline constexpr index_t head_blocks = (index_t{sizeof(carried_head)} + plain_bytes - 1) / plain_bytes;

/// Blocks of a stream: seven words lose the bit that makes numbers of 2 and more, and an eighth takes these bits and a byte.
inline void encode(std::byte const* plain, std::byte* to, index_t blocks) noexcept
{
    for (index_t i = 0; i < blocks; ++i, plain += plain_bytes, to += block_bytes)
    {
        std::uint16_t words[8]{};
        std::memcpy(words, plain, plain_bytes);
        unsigned bits = 0;
        for (unsigned w = 0; w < 7; ++w)
        {
            bits |= (words[w] >> 14 & 1U) << w;
            words[w] &= 0xBFFFU;
        }
        words[7] = static_cast<std::uint16_t>(words[7] | (bits & 63U) << 8 | bits >> 6 << 15);
        std::memcpy(to, words, block_bytes);
    }
}
inline void decode(std::byte const* from, std::byte* plain, index_t blocks) noexcept
{
    for (index_t i = 0; i < blocks; ++i, from += block_bytes, plain += plain_bytes)
    {
        std::uint16_t words[8];
        std::memcpy(words, from, block_bytes);
        unsigned const bits = (words[7] >> 8 & 63U) | static_cast<unsigned>(words[7] >> 15) << 6;
        for (unsigned w = 0; w < 7; ++w) { words[w] = static_cast<std::uint16_t>(words[w] | (bits >> w & 1U) << 14); }
        std::memcpy(plain, words, plain_bytes);
    }
}

/// The head of the stream that begins in a cell; of other magic if none does.
[[nodiscard]] inline carried_head carried_in(attention_node const& node, index_t cell) noexcept
{
    carried_head head{};
    auto const row = node.key_row(cell);
    if (std::ssize(row) < head_blocks * block_bytes) { return head; }
    std::byte plain[head_blocks * plain_bytes];
    decode(row.data(), plain, head_blocks);
    std::memcpy(&head, plain, sizeof head);
    return head;
}
[[nodiscard]] inline bool begins_carried(attention_node const& node, index_t cell) noexcept
{
    return carried_in(node, cell).magic == carried_magic;
}

/// Which layer, and which shape, the cache must be of.
[[nodiscard]] inline std::string carried_identity(attention_node const& node, index_t layer)
{
    return "layer " + std::to_string(layer) + ": " + std::to_string(node.heads()) + " heads of "
           + std::to_string(node.dims().keys) + " and " + std::to_string(node.dims().values) + ", scale "
           + std::to_string(mdkv::detail::bits_of_float(node.scale()));
}

/// The packed cache of one layer of one sequence, for whoever reads its cells through ggml.
class carried_cells
{
public:
    carried_cells()                                = default;
    carried_cells(carried_cells const&)            = delete;
    carried_cells& operator=(carried_cells const&) = delete;
    ~carried_cells() { end(); }

    /// From now on readers of the first `tokens` cells find the cache, whose compressed part is theirs and stays as it is until
    /// end(). Returns false if it does not fit into their bytes.
    bool begin(attention_node const& node, index_t layer, cell_list const& cells, index_t tokens,
        mdkv::cpu::cache<mdkv::half> const& cache, double share)
    {
        end();
        std::lock_guard const one_at_a_time{lock()};
        ggml_backend_buffer_t const buffers[]{buffer_of(node.k()), buffer_of(node.v())};
        head_                = {carried_magic, 0, tokens, share, {}};
        identity_            = carried_identity(node, layer);
        none_                = 0;
        cache_               = cache.view();
        cache_.appended      = &none_; // tokens of the tail are in their cells
        cache_.tail_capacity = 0;
        head_.bytes          = mdkv::stored_bytes(mdkv::cache_identity{.model = identity_}, place(), layers());
        rows_[0]             = node.key_row(0);
        rows_[1]             = node.value_row(0);
        if (buffers[0] == nullptr || buffers[1] == nullptr || std::ssize(rows_[0]) < head_blocks * block_bytes
            || head_.stream_bytes() > tokens * (std::ssize(rows_[0]) + std::ssize(rows_[1])))
        {
            return false;
        }
        auto const first = cells.first(tokens);
        cells_.assign(first.begin(), first.end());
        for (auto* const buffer : buffers) { watch(buffer); }
        all().insert(this);
        return true;
    }

    void end()
    {
        std::lock_guard const one_at_a_time{lock()};
        all().erase(this);
        stream_ = {};
    }

    /// Frees the memory of what was read.
    void forget()
    {
        if (stream_.empty()) { return; }
        std::lock_guard const one_at_a_time{lock()};
        stream_ = {};
    }

private:
    using get = void (*)(ggml_backend_buffer_t, ggml_tensor const*, void*, std::size_t, std::size_t);

    [[nodiscard]] static std::mutex& lock()
    {
        static std::mutex one;
        return one;
    }
    [[nodiscard]] static std::set<carried_cells*>& all()
    {
        static std::set<carried_cells*> every;
        return every;
    }
    [[nodiscard]] static get& original()
    {
        static get of_buffers = nullptr;
        return of_buffers;
    }

    [[nodiscard]] static ggml_backend_buffer_t buffer_of(ggml_tensor const& view) noexcept
    {
        ggml_backend_buffer_t const buffer = attention_node::whole(view).buffer;
        bool const known =
            buffer != nullptr && buffer->iface.get_tensor != nullptr
            && (original() == nullptr || buffer->iface.get_tensor == original() || buffer->iface.get_tensor == read);
        return known && ggml_backend_buffer_is_host(buffer) ? buffer : nullptr;
    }

    /// Reads of the buffer pass through `read` from now on. All buffers of host memory have the same function.
    static void watch(ggml_backend_buffer_t buffer)
    {
        if (buffer->iface.get_tensor == read) { return; }
        original()               = buffer->iface.get_tensor;
        buffer->iface.get_tensor = read;
    }

    static void read(
        ggml_backend_buffer_t buffer, ggml_tensor const* tensor, void* data, std::size_t offset, std::size_t size)
    {
        std::lock_guard const one_at_a_time{lock()};
        original()(buffer, tensor, data, offset, size);
        auto const* const from = static_cast<std::byte const*>(tensor->data) + offset;
        try
        {
            for (carried_cells* const one : all())
            {
                one->copy(from, static_cast<std::byte*>(data), static_cast<index_t>(size));
            }
        }
        catch (std::exception const&) // no memory: zeros, which are refused when they are loaded
        {}
    }

    /// Replaces what was read from `from` on, as far as these are rows of the cells that still hold zeros (or the stamp of the
    /// first cell): a program may have written others meanwhile.
    void copy(std::byte const* from, std::byte* to, index_t size)
    {
        index_t at = 0; // in the stream
        for (std::span<std::byte const> const& row : rows_)
        {
            index_t const bytes = std::ssize(row);
            for (std::int32_t const cell : cells_)
            {
                if (at >= head_.stream_bytes()) { return; }
                auto const begin    = reinterpret_cast<std::intptr_t>(row.data()) + cell * bytes;
                auto const wanted   = reinterpret_cast<std::intptr_t>(from);
                index_t const first = std::max<index_t>(begin, wanted);
                index_t const last  = std::min<index_t>(begin + bytes, wanted + size);
                auto* const there   = to + (first - wanted);
                index_t const stamp =
                    cell == 0 && &row == &rows_[0] && first == begin ? index_t{sizeof(std::uint64_t)} : 0;
                auto const is_zero = [](std::byte x) { return x == std::byte{0}; };
                if (first < last && std::all_of(there + std::min(stamp, last - first), there + (last - first), is_zero))
                {
                    if (stream_.empty()) { make(); }
                    index_t const place = at + (first - begin);
                    index_t const count = std::min(last - first, std::ssize(stream_) - place);
                    if (count > 0) { std::copy_n(stream_.data() + place, count, there); }
                }
                at += bytes;
            }
        }
    }

    void make()
    {
        index_t const blocks = head_.stream_bytes() / block_bytes;
        std::vector<std::byte> plain(static_cast<std::size_t>(blocks * plain_bytes));
        std::memcpy(plain.data(), &head_, sizeof head_);
        auto* next = plain.data() + sizeof head_;
        mdkv::write([&](std::span<std::byte const> bytes) { next = std::copy(bytes.begin(), bytes.end(), next); },
            mdkv::cache_identity{.model = identity_}, place(), layers());
        stream_.resize(static_cast<std::size_t>(head_.stream_bytes()));
        encode(plain.data(), stream_.data(), blocks);
    }

    [[nodiscard]] mdkv::cache_place place() const
    {
        return {
            .model_layers = 1, .model_heads = cache_.layout.heads, .attachment = std::as_bytes(std::span{&head_, 1})};
    }
    [[nodiscard]] std::span<mdkv::layer_to_write<mdkv::half>> layers()
    {
        written_.cache = cache_;
        return {&written_, 1};
    }

    carried_head head_{};
    std::string identity_;
    mdkv::cache_view<mdkv::half const, mdkv::space::host> cache_;
    mdkv::layer_to_write<mdkv::half> written_{};
    index_t none_ = 0;                   // appended tokens that are stored
    std::span<std::byte const> rows_[2]; // the keys and the values of cell 0; other cells follow without gaps
    std::vector<std::int32_t> cells_;
    std::vector<std::byte> stream_;
};

/// Whether some of the tokens before a batch have a blank cell, or most of them values of zero: their keys may have been shifted
/// since a state was loaded.
[[nodiscard]] inline bool some_blank(attention_node const& node, cell_list const& cells, index_t before) noexcept
{
    index_t const looks = std::min<index_t>(before, 8);
    index_t zeros       = 0;
    for (index_t i = 0; i < looks; ++i)
    {
        for (index_t const place : {i * before / looks, (i + 1) * before / looks - 1})
        {
            if (node.is_blank(cells[place])) { return true; }
            auto const row = node.value_row(cells[place]);
            zeros += std::all_of(row.begin(), row.end(), [](std::byte x) { return x == std::byte{0}; }) ? 1 : 0;
        }
    }
    return looks > 0 && zeros > looks;
}

/// The cache that a layer's cells hold.
struct found_cache
{
    mdkv::cpu::cache<mdkv::half> cache;
    carried_head head;

    /// \param before   tokens of the sequence
    /// \param layer    number of the layer
    /// \throws mdkv::error   the cells hold no stream of this layer, or a damaged one
    found_cache(attention_node const& node, index_t layer, cell_list const& cells, index_t before)
    {
        head = carried_in(node, cells[0]);
        mdkv::expects(head.tokens >= 1 && head.tokens <= before, "the cells of a saved state are of ", head.tokens,
            " tokens, of which ", before, " are there");
        for (index_t place = head.tokens; place < before; ++place)
        {
            mdkv::expects(!node.is_blank(cells[place]), "cells of a saved state hold zeros");
        }
        index_t const room = head.tokens * (std::ssize(node.key_row(0)) + std::ssize(node.value_row(0)));
        mdkv::expects(head.bytes >= 0 && head.bytes <= room && head.stream_bytes() <= room && std::isfinite(head.share)
                          && head.share > 0,
            "the cells of a saved state are damaged");
        std::vector<std::byte> encoded;
        for (bool const values : {false, true})
        {
            for (index_t i = 0; i < head.tokens && std::ssize(encoded) < head.stream_bytes(); ++i)
            {
                auto const row = values ? node.value_row(cells[i]) : node.key_row(cells[i]);
                encoded.insert(encoded.end(), row.begin(), row.end());
            }
        }
        index_t const blocks = head.stream_bytes() / block_bytes;
        struct alignas(mdkv::workspace::alignment) line
        {
            std::byte bytes[mdkv::workspace::alignment];
        };
        std::vector<line> lines(static_cast<std::size_t>(blocks * plain_bytes) / sizeof(line) + 1);
        auto const stream = std::as_writable_bytes(std::span{lines});
        decode(encoded.data(), stream.data(), blocks);
        std::string const identity = carried_identity(node, layer);
        auto const stored          = mdkv::read<mdkv::half>(
            stream.subspan(sizeof head, static_cast<std::size_t>(head.bytes)), {.model = identity});
        auto const copy = stored.attachment();
        mdkv::expects(copy.size() == sizeof head && std::memcmp(copy.data(), &head, sizeof head) == 0,
            "the cells of a saved state are damaged");
        mdkv::expects(stored.layers() == 1 && stored.heads() == node.heads(), "the cells hold another cache");
        auto const from = stored.layer(0);
        mdkv::expects(from.layout.dims == node.dims() && from.layout.scale == node.scale() && *from.appended == 0,
            "the cells hold another cache");
        cache         = {from.layout, from.arena_bytes};
        auto const to = cache.view();
        std::copy_n(from.arena, from.arena_bytes, to.arena);
        std::copy_n(from.heads, from.layout.heads, to.heads);
    }
};

} // namespace mdkv_ggml
