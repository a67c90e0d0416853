/// \file mdkv.cuh: everything, for CUDA sources: mdkv.hpp and the CUDA backend
#pragma once

#include <mdkv/mdkv.hpp>

#include <mdkv/gpu/allocate.cuh>
#include <mdkv/gpu/append.cuh>
#include <mdkv/gpu/attend.cuh>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/basis.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/gpu/compress.cuh>
#include <mdkv/gpu/finite.cuh>
#include <mdkv/gpu/memory.cuh>
#include <mdkv/gpu/merge.cuh>
#include <mdkv/gpu/pack.cuh>
#include <mdkv/gpu/pages.cuh>
#include <mdkv/gpu/pool.cuh>
#include <mdkv/gpu/recompress.cuh>
#include <mdkv/gpu/score.cuh>
#include <mdkv/gpu/slots.cuh>
