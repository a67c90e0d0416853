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
#include <string_view>
#include <type_traits>

namespace MDKV_NAMESPACE
{

/// The model that a stored cache was made with. Each text is the caller's own, e.g. the hash of a file; two caches fit
/// together if all five are equal.
struct cache_identity
{
    std::string_view model{};
    std::string_view revision{};
    std::string_view tokenizer{};
    std::string_view rope{}; ///< the encoding of positions
    std::string_view salt{}; ///< anything else that must agree, or a secret of one tenant

    [[nodiscard]] array<std::string_view, 5> texts() const noexcept
    {
        return {{model, revision, tokenizer, rope, salt}};
    }
};

/// Layers, heads and tokens that a file covers: layers [first_layer, first_layer + n) for n layers given, and heads [first_head,
/// first_head + H).
struct cache_place
{
    index_t first_layer  = 0;
    index_t model_layers = 0;
    index_t first_head   = 0;
    index_t model_heads  = 0;
    std::span<std::int32_t const> tokens{};  ///< [N]  the text's tokens, appended ones included; only hashes are stored
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

/// Whether `read` compares checksums, which reads all bytes; bounds are checked in either case.
enum class verify : std::uint8_t
{
    everything,
    bounds
};

namespace detail
{

template <element T>
struct stored_writer; // one call of write: pipeline/storing.hpp
template <element T>
struct stored_reader; // one call of read: pipeline/loading.hpp

} // namespace detail

/// Bytes that `write` would write, a multiple of 64.
/// \throws invalid_argument   as write
/// \see    tests/unit/engine/stored.cpp
template <writable_layer Layer>
[[nodiscard]] index_t stored_bytes(cache_identity const& identity, cache_place const& place, std::span<Layer> layers)
{
    return detail::stored_writer<typename decltype(Layer::cache)::element_type>{identity, place, layers, false}
        .header.bytes;
}

/// Writes the caches of neighbouring layers of one sequence, from a file's first byte to its last. Only defined bytes are written:
/// padding and unused memory are not.
///
/// \param sink      takes `std::span<std::byte const>`, any number of times, in order
/// \param identity  the model; `read` refuses another
/// \param place     layers, heads and tokens; the caller's bytes
/// \param layers    [layers]  with equal numbers of heads
/// \cost   reads every stored byte twice, for checksums and for the sink; no allocation
/// \sync   returns when done
/// \throws invalid_argument   a directory is none that its layout gives (a cache that was never packed), heads differ, or
///                            the place does not hold the layers; nothing was written. Exceptions of the sink
/// \see    tests/unit/engine/stored.cpp, docs/stored-caches.md
template <std::invocable<std::span<std::byte const>> Sink, writable_layer Layer>
void write(Sink&& sink, cache_identity const& identity, cache_place const& place, std::span<Layer> layers)
{
    detail::stored_writer<typename decltype(Layer::cache)::element_type>{identity, place, layers, true}.write(sink);
}

/// Stored caches where their bytes lie, which must stay there unchanged: they were checked once.
template <element T>
class stored_caches
{
public:
    /// From one call of `read`, behind its checks.
    explicit stored_caches(detail::stored_reader<T> const& checked) noexcept
        : file_{checked.file}
        , place_{checked.place}
        , links_{file_.data() + checked.header.table[detail::place_section].offset + sizeof place_}
        , layouts_{file_.data() + checked.header.table[detail::layout_section].offset}
    {}

    [[nodiscard]] index_t layers() const noexcept { return place_.layers; }
    [[nodiscard]] index_t first_layer() const noexcept { return place_.first_layer; }
    [[nodiscard]] index_t model_layers() const noexcept { return place_.model_layers; }
    [[nodiscard]] index_t heads() const noexcept { return place_.heads; }
    [[nodiscard]] index_t first_head() const noexcept { return place_.first_head; }
    [[nodiscard]] index_t model_heads() const noexcept { return place_.model_heads; }
    [[nodiscard]] index_t tokens() const noexcept { return place_.tokens; } ///< N of the text
    [[nodiscard]] std::span<std::byte const> attachment() const noexcept
    {
        return {links_ + detail::links_of(place_.tokens) * index_t{sizeof(detail::sha256::digest)},
            static_cast<std::size_t>(place_.attachment)};
    }

