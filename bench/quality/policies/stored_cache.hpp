/// \file stored_cache.hpp: a layer's cache whose packed part lies in a file, and whose appended tokens are in memory
#pragma once

#include <mdkv/append.hpp>
#include <mdkv/attend.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/engine/stored.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layer_cache.hpp"
#include "runner/scratch_memory.hpp"

namespace runner
{

template <mdkv::element T>
class stored_cache : public layer_cache
{
public:
    /// \param stored   a layer of a file whose bytes must outlive this
    /// \param group    query heads that share each cached head
    stored_cache(
        mdkv::cache_view<T const, mdkv::space::host> const& stored, std::int64_t group, std::int64_t tail_tokens)
        : query_heads_{stored.layout.heads * group}
        , lse_(static_cast<std::size_t>(query_heads_))
    {
        grow(stored, *stored.appended + tail_tokens);
    }
    stored_cache(stored_cache const&)            = delete; // the view points to the tail and the count
    stored_cache& operator=(stored_cache const&) = delete;

    void attend(mdkv::cpu::executor_ref executor, scratch_memory& scratch, float const* query, float const* key,
        float const* value, float* output) override
    {
        if (appended_ == cache_.tail_capacity) { grow(cache_, 2 * appended_ + 16); }
        mdkv::cache_layout const& layout = cache_.layout;
        scratch.run(executor, [&](mdkv::cpu::backend on) {
            using mdkv::in;
            using mdkv::out;
            mdkv::append(on, in(on, key, layout.heads, layout.dims.keys),
                in(on, value, layout.heads, layout.dims.values), cache_);
            mdkv::attend(on, in(on, query, query_heads_, layout.dims.keys), cache_, {},
                out(on, output, query_heads_, layout.dims.values), out(on, lse_.data(), query_heads_));
            return 0;
        });
    }

    [[nodiscard]] std::int64_t resident_bytes() const noexcept override { return cache_.arena_bytes; }

    /// With the appended tokens.
    [[nodiscard]] mdkv::cache_view<T const, mdkv::space::host> view() const noexcept { return cache_; }

private:
    void grow(mdkv::cache_view<T const, mdkv::space::host> const& from, std::int64_t tokens)
    {
        auto const token_bytes =
            from.layout.heads * (from.layout.dims.keys + from.layout.dims.values) * std::int64_t{sizeof(T)};
        std::vector<std::byte> larger(static_cast<std::size_t>(tokens * token_bytes));
        mdkv::index_t appended = 0;
        scratch_memory scratch;
        cache_ = scratch.run({}, [&](mdkv::cpu::backend on) { return with_tail(on, from, larger, tokens, appended); });
        appended_       = appended;
        cache_.appended = &appended_;
        tail_.swap(larger);
    }

    std::vector<std::byte> tail_;
    mdkv::index_t appended_ = 0;
    mdkv::cache_view<T, mdkv::space::host> cache_;
    std::int64_t query_heads_;
    std::vector<float> lse_; // [query_heads], needed by attend alone
};

} // namespace runner
