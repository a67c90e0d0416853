// expect: no matching function for call to
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/engine/finite.hpp>

void unknown_element(mdkv::cpu::backend const& on, double const* keys)
{
    mdkv::expects_finite(on, "keys", mdkv::in(on, keys, 2, 8, 64));
}
