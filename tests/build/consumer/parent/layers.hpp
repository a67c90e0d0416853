#pragma once

#include <mdkv/mdkv.hpp>

/// Shared by two sources of a library and one of a program.
namespace layers
{

struct sizes
{
    mdkv::index_t heads = 2, tokens = 64, window = 8, dim = 16;
};

/// A layer's keys, whose values they are as well, in codes.
mdkv::cpu::cache<mdkv::half> compressed(sizes const& s, std::vector<mdkv::half> const& keys);

/// The first number that attention to it gives.
float attended(sizes const& s, mdkv::cpu::cache<mdkv::half>& cache);

} // namespace layers
