/// \file advance_cases.hpp: rotary encodings and rows that the tests of advance on both backends share, encoded in double
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/replay/replay.hpp>

#include "support/host.hpp"
#include "support/random.hpp"

#include <cmath>
#include <vector>

namespace support
{

struct advance_case
{
    index_t dim              = 64;
    index_t rotating         = 0;
    double base              = 10000;
    mdkv::rotary_pairs pairs = mdkv::rotary_pairs::halves;
    bool table               = false; ///< the base's frequencies scaled, as models for longer contexts have them

    [[nodiscard]] index_t turned() const { return rotating == 0 ? dim : rotating; }
};

[[nodiscard]] inline std::vector<advance_case> advance_cases()
{
    std::vector<advance_case> all;
    for (auto const pairs : {mdkv::rotary_pairs::halves, mdkv::rotary_pairs::neighbours})
    {
        for (bool const table : {false, true})
        {
            all.push_back({64, 0, 10000, pairs, table});
            all.push_back({80, 20, 1000000, pairs, table}); // partial
            all.push_back({2, 2, 500, pairs, table});
            all.push_back({130, 64, 5e5, pairs, table});
        }
    }
    return all;
}

[[nodiscard]] inline double frequency_of(advance_case const& x, index_t pair)
{
    double const plain = std::pow(x.base, -2.0 * static_cast<double>(pair) / static_cast<double>(x.turned()));
    return !x.table ? plain : pair % 3 == 0 ? plain / 8 : plain * 0.75;
}

[[nodiscard]] inline tensor<double, 1> table_of(advance_case const& x)
{
    tensor<double, 1> all{{x.turned() / 2}};
    for (index_t i = 0; i < x.turned() / 2; ++i) { all.set(frequency_of(x, i), i); }
    return all;
}

/// The coordinate that rotates with this one, or -1.
[[nodiscard]] inline index_t partner(index_t d, advance_case const& x)
{
    if (d >= x.turned()) { return -1; }
    if (x.pairs == mdkv::rotary_pairs::neighbours) { return d % 2 == 0 ? d + 1 : d - 1; }
    return d < x.turned() / 2 ? d + x.turned() / 2 : d - x.turned() / 2;
}

/// Rows of which row i stands at position first + i, encoded in double.
[[nodiscard]] inline tensor<double, 3> encoded(tensor<double, 3> const& plain, advance_case const& x, index_t first)
{
    tensor<double, 3> to{{plain.extent(0), plain.extent(1), plain.extent(2)}};
    for (index_t h = 0; h < plain.extent(0); ++h)
    {
        for (index_t i = 0; i < plain.extent(1); ++i)
        {
            for (index_t d = 0; d < plain.extent(2); ++d)
            {
                index_t const other = partner(d, x);
                double value        = plain.get(h, i, d);
                if (other >= 0)
                {
                    bool const halves  = x.pairs == mdkv::rotary_pairs::halves;
                    index_t const pair = halves ? d % (x.turned() / 2) : d / 2;
                    double const angle = static_cast<double>(first + i) * frequency_of(x, pair);
                    double const sign  = other > d ? -1.0 : 1.0;
                    value              = value * std::cos(angle) + sign * plain.get(h, i, other) * std::sin(angle);
                }
                to.set(value, h, i, d);
            }
        }
    }
    return to;
}

template <class T>
[[nodiscard]] tensor<T, 3> random_rows(index_t heads, index_t rows, index_t dim)
{
    source random{"rows to advance", dim};
    tensor<T, 3> all{{heads, rows, dim}};
    for (index_t h = 0; h < heads; ++h)
    {
        for (index_t i = 0; i < rows; ++i)
        {
            for (index_t d = 0; d < dim; ++d) { all.set(static_cast<T>(static_cast<float>(random.normal())), h, i, d); }
        }
    }
    return all;
}

template <class T>
[[nodiscard]] tensor<T, 3> rounded(tensor<double, 3> const& from)
{
    tensor<T, 3> to{{from.extent(0), from.extent(1), from.extent(2)}};
    for (index_t h = 0; h < from.extent(0); ++h)
    {
        for (index_t i = 0; i < from.extent(1); ++i)
        {
            for (index_t d = 0; d < from.extent(2); ++d)
            {
                to.set(mdkv::narrow<T>(static_cast<float>(from.get(h, i, d))), h, i, d);
            }
        }
    }
    return to;
}

} // namespace support
