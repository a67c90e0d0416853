/// \file layers.cuh: layers of Llama-3-8B's shape, made on the device: 8 KV heads, 4 query heads each, D = 128, bf16
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/device.cuh>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "bench.cuh"

namespace bench
{

using element = mdkv::bfloat16;

inline constexpr index_t heads  = 8;
inline constexpr index_t group  = 4;
inline constexpr index_t dim    = 128;
inline constexpr index_t window = 32;
inline constexpr mdkv::head_dims dims{dim, dim};
inline constexpr index_t token_bytes = 2 * dim * index_t{sizeof(element)}; // of one head, uncompressed

/// As many layers as a benchmark rotates over, so that the L2 cache holds little of the next one.
[[nodiscard]] inline index_t layers_beyond_cache(index_t bytes)
{
    constexpr index_t beyond = index_t{256} << 20;
    return std::max<index_t>(1, (beyond + bytes - 1) / bytes);
}

namespace device = mdkv::gpu::device;

namespace kernels
{

/// Numbers by their index: the same in every run.
[[nodiscard]] MDKV_HD inline std::uint64_t hash(std::uint64_t x)
{
    x += 0x9e3779b97f4a7c15U;
    x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31U);
}
/// In [0, 1).
[[nodiscard]] MDKV_HD inline float uniform(std::uint64_t x)
{
    return static_cast<float>(hash(x) >> 40U) * 0x1p-24F;
}
/// Near enough to a normal distribution: four uniform numbers, their variance made 1.
[[nodiscard]] MDKV_HD inline float normal(std::uint64_t x)
{
    std::uint64_t const bits = hash(x);
    float sum                = -2.0F;
    for (unsigned i = 0; i < 4; ++i) { sum += static_cast<float>((bits >> (16 * i)) & 0xffffU) * 0x1p-16F; }
    return sum * 1.7320508F;
}

/// Normal numbers of one size.
template <class T>
struct fill_normal
{
    static constexpr char const* name = "fill_normal";
    static constexpr int threads      = 256;

    T* to; // [count]
    index_t count;
    std::uint64_t seed;
    float size;

    __device__ void operator()() const
    {
        index_t const i = device::block() * threads + device::thread();
        if (i < count) { to[i] = mdkv::narrow<T>(size * normal((seed << 40U) + static_cast<std::uint64_t>(i))); }
    }
};

/// Rows whose energy lies in few directions, fewer in some heads than in others, and none of them along an axis. One row a
/// thread: its coordinates by falling size, then a Walsh-Hadamard transform.
struct fill_rows
{
    static constexpr char const* name = "fill_rows";
    static constexpr int threads      = 64;

    element* to; // [heads * rows, dim]
    index_t rows;
    std::uint64_t seed;
    float size;

    __device__ void operator()() const
    {
        index_t const row = device::block() * threads + device::thread();
        if (row >= heads * rows) { return; }
        float const fade = 6.0F + 2.0F * static_cast<float>(row / rows); // coordinates from one half to the next
        float x[dim];
        for (int d = 0; d < int{dim}; ++d)
        {
            auto const at = (seed << 40U) + static_cast<std::uint64_t>(row * dim + d);
            x[d]          = size * exp2f(-static_cast<float>(d) / fade) * normal(at);
        }
        for (int step = 1; step < int{dim}; step *= 2)
        {
            for (int d = 0; d < int{dim}; ++d)
            {
                if ((d & step) != 0) { continue; }
                float const a = x[d];
                float const b = x[d + step];
                x[d]          = a + b;
                x[d + step]   = a - b;
            }
        }
        for (int d = 0; d < int{dim}; ++d) { to[row * dim + d] = mdkv::narrow<element>(x[d] * 0.088388348F); }
    }
};

/// Every token's rung by lot.
struct fill_rungs
{
    static constexpr char const* name = "fill_rungs";
    static constexpr int threads      = 256;

