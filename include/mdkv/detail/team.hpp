/// \file team.hpp: the second of the two primitives that algorithms are written over: a team works on one item of a job, one thread on a CPU, one block on a GPU; and three jobs that several stages have.
#pragma once

#include <mdkv/core/ground.hpp>

#include <concepts>

// A job is a trivially copyable object: its operands, and its body, which is written once for every backend (an example:
// docs/backends.md). It has a `name`, `threads` of a GPU's block (256 if left out), `scratch_bytes()` of one team (none if left
// out), and the body `MDKV_HD void operator()(team auto const& t, index_t item) const`.
//
// `run(backend, job, items)` is a backend's other primitive, found by argument-dependent lookup: one team an item, asynchronous
// on a GPU's stream. `fetch(backend, from, to, n)` copies to the host and waits on a GPU. All members of a team call `sync`,
// `sum`, `largest` and `prefix` together. Work within an item is shared out in steps of `lanes` neighbours:
//
//   for (index_t i = t.rank() * Team::lanes; i < n; i += t.size() * Team::lanes)
//       for (int l = 0; l < Team::lanes; ++l) ... x[i + l] ...          // a fixed count, which compilers vectorise

namespace MDKV_NAMESPACE::detail
{

/// Sum over the members before this one, and over all of them.
template <class V>
struct prefix_sum
{
    V before;
    V total;
};

/// Cuts a team's scratch memory into arrays, each aligned to 16 bytes. A default-made one only counts, so that a job's
/// `scratch_bytes()` and its body share the code that cuts.
class carver
{
public:
    // Any address but null serves to count with: a test for null in `take` would hide from nvcc that it is shared memory.
    MDKV_HD carver() noexcept
        : memory_{reinterpret_cast<std::byte*>(std::uintptr_t{64})}
    {}
    MDKV_HD explicit carver(std::byte* memory) noexcept
        : memory_{memory}
    {}

    /// Room for n objects, uninitialised.
    template <class V>
    [[nodiscard]] MDKV_HD V* take(index_t n) noexcept
    {
        static_assert(alignof(V) <= 16, "carver: this type needs a stricter alignment");
        std::byte* const at = memory_ + used_;
        used_ += static_cast<index_t>((static_cast<std::uint64_t>(n) * sizeof(V) + 15) / 16 * 16); // unsigned: a mask
        return reinterpret_cast<V*>(at);
    }
    [[nodiscard]] MDKV_HD index_t bytes() const noexcept { return used_; }

private:
    std::byte* memory_;
    index_t used_ = 0;
};

/// Bytes that a Scratch of these sizes takes of a carver, its first member or parameter.
template <class Scratch, class... Sizes>
[[nodiscard]] index_t bytes_of(Sizes const&... sizes)
{
    carver counting;
    static_cast<void>(Scratch{counting, sizes...});
    return counting.bytes();
}

/// Members that work on one item together. `add` is for the team's own scratch, the `_across` functions for memory that
/// other teams change at the same time; all are for whole numbers, so that results do not depend on any order.
template <class T>
concept team = requires(T const& t, index_t n, index_t* counter) {
    T::lanes;
    T::register_lanes;
    n = t.rank();
    n = t.size();
    t.sync();
    n = t.sum(n);
    n = t.largest(n);
    prefix_sum<index_t>{t.prefix(n)};
    t.add(counter, n);
    t.add_across(counter, n);
    t.min_across(counter, n);
    carver{t.scratch()};
};

/// A member's share of rows of `columns` each: columns column, column + size(), ... of rows row, row + rows, ...; neighbours
/// take neighbouring columns, and a team longer than a row takes several rows at once.
struct rows_share
{
    index_t row;
    index_t rows;
    index_t column;
};
[[nodiscard]] MDKV_HD rows_share share_rows(team auto const& t, index_t columns) noexcept
{
    if (columns == 0 || t.size() < 2 * columns) { return {0, 1, t.rank()}; }
    index_t const rows = t.size() / columns;
    index_t const row  = t.rank() / columns;
    // The rest of the team has no column.
    return {row, rows, row < rows ? t.rank() % columns : columns};
}

/// Rank and size as int, for loops over the coordinates of a token.
[[nodiscard]] MDKV_HD constexpr int member(team auto const& t) noexcept
{
    return static_cast<int>(t.rank());
}
[[nodiscard]] MDKV_HD constexpr int members(team auto const& t) noexcept
{
    return static_cast<int>(t.size());
}

template <class Job>
[[nodiscard]] constexpr int threads_of() noexcept
{
    if constexpr (requires { Job::threads; }) { return Job::threads; }
    else { return 256; }
}

[[nodiscard]] index_t scratch_bytes_of(auto const& job)
{
    if constexpr (requires { job.scratch_bytes(); }) { return job.scratch_bytes(); }
    else { return 0; }
}

/// Runs a job that has its number of items as a member.
void run(auto const& on, auto const& job)
{
    run(on, job, job.items());
}

/// Sets n objects to one value.
template <class V>
struct fill
{
    static constexpr char const* name = "fill";
    static constexpr index_t per_item = 1 << 16;

