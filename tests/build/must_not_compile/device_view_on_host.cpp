// expect: space::host
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/engine/finite.hpp>

struct device_backend
{
    static constexpr mdkv::space memory_space = mdkv::space::device;
};

void device_view_on_host(mdkv::cpu::backend const& on, mdkv::half const* keys)
{
    mdkv::in_view<mdkv::half, 3, mdkv::cpu::backend> const view = mdkv::in(device_backend{}, keys, 2, 8, 64);
    mdkv::expects_finite(on, "keys", view);
}
