/// \file attention_node.hpp: a FLASH_ATTN_EXT node of ggml as the library sees it: its tensors as views
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

#include "ggml.h"
#include <sys/mman.h>
#include <unistd.h>

namespace mdkv_ggml
{

using mdkv::index_t;

/// The engine's cells lie as [cells, H, D] in half. A token's row of the mask says which cells the token sees.
struct attention_node
{
    ggml_tensor* node = nullptr;

    [[nodiscard]] ggml_tensor const& q() const noexcept { return *node->src[0]; }
    [[nodiscard]] ggml_tensor const& k() const noexcept { return *node->src[1]; }
    [[nodiscard]] ggml_tensor const& v() const noexcept { return *node->src[2]; }
    [[nodiscard]] ggml_tensor const& mask() const noexcept { return *node->src[3]; }

    [[nodiscard]] index_t tokens() const noexcept { return q().ne[1]; }  ///< tokens of the batch in each cache
    [[nodiscard]] index_t streams() const noexcept { return q().ne[3]; } ///< caches, each with a part of the batch
    [[nodiscard]] index_t query_heads() const noexcept { return q().ne[2]; }
    [[nodiscard]] index_t heads() const noexcept { return k().ne[2]; }
    [[nodiscard]] mdkv::head_dims dims() const noexcept { return {k().ne[0], v().ne[0]}; }
    [[nodiscard]] float scale() const noexcept { return parameter(0); }

    /// [query_heads]  logits of attention sinks, which belong to no token; or null.
    [[nodiscard]] float const* sinks() const noexcept
    {
        return node->src[4] == nullptr ? nullptr : static_cast<float const*>(node->src[4]->data);
    }
    /// [query_heads, 1]  likewise, for a call of mdkv.
    template <mdkv::backend B>
    [[nodiscard]] std::optional<mdkv::in_view<float, 2, B>> sink_logits(B const& on) const
    {
        if (sinks() == nullptr) { return std::nullopt; }
        return mdkv::in(on, sinks(), query_heads(), 1);
    }

    /// Cells of a cache; the node may look at fewer.
    [[nodiscard]] index_t cells() const noexcept { return whole(k()).ne[1]; }

    /// Number of the node's first cache among the caches in its tensor. Each cache has its own sequences: one, or all of
    /// them.
    [[nodiscard]] index_t stream() const noexcept
    {
        ggml_tensor const& all = whole(k());
        return (bytes(k()) - bytes(all)) / stride(all, 2);
    }

    /// Bytes of one token's cells.
    [[nodiscard]] index_t token_bytes() const noexcept
    {
        return heads() * (dims().keys + dims().values) * index_t{sizeof(mdkv::half)};
    }

    /// Whether the layers of two nodes have the same sizes and scale.
    [[nodiscard]] bool is_like(attention_node const& other) const noexcept
    {
        return heads() == other.heads() && query_heads() == other.query_heads() && dims() == other.dims()
               && scale() == other.scale();
    }

    /// Reason why no compressed cache can serve the node, with any mask; null if one can.
    [[nodiscard]] char const* why_not() const noexcept
    {
        if (node->src[1] == nullptr || node->src[2] == nullptr || node->src[3] == nullptr) { return "no mask"; }
        if (node->src[4] != nullptr && (node->src[4]->type != GGML_TYPE_F32 || node->src[4]->ne[0] != query_heads()))
        {
            return "sink logits of another kind";
        }
        if (parameter(1) != 0.0F) { return "ALiBi"; }
        if (parameter(2) != 0.0F) { return "soft caps on logits"; }
        if (!(scale() > 0.0F)) { return "a scale that is not positive"; }
        if (std::strncmp(whole(k()).name, "cache_k_l", 9) != 0) { return "keys that are in no cache"; }
        if (&whole(k()) == &whole(v())) { return "values that are a part of the keys (MLA)"; }
        if (k().type != GGML_TYPE_F16 || v().type != GGML_TYPE_F16) { return "cells that are not f16"; }
        if (k().ne[3] != q().ne[3] || v().ne[3] != q().ne[3])
        {
            return "queries and cells of different numbers of caches";
        }
        if (mask().type != GGML_TYPE_F16 || mask().ne[2] != 1 || mask().ne[3] != q().ne[3] || mask().ne[0] != k().ne[1]
            || mask().ne[1] < q().ne[1] || mask().nb[0] != 2)
        {
            return "a mask of another kind";
        }
        bool const rows = q().type == GGML_TYPE_F32 && q().nb[0] == 4 && k().nb[0] == 2 && v().nb[0] == 2
                          && node->type == GGML_TYPE_F32 && node->nb[0] == 4
                          && node->nb[1] == 4 * static_cast<std::size_t>(v().ne[0]);
        if (!rows) { return "values or keys that lie transposed"; }
        if (v().ne[2] != k().ne[2] || v().ne[1] != k().ne[1] || q().ne[2] % k().ne[2] != 0)
        {
            return "heads or cells that do not match";
        }
        return nullptr;
    }

