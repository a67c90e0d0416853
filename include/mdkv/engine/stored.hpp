/// \file stored.hpp: compressed caches as bytes of a file, written once and attended where they lie: write, read, stored_bytes, with_tail.
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/detail/cache_owner.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/stored_format.hpp>

#include <concepts>
#include <span>
#include <type_traits>
#include <utility>

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
    index_t model_layers = 0; ///< 0: those given are the last
    index_t first_head   = 0;
    index_t model_heads  = 0; ///< 0: likewise
    index_t tokens       = 0; ///< N of the text so far, folded and appended ones included; 0: unknown, and no positions
    std::span<std::byte const> attachment{}; ///< bytes of the caller's, e.g. preset, budget, report, last logits
};

/// A layer that is to be written with more than its cache.
template <element T>
struct layer_to_write
{
    cache_view<T const, space::host> cache;
    view<std::int32_t const, 2, space::host> positions{}; ///< [H, S]  text position of each slot, or -1; or empty
};

namespace detail
{

template <element T>
[[nodiscard]] layer_to_write<T> as_layer(layer_to_write<T> const& layer)
{
    return layer;
}
template <class Cache>
    requires(decltype(std::declval<Cache const&>().view())::memory_space == space::host)
[[nodiscard]] auto as_layer(Cache const& cache) -> layer_to_write<typename decltype(cache.view())::element_type>
{
    return {cache.view(), {}};
}

} // namespace detail

/// A layer for `write`: `layer_to_write`, or a cache in host memory, by its owner or its view.
template <class Layer>
concept writable_layer = requires(Layer const& layer) { detail::as_layer(layer); };

/// Whether `read` compares the checksum, which reads all bytes; bounds are checked in either case.
enum class verify : std::uint8_t
{
    everything,
    bounds
};

namespace detail
{

/// Passes a file's bytes on to a sink, counted and summed.
template <class Sink>
struct file_output
{
    Sink& sink;
    index_t at        = 0;
    std::uint32_t crc = 0;

    void add(void const* data, index_t size)
    {
        if (size == 0) { return; }
        std::span const bytes{static_cast<std::byte const*>(data), static_cast<std::size_t>(size)};
        crc = crc32c(crc, bytes.data(), bytes.size());
        sink(bytes);
        at += size;
    }
    /// Adds zeros before byte `to`.
    void pad(index_t to)
    {
        static constexpr std::byte zeros[stored_alignment]{};
        add(zeros, to - at);
    }
    /// Adds the appended tokens of a head as a tail that has room for no more: the last tile of keys is narrower there.
    void add_tail(stored_run const& tail)
    {
        index_t const full_tokens = run_rows::tile_begin(tail.tokens);
        add(tail.keys.begin, full_tokens * tail.keys.token_bytes);
        for (int c = 0; c < tail.keys.coordinates && full_tokens < tail.tokens; ++c)
        {
            add(tail.keys.begin + tail.keys.coordinate(full_tokens, c), (tail.tokens - full_tokens) * tail.keys.unit);
        }
        add(tail.values.begin, tail.tokens * tail.values.token_bytes);
    }
};

/// The header of a call of write, after its checks.
template <class Layer>
[[nodiscard]] file_header checked_header(
    cache_identity const& identity, cache_place const& place, std::span<Layer> layers)
{
    using T             = typename decltype(as_layer(layers[0]).cache)::element_type;
    index_t const heads = layers.empty() ? 0 : as_layer(layers[0]).cache.layout.heads;
    auto const of_model = [](index_t all, index_t first, index_t count) {
        return all == 0 ? checked_add(first, count) : all;
    };
    file_header header{magic, element_code<T>, stored_version, 0, 0, identity, std::ssize(layers),
        of_model(place.model_layers, place.first_layer, std::ssize(layers)), place.first_layer, heads,
        of_model(place.model_heads, place.first_head, heads), place.first_head, place.tokens,
        std::ssize(place.attachment)};
    expects_place("write: place from layer ", header);
    index_t at = end_of_attachment(header);
    for (index_t i = 0; i < header.layers; ++i)
    {
        auto const [cache, positions] = as_layer(layers[static_cast<std::size_t>(i)]);
        char const* const call        = "write: layer ";
        expects(cache.layout.rungs > 0, call, i, " has no layout: nothing was packed into it, or it was moved from");
        expects(
            cache.layout.heads == header.heads, call, i, " has ", cache.layout.heads, " heads, layer 0 ", header.heads);
        expects((header.heads == 0 || (cache.heads != nullptr && cache.appended != nullptr))
                    && (cache.arena_bytes == 0 || cache.arena != nullptr),
            call, i, " has no directory, or no arena");
        layer_record const record = record_of(cache, positions, at);
        at                        = layer_parts{record, layout_of(call, i, record, header.heads), sizeof(T)}.end;
        expects_layer<T>(call, i, cache, positions, place.tokens);
    }
    header.bytes = aligned(checked_add(at, checksum_bytes));
    return header;
}

} // namespace detail

/// Bytes that `write` would write, a multiple of 64.
/// \throws invalid_argument   as write
/// \see    tests/unit/engine/stored.cpp
template <writable_layer Layer>
[[nodiscard]] index_t stored_bytes(cache_place const& place, std::span<Layer> layers)
{
    return detail::checked_header({}, place, layers).bytes;
}

