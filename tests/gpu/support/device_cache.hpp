/// \file device_cache.hpp: a host cache's bytes on the device, under a device view
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>

#include <device_memory.hpp>

#include <cstddef>
#include <cstring>
#include <vector>

namespace support
{

template <class T>
class device_cache
{
public:
    explicit device_cache(mdkv::cache_view<T const, mdkv::space::host> const& host)
        : arena_{bytes(host.arena, host.arena_bytes), 0}
        , heads_{bytes(host.heads, host.layout.heads * mdkv::index_t{sizeof(mdkv::head_entry)}), 0}
        , tail_{bytes(host.tail, host.layout.heads * host.tail_head_bytes()), 0}
        , appended_{bytes(host.appended, host.appended == nullptr ? 0 : mdkv::index_t{sizeof(mdkv::index_t)}), 0}
        , view_{host.layout, arena_.data(), host.arena_bytes, reinterpret_cast<mdkv::head_entry*>(heads_.data()),
              tail_.data(), host.tail_capacity, reinterpret_cast<mdkv::index_t*>(appended_.data())}
    {}

    [[nodiscard]] mdkv::cache_view<T, mdkv::space::device> const& view() const { return view_; }

private:
    [[nodiscard]] static std::vector<std::byte> bytes(void const* from, mdkv::index_t count)
    {
        std::vector<std::byte> copy(static_cast<std::size_t>(count));
        if (count > 0) { std::memcpy(copy.data(), from, copy.size()); }
        return copy;
    }

    device_memory arena_;
    device_memory heads_;
    device_memory tail_;
    device_memory appended_;
    mdkv::cache_view<T, mdkv::space::device> view_;
};

} // namespace support
