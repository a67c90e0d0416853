/// \file recompress.hpp: recompress with the CPU's stages.
#pragma once

#include <mdkv/recompress.hpp>

#include <mdkv/cpu/allocate.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/finite.hpp>
#include <mdkv/cpu/pack.hpp>
#include <mdkv/cpu/pool.hpp>
#include <mdkv/cpu/run.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/cpu/slots.hpp>
#include <mdkv/cpu/width.hpp>
