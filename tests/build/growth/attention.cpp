// One call of attend over a packed layer of one KV head, for tests/tools/attention_instructions.py, which counts the
// instructions of its inner loops:  attention f16|int8|int4 GROUP DIM TOKENS
#include <mdkv/mdkv.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

int main(int count, char** arguments)
{
    using namespace mdkv;
    using host = cpu::backend;
    if (count != 5)
    {
        std::fputs("attention f16|int8|int4 GROUP DIM TOKENS\n", stderr);
        return 2;
    }
    std::string const kind = arguments[1];
    index_t const group    = std::atoi(arguments[2]);
    index_t const dim      = std::atoi(arguments[3]);
    index_t const tokens   = std::atoi(arguments[4]);

    std::vector<half> rows(static_cast<std::size_t>((2 * tokens + group) * dim));
    std::uint64_t state = 1;
    for (half& x : rows)
    {
        state = state * 6364136223846793005U + 1442695040888963407U;
        x     = narrow<half>(static_cast<float>(state >> 40U) * 0x1p-24F - 0.5F);
    }
    half const* const keys   = rows.data();
    half const* const values = keys + tokens * dim;
    std::vector<float> const basis(static_cast<std::size_t>(dim * dim)); // no rung is in it
    std::vector<std::uint8_t> const rung(static_cast<std::size_t>(tokens), std::uint8_t{1});
    std::vector<half> output(static_cast<std::size_t>(group * dim));
    std::vector<float> lse(static_cast<std::size_t>(group));

    host const on{};
    ratio_set const ratios{drop, kind == "int8" ? full_int8 : kind == "int4" ? full_int4 : full};
    cache_layout const layout{ratios, 1, 0, {dim, dim}};
    auto const rungs   = in(on, rung.data(), 1, tokens);
    auto const no_rows = in(on, keys, 1, 0, dim);
    auto const unused  = in(on, basis.data(), 1, dim, dim);
    alignas(workspace::alignment) static std::array<std::byte, std::size_t{1} << 24U> memory;
    auto const run = [&](auto const& stage) {
        workspace scratch{memory};
        stage(host{&scratch});
    };
    index_t bytes = 0;
    run([&](host const& with) { bytes = packed_bytes<half>(with, rungs, layout); });
    cpu::cache<half> cache{layout, bytes, 16};
    run([&](host const& with) {
        pack(with, in(on, keys, 1, tokens, dim), in(on, values, 1, tokens, dim), no_rows, no_rows, unused, unused,
            rungs, cache.view());
    });
    run([&](host const& with) {
        attend(with, in(on, values + tokens * dim, group, dim), cache.view(), {}, out(on, output.data(), group, dim),
            out(on, lse.data(), group));
    });
    std::printf("%g\n", static_cast<double>(lse[0])); // something must be read
    return 0;
}
