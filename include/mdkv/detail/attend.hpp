/// \file attend.hpp: the part of attend that all backends share: the sizes of a query and of its sums in every basis, and where a head's bytes are cut (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/softmax.hpp>

#include <algorithm>

namespace MDKV_NAMESPACE::detail
{

/// Sizes in floats. A query is kept in every basis that a run of the layout may have, and so are the sums of values: first
/// in the original basis, then projected, then rotated.
struct attend_sizes
{
    int keys          = 0; ///< D
    int values        = 0; ///< Dv
    int key_latents   = 0; ///< widest projected rung of the layout
    int value_latents = 0;
    bool rotated      = false; ///< a rung of the layout is rotated
    int key_bytes   = 0; ///< bytes of the longest stored key: a few coordinates may take more as codes than as elements
    int value_bytes = 0;

    /// Sizes for elements of `unit` bytes.
    attend_sizes(cache_layout const& layout, index_t unit)
        : keys{static_cast<int>(layout.dims.keys)}
        , values{static_cast<int>(layout.dims.values)}
        , rotated{layout.any_rotated()}
        , key_bytes{static_cast<int>(layout.dims.keys * unit)}
        , value_bytes{static_cast<int>(layout.dims.values * unit)}
    {
        auto const raise = [](int& most, index_t n) { most = (std::max)(most, static_cast<int>(n)); };
        for (std::size_t r = 0; r < layout.rungs; ++r)
        {
            raise(key_bytes, layout.key_bytes(r, unit));
            raise(value_bytes, layout.value_bytes(r, unit));
            if (!layout.projected(r)) { continue; }
            raise(key_latents, layout.key_coordinates[r]);
            raise(value_latents, layout.value_coordinates[r]);
        }
    }

    [[nodiscard]] MDKV_HD int queries() const noexcept { return keys + key_latents + (rotated ? keys : 0); }
    [[nodiscard]] MDKV_HD int queries_of(run_basis basis) const noexcept { return begin(basis, keys, key_latents); }
    [[nodiscard]] MDKV_HD int sums() const noexcept { return values + value_latents + (rotated ? values : 0); }
    [[nodiscard]] MDKV_HD int sums_of(run_basis basis) const noexcept { return begin(basis, values, value_latents); }

private:
    [[nodiscard]] MDKV_HD static int begin(run_basis basis, int original, int projected) noexcept
    {
        return basis == run_basis::original ? 0 : basis == run_basis::projected ? original : original + projected;
    }
};

/// Factor of q.k for logits in base 2; a `scale` of 0 is the layout's.
[[nodiscard]] inline float attend_scale(float scale, cache_layout const& layout) noexcept
{
    return scale_in_base_two(scale > 0.0F ? scale : layout.scale, layout.dims.keys);
}

/// All bytes stored of head h. `cache`: see run_of_head.
template <element T, class Cache>
[[nodiscard]] MDKV_HD index_t bytes_of_head(cache_layout const& layout, Cache const& cache, index_t h) noexcept
{
    index_t bytes = 0;
    for (std::size_t i = 0; i < most_runs(layout); ++i)
    {
        stored_run const run = run_of_head<T>(layout, cache, h, i);
        bytes += run.tokens * run.token_bytes();
    }
    return bytes;
}

/// A run is cut at multiples of this many tokens.
inline constexpr int attend_piece = 64;

/// First token of a run, with tokens, whose piece begins at or behind byte `at` of the head; the run begins at `run_begin`.
[[nodiscard]] MDKV_HD inline index_t cut_run(stored_run const& run, index_t run_begin, index_t at) noexcept
{
    index_t const bytes  = attend_piece * run.token_bytes();
    index_t const pieces = at <= run_begin ? 0 : (at - run_begin + bytes - 1) / bytes;
    return pieces * attend_piece < run.tokens ? pieces * attend_piece : run.tokens;
}

} // namespace MDKV_NAMESPACE::detail
