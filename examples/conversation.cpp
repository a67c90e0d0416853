/// \file conversation.cpp: layers compressed one at a time, decoded tokens in their tails, and caches kept in a mapped file
#include <mdkv/mdkv.hpp>

#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <span>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

using namespace mdkv;
using host = cpu::backend;

namespace
{
constexpr index_t L = 3, H = 2, G = 3, D = 64, N = 600, decoded = 60;
constexpr preset const& chosen = presets::by_window;

std::vector<half> rows(index_t count, float mean) // in the place of a model's tensors
{
    static unsigned state = 7;
    std::vector<half> x(static_cast<std::size_t>(count * D));
    for (half& e : x)
    {
        state = state * 1664525U + 1013904223U;
        e     = narrow<half>(mean + 8.0F * (static_cast<float>(state >> 8) * 0x1p-24F - 0.5F));
    }
    return x;
}

/// One token of every layer: into the tail, then its queries see everything.
void decode(host const& on, std::vector<cpu::cache<half>>& caches)
{
    std::vector<half> output(H * G * D);
    std::vector<float> lse(H * G);
    for (auto& cache : caches)
    {
        auto const key = rows(H, 0), value = rows(H, 0), query = rows(H * G, 1);
        append(on, in(on, key.data(), H, D), in(on, value.data(), H, D), cache);
        attend(on, in(on, query.data(), H * G, D), cache, {}, out(on, output.data(), H * G, D),
            out(on, lse.data(), H * G));
    }
}

/// The log-sum-exps of fixed queries over a cache: equal if the caches are.
std::vector<float> sums_over(host const& on, cache_view<half const, space::host> const& cache)
{
    static std::vector<half> const queries = rows(H * G, 1);
    std::vector<half> output(H * G * D);
    std::vector<float> lse(H * G);
    attend(
        on, in(on, queries.data(), H * G, D), cache, {}, out(on, output.data(), H * G, D), out(on, lse.data(), H * G));
    return lse;
}
} // namespace

int main()
{
    cpu::thread_pool threads{2};
    workspace scratch{cpu::host_memory{}}; // grows to what its calls need
    host const on{&scratch, threads};

    std::vector<cpu::cache<half>> caches(L);
    index_t held = 0;
    for (auto& cache : caches) // an engine that sees one finished layer at a time
    {
        auto const q = rows(H * G * chosen.queries, 1), k = rows(H * N, 0), v = rows(H * N, 0);
        prompt_rows<host, half> const prompt{
            in(on, q.data(), H * G, chosen.queries, D), in(on, k.data(), H, N, D), in(on, v.data(), H, N, D)};
        held += compress(on, prompt, chosen, budget::fraction(1, 4), cache).resident_bytes;
        cache.reserve_tail(decoded);
    }
    for (index_t token = 0; token < decoded; ++token) { decode(on, caches); }

    // A file (an engine would write a temporary one, sync and rename it), mapped, from which attention reads.
    auto const path = std::filesystem::temp_directory_path() / "mdkv_example_conversation.cache";
    cache_identity const model{{'e', 'x', 'a', 'm', 'p', 'l', 'e'}}; // an engine: the SHA-256 of all that must agree
    {
        std::ofstream file{path, std::ios::binary};
        auto const sink = [&](std::span<std::byte const> bytes) {
            file.write(reinterpret_cast<char const*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
        };
        write(sink, model, {}, std::span{caches});
    }
    auto const size = static_cast<std::size_t>(std::filesystem::file_size(path));
    int const file  = open(path.c_str(), O_RDONLY);
    void* const map = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
    auto const kept = read<half>({static_cast<std::byte const*>(map), size}, model);
    bool same       = true;
    for (index_t l = 0; l < L; ++l)
    {
        same = same && sums_over(on, kept.layer(l)) == sums_over(on, caches[static_cast<std::size_t>(l)].view());
    }
    std::printf("%td tokens in arenas of %td bytes, %td in tails; the file's %zu bytes attend %s\n", N, held, decoded,
        size, same ? "alike" : "DIFFERENTLY");
    munmap(map, size);
    close(file);
    std::filesystem::remove(path);
    return same ? 0 : 1;
}
