/// \file mapped_cache.hpp: a cache whose arena lies in the bytes of a file, with a tail of its own
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/engine/stored.hpp>

#include <cstddef>
#include <memory>
#include <utility>

#include "engine.hpp"
#include "host.hpp"

namespace mdkv_python
{

/// Has the interface of mdkv::cpu::cache as far as layer_of calls it. The file's bytes must outlive the cache, or stay until it
/// is folded: recompress puts a cache in memory of its own in its place.
template <mdkv::element T>
class mapped_cache
{
    using writable = mdkv::cache_view<T, mdkv::space::host>;
    using readable = mdkv::cache_view<T const, mdkv::space::host>;

public:
    mapped_cache() = default;
    /// Copies the appended tokens, and nothing else.
    explicit mapped_cache(readable const& stored)
        : fold_limit{stored.arena_bytes}
    {
        take(stored, stored.layout.heads == 0 ? 0 : *stored.appended);
    }

    index_t fold_limit = 0; ///< see mdkv::cpu::cache; the bytes in the file

    [[nodiscard]] writable view() noexcept { return mapped() ? view_ : own_.view(); }
    [[nodiscard]] readable view() const noexcept
    {
        if (mapped()) { return view_; }
        return own_.view();
    }

    [[nodiscard]] mdkv::cache_layout const& layout() const noexcept { return mapped() ? view_.layout : own_.layout(); }
    [[nodiscard]] index_t arena_bytes() const noexcept { return mapped() ? view_.arena_bytes : own_.arena_bytes(); }
    [[nodiscard]] index_t tail_capacity() const noexcept
    {
        return mapped() ? view_.tail_capacity : own_.tail_capacity();
    }
    [[nodiscard]] index_t tail_bytes() const noexcept
    {
        return mapped() ? view_.layout.heads * view_.tail_head_bytes() : own_.tail_bytes();
    }
    [[nodiscard]] index_t directory_bytes() const noexcept
    {
        auto const in_file = view_.layout.heads * index_t{sizeof(mdkv::head_entry)} + index_t{sizeof(index_t)};
        return mapped() ? in_file : own_.directory_bytes();
    }
    static void wait() noexcept {}

    /// \throws invalid_argument   tokens is negative
    void reserve_tail(index_t tokens)
    {
        if (!mapped()) { return own_.reserve_tail(tokens); }
        mdkv::expects(tokens >= 0, "cache: tokens is ", tokens, "; it must not be negative");
        if (tokens > view_.tail_capacity) { take(view_, tokens); }
    }

    /// An empty cache of other sizes in memory of its own.
    [[nodiscard]] mapped_cache like(mdkv::cache_layout const& layout, index_t arena_bytes, index_t tail_tokens) const
    {
        mapped_cache made;
        made.own_ = own_.like(layout, arena_bytes, tail_tokens);
        return made;
    }

    /// An equal cache in the same bytes of the file.
    [[nodiscard]] mapped_cache shared() const
    {
        mapped_cache made;
        made.fold_limit = fold_limit;
        if (mapped()) { made.take(view_, view_.tail_capacity); }
        else { made.own_ = own_.copy(); }
        return made;
    }

private:
    [[nodiscard]] bool mapped() const noexcept { return appended_ != nullptr; }

    /// Becomes another cache, with a tail of so many tokens.
    void take(readable const& from, index_t tail_tokens)
    {
        auto const bytes = from.layout.tail_bytes(tail_tokens, sizeof(T));
        host_bytes tail{bytes, {}};
        auto appended = std::make_unique<index_t>(0);
        mdkv::workspace none{mdkv::cpu::host_memory{}};
        view_ = mdkv::with_tail(mdkv::cpu::backend{&none}, from, {tail.data(), static_cast<std::size_t>(tail.size())},
            tail_tokens, *appended);
        tail_ = std::move(tail);
        appended_ = std::move(appended);
    }

    writable view_;
    host_bytes tail_;
    std::unique_ptr<index_t> appended_; // tokens in the tail; null: the cache is in its own memory
    mdkv::cpu::cache<T> own_;
};

} // namespace mdkv_python
