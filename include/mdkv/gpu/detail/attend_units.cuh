/// \file attend_units.cuh: the units of a warp's full tiles on their way to its shared memory (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/gpu/detail/attend_rows.cuh>
#include <mdkv/gpu/device.cuh>

namespace MDKV_NAMESPACE::gpu::kernels
{

/// Begins to copy n bytes, at most `Size`, or exactly as many if `Exact`, `Bytes` at a time, in rows of 128 bytes to their
/// `smem_offset`. If `step` is not 0, they are the first n bytes of each of 16 rows that are `step` bytes apart, and Size is 128.
template <class Rows, bool Values, int Bytes, int Size, bool Exact>
__device__ __forceinline__ void copy_rows(int lane, std::byte const* from, int step, int n, std::byte* to)
{
    constexpr int lanes   = 8; // lanes that copy a row
    constexpr int at_once = device::warp_size / lanes;
    constexpr int rows    = Size == copied_row ? int{tile_tokens} : (Size + copied_row - 1) / copied_row;
    static_assert(rows % at_once <= 1);
    // Four rows that Rows::smem_offset swaps alike are copied at once.
    constexpr int apart = Rows::coded && Values && Rows::kind == storage::int8 ? 2 : 1;
    int const first     = lane / lanes * apart;
    int const column    = lane % lanes * Bytes;
    int const between   = step == 0 ? copied_row : step;
    from += first * between + column;
    MDKV_UNROLL
    for (int j = 0; j < rows; j += at_once)
    {
        auto const before = [](int i) { return apart == 1 ? i : i / 8 * 8 + i / 4 % 2; }; // the first lane's row
        bool const last   = Exact && j + at_once > rows; // one row is left, for eight lanes
        int const row     = last ? j : first + before(j);
        MDKV_UNROLL
        for (int i = 0; i < copied_row; i += lanes * Bytes)
        {
            bool const in_range = !Exact ? (step == 0 ? row * copied_row : 0) + column + i < n
                                  : last ? first == 0 && (Size % copied_row == 0 || column + i < Size % copied_row)
                                         : true;
            // unwritten: rows of a tile behind a tail's last token, which have no weight
            if (in_range) { device::copy_async<Bytes>(to + Rows::smem_offset(Values, row, column + i), from + i); }
        }
        from += (before(j + at_once) - before(j)) * between;
    }
}

/// Begins to copy a tile's n bytes, or all `Size` if there are more or if `Exact`, whose addresses are multiples of `align`.
template <class Rows, bool Values, int Size, bool Exact>
__device__ __forceinline__ void copy_tile(int align, int lane, std::byte const* from, int step, int n, std::byte* to)
{
    int const size = n < Size ? n : Size;
    if (align >= 16 && (Exact || n >= Size)) { copy_rows<Rows, Values, 16, Size, true>(lane, from, step, size, to); }
    else if (align >= 8) { copy_rows<Rows, Values, 8, Size, Exact>(lane, from, step, size, to); }
    else { copy_rows<Rows, Values, 4, Size, Exact>(lane, from, step, size, to); }
}

/// Facts about the copies of a run that all warps share, in shared memory.
struct attend_copies
{
    int align;       ///< power of two up to 16 that divides all addresses and sizes
    int key_bytes;   ///< bytes of a tile's keys
    int value_bytes; ///< bytes of a tile's values, or of one plain value's columns
    int key_jump;    ///< bytes from the end of a tile's keys to those of the warp's next tile
    int value_jump;  ///< the same of values
    int value_step;  ///< bytes of a value

