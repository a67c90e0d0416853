// expect: const float
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>

using on_host = mdkv::cpu::backend;

mdkv::out_view<float, 3, on_host> input_as_output(mdkv::in_view<float, 3, on_host> const& input)
{
    return input;
}
