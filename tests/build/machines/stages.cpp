// Compiled for several processors by cmake/machines.py.
#include <mdkv/mdkv.hpp>

#include <mdkv/cpu/thread_pool.hpp>

namespace
{

using namespace mdkv;
using host = cpu::backend;

} // namespace

void pool_two(host const& on, in_view<float, 3, host> loss, out_view<float, 3, host> pooled)
{
    cpu::thread_pool threads{2};
    pool(host{on.scratch, threads}, loss, {}, pooled);
}

void check_two(host const& on, in_view<half, 3, host> rows)
{
    expects_finite(on, "rows", rows);
}

void pack_two(host const& on, in_view<half, 3, host> rows, in_view<float, 3, host> basis,
    in_view<std::uint8_t, 2, host> rung, cpu::cache<half>& cache)
{
    index_t const bytes = packed_bytes<half>(on, rung, cache.layout());
    if (bytes <= cache.arena_bytes()) { pack(on, rows, rows, rows, rows, basis, basis, rung, cache.view()); }
}

void append_two(host const& on, in_view<float, 2, host> row, cpu::cache<half>& cache)
{
    append(on, row, row, cache.view());
}

void attend_two(host const& on, in_view<half, 2, host> queries, cpu::cache<half>& cache, out_view<half, 2, host> output,
    out_view<float, 1, host> lse)
{
    attend(on, queries, cache.view(), {}, output, lse);
    merge_attention(on, as_input(output), as_input(lse), as_input(output), as_input(lse), output, lse);
}

#if !defined(__OPTIMIZE__) // optimised these two take minutes, seven times
void compress_two(host const& on, in_view<half, 3, host> rows, cpu::cache<half>& cache)
{
    compress(on, prompt_rows<host, half>{rows, rows, rows}, presets::by_window, budget::fraction(1, 4), cache);
}

void recompress_two(host const& on, in_view<half, 3, host> rows, cpu::cache<half>& cache)
{
    static_cast<void>(recompress(on, rows, bit_ratios, {.limit = budget::fraction(1, 4)}, cache));
}

#endif
