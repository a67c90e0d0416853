/// \file merge.cuh: merge_attention on the GPU.
#pragma once

#include <mdkv/merge.hpp>

#include <mdkv/detail/merge.hpp>
#include <mdkv/gpu/run.cuh>

namespace mdkv::gpu
{

using mdkv::detail::merge_attention_impl;

} // namespace mdkv::gpu