    /// `values` is the number of coordinates of a value that are copied.
    [[nodiscard]] __device__ static attend_copies of(stored_run const& run, int values)
    {
        bool const coded    = run.keys.kind != storage::plain;
        int const unit      = coded ? attend_rows<half, storage::int8>::unit : attend_rows<half, storage::plain>::unit;
        int const tile      = int{tile_tokens};
        int const per_value = coded ? tile : 1; // tokens of what is copied at once
        auto const bytes    = [&](int n) { return static_cast<int>(coordinate_bytes(run.keys.kind, n, 2)); };
        auto const jump     = [&](int token_bytes, int coordinates, int unit_bytes) {
            int const units = (coordinates + unit - 1) / unit;
            return attend_warps * tile * token_bytes - unit_bytes * (units > 1 ? units : 1);
        };
        auto const addresses =
            reinterpret_cast<std::uintptr_t>(run.keys.begin) | reinterpret_cast<std::uintptr_t>(run.values.begin);
        auto const all = static_cast<unsigned>(addresses) | static_cast<unsigned>(run.keys.token_bytes * tile)
                         | static_cast<unsigned>(run.values.token_bytes * per_value) | 16U;
        return {static_cast<int>(all & (~all + 1U)), tile * run.keys.token_bytes, per_value * bytes(values),
            jump(run.keys.token_bytes, run.keys.coordinates, tile * bytes(unit)),
            jump(run.values.token_bytes, values, coded ? tile * bytes(unit) : copied_row), run.values.token_bytes};
    }
};

/// The keys, then the values, of tiles tile, tile + 4, ... below `end`, unit by unit: `buffers` - 1 of them are on their way
/// while one is worked on. Runs whose keys and values have `Columns` coordinates are copied by constants.
template <element T, storage Kind, int Columns>
class attend_units
{
    using rows                    = attend_rows<T, Kind>;
    static constexpr int fixed    = rows::unit < Columns ? rows::unit : Columns; ///< coordinates of a unit of such runs
    static constexpr int key_unit = rows::bytes(rows::unit);
    static constexpr int value_unit = rows::coded ? key_unit : copied_row;

public:
    /// Begins to copy coordinates from `first_value` on.
    __device__ attend_units(int lane, stored_run const& run, attend_copies const& copies, int first_value,
        std::byte* ring, int tile, int end)
        : lane_{lane}
        , tiles_{tile < end ? (end - tile + attend_warps - 1) / attend_warps : 0}
        , keys_left_{copies.key_bytes}
        , values_left_{copies.value_bytes}
        , copies_{copies}
        , ring_{ring}
    {
        index_t const begin = index_t{tile} * tile_tokens;
        next_key_           = run.keys.begin + begin * run.keys.token_bytes;
        next_value_         = run.values.begin + begin * run.values.token_bytes
                      + (rows::coded ? first_value / group * rows::group_bytes : first_value * 2);
        MDKV_ROLLED
        for (int i = 0; i < rows::buffers - 1; ++i) { stage<false>(ring_ + i * rows::buffer_bytes); }
    }

    /// Waits for the next unit and begins to copy another one to the buffer of the unit before, which every lane has read then.
    template <bool Fixed>
    [[nodiscard]] __device__ std::byte* next()
    {
        constexpr int last = (rows::buffers - 1) * rows::buffer_bytes;
        device::copy_async_wait<rows::buffers - 2>();
        device::sync_warp();
        stage<Fixed>(ring_ + (next_ == 0 ? last : next_ - rows::buffer_bytes));
        std::byte* const now = ring_ + next_;
        next_                = next_ == last ? 0 : next_ + rows::buffer_bytes;
        return now;
    }
    /// Waits until nothing is on its way.
    __device__ void drain() const
    {
        device::copy_async_wait<0>();
        device::sync_warp();
    }

private:
    template <bool Fixed>
    __device__ void stage(std::byte* to)
    {
        int const lane = Fixed ? lane_ : device::thread_again() % device::warp_size;
        if (tiles_ > 0)
        {
            if (keys_left_ > 0)
            {
                constexpr int size = Fixed ? rows::bytes(fixed) : key_unit;
                copy_tile<rows, false, size, Fixed>(copies_.align, lane, next_key_, 0, keys_left_, to);
                next_key_ += key_unit;
                keys_left_ -= key_unit;
            }
            else
            {
                constexpr int size = !rows::coded ? copied_row : Fixed ? rows::bytes(fixed) : key_unit;
                copy_tile<rows, true, size, Fixed>(
                    copies_.align, lane, next_value_, rows::coded ? 0 : copies_.value_step, values_left_, to);
                next_value_ += value_unit;
                values_left_ -= value_unit;
                if (values_left_ <= 0)
                {
                    --tiles_;
                    keys_left_   = copies_.key_bytes;
                    values_left_ = copies_.value_bytes;
                    next_key_ += copies_.key_jump;
                    next_value_ += copies_.value_jump;
                }
            }
        }
        device::copy_async_commit();
    }

    int lane_;
    int tiles_;       ///< tiles not yet copied to their end
    int keys_left_;   ///< bytes of the tile that is copied
    int values_left_; ///< the same of its values
    attend_copies const& copies_;
    std::byte* ring_; ///< buffers that are filled and read in turn
    int next_ = 0;    ///< first byte of the unit read next
    std::byte const* next_key_;
    std::byte const* next_value_;
};

} // namespace MDKV_NAMESPACE::gpu::kernels
