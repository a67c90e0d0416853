// expect: expects_finite: no implementation for this backend is visible; include <mdkv/cpu/finite.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/finite.hpp>

void missing_implementation(mdkv::cpu::backend const& on, float const* keys)
{
    mdkv::expects_finite(on, "keys", mdkv::in(on, keys, 2, 8, 64));
}
