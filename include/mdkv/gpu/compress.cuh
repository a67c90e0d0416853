/// \file compress.cuh: compress with the GPU's stages.
#pragma once

#include <mdkv/compress.hpp>

#include <mdkv/gpu/allocate.cuh>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/basis.cuh>
#include <mdkv/gpu/finite.cuh>
#include <mdkv/gpu/pack.cuh>
#include <mdkv/gpu/pool.cuh>
#include <mdkv/gpu/run.cuh>
#include <mdkv/gpu/score.cuh>

namespace mdkv::gpu
{

template <element T>
using compressed_layer = mdkv::compressed_layer<T, space::device>;

} // namespace mdkv::gpu
