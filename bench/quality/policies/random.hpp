/// \file random.hpp: random scores, which a policy must beat
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runner/scratch_memory.hpp"
#include "prompt_layer.hpp"

namespace runner
{

/// The output function of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014): a
/// bijection after which neighbouring numbers have nothing in common.
[[nodiscard]] constexpr std::uint64_t mix_bits(std::uint64_t z) noexcept
{
    z += 0x9e3779b97f4a7c15U;
    z = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27U)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31U);
}

/// Uniform in [0, 1), a function of seed, layer, head and token alone: the same on every machine, for any number of
/// threads.
///
/// \return [heads, past]
template <mdkv::element T>
[[nodiscard]] std::vector<float> random_scores(
    prompt_layer<T> const& layer, std::uint64_t seed, mdkv::cpu::executor_ref, scratch_memory&)
{
    std::vector<float> scores;
    scores.reserve(static_cast<std::size_t>(layer.heads * layer.past()));
    for (std::int64_t h = 0; h < layer.heads; ++h)
    {
        std::uint64_t const of_layer = mix_bits(mix_bits(seed) ^ static_cast<std::uint64_t>(layer.layer));
        std::uint64_t const of_head  = mix_bits(of_layer ^ static_cast<std::uint64_t>(h));
        for (std::int64_t t = 0; t < layer.past(); ++t)
        {
            std::uint64_t const bits = mix_bits(of_head ^ static_cast<std::uint64_t>(t));
            scores.push_back(static_cast<float>(bits >> 40U) * 0x1p-24F);
        }
    }
    return scores;
}

} // namespace runner
