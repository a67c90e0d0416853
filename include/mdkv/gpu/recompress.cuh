/// \file recompress.cuh: recompress with the GPU's stages.
#pragma once

#include <mdkv/recompress.hpp>

#include <mdkv/gpu/allocate.cuh>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/gpu/finite.cuh>
#include <mdkv/gpu/pack.cuh>
#include <mdkv/gpu/pool.cuh>
#include <mdkv/gpu/run.cuh>
#include <mdkv/gpu/score.cuh>
#include <mdkv/gpu/slots.cuh>
