/// \file error.cuh: the exception of a failed call into the CUDA runtime.
#pragma once

#include <mdkv/core/error.hpp>

#include <string>

#include <cuda_runtime_api.h>

namespace MDKV_NAMESPACE::gpu
{

/// A call into the CUDA runtime failed; the state of the stream's earlier work is unknown.
class cuda_error : public error
{
public:
    cuda_error(char const* what, cudaError_t code)
        : error{std::string{what} + ": " + cudaGetErrorString(code)}
        , code_{code}
    {}
    [[nodiscard]] cudaError_t code() const noexcept { return code_; }

private:
    cudaError_t code_;
};

/// \throws cuda_error   for every code but success. The runtime keeps an error of its thread until it is read: it is
///                      read here, so that no later call that succeeds returns it
inline void expects_success(cudaError_t code, char const* what)
{
    if (code == cudaSuccess) { return; }
    static_cast<void>(cudaGetLastError());
    mdkv::detail::raise(cuda_error{what, code});
}

} // namespace MDKV_NAMESPACE::gpu
