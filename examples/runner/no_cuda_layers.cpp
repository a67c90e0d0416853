/// \file no_cuda_layers.cpp: stands in for cuda_layers.cu in a build without nvcc
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <memory>

#include "device_layers.hpp"

namespace runner
{

template <mdkv::element T>
std::unique_ptr<device_layers<T>> make_device_layers()
{
    throw mdkv::error{"--backend cuda: this build has no CUDA backend; configure with nvcc on the PATH (MDKV_CUDA=ON)"};
}

template std::unique_ptr<device_layers<float>> make_device_layers<float>();
template std::unique_ptr<device_layers<mdkv::half>> make_device_layers<mdkv::half>();

} // namespace runner
