// A stranger's CUDA source: the headers as they were installed, C++20 because mdkv::cuda asks for it. Its memory refuses, so
// that no device is needed and this runs anywhere.
#include <mdkv/gpu/attend.cuh>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/stages/allocate.hpp>

#include <cstddef>
#include <cstdint>
#include <iostream>
#include <new>

namespace
{

struct no_memory
{
    static constexpr std::size_t alignment = 256;

    static void* allocate(std::size_t) { throw std::bad_alloc{}; }
    static void release(void*, std::size_t) noexcept {}
};

} // namespace

int main()
{
    mdkv::workspace scratch{no_memory{}};
    mdkv::gpu::backend const on{nullptr, &scratch};
    static float loss[8 * 2 * 100];
    static mdkv::index_t limit[1];
    static std::uint8_t rung[8 * 100];
    static mdkv::allocation report[1];
    mdkv::rung_costs costs;
    costs.rungs    = 2;
    costs.bytes[1] = 256;
    try
    {
        mdkv::allocate(on, {mdkv::in(on, loss, 8, 2, 100), mdkv::out(on, rung, 8, 100)}, costs, mdkv::in(on, limit, 1),
            {}, mdkv::out(on, report, 1));
    }
    catch (std::bad_alloc const&)
    {
        std::cout << "no memory for scratch\n";
        return 0;
    }
    return 1;
}
