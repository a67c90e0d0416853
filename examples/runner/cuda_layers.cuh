/// \file cuda_layers.cuh: device_layers over the library's CUDA backend: what the host holds goes to the device, is compressed and attended there
#pragma once

#include <mdkv/append.hpp>
#include <mdkv/attend.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/gpu/attend.cuh>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/gpu/memory.cuh>
#include <mdkv/gpu/score.cuh>
#include <mdkv/prompt.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <driver_types.h>

#include "device_layers.hpp"
#include "systems/layer_cache.hpp"
#include "systems/prompt_layer.hpp"
#include "scratch_memory.hpp"

namespace runner
{

/// A stream, and memory on the device that grows to what a call needs and is kept for the next one.
template <mdkv::gpu::memory_resource Resource>
class device_scratch
{
public:
    using bytes = mdkv::gpu::device_bytes<Resource>;

    /// Both must outlive this.
    device_scratch(cudaStream_t stream, Resource& memory)
        : stream_{stream}
        , memory_{&memory}
        , scratch_{mdkv::gpu::stream_memory<Resource>{stream, &memory}}
    {}

    /// Calls `call(backend)`.
    template <class Call>
    void run(Call const& call)
    {
        call(mdkv::gpu::backend{stream_, &scratch_});
    }

    /// Room for one step's rows, valid until the next call.
    [[nodiscard]] float* rows(mdkv::index_t floats)
    {
        mdkv::index_t const size = floats * mdkv::index_t{sizeof(float)};
        if (size > rows_.size()) { rows_ = allocated(size); }
        return reinterpret_cast<float*>(rows_.data());
    }

    [[nodiscard]] bytes allocated(mdkv::index_t size) { return bytes{size, {stream_, memory_}}; }

    /// `count` elements of the host, copied.
    template <class V>
    [[nodiscard]] bytes copied(V const* host, mdkv::index_t count)
    {
        bytes made = allocated(count * mdkv::index_t{sizeof(V)});
        mdkv::gpu::copy(backend(), host, made.data(), made.size());
        return made;
    }

    [[nodiscard]] mdkv::gpu::backend backend() const noexcept { return {stream_, nullptr}; }
    [[nodiscard]] Resource& memory() const noexcept { return *memory_; }

private:
    cudaStream_t stream_;
    Resource* memory_;
    mdkv::workspace scratch_;
    bytes rows_; // of a step: what goes in, then what comes out
};

/// One layer, packed on the device. A step's rows go there in one copy, and its output comes back in another.
template <mdkv::element T, mdkv::gpu::memory_resource Resource>
class cuda_cache final : public layer_cache
{
public:
    using packed = mdkv::gpu::cache<T, Resource>;

    /// \param finished  its tail is empty
    /// \param scratch   must outlive the cache
    cuda_cache(packed finished, std::int64_t group, device_scratch<Resource>& scratch)
        : cache_{std::move(finished)}
        , query_heads_{cache_.layout().heads * group}
        , scratch_{&scratch}
    {}

    void attend(mdkv::cpu::executor_ref, scratch_memory&, float const* query, float const* key, float const* value,
        float* output) override
    {
        mdkv::cache_layout const& layout = cache_.layout();
        std::int64_t const D             = layout.dims.keys;
        std::int64_t const Dv            = layout.dims.values;
        std::int64_t const queries       = query_heads_ * D;
        std::int64_t const keys          = layout.heads * D;
        std::int64_t const values        = layout.heads * Dv;
        std::int64_t const in_rows       = queries + keys + values;
        std::int64_t const out_rows      = query_heads_ * Dv;
        if (appended_ == cache_.tail_capacity()) { cache_.reserve_tail(2 * cache_.tail_capacity() + 16); }
        step_.resize(static_cast<std::size_t>(in_rows));
        std::copy_n(value, values, std::copy_n(key, keys, std::copy_n(query, queries, step_.data())));
        float* const rows    = scratch_->rows(in_rows + out_rows + query_heads_);
        float* const results = rows + in_rows;
        mdkv::gpu::copy(scratch_->backend(), step_.data(), rows, in_rows * std::int64_t{sizeof(float)});
        scratch_->run([&](mdkv::gpu::backend const& on) {
            using mdkv::in;
            using mdkv::out;
            float const* const given = rows;
            mdkv::append(on, in(on, given + queries, layout.heads, D), in(on, given + queries + keys, layout.heads, Dv),
                cache_);
            mdkv::attend(on, in(on, given, query_heads_, D), cache_, {}, out(on, results, query_heads_, Dv),
                out(on, results + out_rows, query_heads_));
        });
        mdkv::gpu::copy(scratch_->backend(), results, output, out_rows * std::int64_t{sizeof(float)});
        ++appended_;
    }

