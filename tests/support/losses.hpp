/// \file losses.hpp: losses without keys, values or queries behind them
#pragma once

#include "support/host.hpp"
#include "support/random.hpp"

#include <cmath>

namespace support
{

/// [heads, rungs, tokens], positive, of about this size and very uneven, as losses are.
[[nodiscard]] inline tensor<float, 3> random_losses(index_t heads, index_t rungs, index_t tokens, float size)
{
    source random{"losses", tokens};
    tensor<float, 3> loss{{heads, rungs, tokens}};
    for (index_t h = 0; h < heads; ++h)
    {
        for (index_t r = 0; r < rungs; ++r)
        {
            for (index_t i = 0; i < tokens; ++i)
            {
                loss.set(size * static_cast<float>(std::exp(2 * random.normal())), h, r, i);
            }
        }
    }
    return loss;
}

} // namespace support
