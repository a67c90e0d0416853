// Prompts and caches of one element type, MDKV_PYTHON_ELEMENT, on a CUDA device.
#include <mdkv/core/types.hpp>
#include <mdkv/gpu/attend.cuh>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/score.cuh>

#include <memory>

#include "device.cuh"
#include "engine_of.hpp"
#include "reader_of.hpp"

namespace mdkv_python
{

template <mdkv::element T>
std::unique_ptr<layer> make_layer(
    std::shared_ptr<device> on, layer_facts const& facts, mdkv::cache_view<T const, mdkv::space::host> const& stored)
{
    auto const turn    = on->turn();
    auto const& layout = stored.layout;
    place_types<device>::cache<T> there{layout, stored.arena_bytes, stored.tail_capacity, on->source()};
    auto const to   = there.view();
    auto const copy = [&](auto const* from, void* first, index_t bytes) {
        if (bytes > 0) { on->copy(reinterpret_cast<std::byte const*>(from), static_cast<std::byte*>(first), bytes); }
    };
    copy(stored.arena, to.arena, stored.arena_bytes);
    copy(stored.tail, to.tail, layout.tail_bytes(stored.tail_capacity, sizeof(T)));
    copy(stored.heads, to.heads, layout.heads * index_t{sizeof(mdkv::head_entry)});
    copy(&facts.appended, to.appended, sizeof(index_t));
    there.fold_limit = facts.fold_limit;
    return std::make_unique<layer_of<T, device>>(on, facts.ratios, facts.read, std::move(there), facts.appended);
}

#if defined(MDKV_PYTHON_FIRST_ELEMENT)
std::shared_ptr<device> make_device(std::uintptr_t stream, std::unique_ptr<device_source> from)
{
    int count = 0;
    mdkv::gpu::expects_success(
        cudaGetDeviceCount(&count), "CudaBackend: there is no GPU whose driver is new enough for this package");
    return std::make_shared<device>(stream, std::move(from));
}
index_t scratch_bytes(device& on)
{
    return on.scratch_bytes();
}
void release_scratch(device& on)
{
    on.release_scratch();
}
#endif

template std::unique_ptr<layer> make_layer<MDKV_PYTHON_ELEMENT>(
    std::shared_ptr<device>, layer_facts const&, mdkv::cache_view<MDKV_PYTHON_ELEMENT const, mdkv::space::host> const&);

template std::unique_ptr<prompt> make_prompt<MDKV_PYTHON_ELEMENT, device>(
    std::shared_ptr<device>, mdkv::preset const&, prompt_sizes const&);

template std::unique_ptr<reader> make_reader<MDKV_PYTHON_ELEMENT, device>(
    std::shared_ptr<device>, mdkv::preset const&, prompt_sizes const&, mdkv::reader_options const&);

} // namespace mdkv_python
