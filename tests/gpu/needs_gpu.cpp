// Linked into the tests for a real GPU: where none answers, they say so and stop before the first of them.
#include <cstdio>
#include <cstdlib>

#include <cuda_runtime_api.h>

namespace
{

[[maybe_unused]] bool const answers = [] {
    int devices            = 0;
    cudaError_t const code = cudaGetDeviceCount(&devices);
    if (code == cudaSuccess && devices > 0) { return true; }
    std::printf("SKIPPED: tests on a GPU: none answers (%s)\n", cudaGetErrorString(code));
    std::fflush(stdout);
    std::_Exit(77);
}();

} // namespace
