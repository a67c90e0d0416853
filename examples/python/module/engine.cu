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

template <mdkv::element T, class Place>
std::unique_ptr<prompt> make_prompt(std::shared_ptr<Place> on, mdkv::preset const& chosen, prompt_sizes const& sizes)
{
    return std::make_unique<prompt_of<T, Place>>(std::move(on), chosen, sizes);
}

template <mdkv::element T, class Place>
std::unique_ptr<reader> make_reader(std::shared_ptr<Place> on, mdkv::preset const& chosen, prompt_sizes const& sizes,
    mdkv::reader_options const& options)
{
    return std::make_unique<reader_of<T, Place>>(std::move(on), chosen, sizes, options);
}

#if defined(MDKV_PYTHON_FIRST_ELEMENT)
std::shared_ptr<device> make_device(std::uintptr_t stream)
{
    return std::make_shared<device>(stream);
}
#endif

template std::unique_ptr<prompt> make_prompt<MDKV_PYTHON_ELEMENT, device>(
    std::shared_ptr<device>, mdkv::preset const&, prompt_sizes const&);

template std::unique_ptr<reader> make_reader<MDKV_PYTHON_ELEMENT, device>(
    std::shared_ptr<device>, mdkv::preset const&, prompt_sizes const&, mdkv::reader_options const&);

} // namespace mdkv_python
