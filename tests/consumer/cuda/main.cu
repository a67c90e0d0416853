// A stranger's CUDA source: the headers as they were installed, C++20 because mdkv::cuda asks for it. The dry run needs no
// device, so this runs anywhere.
#include <mdkv/gpu/attend.cuh>
#include <mdkv/gpu/pool.cuh>

#include <iostream>

int main()
{
    mdkv::workspace counting;
    mdkv::gpu::backend const on{nullptr, &counting};
    float* const none = nullptr;
    mdkv::pool(on, mdkv::in(on, none, 8, 4, 100000), {.kind = mdkv::pooling::adaptive}, mdkv::out(on, none, 8, 4, 100000));
    std::cout << counting.bytes() << " bytes of scratch\n";
    return counting.bytes() > 0 ? 0 : 1;
}
