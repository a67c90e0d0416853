/// \file cpu_pipeline.cpp: the stages one by one on one layer, as an engine would call them that takes only some.
#include <mdkv/mdkv.hpp>

#include <cstddef>
#include <cstdint>
#include <iostream>
#include <random>
#include <vector>

using namespace mdkv;

int main()
{
    index_t const H = 2, G = 3, W = 32, N = 1000, D = 64, R = static_cast<index_t>(paper_ratios.size());
    workspace scratch{cpu::host_memory{}};
    cpu::thread_pool threads{2};
    cpu::backend const on{&scratch, threads};

    std::mt19937 random{7};
    auto const rows = [&](index_t count, float mean) {
        std::normal_distribution<float> normal{mean, 1.0F};
        std::vector<half> x(static_cast<std::size_t>(count * D));
        for (half& e : x) { e = narrow<half>(normal(random)); }
        return x;
    };
    auto const q = rows(H * G * W, 0.3F), k = rows(H * (N + W), 0), v = rows(H * (N + W), 0);
    auto const queries = in(on, q.data(), H * G, W, D);
    auto const all_keys = in(on, k.data(), H, N + W, D), all_values = in(on, v.data(), H, N + W, D);
    auto const keys = slice<1>(all_keys, 0, N), window_keys = slice<1>(all_keys, N, W);
    auto const values = slice<1>(all_values, 0, N), window_values = slice<1>(all_values, N, W);

    // What every token would lose at every rung: bases, losses, and their maximum over neighbours.
    std::vector<float> key_basis(H * D * D), value_basis(H * D * D), energy(H * D);
    std::vector<float> losses(H * R * N), pooled(H * R * N);
    fit_basis(on, keys, out(on, key_basis.data(), H, D, D), out(on, energy.data(), H, D));
    fit_basis(on, values, out(on, value_basis.data(), H, D, D), out(on, energy.data(), H, D));
    auto const uk = in(on, key_basis.data(), H, D, D), uv = in(on, value_basis.data(), H, D, D);
    auto const loss = out(on, losses.data(), H, R, N), smooth = out(on, pooled.data(), H, R, N);
    score(on, queries, keys, values, window_keys, uk, uv, paper_ratios, {}, loss);
    pool(on, as_input(loss), {.width = 7}, smooth);

    // A rung for every token within 160 full tokens' bytes a head, the window included.
    layer_shape const shape{H, G, N, W, {D, D}, sizeof(half)};
    index_t const budget_bytes = budget::kv_size(160).in_bytes(shape);
    index_t const limit        = budget_bytes - shape.window_bytes();
    rung_costs const costs{paper_ratios, shape.dims, shape.element_bytes};
    std::vector<std::uint8_t> rung_of(H * N);
    allocation report;
    auto const rung = out(on, rung_of.data(), H, N);
    allocate(on, {as_input(smooth), rung}, costs, in(on, &limit, 1), {}, out(on, &report, 1));

    // The packed cache, and one token's attention over it.
    cache_layout const layout{paper_ratios, H, W, shape.dims};
    cpu::cache<half> cache{layout, packed_bytes<half>(on, as_input(rung), layout)};
    pack(on, keys, values, window_keys, window_values, uk, uv, as_input(rung), cache.view());
    std::vector<half> output(H * G * D);
    std::vector<float> lse(H * G);
    auto const new_query = rows(H * G, 0.3F);
    attend(on, in(on, new_query.data(), H * G, D), cache, {}, out(on, output.data(), H * G, D),
        out(on, lse.data(), H * G));

    for (std::size_t r = 0; r < paper_ratios.size(); ++r)
    {
        std::cout << report.tokens[r] << " tokens: " << layout.key_coordinates[r] << " coordinates of " << D << '\n';
    }
    std::cout << cache.arena_bytes() << " bytes; " << budget_bytes << " allowed, " << shape.full_bytes() << " whole\n";
    bool const fits = cache.arena_bytes() <= budget_bytes && report.status == allocation_status::optimal;
    return fits ? 0 : 1;
}