    /// The mask's row of token i of the batch: a number for each cell, usually 0 (visible) or minus infinity (hidden).
    [[nodiscard]] std::span<std::uint16_t const> mask_row(index_t i) const noexcept
    {
        return {reinterpret_cast<std::uint16_t const*>(bytes(mask()) + i * stride(mask(), 1)),
            static_cast<std::size_t>(mask().ne[0])};
    }

    /// [Hq, n, D] of n tokens of the batch from token i on.
    template <class B>
    [[nodiscard]] auto queries(B const& on, index_t i, index_t n) const
    {
        auto const* const data = reinterpret_cast<float const*>(bytes(q()) + i * stride(q(), 1));
        return mdkv::in(on, data, {query_heads(), n, dims().keys}, {stride(q(), 2) / 4, stride(q(), 1) / 4, 1});
    }

    /// [Hq, n, Dv] of n tokens of the batch from token i on.
    template <class B>
    [[nodiscard]] auto output(B const& on, index_t i, index_t n) const
    {
        auto* const data = reinterpret_cast<float*>(bytes(*node) + i * stride(*node, 2));
        return mdkv::out(on, data, {query_heads(), n, dims().values}, {dims().values, stride(*node, 2) / 4, 1});
    }

    /// [H, count, D] of neighbouring cells.
    template <class B>
    [[nodiscard]] auto keys(B const& on, index_t cell, index_t count) const
    {
        return neighbours(on, k(), cell, count);
    }
    template <class B>
    [[nodiscard]] auto values(B const& on, index_t cell, index_t count) const
    {
        return neighbours(on, v(), cell, count);
    }

    /// [cells, 1, H, D] of all cells: pages of one token.
    template <class B>
    [[nodiscard]] auto key_pages(B const& on) const
    {
        return pages(on, k());
    }
    template <class B>
    [[nodiscard]] auto value_pages(B const& on) const
    {
        return pages(on, v());
    }

    /// [H, D] of one cell.
    template <class B>
    [[nodiscard]] auto key(B const& on, index_t cell) const
    {
        return one(on, k(), cell);
    }
    template <class B>
    [[nodiscard]] auto value(B const& on, index_t cell) const
    {
        return one(on, v(), cell);
    }

    /// The bytes of a cell's keys of all heads.
    [[nodiscard]] std::span<std::byte const> key_row(index_t cell) const noexcept { return row(k(), cell); }
    [[nodiscard]] std::span<std::byte const> value_row(index_t cell) const noexcept { return row(v(), cell); }

    /// Whether a cell's keys are all 0 except for a stamp, like the keys of a cell that was given back.
    [[nodiscard]] bool is_blank(index_t cell) const noexcept
    {
        for (index_t h = 0; h < heads(); ++h)
        {
            auto const* const row = halves(k(), cell) + h * (stride(k(), 2) / 2);
            auto const* const end = row + k().ne[0];
            auto const* const own = h == 0 ? std::min(row + stamped, end) : row;
            if (!std::all_of(row, own, [](mdkv::half x) { return x.bits < smallest_normal; })) { return false; }
            if (!std::all_of(own, end, [](mdkv::half x) { return x.bits == 0; })) { return false; }
        }
        return true;
    }

    /// Gives the pages of the cells [first, end) back to the system: they read as zeros until they are written again.
    /// Returns the bytes; pages that also hold other cells stay, but these cells are zeros, too.
    index_t give_back(index_t first, index_t end) const noexcept
    {
        index_t given   = 0;
        auto const page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
        for (ggml_tensor const* const t : {&k(), &v()})
        {
            auto const begin = reinterpret_cast<std::uintptr_t>(bytes(*t) + first * stride(*t, 1));
            auto const last  = reinterpret_cast<std::uintptr_t>(bytes(*t) + end * stride(*t, 1));
            auto const from = (begin + page - 1) / page * page, to = last / page * page;
            if (from < to && madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED) == 0)
            {
                given += static_cast<index_t>(to - from);
                std::memset(reinterpret_cast<void*>(begin), 0, from - begin);
                std::memset(reinterpret_cast<void*>(to), 0, last - to);
            }
            else { std::memset(reinterpret_cast<void*>(begin), 0, last - begin); }
        }
        return given;
    }

    /// Gives pages of zeros of all the layer's cells back to the system, e.g. those that no token was written to yet. Returns
    /// the bytes.
    index_t give_back_zeros() const noexcept
    {
        index_t given    = 0;
        auto const bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
        for (ggml_tensor const* const t : {&whole(k()), &whole(v())})
        {
            auto const begin = reinterpret_cast<std::uintptr_t>(t->data), end = begin + ggml_nbytes(t);
            for (auto page = (begin + bytes - 1) / bytes * bytes; page + bytes <= end; page += bytes)
            {
                auto* const first = reinterpret_cast<std::uint64_t*>(page);
                bool const zero   = std::all_of(first, first + bytes / sizeof *first, [](auto x) { return x == 0; });
                if (!zero || madvise(first, bytes, MADV_DONTNEED) != 0) { continue; }
                given += static_cast<index_t>(bytes);
            }
        }
        return given;
    }

