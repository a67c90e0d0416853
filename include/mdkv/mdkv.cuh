/// \file mdkv.cuh: everything, for CUDA sources: mdkv.hpp and the CUDA backend
#pragma once

#include <mdkv/mdkv.hpp>

#include <mdkv/gpu/attend.cuh>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/gpu/memory.cuh>
#include <mdkv/gpu/score.cuh>
