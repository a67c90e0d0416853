/// \file stored.hpp: compressed caches as bytes of a file, written once and attended where they lie: write, read, stored_bytes, with_tail.
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/cache_owner.hpp>
#include <mdkv/detail/stored_format.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace MDKV_NAMESPACE
{

/// 32 bytes of the caller's for all that must agree before a cache may be used, e.g. the SHA-256 of the model's file, its
/// revision, the encoding of positions, the text's tokens, and a secret of one tenant.
using cache_identity = array<std::uint8_t, 32>;

/// Layers, heads and tokens that a file covers: layers [first_layer, first_layer + n) for n layers given, and heads [first_head,
/// first_head + H).
struct cache_place
{
    index_t first_layer  = 0;
    index_t model_layers = 0;
    index_t first_head   = 0;
    index_t model_heads  = 0;
    index_t tokens       = 0; ///< N of the text, appended ones included; 0: unknown, and there are no positions
    std::span<std::byte const> attachment{}; ///< bytes of the caller's, e.g. preset, budget, report, last logits
};

/// A layer that is to be written.
template <element T>
struct layer_to_write
{
    cache_view<T const, space::host> cache;
    view<std::int32_t const, 2, space::host> positions{}; ///< [H, S]  text position of each slot, or -1; or empty
};

template <class Layer>
concept writable_layer = std::same_as<std::remove_const_t<Layer>,
    layer_to_write<typename decltype(std::remove_const_t<Layer>::cache)::element_type>>;

/// Whether `read` compares the checksum, which reads all bytes; bounds are checked in either case.
enum class verify : std::uint8_t
{
    everything,
    bounds
};

namespace detail
{

template <element T>
struct stored_writer; // one call of write

} // namespace detail

/// Bytes that `write` would write, a multiple of 64.
/// \throws invalid_argument   as write
/// \see    tests/unit/engine/stored.cpp
template <writable_layer Layer>
[[nodiscard]] index_t stored_bytes(cache_place const& place, std::span<Layer> layers)
{
    return detail::stored_writer<typename decltype(Layer::cache)::element_type>{{}, place, layers}.header.bytes;
}

/// Writes the caches of neighbouring layers of one sequence, from a file's first byte to its last. Only defined bytes are written:
/// padding and unused memory are not.
///
/// \param sink      takes `std::span<std::byte const>`, any number of times, in order
/// \param identity  `read` refuses another
/// \param place     layers, heads and tokens; the caller's bytes
/// \param layers    [layers]  with equal numbers of heads
/// \cost   reads every stored byte once; no allocation
/// \sync   returns when done
/// \throws invalid_argument   a directory is none that its layout gives (a cache that was never packed), heads differ, or
///                            the place does not hold the layers; nothing was written. Exceptions of the sink
/// \see    tests/unit/engine/stored.cpp, docs/stored-caches.md
template <std::invocable<std::span<std::byte const>> Sink, writable_layer Layer>
void write(Sink&& sink, cache_identity const& identity, cache_place const& place, std::span<Layer> layers)
{
    detail::stored_writer<typename decltype(Layer::cache)::element_type>{identity, place, layers}.write(sink);
}

/// Stored caches where their bytes lie, which must stay there unchanged: they were checked once.
template <element T>
class stored_caches
{
public:
    /// See `read`.
    stored_caches(std::span<std::byte const> bytes, cache_identity const& identity, verify how);

    [[nodiscard]] index_t layers() const noexcept { return header_->layers; }
    [[nodiscard]] index_t heads() const noexcept { return header_->heads; }
    /// The place that was given to `write`; its attachment lies in the file's bytes.
    [[nodiscard]] cache_place place() const noexcept
    {
        detail::file_header const& file = *header_;
        auto const* const attachment    = reinterpret_cast<std::byte const*>(records() + layers());
        return {file.first_layer, file.model_layers, file.first_head, file.model_heads, file.tokens,
            {attachment, static_cast<std::size_t>(file.attachment)}};
    }

    /// Heads [head, head + count) of layer i of the file, all of them unless told otherwise: a view into the file's bytes.
    /// \throws invalid_argument   there is no such layer, or no such heads
    [[nodiscard]] cache_view<T const, space::host> layer(index_t i, index_t head = 0, index_t count = -1) const
    {
        cache_view<T const, space::host> part = found(i).cache;
        bool const in_range                   = head >= 0 && head <= heads();
        part.layout.heads                     = in_range && count < 0 ? heads() - head : count;
        expects(in_range && part.layout.heads <= heads() - head, "stored_caches: heads [", head, ", ", head, " + ",
            part.layout.heads, ") are not among the ", heads(), " of layer ", i);
        part.heads += head;
        part.tail += head * part.tail_head_bytes();
        return part;
    }

    /// [H, S] positions in the text of the slots of layer i, -1 beyond a head's last one; S is 0 if none were stored.
    /// \throws invalid_argument   there is no such layer
    [[nodiscard]] view<std::int32_t const, 2, space::host> positions(index_t i) const { return found(i).positions; }

private:
    [[nodiscard]] detail::layer_record const* records() const noexcept
    {
        return reinterpret_cast<detail::layer_record const*>(header_ + 1);
    }
    [[nodiscard]] layer_to_write<T> found(index_t i) const
    {
        expects(i >= 0 && i < layers(), "stored_caches: layer ", i, " is not among the file's ", layers());
        detail::layer_record const& record = records()[i];
        cache_layout const layout          = detail::layout_of("stored_caches: layer ", i, record, heads());
        detail::layer_parts const at{record, layout, sizeof(T)};
        auto const* const file = reinterpret_cast<std::byte const*>(header_);
        return {{layout, file + at.arena, record.arena_bytes, reinterpret_cast<head_entry const*>(file + record.begin),
                    file + at.tail, record.appended, &record.appended},
            {reinterpret_cast<std::int32_t const*>(file + at.positions), {{heads(), record.slot_count}},
                {{record.slot_count, 1}}}};
    }

    detail::file_header const* header_;
};

/// Finds the caches in the bytes of a file, e.g. a mapped one, after checks of everything that later decides an access.
/// Bytes from a stranger are refused or can be attended without an access outside of them; no checksum is trusted. Nothing
/// is copied.
///
/// \param bytes     the whole file, at a multiple of 64; it must neither change nor go while the result is in use
/// \param identity  as it was given to `write`
/// \param how       whether all bytes are read for their checksum
/// \cost   O(layers * heads) and all positions; with verify::everything also every byte. No allocation
/// \sync   returns when done
/// \throws mismatch           the file is of another identity or element type
/// \throws invalid_argument   the bytes are no such file, cut, damaged, or of another version; the message names the place and the
///                            reason
/// \see    tests/unit/engine/stored.cpp, docs/stored-caches.md
template <element T>
[[nodiscard]] stored_caches<T> read(
    std::span<std::byte const> bytes, cache_identity const& identity, verify how = verify::everything)
{
    return {bytes, identity, how};
}

/// The same cache with a tail that can be written, for append and attend only. The file's arena stays where it is.
///
/// \param on             backend: threads, scratch
/// \param cache          from stored_caches::layer; its appended tokens are copied
/// \param[out] tail      H * tail_tokens * (D + Dv) elements; must outlive the view
/// \param tail_tokens    tokens that the tail has room for
/// \param[out] appended  number of tokens in the tail; must outlive the view
/// \cost   copies the tail
/// \sync   returns when done
/// \throws invalid_argument        tail_tokens is negative
/// \throws insufficient_workspace  the tail is too small, or has no room for the appended tokens
/// \see    tests/unit/engine/stored.cpp
template <backend B, element T>
    requires(B::memory_space == space::host)
[[nodiscard]] cache_view<T, space::host> with_tail(B const& on, cache_view<T const, space::host> const& cache,
    std::span<std::byte> tail, index_t tail_tokens, index_t& appended)
{
    expects(tail_tokens >= 0, "with_tail: tail_tokens is ", tail_tokens, "; it must not be negative");
    index_t const bytes = detail::tail_bytes(cache.layout, tail_tokens, sizeof(T));
    index_t const held  = detail::appended_tokens(cache);
    expects<insufficient_workspace>(static_cast<index_t>(tail.size()) >= bytes && held <= tail_tokens,
        "with_tail: the tail has ", tail.size(), " bytes for ", tail_tokens, " tokens; ", bytes, " are needed, and ",
        held, " tokens were appended");
    auto const from = detail::without_const(cache);
    cache_view<T, space::host> const to{
        from.layout, from.arena, from.arena_bytes, from.heads, tail.data(), tail_tokens, &appended};
    appended = held;
    detail::move_tail<T, space::host> const job{from, to};
    if (held > 0) { run(on, job, job.items()); }
    return to;
}

} // namespace MDKV_NAMESPACE

#include <mdkv/pipeline/storing.hpp>
