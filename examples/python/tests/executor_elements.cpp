// The element types that a build with the executor of PTX leaves out, in the place of engine.cpp and engine.cu.
#include <mdkv/core/error.hpp>

#include "../module/engine.hpp"

namespace mdkv_python
{

[[noreturn]] static void refuse()
{
    throw mdkv::invalid_argument{"this build, for tests, serves float16 alone"};
}

template <mdkv::element T, class Place>
std::unique_ptr<prompt> make_prompt(std::shared_ptr<Place>, mdkv::preset const&, prompt_sizes const&)
{
    refuse();
}
template <mdkv::element T, class Place>
std::unique_ptr<reader> make_reader(
    std::shared_ptr<Place>, mdkv::preset const&, prompt_sizes const&, mdkv::reader_options const&)
{
    refuse();
}
template <mdkv::element T>
std::unique_ptr<layer> make_layer(
    std::shared_ptr<device>, layer_facts const&, mdkv::cache_view<T const, mdkv::space::host> const&)
{
    refuse();
}
template <mdkv::element T>
std::unique_ptr<layer> make_mapped_layer(
    std::shared_ptr<host>, mdkv::cache_view<T const, mdkv::space::host> const&, mdkv::ratio_set const&, index_t)
{
    refuse();
}
template <mdkv::element T>
std::vector<float> log_sum_exps(host&, tensor const&, tensor const&, float)
{
    refuse();
}

#define MDKV_REFUSED_ON(T, Place)                                                                                      \
    template std::unique_ptr<prompt> make_prompt<T>(std::shared_ptr<Place>, mdkv::preset const&, prompt_sizes const&); \
    template std::unique_ptr<reader> make_reader<T>(                                                                   \
        std::shared_ptr<Place>, mdkv::preset const&, prompt_sizes const&, mdkv::reader_options const&);
#define MDKV_REFUSED(T)                                                                                                \
    MDKV_REFUSED_ON(T, host)                                                                                           \
    MDKV_REFUSED_ON(T, device)                                                                                         \
    template std::unique_ptr<layer> make_layer<T>(                                                                     \
        std::shared_ptr<device>, layer_facts const&, mdkv::cache_view<T const, mdkv::space::host> const&);             \
    template std::unique_ptr<layer> make_mapped_layer<T>(                                                              \
        std::shared_ptr<host>, mdkv::cache_view<T const, mdkv::space::host> const&, mdkv::ratio_set const&, index_t);  \
    template std::vector<float> log_sum_exps<T>(host&, tensor const&, tensor const&, float);
MDKV_REFUSED(float)
MDKV_REFUSED(mdkv::bfloat16)

} // namespace mdkv_python
