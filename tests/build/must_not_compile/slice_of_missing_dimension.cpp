// expect: slice: the view has no such dimension
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>

auto fourth_dimension_of_three(float* data)
{
    return mdkv::slice<3>(mdkv::out(mdkv::cpu::backend{}, data, 2, 8, 64), 0, 4);
}