/// Writes the caches of neighbouring layers of one sequence, from a file's first byte to its last. Only defined bytes are written:
/// padding and unused memory are not.
///
/// \param sink      takes `std::span<std::byte const>`, any number of times, in order
/// \param identity  `read` refuses another
/// \param place     first_layer, model_layers, first_head, model_heads, tokens, attachment; `{}`: all layers, tokens unknown
/// \param layers    [layers]  caches, or `layer_to_write`, with equal numbers of heads
/// \cost   reads every stored byte once; no allocation
/// \sync   returns when done
/// \throws invalid_argument   a directory is none that its layout gives (a cache that was never packed), heads differ, or
///                            the place does not hold the layers; nothing was written. Exceptions of the sink
/// \see    tests/unit/engine/stored.cpp, docs/stored-caches.md
template <std::invocable<std::span<std::byte const>> Sink, writable_layer Layer>
void write(Sink&& sink, cache_identity const& identity, cache_place const& place, std::span<Layer> layers)
{
    using namespace detail;
    using T                  = typename decltype(as_layer(layers[0]).cache)::element_type;
    file_header const header = checked_header(identity, place, layers);
    file_output<Sink> out{sink};
    out.add(&header, sizeof header);
    index_t at = end_of_attachment(header);
    for (Layer const& layer : layers)
    {
        auto const [cache, positions] = as_layer(layer);
        layer_record const record     = record_of(cache, positions, at);
        out.add(&record, sizeof record);
        at = layer_parts{record, cache.layout, sizeof(T)}.end;
    }
    out.add(place.attachment.data(), header.attachment);
    for (Layer const& layer : layers)
    {
        auto const [cache, positions] = as_layer(layer);
        out.pad(aligned(out.at));
        out.add(cache.heads, header.heads * index_t{sizeof(head_entry)});
        for (index_t h = 0; h < positions.extent(0); ++h)
        {
            out.add(positions.row(h), positions.extent(1) * index_t{sizeof(std::int32_t)});
        }
        out.pad(aligned(out.at));
        out.add(cache.arena, cache.arena_bytes);
        out.pad(aligned(out.at));
        for (index_t h = 0; h < header.heads; ++h)
        {
            out.add_tail(run_of_head(without_const(cache), h, cache.layout.rungs + 1));
        }
    }
    out.pad(header.bytes - checksum_bytes);
    std::uint32_t const crc = out.crc;
    out.add(&crc, sizeof crc);
}

/// Stored caches where their bytes lie, which must stay there unchanged: they were checked once.
template <element T>
class stored_caches
{
public:
    /// See `read`.
    stored_caches(std::span<std::byte const> bytes, cache_identity const& identity, verify how)
        : header_{reinterpret_cast<detail::file_header const*>(bytes.data())}
    {
        using namespace detail;
        index_t const size = std::ssize(bytes);
        index_t const end  = size - checksum_bytes;
        expects(reinterpret_cast<std::uintptr_t>(bytes.data()) % stored_alignment == 0,
            "read: the bytes are not aligned to ", stored_alignment, "; map the file, or read it into such memory");
        expects(end >= index_t{sizeof(file_header)}, "read: the file has ", size, " bytes, fewer than a header");
        file_header const& file = *header_;
        expects(file.magic == magic, "read: byte 0: this is no file of compressed caches");
        expects(file.version == stored_version, "read: byte 12: the file is of version ", file.version,
            "; this library reads version ", stored_version);
        expects(file.bytes == size, "read: the file has ", file.bytes, " bytes, of which there are ", size);
        auto const digits = [](cache_identity const& of) { // the first ones, in hexadecimal
            array<char, 17> text{};
            for (std::size_t i = 0; i < 16; ++i) { text[i] = "0123456789abcdef"[of[i / 2] >> (4 - i % 2 * 4) & 15]; }
            return text;
        };
        expects<mismatch>(file.identity == identity, "read: byte 24: the file is of the identity ",
            digits(file.identity).data(), "..., not ", digits(identity).data(), "...");
        expects<mismatch>(file.element == element_code<T>, "read: byte 8: the file has elements of type ", file.element,
            "; ", element_code<T>, " (", element_name<T>(), ") is needed");
        expects(how == verify::bounds
                    || load_bytes<std::uint32_t>(bytes.data() + end)
                           == crc32c(0, bytes.data(), static_cast<std::size_t>(end)),
            "read: the file is damaged: its checksum differs");
        expects_place("read: place from layer ", file);
        index_t at = end_of_attachment(file);
        expects(at <= end, "read: the records of ", layers(), " layers and an attachment of ", file.attachment,
            " bytes do not end before byte ", end);
        for (index_t i = 0; i < layers(); ++i)
        {
            char const* const call     = "read: layer ";
            layer_record const& record = records()[i];
            index_t const begin        = aligned(at);
            at                         = layer_parts{record, layout_of(call, i, record, heads()), sizeof(T)}.end;
            expects(record.begin == begin && at <= end, call, i, " lies at bytes [", record.begin, ", ", at,
                "); it must begin at ", begin, " and end before ", end);
            auto const [cache, positions] = found(i);
            expects_layer<T>(call, i, cache, positions, file.tokens);
        }
        expects(
            aligned(at + checksum_bytes) == size, "read: the file has ", size, " bytes; its layers end at byte ", at);
    }

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

/// Finds the caches in the bytes of a file, e.g. a mapped one, after checks of everything that later decides an access. Bytes from
/// a stranger are refused or can be attended without an access outside of them; no checksum is trusted. Nothing is copied.
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
    index_t const bytes = cache.layout.tail_bytes(tail_tokens, sizeof(T));
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