    V* to;
    V value;
    index_t n;

    [[nodiscard]] index_t items() const noexcept { return (n + per_item - 1) / per_item; }

    MDKV_HD void operator()(team auto const& t, index_t item) const
    {
        index_t const end = (item + 1) * per_item < n ? (item + 1) * per_item : n;
        for (index_t i = item * per_item + t.rank(); i < end; i += t.size()) { to[i] = value; }
    }
};

/// Copies rows, to floats or another element type times a factor. An item is one row; rows without elements, which views
/// without memory may have, are no items.
template <backend B, class T, class V = T>
struct copy_rows
{
    static constexpr char const* name = "copy_rows";
    static constexpr int threads      = 128;

    in_view<T, 3, B> from;
    out_view<V, 3, B> to;
    float factor = 1.0F;

    [[nodiscard]] index_t items() const noexcept { return to.extent(2) > 0 ? to.extent(0) * to.extent(1) : 0; }

    MDKV_HD void operator()(team auto const& t, index_t item) const
    {
        index_t const h     = item / to.extent(1);
        index_t const i     = item % to.extent(1);
        index_t const n     = to.extent(2);
        T const* const here = from.row(h, i);
        V* const dest       = to.row(h, i);
        for (index_t d = t.rank(); d < n; d += t.size())
        {
            T const x = load_at<T>(here + d);
            if constexpr (std::same_as<T, V> && !std::same_as<V, float>) { dest[d] = x; }
            else { dest[d] = narrow<V>(factor * widen(x)); }
        }
    }
};

/// Sums of pieces of rows in double, in an order that does not depend on the number of threads. An item is a piece; a row's
/// pieces are neighbours.
template <backend B>
struct sum_pieces
{
    static constexpr char const* name = "sum_pieces";
    static constexpr index_t piece    = 4096;

    in_view<float, 3, B> rows;      // [L, H, N]
    double* sums;                   // [L, heads, pieces]
    index_t heads = rows.extent(1); // number of rows [l, *, *], on all ranks
    index_t first = 0;              // number of row [l, 0, *] among them

    [[nodiscard]] MDKV_HD index_t pieces() const noexcept { return (rows.extent(2) + piece - 1) / piece; }
    [[nodiscard]] MDKV_HD index_t items() const noexcept { return rows.extent(0) * rows.extent(1) * pieces(); }
    [[nodiscard]] MDKV_HD index_t room() const noexcept { return rows.extent(0) * heads * pieces(); }

    MDKV_HD void operator()(team auto const& t, index_t item) const
    {
        index_t const row      = item / pieces();
        index_t const l        = row / rows.extent(1);
        index_t const h        = row % rows.extent(1);
        index_t const begin    = item % pieces() * piece;
        index_t const left     = rows.extent(2) - begin;
        index_t const end      = begin + (left < piece ? left : piece);
        float const* const all = rows.row(l, h);
        double sum             = 0;
        for (index_t i = begin + t.rank(); i < end; i += t.size()) { sum += double{all[i]}; }
        sum = t.sum(sum);
        if (t.rank() == 0) { sums[(l * heads + first + h) * pieces() + item % pieces()] = sum; }
    }

    /// Sum of the rows [l, *, *], from their pieces.
    [[nodiscard]] MDKV_HD double total(team auto const& t, index_t l) const
    {
        index_t const each = heads * pieces();
        double sum         = 0;
        for (index_t i = t.rank(); i < each; i += t.size()) { sum += sums[l * each + i]; }
        return t.sum(sum);
    }
};

} // namespace MDKV_NAMESPACE::detail
