// expect: attend: no implementation for this backend is visible; include <mdkv/cpu/attend.hpp>
#include <mdkv/attend.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>

void missing_implementation(mdkv::cpu::backend const& on, float const* queries, float* output, float* lse)
{
    mdkv::cache_view<float, mdkv::space::host> const cache;
    mdkv::attend(on, mdkv::in(on, queries, 8, 64), cache, {}, mdkv::out(on, output, 8, 64), mdkv::out(on, lse, 8));
}
