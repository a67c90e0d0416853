/// \file device_layers.hpp: layers compressed and attended on a GPU, behind an interface that host code can include
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/prompt.hpp>

#include <cstdint>
#include <memory>

#include "systems/layer_cache.hpp"
#include "systems/prompt_layer.hpp"

namespace runner
{

/// What a layer is to become.
struct device_request
{
    mdkv::preset by;                    // does not replay
    std::int64_t bytes       = 0;       // the layer may keep
    std::uint8_t* rungs      = nullptr; // [heads, past] receives the tokens' rungs, or null; in host memory
    std::int64_t tail_tokens = 0;       // room made for appended tokens; more of them cost a copy of the tail
};

/// One for a sequence. Its layers work on one stream and share their scratch memory, so they are used one at a time.
template <mdkv::element T>
class device_layers
{
public:
    virtual ~device_layers() = default;

    /// Returns when the layer is compressed; its host memory may then go.
    /// \param report   as compress returns it
    /// \return a cache that must not outlive this
    /// \throws mdkv::invalid_argument, mdkv::non_finite_input   as compress
    [[nodiscard]] virtual std::unique_ptr<layer_cache> compress(
        prompt_layer<T> const& layer, device_request const& request, mdkv::compress_report& report) = 0;

    /// The same cache on the device; its tail is empty.
    /// \param group   query heads that share each cached head
    [[nodiscard]] virtual std::unique_ptr<layer_cache> copy(mdkv::cpu::cache<T> const& made, std::int64_t group) = 0;
};

/// \throws mdkv::error   this program was built without CUDA, or no GPU answers
template <mdkv::element T>
[[nodiscard]] std::unique_ptr<device_layers<T>> make_device_layers();

} // namespace runner
