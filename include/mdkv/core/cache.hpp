/// \file cache.hpp: the packed layout of one layer's compressed cache, and its view for stages that write or read it (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/detail/check.hpp>

#include <concepts>
#include <type_traits>
#include <utility>

namespace MDKV_NAMESPACE
{

// One layer's cache is one block of bytes (the arena) and a small directory. There is no padding: the arena has exactly
// the bytes that are charged to the budget. Per head, one after another:
//
//   key projection    [Dk, columns]   element type   brings queries to the leading coordinates of keys; only if a
//                                                    projected rung is in use
//   value projection  [columns, Dv]   element type   leading rows of the value basis
//   channels          [2 Dk + Dv]     element type   means, subtracted from keys before rotation; scales, which divide the
//                                                    centred keys; means, subtracted from values before rotation; only if
//                                                    a rotated rung is in use
//   rung 1            keys, values    tokens at that rung, positions ascending; the full rung is not among these. One of
//                                     these runs may end with the head's stand-ins
//   rung 2            keys, values
//   ...
//   exact run         keys, values    tokens at the full rung, then the window: original vectors; then the head's stand-ins, if
//                                     no other run has them
//
// and beside the arena the tail: per head one exact run with room for tail_capacity appended tokens.
//
// A run of n tokens with r coordinates each is stored in tiles. A tile is 16 tokens; the last one of a run of n tokens
// (n the capacity, for a tail) holds the remaining n mod 16 tokens, unpadded. With w the width of a tile:
//
//   plain keys    tile by tile, each [r, w]: coordinate by coordinate, so that 16 logits grow side by side
//   plain values  [n, r] token by token, so that a weighted sum reads them once in order
//
//   quantised     tile by tile, inside a tile group by group (64 coordinates, the last group fewer), and a group with
//                 g coordinates as scales [w] half, minima [w] half, then the codes:
//                 keys [g / 4, w, 4] bytes, four neighbours of a token together, and values [w / 4, g, 4], the same
//                 coordinate of four tokens together: instructions multiply such fours and add their products. The g % 4
//                 or w % 4 that are left follow as [g % 4, w] and [w % 4, g]. In int4, g' = (g + 1) / 2 bytes stand for g:
//                 byte j holds coordinate j of the group in its low half and g' + j in its high half (0 if there is
//                 none), so that a vector of bytes gives two vectors of neighbours.
//                 A projected rung has codes of coordinates in the head's basis. For other rungs each group of the
//                 vector's own coordinates (centred, keys scaled, too, by channel) is rotated first (detail/hadamard.hpp):
//                 multiplied with the Hadamard matrix of its size over the root of that size, block by block if the size
//                 is no power of two.
//
// Every tile before the last takes 16 * coordinate_bytes(kind, r) bytes, so token t's tile begins at t / 16 times that.

inline constexpr index_t tile_tokens = 16;

/// Properties common to all heads of a cache.
struct cache_layout
{
    index_t heads  = 0; ///< H
    index_t window = 0; ///< W
    head_dims dims;
    std::size_t rungs        = 0;
    std::size_t full_rung    = 0; ///< == rungs when no rung keeps the original vector
    std::size_t stand_in_run = 0; ///< run that ends with the stand-ins: a rung's own; == rungs: the exact run
    mdkv::array<index_t, max_rungs> key_coordinates{};   ///< by rung; 0 if dropped
    mdkv::array<index_t, max_rungs> value_coordinates{}; ///< by rung
    mdkv::array<storage, max_rungs> kinds{};             ///< by rung
    mdkv::array<bool, max_rungs> in_basis{};             ///< by rung: coordinates in the head's basis

    /// The model's factor of q.k, in all logits by which tokens are scored and attended; 0 means 1/sqrt(D), D the original
    /// dimension. compress copies it from score_options::scale; attend and recompress use it unless told another.
    float scale = 0.0F;

    cache_layout() = default;

    /// \throws invalid_argument   a rung is no whole number of coordinates, a size is negative, a dimension of some heads is
    ///                            0, or the scale is negative or not finite
    MDKV_OUTLINE constexpr cache_layout(
        ratio_set const& ratios, index_t heads_, index_t window_, head_dims dims_, float scale_ = 0.0F)
        : heads{heads_}
        , window{window_}
        , dims{dims_}
        , rungs{ratios.size()}
        , full_rung{ratios.full_rung()}
        , stand_in_run{ratios.size()}
        , scale{scale_}
    {
        expects(heads >= 0 && window >= 0, "cache_layout: heads (", heads, ") and window (", window,
            ") must not be negative");
        expects(dims.keys >= (heads > 0 ? 1 : 0) && dims.values >= (heads > 0 ? 1 : 0),
            "cache_layout: head dimensions are ", dims.keys, " and ", dims.values, "; they must be at least 1");
        detail::expects_not_negative("cache_layout", "scale", scale);
        ratios.expects_fit("key", dims.keys);
        ratios.expects_fit("value", dims.values);
        for (std::size_t r = 0; r < rungs; ++r)
        {
            key_coordinates[r]   = ratios.coordinates(r, dims.keys);
            value_coordinates[r] = ratios.coordinates(r, dims.values);
            kinds[r]             = ratios[r].kind;
            in_basis[r]          = ratios[r].projected();
        }
    }