    [[nodiscard]] std::int64_t resident_bytes() const noexcept override { return cache_.arena_bytes(); }

private:
    packed cache_;
    std::int64_t query_heads_;
    std::int64_t appended_ = 0; // the device's own count is not read
    device_scratch<Resource>* scratch_;
    std::vector<float> step_; // [query_heads * D + heads * (D + Dv)]  query, key, value
};

template <mdkv::element T, mdkv::gpu::memory_resource Resource>
class cuda_layers : public device_layers<T>
{
public:
    /// Both must outlive this, and the caches that it makes.
    cuda_layers(cudaStream_t stream, Resource& memory)
        : scratch_{stream, memory}
    {}

    [[nodiscard]] std::unique_ptr<layer_cache> compress(
        prompt_layer<T> const& layer, device_request const& request, mdkv::compress_report& report) override
    {
        std::int64_t const H = layer.heads;
        device_copy const from{scratch_, layer};
        packed cache{mdkv::cache_layout{}, 0, 0, scratch_.backend().stream, scratch_.memory()};
        scratch_.run([&](mdkv::gpu::backend const& on) {
            auto const rows = from.rows(on, layer);
            mdkv::prompt<mdkv::gpu::backend, T> p{on, request.by,
                {.layers         = 1,
                    .heads       = H,
                    .group       = layer.group,
                    .dims        = {layer.key_dim, layer.value_dim},
                    .tokens      = layer.tokens,
                    .first_layer = layer.layer}};
            p.finish_layer(on, 0, rows);
            auto const chosen = p.allocate(on, mdkv::budget::bytes(request.bytes));
            report            = p.pack(on, 0, rows, cache);
            report.chosen     = chosen;
            for (mdkv::index_t h = 0; request.rungs != nullptr && h < H; ++h)
            {
                mdkv::gpu::copy(on, p.rungs_of(0).row(h), request.rungs + h * layer.past(), layer.past());
            }
        });
        cache.reserve_tail(request.tail_tokens);
        return std::make_unique<cuda_cache<T, Resource>>(std::move(cache), layer.group, scratch_);
    }

    [[nodiscard]] std::unique_ptr<layer_cache> copy(mdkv::cpu::cache<T> const& made, std::int64_t group) override
    {
        auto there = mdkv::gpu::to_device(made, scratch_.backend().stream, scratch_.memory());
        return std::make_unique<cuda_cache<T, Resource>>(std::move(there), group, scratch_);
    }

private:
    using bytes  = typename device_scratch<Resource>::bytes;
    using packed = mdkv::gpu::cache<T, Resource>;

    /// What is read of a layer, on the device.
    struct device_copy
    {
        bytes queries; // [heads * group, query_tokens, key_dim]
        bytes keys;    // [heads, tokens, key_dim]
        bytes values;  // [heads, tokens, value_dim]
        bytes lse;     // [heads * group, query_tokens]

        device_copy(device_scratch<Resource>& to, prompt_layer<T> const& layer)
            : queries{to.copied(layer.queries, layer.heads * layer.group * layer.query_tokens * layer.key_dim)}
            , keys{to.copied(layer.keys, layer.heads * layer.tokens * layer.key_dim)}
            , values{to.copied(layer.values, layer.heads * layer.tokens * layer.value_dim)}
            , lse{to.copied(layer.lse, layer.heads * layer.group * layer.query_tokens)}
        {}

        [[nodiscard]] mdkv::prompt_rows<mdkv::gpu::backend, T> rows(
            mdkv::gpu::backend const& on, prompt_layer<T> const& layer) const
        {
            auto const elements    = [](bytes const& of) { return reinterpret_cast<T const*>(of.data()); };
            std::int64_t const H   = layer.heads;
            std::int64_t const all = H * layer.group;
            return {mdkv::in(on, elements(queries), all, layer.query_tokens, layer.key_dim),
                mdkv::in(on, elements(keys), H, layer.tokens, layer.key_dim),
                mdkv::in(on, elements(values), H, layer.tokens, layer.value_dim),
                mdkv::in(on, reinterpret_cast<float const*>(lse.data()), all, layer.query_tokens)};
        }
    };

    device_scratch<Resource> scratch_;
};

} // namespace runner
