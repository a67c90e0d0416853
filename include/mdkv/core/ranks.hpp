/// \file ranks.hpp: heads on several ranks that share one budget, which exchange sums of integers and nothing else.
#pragma once

#include <mdkv/core/ground.hpp>

namespace MDKV_NAMESPACE
{

/// Ranks are processes, threads or GPUs, each of which has some heads of every layer of a prompt, or none. A prompt with
/// `prompt_shape::ranks` chooses rungs, bit for bit, as one rank with all heads does, within one limit for the heads of all
/// ranks. All ranks make the same calls of `finish_layer` and `allocate` in the same order. If one of them refuses its arguments,
/// or if ranks differ where they must not, the call throws on every rank. A rank that ends without a call leaves the others to
/// their transport's limit of time.
struct ranks
{
    index_t first_head = 0; ///< number of this rank's first head in each layer
    index_t heads      = 0; ///< heads of a layer, on all ranks together

    /// Makes each of the numbers, which lie in the host's memory, its sum over all ranks. All ranks call it alike. Its exceptions
    /// leave the call.
    void (*sum)(void* state, std::int64_t* numbers, index_t count) = nullptr;
    void* state                                                    = nullptr; ///< first argument of `sum`
};

} // namespace MDKV_NAMESPACE
