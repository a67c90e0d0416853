/// \file device_layers.hpp: layers compressed and attended on a GPU, behind an interface that host code can include
#pragma once

#include <mdkv/compress.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/stages/allocate.hpp>
#include <mdkv/stages/pool.hpp>
#include <mdkv/stages/score.hpp>

#include <cstdint>
#include <memory>
#include <span>

#include "policies/layer_cache.hpp"
#include "policies/prompt_layer.hpp"

namespace runner
{

/// What a layer is to become; all pointers are to host memory.
struct device_request
{
    std::int64_t bytes = 0; // the layer may keep
    mdkv::pool_options pooling{};
    mdkv::projection_charge charge = mdkv::projection_charge::by_use;
    float even_queries             = 0.0F;
    std::span<float const> query_weights{}; // [Q] as many of the layer's last queries score
    std::uint8_t* rungs      = nullptr;     // [heads, past] receives the tokens' rungs, or null
    std::int64_t tail_tokens = 0;           // room made for appended tokens; more of them cost a copy of the tail
};

/// One for a sequence. Its layers work on one stream and share their scratch memory, so they are used one at a time.
template <mdkv::element T>
class device_layers
{
public:
    virtual ~device_layers() = default;

    /// Returns when the layer is compressed; its host memory may then go.
    /// \param report   as compress returns it on the CPU
    /// \return a cache that must not outlive this
    /// \throws mdkv::invalid_argument, mdkv::non_finite_input   as compress on the CPU; and the ratio set has no rung 1
    ///                                                          for a layer that the budget holds whole
    [[nodiscard]] virtual std::unique_ptr<layer_cache> compress(prompt_layer<T> const& layer,
        mdkv::ratio_set const& ratios, device_request const& request, mdkv::compress_report& report) = 0;

    /// The same cache on the device; its tail is empty.
    /// \param group   query heads that share each cached head
    [[nodiscard]] virtual std::unique_ptr<layer_cache> copy(mdkv::cpu::cache<T> const& made, std::int64_t group) = 0;
};

/// \throws mdkv::error   this program was built without CUDA, or no GPU answers
template <mdkv::element T>
[[nodiscard]] std::unique_ptr<device_layers<T>> make_device_layers();

} // namespace runner
