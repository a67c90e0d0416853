#include <mdkv/replay/replay.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/gpu/backend.cuh>

#include "gpu/support/device.hpp"
#include "support/advance_cases.hpp"
#include "support/host.hpp"

#include <cmath>
#include <cstddef>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::advance_case;
using support::device_tensor;
using support::tensor;

template <class B>
rotary_encoding<B> encoding_of(advance_case const& x)
{
    return {.base = x.base, .rotating = x.rotating, .pairs = x.pairs};
}

template <class T>
void check(advance_case const& x, index_t rows, index_t by, bool in_place)
{
    CAPTURE(x.dim);
    CAPTURE(x.rotating);
    CAPTURE(rows);
    auto const given = support::rounded<T>(support::random_rows<double>(3, rows, x.dim));
    auto const table = support::table_of(x);
    auto on_host     = encoding_of<cpu::backend>(x);
    auto on_device   = encoding_of<gpu::backend>(x);
    device_tensor<double, 1> const f{table};
    if (x.table) { on_host.frequencies = table.in(), on_device.frequencies = f.in(); }
    tensor<T, 3> want{{3, rows, x.dim}};
    support::run([&](cpu::backend const& on) { advance(on, given.in(), by, on_host, want.out()); });
    device_tensor<T, 3> own{given};
    device_tensor<T, 3> other{{3, rows, x.dim}, {.slack = 3}};
    support::run_on_device([&](gpu::backend const& on) {
        if (in_place) { advance(on, own.in(), by, on_device, own.out()); }
        else { advance(on, own.in(), by, on_device, other.out()); }
    });
    std::vector<T> const got    = in_place ? own.elements() : other.elements();
    std::vector<T> const wanted = want.elements();
    double const unit           = std::is_same_v<T, float> ? 0x1p-22 : std::is_same_v<T, half> ? 0x1p-10 : 0x1p-7;
    int wrong                   = 0;
    for (std::size_t i = 0; i < got.size(); ++i)
    {
        double const a = double{widen(got[i])};
        double const b = double{widen(wanted[i])};
        wrong += std::fabs(a - b) <= unit * (std::fabs(b) + 0x1p-10) + 0x1p-22 ? 0 : 1;
    }
    CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("advance on the GPU gives the CPU's rows, to rounding, in place or not", T, float, half, bfloat16)
{
    for (advance_case const& x : support::advance_cases())
    {
        for (index_t const rows : {1, 64, 70}) { check<T>(x, rows, 2048, rows == 70); }
    }
    check<T>({}, 3, -1000000, false);
}

} // namespace
