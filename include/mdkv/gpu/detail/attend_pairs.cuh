/// \file attend_pairs.cuh: pairs of a warp's tiles of codes on their way to its shared memory, if keys and values have as many coordinates as a block has columns (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/gpu/detail/attend_rows.cuh>
#include <mdkv/gpu/detail/attend_units.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstddef>
#include <type_traits>

namespace MDKV_NAMESPACE::gpu::kernels
{

inline constexpr int attend_pairs_stride = 2 * attend_warps; ///< tiles that the warps of a block take at once, in pairs

/// The keys, then the values, of pairs of neighbouring tiles, unit by unit: two units are on their way while one is worked
/// on. The queries' fragments are loaded once for both tiles, and all sizes are constants. A warp's next pair is eight tiles
/// further on.
template <element T, storage Kind, int Columns>
class attend_pairs
{
public:
    static constexpr int group = int{quantised_group};
    static constexpr int tiles = 2;
    using rows = attend_rows<T, Kind, tiles, Kind == storage::int8 || Columns == group ? group : 2 * group>;
    static constexpr int units = Columns / rows::unit; ///< units of keys, and of values

    /// Begins to copy a warp's pairs, the first of which begins with `tile`.
    __device__ attend_pairs(
        int lane, stored_run const& run, attend_copies const& copies, std::byte* ring, int tile, int pairs)
        : lane_{lane}
        , left_{pairs}
        , copies_{copies}
        , buffers_{ring}
        , key_{run.keys.begin + index_t{tile} * stored_tile}
        , value_{run.values.begin + index_t{tile} * stored_tile}
    {
        stage(0, buffers_[0]);
        stage(1, buffers_[1]);
    }

    /// Whether a pair is left to be worked on.
    [[nodiscard]] __device__ bool more() const { return left_ > (units == 1 ? -1 : 0); }

    /// Waits for unit `u` of a pair, 0 to 2 * units - 1, keys first, and begins to copy the unit after the next one.
    [[nodiscard]] __device__ __forceinline__ std::byte* next(int u)
    {
        buffers_.wait();
        stage((u + 2) % (2 * units), buffers_.free());
        return buffers_.take();
    }

    /// Waits until nothing is on its way.
    __device__ void drain() const { buffers_.drain(); }

private:
    static constexpr int stored_tile =
        Columns / group * rows::group_bytes; ///< bytes of a tile's keys, and of its values
    static constexpr int unit_bytes = rows::unit / group * rows::group_bytes; ///< bytes of a tile's share of a unit

    /// Begins to copy unit `u`: after the last one the next pair's units follow.
    __device__ __forceinline__ void stage(int u, std::byte* to)
    {
        if (left_ > 0)
        {
            if (u < units) { copy<false>(key_ + u * unit_bytes, to); }
            else { copy<true>(value_ + (u - units) * unit_bytes, to); }
        }
        device::copy_async_commit();
        if (u == 2 * units - 1)
        {
            --left_;
            key_ += attend_pairs_stride * stored_tile;
            value_ += attend_pairs_stride * stored_tile;
        }
    }
    template <bool Values>
    __device__ __forceinline__ void copy(std::byte const* from, std::byte* to) const
    {
        auto const all = [&](auto bytes, int lane) {
            MDKV_UNROLL
            for (int t = 0; t < tiles; ++t)
            {
                copy_rows<rows, Values, decltype(bytes)::value, unit_bytes, true>(
                    lane, from + t * stored_tile, 0, unit_bytes, to + t * rows::tile_bytes);
            }
        };
        // The lane is read anew for rare alignments: their addresses shall take no registers in the loop.
        auto const lane_again = [] { return device::thread_again() % device::warp_size; };
        if (copies_.align >= 16) { all(std::integral_constant<int, 16>{}, lane_); }
        else if (copies_.align >= 8) { all(std::integral_constant<int, 8>{}, lane_again()); }
        else { all(std::integral_constant<int, 4>{}, lane_again()); }
    }

    int lane_;
    int left_; ///< pairs not yet copied to their end
    attend_copies const& copies_;
    unit_buffers<3, rows::buffer_bytes> buffers_;
    std::byte const* key_; ///< the pair that is copied
    std::byte const* value_;
};

} // namespace MDKV_NAMESPACE::gpu::kernels