    std::uint8_t* to; // [count]
    index_t count;
    mdkv::array<float, mdkv::max_rungs> share; ///< of the tokens, from rung 1 on; what is left is dropped
    int rungs;

    __device__ void operator()() const
    {
        index_t const i = device::block() * threads + device::thread();
        if (i >= count) { return; }
        float const lot = uniform(static_cast<std::uint64_t>(i));
        float up_to     = 0.0F;
        int chosen      = 0;
        for (int r = 1; r < rungs && chosen == 0; ++r)
        {
            up_to += share[static_cast<std::size_t>(r)];
            if (lot < up_to) { chosen = r; }
        }
        to[i] = static_cast<std::uint8_t>(chosen);
    }
};

} // namespace kernels

template <class T>
[[nodiscard]] device_array<T> normal_numbers(index_t count, std::uint64_t seed, float size)
{
    using kernel = kernels::fill_normal<T>;
    device_array<T> made{count};
    launch(kernel{made.data(), count, seed, size}, (count + kernel::threads - 1) / kernel::threads);
    return made;
}

/// Rows for each KV head.
[[nodiscard]] inline device_array<element> rows_of(index_t rows, std::uint64_t seed, float size)
{
    using kernel = kernels::fill_rows;
    device_array<element> made{heads * rows * dim};
    launch(kernel{made.data(), rows, seed, size}, (heads * rows + kernel::threads - 1) / kernel::threads);
    return made;
}

/// A rung for each token, such that all of them take about what `kv_size` uncompressed tokens a head take, projections
/// included, and each rung its share of that. Nothing that was scored: random layers have no tokens that matter.
template <std::size_t R>
[[nodiscard]] device_array<std::uint8_t> forced_rungs(
    mdkv::ratio_set const& ratios, std::array<double, R> const& shares, index_t tokens, index_t kv_size)
{
    using kernel       = kernels::fill_rungs;
    index_t const room = kv_size * token_bytes - mdkv::rung_costs{ratios, dims, sizeof(element)}.widest_projection();
    device_array<std::uint8_t> made{heads * tokens};
    kernel job{made.data(), made.size(), {}, static_cast<int>(R)};
    for (std::size_t r = 1; r < R; ++r)
    {
        auto const bytes = static_cast<double>(ratios.bytes(r, dims, sizeof(element)));
        job.share[r] = static_cast<float>(shares[r] * static_cast<double>(room) / bytes / static_cast<double>(tokens));
    }
    launch(job, (made.size() + kernel::threads - 1) / kernel::threads);
    return made;
}

/// One layer as prefill leaves it.
struct source_layer
{
    index_t tokens;                // N, without the window
    device_array<element> queries; // [H*G, W, D]
    device_array<element> keys;    // [H, N + W, D]
    device_array<element> values;  // [H, N + W, D]

    /// Logits spread over some units, so that attention is neither even nor on one token.
    source_layer(index_t n, std::uint64_t seed)
        : tokens{n}
        , queries{rows_of(group * window, 3 * seed, 4.0F)}
        , keys{rows_of(n + window, 3 * seed + 1, 4.0F)}
        , values{rows_of(n + window, 3 * seed + 2, 1.0F)}
    {}

    struct parts
    {
        mdkv::in_view<element, 3, gpu::backend> queries, keys, values, window_keys, window_values;
    };
    [[nodiscard]] parts view() const
    {
        gpu::backend const on;
        auto const k = mdkv::in(on, keys.data(), heads, tokens + window, dim);
        auto const v = mdkv::in(on, values.data(), heads, tokens + window, dim);
        return {mdkv::in(on, queries.data(), heads * group, window, dim), mdkv::slice<1>(k, 0, tokens),
            mdkv::slice<1>(v, 0, tokens), mdkv::slice<1>(k, tokens, window), mdkv::slice<1>(v, tokens, window)};
    }
    [[nodiscard]] mdkv::layer_shape shape() const
    {
        return {heads, group, tokens, window, dims, index_t{sizeof(element)}};
    }
};

} // namespace bench
