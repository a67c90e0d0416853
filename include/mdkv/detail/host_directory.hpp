/// \file host_directory.hpp: a cache's directory where the host can read it, whatever memory the cache lies in.
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace mdkv::detail
{

/// The cache itself where it is the host's. Elsewhere a copy of its directory, read with the backend's
/// `read_back(on, from, to, bytes)`, which waits for the work that was enqueued before.
template <element T>
class host_directory
{
public:
    /// \throws std::bad_alloc, and what read_back throws   where the cache is not the host's
    template <backend B>
    host_directory(B const& on, cache_view<T, B::memory_space> const& cache)
    {
        if constexpr (B::memory_space == space::host) { view_ = cache; }
        else
        {
            view_.layout        = cache.layout;
            view_.arena_bytes   = cache.arena_bytes;
            view_.tail_capacity = cache.tail_capacity;
            if (cache.heads == nullptr) { return; }
            heads_.resize(static_cast<std::size_t>(cache.layout.heads));
            read_back(on, cache.heads, heads_.data(), cache.layout.heads * index_t{sizeof(head_entry)});
            read_back(on, cache.appended, &appended_, index_t{sizeof(appended_)});
            appended_      = std::min(appended_, cache.tail_capacity); // what was counted beyond it is not there
            view_.heads    = heads_.data();
            view_.appended = &appended_;
        }
    }

    host_directory(host_directory const&)            = delete;
    host_directory& operator=(host_directory const&) = delete;

    /// Layout, sizes, heads and the count of appended tokens. Arena and tail are there where the cache is the host's.
    [[nodiscard]] cache_view<T, space::host> const& view() const noexcept { return view_; }

private:
    cache_view<T, space::host> view_;
    std::vector<head_entry> heads_; // [H]
    index_t appended_ = 0;
};

} // namespace mdkv::detail
