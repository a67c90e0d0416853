/// \file stored.cpp: fuzzes read: any bytes are refused, or all layers can be attended and unpacked
#include <mdkv/attend.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/engine/stored.hpp>
#include <mdkv/engine/unpack.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <vector>

namespace
{

using namespace mdkv;

constexpr cache_identity fuzz_identity{{0x5e, 0xed, 7, 0xff}}; // that of the seeds

/// Memory of which a call gets at most 4 MiB at once; honest files ask for more, too.
struct little_memory : cpu::host_memory
{
    [[nodiscard]] void* allocate(std::size_t bytes) const
    {
        if (bytes > std::size_t{1} << 22) { throw std::bad_alloc{}; }
        return host_memory::allocate(bytes);
    }
};

template <class Call>
void run_within_limits(Call const& call)
{
    workspace scratch{little_memory{}};
    try
    {
        call(cpu::backend{&scratch});
    }
    catch (std::bad_alloc const&)
    {}
}

template <element T>
void use(cache_view<T const, space::host> const& cache)
{
    auto const [heads, dim, value_dim] =
        mdkv::array<index_t, 3>{{cache.layout.heads, cache.layout.dims.keys, cache.layout.dims.values}}.items;
    index_t const rows = most_rows(cache);
    if (heads * (rows + 4) * (dim + value_dim) > index_t{1} << 17) { return; }
    auto const size = [](index_t n) { return static_cast<std::size_t>(n); };
    std::vector<float> const queries(size(2 * heads * dim), 0.5F);
    std::vector<float> output(size(2 * heads * value_dim));
    std::vector<float> lse(size(2 * heads));
    run_within_limits([&](cpu::backend const& on) {
        attend(on, in(on, queries.data(), 2 * heads, dim), cache, {}, out(on, output.data(), 2 * heads, value_dim),
            out(on, lse.data(), 2 * heads));
    });
    std::vector<T> keys(size(heads * rows * dim));
    std::vector<T> values(size(heads * rows * value_dim));
    std::vector<index_t> kept(size(heads));
    run_within_limits([&](cpu::backend const& on) {
        unpack(on, cache, out(on, keys.data(), heads, rows, dim), out(on, values.data(), heads, rows, value_dim),
            out(on, kept.data(), heads));
    });
}

template <element T>
void read_and_use(std::span<std::byte const> bytes)
{
    try
    {
        auto const file = read<T>(bytes, fuzz_identity, verify::bounds);
        for (index_t i = 0; i < file.layers(); ++i)
        {
            use<T>(file.layer(i));
            auto const positions = file.positions(i);
            for (index_t h = 0; h < positions.extent(0); ++h)
            {
                for (index_t s = 0; s < positions.extent(1); ++s)
                {
                    if (positions(h, s) < -1 || positions(h, s) >= file.place().tokens) { std::abort(); }
                }
            }
        }
        std::uint8_t volatile last = 0;
        for (std::byte const byte : file.place().attachment) { last = std::to_integer<std::uint8_t>(byte); }
        static_cast<void>(last);
    }
    catch (invalid_argument const&)
    {}
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size)
{
    // exactly as many bytes as there are: the sanitizer sees the first one behind them
    std::unique_ptr<std::byte, void (*)(void*)> const memory{
        static_cast<std::byte*>(::operator new(size, std::align_val_t{64})),
        [](void* p) { ::operator delete(p, std::align_val_t{64}); }};
    if (size > 0) { std::memcpy(memory.get(), data, size); }
    auto const bytes = static_cast<index_t>(size); // without which few files would come further
    if (size >= sizeof(detail::file_header))
    {
        std::memcpy(memory.get() + offsetof(detail::file_header, bytes), &bytes, sizeof bytes);
    }
    std::span<std::byte const> const file{memory.get(), size};
    read_and_use<half>(file);
    read_and_use<float>(file);
    return 0;
}