    /// Marks the first cell, which was given back: zeros that a program loads then differ from its zeros. The mark is a
    /// negligible key, because the engine's code may read cells that it does not use.
    void stamp(std::uint64_t number) const noexcept
    {
        auto* const row = reinterpret_cast<mdkv::half*>(bytes(k()));
        for (index_t i = 0; i < std::min<index_t>(stamped, k().ne[0]); ++i, number >>= 10)
        {
            row[i].bits = static_cast<std::uint16_t>(number % smallest_normal);
        }
    }

    /// A hash of the first bytes of a cell's key, which stands for the cell.
    [[nodiscard]] std::uint64_t word(index_t cell) const noexcept
    {
        std::uint64_t sum = 0;
        auto const* from  = bytes(k()) + cell * stride(k(), 1);
        auto const* end   = from + std::min<index_t>(64, 2 * k().ne[0]);
        for (std::uint64_t part = 0; end - from >= index_t{sizeof part}; from += sizeof part)
        {
            std::memcpy(&part, from, sizeof part);
            sum = (sum ^ part) * 0x9E3779B97F4A7C15U;
            sum ^= sum >> 32;
        }
        return sum;
    }

    /// The tensor that a view shows a part of.
    [[nodiscard]] static ggml_tensor const& whole(ggml_tensor const& view) noexcept
    {
        return view.view_src != nullptr ? *view.view_src : view;
    }

private:
    static constexpr index_t stamped               = 4;     ///< elements of a key
    static constexpr std::uint16_t smallest_normal = 0x400; ///< 10 bits of an element make a number below it

    [[nodiscard]] float parameter(std::size_t i) const noexcept
    {
        float value = 0;
        std::memcpy(&value, reinterpret_cast<char const*>(node->op_params) + i * sizeof value, sizeof value);
        return value;
    }
    [[nodiscard]] static std::byte* bytes(ggml_tensor const& t) noexcept { return static_cast<std::byte*>(t.data); }
    [[nodiscard]] static index_t stride(ggml_tensor const& t, int axis) noexcept
    {
        return static_cast<index_t>(t.nb[axis]);
    }
    [[nodiscard]] static std::span<std::byte const> row(ggml_tensor const& t, index_t cell) noexcept
    {
        return {bytes(t) + cell * stride(t, 1), t.nb[1]};
    }
    [[nodiscard]] static mdkv::half const* halves(ggml_tensor const& t, index_t cell) noexcept
    {
        return reinterpret_cast<mdkv::half const*>(bytes(t) + cell * stride(t, 1));
    }
    template <class B>
    [[nodiscard]] static auto neighbours(B const& on, ggml_tensor const& t, index_t cell, index_t count)
    {
        return mdkv::in(on, halves(t, cell), {t.ne[2], count, t.ne[0]}, {stride(t, 2) / 2, stride(t, 1) / 2, 1});
    }
    template <class B>
    [[nodiscard]] static auto pages(B const& on, ggml_tensor const& t)
    {
        return mdkv::in(on, halves(t, 0), {t.ne[1], index_t{1}, t.ne[2], t.ne[0]},
            {stride(t, 1) / 2, stride(t, 1) / 2, stride(t, 2) / 2, index_t{1}});
    }
    template <class B>
    [[nodiscard]] static auto one(B const& on, ggml_tensor const& t, index_t cell)
    {
        return mdkv::in(on, halves(t, cell), {t.ne[2], t.ne[0]}, {stride(t, 2) / 2, 1});
    }
};

/// A part of a node: some tokens of its batch in one of the engine's caches.
class part_of_node
{
public:
    part_of_node(attention_node const& all, index_t cache, index_t first, index_t tokens) noexcept
        : node_{*all.node}
        , sources_{all.q(), all.k(), all.v(), all.mask()}
    {
        narrow(node_, 3, cache, 1);
        narrow(node_, 2, first, tokens);
        for (std::size_t i = 0; i < std::size(sources_); ++i)
        {
            narrow(sources_[i], 3, cache, 1);
            node_.src[i] = &sources_[i];
        }
        narrow(sources_[0], 1, first, tokens);
        narrow(sources_[3], 1, first, tokens);
    }
    part_of_node(part_of_node const&)            = delete;
    part_of_node& operator=(part_of_node const&) = delete;

    [[nodiscard]] ggml_tensor* get() noexcept { return &node_; }

private:
    static void narrow(ggml_tensor& t, int axis, index_t first, index_t count) noexcept
    {
        t.data     = static_cast<std::byte*>(t.data) + static_cast<std::size_t>(first) * t.nb[axis];
        t.ne[axis] = count;
    }

    ggml_tensor node_;
    ggml_tensor sources_[4];
};

} // namespace mdkv_ggml
