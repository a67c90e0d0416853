/// \file team.hpp: the team of the CPU: one thread, which goes over 16 neighbours at a time.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>

#include <concepts>

namespace MDKV_NAMESPACE::cpu
{

/// One thread. Its functions are MDKV_HD because jobs are; a GPU never runs a job with this team.
class team
{
public:
    static constexpr int lanes          = 16;
    static constexpr int register_lanes = vector_lanes;

    MDKV_HD explicit team(std::byte* memory) noexcept
        : memory_{memory}
    {}

    [[nodiscard]] MDKV_HD static constexpr index_t rank() noexcept { return 0; }
    [[nodiscard]] MDKV_HD static constexpr index_t size() noexcept { return 1; }
    MDKV_HD static constexpr void sync() noexcept {}

    [[nodiscard]] MDKV_HD static constexpr auto sum(auto x) noexcept { return x; }
    [[nodiscard]] MDKV_HD static constexpr auto largest(auto x) noexcept { return x; }
    template <class V>
    [[nodiscard]] MDKV_HD static constexpr mdkv::detail::prefix_sum<V> prefix(V x) noexcept
    {
        return {V{}, x};
    }

    template <std::integral Integer>
    MDKV_HD static constexpr void add(Integer* counter, Integer n) noexcept
    {
        *counter = static_cast<Integer>(*counter + n);
    }
    template <std::integral Integer>
    MDKV_HD static void add_across(Integer* counter, Integer n) noexcept
    {
#if !defined(__CUDA_ARCH__)
        __atomic_fetch_add(counter, n, __ATOMIC_RELAXED);
#endif
    }
    template <std::integral Integer>
    MDKV_HD static void min_across(Integer* least, Integer n) noexcept
    {
#if !defined(__CUDA_ARCH__)
        Integer seen = __atomic_load_n(least, __ATOMIC_RELAXED);
        while (n < seen && !__atomic_compare_exchange_n(least, &seen, n, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
#endif
    }

    [[nodiscard]] MDKV_HD mdkv::detail::carver scratch() const noexcept { return mdkv::detail::carver{memory_}; }

private:
    std::byte* memory_;
};

#if !defined(__CUDA_ARCH__) // nvcc reads jobs of this team for the device, too, with the functions that all teams have

/// any_lane of detail/lanes.hpp for vectors.
[[nodiscard, gnu::always_inline]] MDKV_HD inline bool any_lane(team const&, auto const& x) noexcept
{
    return simd::any(x);
}

/// column_products of detail/columns.hpp in registers: plain loops take several times as long.
template <std::size_t Sums>
MDKV_HD void column_products(team const&, float const* const (&direction)[Sums], float const* column, int dim,
    float (&sum)[Sums][std::size_t{team::lanes}], index_t step = 1) noexcept
{
    constexpr int vectors = team::lanes / vector_lanes;
    constexpr int all     = static_cast<int>(Sums);
    constexpr int rows    = all / vectors; // eight sums keep the multiply-add units busy
    for (int k = 0; k < all; k += rows)
    {
        simd::floats acc[std::size_t{rows}][vectors]{};
        for (int d = 0; d < dim; ++d)
        {
            MDKV_UNROLL
            for (int i = 0; i < rows * vectors; ++i)
            {
                auto const from = simd::load(column + d * team::lanes + i % vectors * vector_lanes);
                acc[i / vectors][i % vectors] += direction[k + i / vectors][d * step] * from;
            }
        }
        MDKV_UNROLL
        for (int i = 0; i < rows * vectors; ++i)
        {
            simd::store(sum[k + i / vectors] + i % vectors * vector_lanes, acc[i / vectors][i % vectors]);
        }
    }
}

/// widen_lanes of detail/columns.hpp by vectors, which compilers do not make of half's conversions.
template <std::size_t N>
    requires(N % std::size_t{vector_lanes} == 0)
MDKV_HD void widen_lanes(team const&, half const* from, float (&x)[N]) noexcept
{
    for (int l = 0; l < static_cast<int>(N); l += vector_lanes) { simd::store(x + l, simd::load(from + l)); }
}
/// narrow_lanes likewise.
template <std::size_t N>
    requires(N % std::size_t{vector_lanes} == 0)
MDKV_HD void narrow_lanes(team const&, float const (&x)[N], half* to) noexcept
{
    for (int l = 0; l < static_cast<int>(N); l += vector_lanes) { simd::narrow_to(to + l, simd::load(x + l)); }
}

/// widen_columns of detail/columns.hpp by squares in registers: number by number it takes two to three times as long.
MDKV_HD void widen_columns(team const&, int tokens, int coordinates, auto const& row, float* to) noexcept
{
    constexpr int side = vector_lanes;
    for (int i = 0; i < tokens; i += side)
    {
        int const end = tokens - i < side ? tokens : i + side;
        int c         = 0;
        for (; end - i == side && c + side <= coordinates; c += side)
        {
            simd::floats x[std::size_t{side}];
            MDKV_UNROLL
            for (int l = 0; l < side; ++l) { x[l] = simd::load(row(i + l) + c); }
            simd::transpose(x);
            MDKV_UNROLL
            for (int l = 0; l < side; ++l) { simd::store(to + (c + l) * team::lanes + i, x[l]); }
        }
        for (; c < coordinates; ++c)
        {
            for (int l = i; l < end; ++l) { to[c * team::lanes + l] = widen(mdkv::detail::load_at(row(l) + c)); }
        }
    }
}

/// powers_of_two of detail/columns.hpp by vectors.
MDKV_HD inline void powers_of_two(team const&, float const (&x)[team::lanes], float* to) noexcept
{
    for (int l = 0; l < team::lanes; l += vector_lanes) { simd::store(to + l, simd::exp2(simd::load(x + l))); }
}

#endif

} // namespace MDKV_NAMESPACE::cpu
