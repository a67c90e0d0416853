/// \file added_error.hpp: what attention adds to the error of the codes that it reads
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>

#include "support/decoding.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"

#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

namespace support
{

/// Attention over 700 tokens stored as `stored`, by a backend, in float; over the tokens as their codes say, in double; and
/// over the tokens themselves.
struct added_error
{
    double added = 0; ///< squared: outputs of the backend minus those of the codes
    double lost  = 0; ///< squared: outputs of the codes minus those of the tokens
    double lse   = 0; ///< root mean square

    /// Root mean square of what is added, divided by that of what is lost.
    [[nodiscard]] double of_outputs() const { return std::sqrt(added / lost); }

    /// \param coordinates   of a query; the others are 0
    /// \param attend        gets a packed cache and queries [8, dim], and returns `output` and `lse`
    template <class Attend>
    added_error(mdkv::rung stored, index_t dim, index_t coordinates, Attend const& attend)
    {
        constexpr index_t tokens = 700;
        packed_layer<mdkv::half> const layer{
            {.heads = 2, .tokens = tokens, .window = 0, .dims = {dim, dim}, .rungs = {mdkv::drop, stored}}, 1};
        auto const cache = layer.packed();
        auto q           = random_queries<float>(8, dim);
        for (index_t row = 0; row < 8; ++row)
        {
            for (index_t d = coordinates; d < dim; ++d) { q.set(0, row, d); }
        }
        auto const got     = attend(cache, q);
        double const scale = 1.0 / std::sqrt(static_cast<double>(dim));
        auto const add     = [](double& sum, double a, double b) { sum += (a - b) * (a - b); };
        for (index_t h = 0; h < 2; ++h)
        {
            std::vector<whole_token> original;
            for (index_t t = 0; t < tokens; ++t)
            {
                whole_token token;
                for (index_t d = 0; d < dim; ++d)
                {
                    token.key.push_back(static_cast<double>(mdkv::widen(layer.keys.get(h, t, d))));
                    token.value.push_back(static_cast<double>(mdkv::widen(layer.values.get(h, t, d))));
                }
                original.push_back(std::move(token));
            }
            auto const reconstructed = reconstructed_tokens(cache.view(), h);
            for (index_t row = h * 4; row < h * 4 + 4; ++row)
            {
                std::vector<double> query;
                for (index_t d = 0; d < dim; ++d) { query.push_back(static_cast<double>(q.get(row, d))); }
                naive_attention const exact{original, query, dim, scale};
                naive_attention const read{reconstructed, query, dim, scale};
                add(lse, static_cast<double>(got.lse.get(row)), read.lse);
                for (index_t c = 0; c < dim; ++c)
                {
                    auto const i = static_cast<std::size_t>(c);
                    add(added, static_cast<double>(got.output.get(row, c)), read.output[i]);
                    add(lost, read.output[i], exact.output[i]);
                }
            }
        }
        lse = std::sqrt(lse / 8);
    }
};

} // namespace support