    /// Whether rung r is stored through the head's projections.
    [[nodiscard]] MDKV_HD constexpr bool projected(std::size_t r) const noexcept { return in_basis[r]; }
    /// Whether tokens at rung r have a run of their own: neither dropped nor in the exact run.
    [[nodiscard]] MDKV_HD constexpr bool own_run(std::size_t r) const noexcept
    {
        return key_coordinates[r] > 0 && r != full_rung;
    }

    /// Whether coordinates at rung r are rotated, group by group, before they become codes (detail/hadamard.hpp). They are
    /// centred channel by channel first, keys scaled, too.
    [[nodiscard]] MDKV_HD constexpr bool rotated(std::size_t r) const noexcept
    {
        return own_run(r) && kinds[r] != storage::plain && !in_basis[r];
    }

    /// Whether some rung is rotated.
    [[nodiscard]] MDKV_HD constexpr bool any_rotated() const noexcept
    {
        bool any = false;
        for (std::size_t r = 0; r < rungs; ++r) { any = any || rotated(r); }
        return any;
    }

    /// Bytes of one token's key, or value, at rung r.
    [[nodiscard]] MDKV_HD constexpr index_t key_bytes(std::size_t r, index_t element_bytes) const noexcept
    {
        return coordinate_bytes(kinds[r], key_coordinates[r], element_bytes);
    }
    [[nodiscard]] MDKV_HD constexpr index_t value_bytes(std::size_t r, index_t element_bytes) const noexcept
    {
        return coordinate_bytes(kinds[r], value_coordinates[r], element_bytes);
    }

    /// Whether stand-ins end the exact run, or that of a rung of whole vectors.
    [[nodiscard]] MDKV_HD constexpr bool stand_ins_fit() const noexcept
    {
        return stand_in_run == rungs || (stand_in_run < rungs && own_run(stand_in_run) && !projected(stand_in_run));
    }

    /// Bytes of one stand-in, key and value.
    [[nodiscard]] MDKV_HD constexpr index_t stand_in_bytes(index_t element_bytes) const noexcept
    {
        bool const coded = stand_in_run < rungs;
        return coded ? key_bytes(stand_in_run, element_bytes) + value_bytes(stand_in_run, element_bytes)
                     : (dims.keys + dims.values) * element_bytes;
    }

    /// Bytes of a tail with room for `tokens` tokens.
    /// \throws size_overflow   they leave 64 bits
    [[nodiscard]] constexpr index_t tail_bytes(index_t tokens, index_t element_bytes) const
    {
        index_t const token_bytes = checked_multiply(checked_add(dims.keys, dims.values), element_bytes);
        return checked_multiply(checked_multiply(heads, token_bytes), tokens);
    }

    /// Stand-ins of a head with `cheapest` tokens at rung 0 that may have `most`: no more than it drops.
    [[nodiscard]] MDKV_HD constexpr index_t stand_ins(index_t cheapest, index_t most) const noexcept
    {
        index_t const dropped = key_coordinates[0] > 0 ? 0 : cheapest;
        return dropped < most ? dropped : most;
    }

    [[nodiscard]] friend constexpr bool operator==(cache_layout const&, cache_layout const&) noexcept = default;
};

/// A run of tokens in the arena.
struct run_entry
{
    index_t tokens = 0;
    index_t keys   = 0; ///< byte offset in the arena
    index_t values = 0; ///< byte offset in the arena

    [[nodiscard]] friend constexpr bool operator==(run_entry const&, run_entry const&) noexcept = default;
};

/// Directory entry of one head.
struct head_entry
{
    mdkv::array<run_entry, max_rungs> runs{}; ///< by rung; the full rung's entry is the exact run (window included)
    run_entry exact;                          ///< full-rung tokens, the window, then stand-ins that no other run has
    index_t key_projection   = 0;             ///< byte offset of [Dk, key_columns]
    index_t value_projection = 0;             ///< byte offset of [value_columns, Dv]
    index_t key_columns      = 0;             ///< widest projected rung in use; 0: no projection stored
    index_t value_columns    = 0;
    index_t channels         = 0; ///< byte offset of [2 Dk + Dv], means and scales, if a rotated rung is in use
    index_t stand_ins        = 0; ///< the last tokens of the layout's stand_in_run; they have no slots

    [[nodiscard]] friend constexpr bool operator==(head_entry const&, head_entry const&) noexcept = default;
};

/// One layer's cache, which kernels take by value. `cpu::cache` and `gpu::cache` own the memory.
/// `cache_view<T const>` is read-only: attend accepts both; pack, append and compress need a writable one.
template <class T, space S>
    requires element<std::remove_const_t<T>>
struct cache_view
{
    template <class V>
    using memory = std::conditional_t<std::is_const_v<T>, V const, V>;

