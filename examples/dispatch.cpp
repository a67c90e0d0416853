/// \file dispatch.cpp: one program for several processors: compiled once for each, and main() takes the best that is there
///
/// The library uses the instructions that a source is compiled for, and all of it stands in a namespace named after them, so
/// that the objects may be linked into one program. Only plain types pass between them. In the link the object for the oldest
/// processor comes first: of functions that all objects have, e.g. of std::vector, the linker takes the first.
#include <cstddef>
#include <cstdio>

#if defined(MDKV_EXAMPLE_VARIANT) // compiled with -DMDKV_EXAMPLE_VARIANT=v3 -march=x86-64-v3, e.g.

#    include <mdkv/mdkv.hpp>

#    include <vector>

namespace MDKV_EXAMPLE_VARIANT
{
std::ptrdiff_t compressed_bytes()
{
    using namespace mdkv;
    using host      = cpu::backend;
    index_t const H = 2, G = 2, Q = 64, N = 500, D = 64;
    unsigned state  = 7;
    auto const rows = [&](index_t count) {
        std::vector<half> x(static_cast<std::size_t>(count * D));
        for (half& e : x)
        {
            e = narrow<half>(static_cast<float>((state = state * 1664525U + 1013904223U) >> 8) * 0x1p-24F);
        }
        return x;
    };
    auto const q = rows(H * G * Q), k = rows(H * N), v = rows(H * N);
    workspace scratch{cpu::host_memory{}};
    host const on{&scratch};
    cpu::cache<half> cache;
    prompt_rows<host, half> const layer{
        in(on, q.data(), H * G, Q, D), in(on, k.data(), H, N, D), in(on, v.data(), H, N, D)};
    auto const report = compress(on, layer, presets::by_window, budget::fraction(1, 8), cache);
    std::vector<half> output(H * G * D);
    std::vector<float> lse(H * G);
    attend(
        on, in(on, q.data(), H * G, D), cache, {}, out(on, output.data(), H * G, D), out(on, lse.data(), H * G));
    return lse[0] > 0 && report.resident_bytes <= report.budget_bytes ? report.resident_bytes : 0;
}
} // namespace MDKV_EXAMPLE_VARIANT

#else // compiled for the oldest processor

namespace v1
{
std::ptrdiff_t compressed_bytes();
}
namespace v3
{
std::ptrdiff_t compressed_bytes();
}
namespace v4
{
std::ptrdiff_t compressed_bytes();
}

namespace
{
/// A part of an engine, behind functions without types of mdkv.
struct variant
{
    char const* name;
    bool (*runs)();            // on this processor
    std::ptrdiff_t (*bytes)(); // compresses a layer, attends over it, and returns the bytes that it took; 0: something failed
};

bool has_v3()
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi")
           && __builtin_cpu_supports("bmi2");
}
bool has_v4()
{
    return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
           && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq")
           && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}
constexpr variant variants[]{{"x86-64-v4 with VNNI", has_v4, v4::compressed_bytes},
    {"x86-64-v3", has_v3, v3::compressed_bytes}, {"x86-64", [] { return true; }, v1::compressed_bytes}};
} // namespace

int main()
{
    std::ptrdiff_t bytes = 0, all = 0;
    for (variant const& one :
        variants) // an engine takes the first that runs; all of them here, to show that they agree
    {
        if (!one.runs()) { continue; }
        bytes = one.bytes();
        std::printf("%s: %td bytes\n", one.name, bytes);
        if (bytes == 0 || (all != 0 && bytes > all + all / 10)) { return 1; }
        all = bytes;
    }
    return 0;
}

#endif
