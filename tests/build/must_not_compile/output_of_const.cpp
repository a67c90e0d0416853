// expect: is_const_v
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>

auto output_of_const(float const* data)
{
    return mdkv::out(mdkv::cpu::backend{}, data, 2, 8, 64);
}