    cache_layout layout;
    memory<std::byte>* arena  = nullptr; ///< [arena_bytes]
    index_t arena_bytes       = 0;
    memory<head_entry>* heads = nullptr; ///< [H]
    memory<std::byte>* tail   = nullptr; ///< [H] runs of tail_capacity tokens: keys, then values
    index_t tail_capacity     = 0;
    memory<index_t>* appended = nullptr; ///< [1] tokens in the tail, the same for every head

    using element_type                  = std::remove_const_t<T>;
    static constexpr space memory_space = S;

    /// Bytes of one head's part of the tail.
    [[nodiscard]] MDKV_HD constexpr index_t tail_head_bytes() const noexcept
    {
        return tail_capacity * (layout.dims.keys + layout.dims.values) * index_t{sizeof(T)};
    }

    /// The cache itself, as its owners give it.
    [[nodiscard]] MDKV_HD constexpr cache_view view() const noexcept { return *this; }

    /// The same cache, for reading only. (A template, because nvcc warns of a conversion to the own type.)
    template <std::same_as<element_type const> Const>
        requires(!std::is_const_v<T>)
    MDKV_HD constexpr operator cache_view<Const, S>() const noexcept
    {
        return {layout, arena, arena_bytes, heads, tail, tail_capacity, appended};
    }
};

namespace detail
{

/// The view with write access that jobs take, also jobs that only read; the public calls before them accept both views.
template <class T, space S>
[[nodiscard]] constexpr cache_view<std::remove_const_t<T>, S> without_const(cache_view<T, S> const& cache) noexcept
{
    return {cache.layout, const_cast<std::byte*>(cache.arena), cache.arena_bytes, const_cast<head_entry*>(cache.heads),
        const_cast<std::byte*>(cache.tail), cache.tail_capacity, const_cast<index_t*>(cache.appended)};
}

} // namespace detail

/// One layer's cache in a backend's memory: a `cache_view`, or an owner: `cpu::cache`, `gpu::cache`, your own type with `view()`.
template <class C, class B>
concept cache_on = decltype(std::declval<C&>().view())::memory_space == B::memory_space;
/// The same, to write to.
template <class C, class B>
concept writable_cache_on =
    cache_on<C, B> && !std::is_const_v<std::remove_pointer_t<decltype(std::declval<C&>().view().arena)>>;

/// Lays out one head from the number of its tokens at each rung and of its stand-ins: fills the entry and returns the first
/// free byte. All offsets are decided here; the sum over the heads is the arena's size.
template <element T>
[[nodiscard]] MDKV_HD constexpr index_t lay_out_head(cache_layout const& layout,
    mdkv::array<index_t, max_rungs> const& tokens, index_t offset, head_entry& entry, index_t stand_ins = 0) noexcept
{
    constexpr index_t bytes = sizeof(T);
    entry                   = head_entry{};
    bool rotated            = false;
    for (std::size_t r = 0; r < layout.rungs; ++r)
    {
        rotated = rotated || (tokens[r] + (r == layout.stand_in_run ? stand_ins : 0) > 0 && layout.rotated(r));
        if (tokens[r] == 0 || !layout.projected(r)) { continue; }
        auto const [keys, values] = head_dims{layout.key_coordinates[r], layout.value_coordinates[r]};
        entry.key_columns         = keys > entry.key_columns ? keys : entry.key_columns;
        entry.value_columns       = values > entry.value_columns ? values : entry.value_columns;
    }
    auto const reserve = [&](index_t size) {
        index_t const at = offset;
        offset += size;
        return at;
    };
    entry.key_projection   = reserve(layout.dims.keys * entry.key_columns * bytes);
    entry.value_projection = reserve(entry.value_columns * layout.dims.values * bytes);
    entry.channels         = reserve(rotated ? channel_bytes(layout.dims, bytes) : 0);
    for (std::size_t r = 0; r < layout.rungs; ++r)
    {
        if (!layout.own_run(r)) { continue; }
        index_t const count  = tokens[r] + (r == layout.stand_in_run ? stand_ins : 0);
        entry.runs[r].tokens = count;
        entry.runs[r].keys   = reserve(count * layout.key_bytes(r, bytes));
        entry.runs[r].values = reserve(count * layout.value_bytes(r, bytes));
    }
    entry.stand_ins    = stand_ins;
    entry.exact.tokens = (layout.full_rung < layout.rungs ? tokens[layout.full_rung] : 0) + layout.window
                         + (layout.stand_in_run == layout.rungs ? stand_ins : 0);
    entry.exact.keys   = reserve(entry.exact.tokens * layout.dims.keys * bytes);
    entry.exact.values = reserve(entry.exact.tokens * layout.dims.values * bytes);
    if (layout.full_rung < layout.rungs) { entry.runs[layout.full_rung] = entry.exact; }
    return offset;
}

} // namespace MDKV_NAMESPACE
