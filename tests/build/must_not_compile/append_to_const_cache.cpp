// expect: no matching function for call to
#include <mdkv/append.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>

void append_to_const_cache(mdkv::cpu::backend const& on, float const* row, mdkv::cpu::cache<float> const& cache)
{
    mdkv::append(on, mdkv::in(on, row, 8, 64), mdkv::in(on, row, 8, 64), cache.view());
}