    /// Heads [head, head + count) of layer i of the file, all of them unless told otherwise: a view into the file's bytes.
    /// \throws invalid_argument   there is no such layer, or no such heads
    [[nodiscard]] cache_view<T const, space::host> layer(index_t i, index_t head = 0, index_t count = -1) const
    {
        detail::layer_record const record = record_of(i);
        bool const in_range               = head >= 0 && head <= record.heads;
        index_t const heads               = in_range && count < 0 ? record.heads - head : count;
        expects(in_range && heads <= record.heads - head, "stored_caches: heads [", head, ", ", head, " + ", heads,
            ") are not among the ", record.heads, " of layer ", i);
        auto const* const entries  = reinterpret_cast<head_entry const*>(file_.data() + record.directory);
        auto const* const appended = reinterpret_cast<index_t const*>(entries + record.heads);
        cache_view<T const, space::host> all{detail::layout_of(record, "stored_caches: layer ", i),
            file_.data() + record.arena, record.arena_bytes, entries + head, file_.data() + record.tail,
            record.tail_tokens, appended};
        all.tail += head * all.tail_head_bytes();
        all.layout.heads = heads;
        return all;
    }

    /// [H, S] positions in the text of the slots of layer i, -1 beyond a head's last one; empty if none were stored.
    /// \throws invalid_argument   there is no such layer
    [[nodiscard]] view<std::int32_t const, 2, space::host> positions(index_t i) const
    {
        detail::layer_record const record = record_of(i);
        if (record.slot_count == 0) { return {}; }
        return {reinterpret_cast<std::int32_t const*>(file_.data() + record.positions),
            {record.heads, record.slot_count}, {record.slot_count, 1}};
    }

    /// Tokens from the first on that are those of the stored text, by the hash chain: all N of it, or a multiple of 256.
    /// \cost   hashes the tokens
    [[nodiscard]] index_t tokens_shared(std::span<std::int32_t const> text) const noexcept
    {
        auto link      = detail::record_at<detail::file_header>(file_.data()).identity;
        index_t shared = 0;
        while (shared < place_.tokens)
        {
            index_t const left  = place_.tokens - shared;
            index_t const count = left < detail::link_tokens ? left : detail::link_tokens;
            if (static_cast<index_t>(text.size()) - shared < count) { break; }
            link =
                detail::link_of(link, text.subspan(static_cast<std::size_t>(shared), static_cast<std::size_t>(count)));
            auto const* const stored = links_ + shared / detail::link_tokens * index_t{sizeof link};
            if (!(detail::record_at<detail::sha256::digest>(stored) == link)) { break; }
            shared += count;
        }
        return shared;
    }

private:
    [[nodiscard]] detail::layer_record record_of(index_t i) const
    {
        expects(i >= 0 && i < place_.layers, "stored_caches: layer ", i, " is not among the file's ", place_.layers);
        return detail::record_at<detail::layer_record>(layouts_ + i * index_t{sizeof(detail::layer_record)});
    }

    std::span<std::byte const> file_;
    detail::place_record place_;
    std::byte const* links_;
    std::byte const* layouts_;
};

/// Finds the caches in the bytes of a file, e.g. a mapped one, after checks of everything that later decides an access.
/// Bytes from a stranger are refused or can be attended without an access outside of them; no checksum is trusted. Nothing
/// is copied.
///
/// \param bytes     the whole file, at a multiple of 64; it must neither change nor go while the result is in use
/// \param identity  the model that is to read the caches
/// \param how       whether all bytes are read for their checksums
/// \cost   O(layers * heads) and all positions; with verify::everything also every byte. No allocation
/// \sync   returns when done
/// \throws mismatch           the file is of another identity or element type
/// \throws invalid_argument   the bytes are no such file, cut, damaged, of another version or endianness; the message names
///                            the place and the reason
/// \see    tests/unit/engine/stored.cpp, docs/stored-caches.md
template <element T>
[[nodiscard]] stored_caches<T> read(
    std::span<std::byte const> bytes, cache_identity const& identity, verify how = verify::everything)
{
    return stored_caches<T>{detail::stored_reader<T>{bytes, identity, how}};
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
    index_t const held  = cache.layout.heads == 0 ? 0 : *cache.appended;
    expects<insufficient_workspace>(static_cast<index_t>(tail.size()) >= bytes && held <= tail_tokens,
        "with_tail: the tail has ", tail.size(), " bytes for ", tail_tokens, " tokens; ", bytes, " are needed, and ",
        held, " tokens were appended");
    cache_view<T, space::host> const from = detail::without_const(cache);
    cache_view<T, space::host> to         = from;
    to.tail                               = tail.data();
    to.tail_capacity                      = tail_tokens;
    to.appended                           = &appended;
    appended                              = held;
    detail::move_tail<T, space::host> const job{from, to};
    if (held > 0) { run(on, job, job.items()); }
    return to;
}

} // namespace MDKV_NAMESPACE

#include <mdkv/pipeline/loading.hpp>
#include <mdkv/pipeline/storing.hpp>
