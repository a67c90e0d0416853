/// \file cuda_layers.cuh: device_layers over the library's CUDA backend: what the host holds goes to the device, is compressed and attended there
#pragma once

#include <mdkv/append.hpp>
#include <mdkv/attend.hpp>
#include <mdkv/compress.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/engine/finite.hpp>
#include <mdkv/gpu/attend.cuh>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/basis.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/gpu/launch.cuh>
#include <mdkv/gpu/memory.cuh>
#include <mdkv/gpu/score.cuh>
#include <mdkv/stages/allocate.hpp>
#include <mdkv/stages/channels.hpp>
#include <mdkv/stages/pack.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <driver_types.h>

#include "policies/layer_cache.hpp"
#include "policies/prompt_layer.hpp"
#include "device_layers.hpp"
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
                cache_.view());
            mdkv::attend(on, in(on, given, query_heads_, D), cache_.view(), {}, out(on, results, query_heads_, Dv),
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

    [[nodiscard]] std::unique_ptr<layer_cache> compress(prompt_layer<T> const& layer, mdkv::ratio_set const& ratios,
        device_request const& request, mdkv::compress_report& report) override
    {
        std::int64_t const H = layer.heads;
        device_copy const from{scratch_, layer, request};
        auto const rungs  = scratch_.allocated(H * layer.past());
        auto const chosen = scratch_.allocated(std::int64_t{sizeof(mdkv::allocation)});
        mdkv::head_dims dims{layer.key_dim, layer.value_dim};
        mdkv::layer_shape const shape{H, layer.group, layer.past(), layer.window, dims, std::int64_t{sizeof(T)}};
        packed cache{mdkv::cache_layout{ratios, H, layer.window, dims},
            std::clamp(request.bytes, std::int64_t{0}, shape.full_bytes()), 0, scratch_.backend().stream,
            scratch_.memory()};

        scratch_.run(
            [&](mdkv::gpu::backend const& on) { expects_finite_layer(on, from.view(on, layer), layer.layer); });
        scratch_.run([&](mdkv::gpu::backend const& on) {
            auto options  = from.options(on, layer, request);
            options.rungs = mdkv::out(on, reinterpret_cast<std::uint8_t*>(rungs.data()), H, layer.past());
            mdkv::compressed_layer<T, mdkv::space::device> to{
                cache.view(), reinterpret_cast<mdkv::allocation*>(chosen.data())};
            report = mdkv::compress(on, from.view(on, layer), ratios, options, to);
        });
        mdkv::gpu::copy(scratch_.backend(), chosen.data(), &report.chosen, chosen.size());
        expects_held(report, mdkv::rung_costs{ratios, dims, shape.element_bytes});
        if (request.rungs != nullptr)
        {
            mdkv::gpu::copy(scratch_.backend(), rungs.data(), request.rungs, rungs.size());
        }
        scratch_.run([&](mdkv::gpu::backend const& on) {
            auto const given      = mdkv::in(on, reinterpret_cast<std::uint8_t const*>(rungs.data()), H, layer.past());
            report.resident_bytes = mdkv::packed_bytes<T>(on, given, cache.layout());
        });
        return std::make_unique<cuda_cache<T, Resource>>(
            fitted(cache, report.resident_bytes, request.tail_tokens), layer.group, scratch_);
    }

    [[nodiscard]] std::unique_ptr<layer_cache> copy(mdkv::cpu::cache<T> const& made, std::int64_t group) override
    {
        auto there = mdkv::gpu::to_device(made, scratch_.backend().stream, scratch_.memory());
        return std::make_unique<cuda_cache<T, Resource>>(std::move(there), group, scratch_);
    }

private:
    using bytes  = typename device_scratch<Resource>::bytes;
    using packed = mdkv::gpu::cache<T, Resource>;

    /// The same cache in an arena of its tokens' size. It was made for the whole budget, because compress gives out its
    /// bytes on the device, after the arena is there. (Through host memory: a layer's few megabytes, once.)
    [[nodiscard]] packed fitted(packed& from, std::int64_t arena_bytes, std::int64_t tail_tokens)
    {
        packed made{from.layout(), arena_bytes, tail_tokens, scratch_.backend().stream, scratch_.memory()};
        auto const copy = [&](void const* source, void* target, std::int64_t size) {
            std::vector<std::byte> host(static_cast<std::size_t>(size));
            mdkv::gpu::copy(scratch_.backend(), source, host.data(), size);
            mdkv::gpu::copy(scratch_.backend(), host.data(), target, size);
        };
        copy(from.view().arena, made.view().arena, arena_bytes);
        copy(from.view().heads, made.view().heads, from.layout().heads * std::int64_t{sizeof(mdkv::head_entry)});
        return made;
    }

    /// What compress reads of a layer, on the device.
    struct device_copy
    {
        bytes queries; // [heads * group, query_tokens, key_dim]
        bytes keys;    // [heads, tokens, key_dim]
        bytes values;  // [heads, tokens, value_dim]
        bytes lse;     // [heads * group, query_tokens]
        bytes weights; // [Q]
        std::int64_t scoring;

        device_copy(device_scratch<Resource>& to, prompt_layer<T> const& layer, device_request const& request)
            : queries{to.copied(layer.queries, layer.heads * layer.group * layer.query_tokens * layer.key_dim)}
            , keys{to.copied(layer.keys, layer.heads * layer.tokens * layer.key_dim)}
            , values{to.copied(layer.values, layer.heads * layer.tokens * layer.value_dim)}
            , lse{to.copied(layer.lse, layer.heads * layer.group * layer.query_tokens)}
            , weights{to.copied(request.query_weights.data(), std::ssize(request.query_weights))}
            , scoring{std::ssize(request.query_weights)}
        {}

        [[nodiscard]] mdkv::layer_view<mdkv::gpu::backend, T> view(
            mdkv::gpu::backend const& on, prompt_layer<T> const& layer) const
        {
            auto const elements  = [](bytes const& of) { return reinterpret_cast<T const*>(of.data()); };
            std::int64_t const H = layer.heads;
            return mdkv::split_window(on,
                mdkv::slice<1>(mdkv::in(on, elements(queries), H * layer.group, layer.query_tokens, layer.key_dim),
                    layer.query_tokens - scoring, scoring),
                mdkv::in(on, elements(keys), H, layer.tokens, layer.key_dim),
                mdkv::in(on, elements(values), H, layer.tokens, layer.value_dim), layer.window);
        }

        [[nodiscard]] mdkv::compress_options<mdkv::gpu::backend> options(
            mdkv::gpu::backend const& on, prompt_layer<T> const& layer, device_request const& request) const
        {
            auto const floats  = [](bytes const& of) { return reinterpret_cast<float const*>(of.data()); };
            auto const all_lse = mdkv::in(on, floats(lse), layer.heads * layer.group, layer.query_tokens);
            mdkv::compress_options<mdkv::gpu::backend> chosen{
                .limit         = mdkv::budget::bytes(request.bytes),
                .pooling       = request.pooling,
                .scoring       = {.lse   = mdkv::slice<1>(all_lse, layer.query_tokens - scoring, scoring),
                          .query_weights = mdkv::in(on, floats(weights), scoring),
                          .even_queries  = request.even_queries},
                .on_non_finite = mdkv::non_finite::unchecked, // looked at before
                .layer         = layer.layer,
            };
            chosen.allocation.charge = request.charge;
            return chosen;
        }
    };

    static void expects_finite_layer(
        mdkv::gpu::backend const& on, mdkv::layer_view<mdkv::gpu::backend, T> const& layer, std::int64_t number)
    {
        mdkv::expects_finite(on, "queries", layer.queries, number);
        mdkv::expects_finite(on, "window_keys", layer.window_keys, number);
        mdkv::expects_finite(on, "window_values", layer.window_values, number);
        mdkv::expects_finite(on, "keys", layer.keys, number);
        mdkv::expects_finite(on, "values", layer.values, number);
    }

    /// What compress throws on the CPU, and can only tell here.
    static void expects_held(mdkv::compress_report const& report, mdkv::rung_costs const& costs)
    {
        using status = mdkv::allocation_status;
        mdkv::expects<mdkv::non_finite_input>(report.chosen.status != status::non_finite_loss,
            "compress: a loss is NaN or infinite; keys, values or queries are too large to multiply");
        mdkv::expects(report.chosen.status != status::over_limit, "compress: a budget of ", report.budget_bytes,
            " bytes cannot hold every token at its cheapest rung; at least ",
            report.window_bytes + report.shape.heads * report.shape.tokens * costs.bytes[0]
                + (costs.projected[0] ? report.shape.heads * costs.projection[0] : 0),
            " bytes are needed");
    }

    device_scratch<Resource> scratch_;
};

} // namespace runner
