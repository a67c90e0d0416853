// A stranger's CUDA source: the headers as they were installed, C++20 because mdkv::cuda asks for it. The dry run needs no
// device, so this runs anywhere.
#include <mdkv/gpu/attend.cuh>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/stages/allocate.hpp>

#include <cstdint>

#include <iostream>

int main()
{
    mdkv::workspace counting;
    mdkv::gpu::backend const on{nullptr, &counting};
    float* const loss              = nullptr;
    mdkv::index_t* const limit     = nullptr;
    std::uint8_t* const rung       = nullptr;
    mdkv::allocation* const report = nullptr;
    mdkv::rung_costs costs;
    costs.rungs    = 2;
    costs.bytes[1] = 256;
    mdkv::allocate(on, {mdkv::in(on, loss, 8, 2, 100000), mdkv::out(on, rung, 8, 100000)}, costs,
        mdkv::in(on, limit, 1), {}, mdkv::out(on, report, 1));
    std::cout << counting.bytes() << " bytes of scratch\n";
    return counting.bytes() > 0 ? 0 : 1;
}
