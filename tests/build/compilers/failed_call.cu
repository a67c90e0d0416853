// A call into the CUDA runtime that fails, with a GPU and without one: with exceptions it is caught, without them the program ends
// with the message.
#include <mdkv/mdkv.cuh>

#include <cstdint>
#include <cstdio>
#include <exception>

int main()
{
    mdkv::gpu::pool_resource pool;
    auto const allocate = [&] { return pool.allocate(nullptr, SIZE_MAX / 2, 256); };
#if defined(__cpp_exceptions)
    try
    {
        return allocate() == nullptr ? 2 : 1;
    }
    catch (std::exception const& error)
    {
        std::printf("mdkv: %s\n", error.what());
        return 0;
    }
#else
    return allocate() == nullptr ? 2 : 1;
#endif
}
