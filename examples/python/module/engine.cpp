// Prompts and caches of one element type, MDKV_PYTHON_ELEMENT: compiled once for each type, side by side.
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/score.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine_of.hpp"
#include "host.hpp"
#include "mapped_cache.hpp"
#include "reader_of.hpp"

namespace mdkv_python
{

template <mdkv::element T>
std::unique_ptr<layer> make_layer(
    std::shared_ptr<host> on, mdkv::ratio_set const& ratios, index_t read, mdkv::cpu::cache<T> cache, index_t appended)
{
    return std::make_unique<layer_of<T, host>>(std::move(on), ratios, read, std::move(cache), appended);
}

template <mdkv::element T>
std::unique_ptr<layer> make_mapped_layer(std::shared_ptr<host> on,
    mdkv::cache_view<T const, mdkv::space::host> const& stored, mdkv::ratio_set const& ratios, index_t read)
{
    return std::make_unique<layer_of<T, host, mapped_cache<T>>>(
        std::move(on), ratios, read, mapped_cache<T>{stored}, stored.layout.heads == 0 ? 0 : *stored.appended);
}

template <mdkv::element T>
std::vector<float> log_sum_exps(host& on, tensor const& queries, tensor const& keys, float scale)
{
    auto const q         = in<T, 3>(mdkv::cpu::backend{}, queries);
    auto const k         = in<T, 3>(mdkv::cpu::backend{}, keys);
    index_t const count  = q.extent(1);
    index_t const tokens = k.extent(1);
    index_t const dim    = k.extent(2);
    index_t const heads  = k.extent(0);
    index_t const group  = heads > 0 ? q.extent(0) / heads : 1;
    mdkv::expects(q.extent(0) == group * heads && q.extent(2) == dim && count <= tokens,
        "log_sum_exps: queries [H*G, Q, D] are ", q.extent(0), " x ", count, " x ", q.extent(2), ", keys [H, N, D] ",
        heads, " x ", tokens, " x ", dim, "; H must divide H*G, D be the same, and Q at most N");
    float const factor = scale > 0 ? scale : 1 / std::sqrt(static_cast<float>(dim));
    std::vector<float> lse(static_cast<std::size_t>(q.extent(0) * count));
    on.lend([&](mdkv::cpu::backend with) {
        with.for_each(q.extent(0) * count, [&](index_t row, index_t) {
            constexpr int lanes = 16;
            index_t const h     = row / count;
            index_t const i     = row % count;
            index_t const sees  = tokens - count + i + 1;
            std::vector<float> query(static_cast<std::size_t>((dim + lanes - 1) / lanes * lanes));
            for (index_t d = 0; d < dim; ++d) { query[static_cast<std::size_t>(d)] = factor * mdkv::widen(q(h, i, d)); }
            std::vector<float> logits(static_cast<std::size_t>(sees));
            float most = -std::numeric_limits<float>::infinity();
            for (index_t t = 0; t < sees; ++t)
            {
                T const* const key = k.row(h / group, t);
                float sums[lanes]{};
                index_t d = 0;
                for (; d + lanes <= dim; d += lanes)
                {
                    for (int l = 0; l < lanes; ++l)
                    {
                        sums[l] += query[static_cast<std::size_t>(d + l)] * mdkv::widen(key[d + l]);
                    }
                }
                float logit = 0;
                for (; d < dim; ++d) { logit += query[static_cast<std::size_t>(d)] * mdkv::widen(key[d]); }
                for (float const sum : sums) { logit += sum; }
                logits[static_cast<std::size_t>(t)] = logit;
                most                                = std::max(most, logit);
            }
            double sum = 0;
            for (float const logit : logits) { sum += static_cast<double>(std::exp(logit - most)); }
            lse[static_cast<std::size_t>(row)] = most + static_cast<float>(std::log(sum));
        });
    });
    return lse;
}

template std::unique_ptr<prompt> make_prompt<MDKV_PYTHON_ELEMENT, host>(
    std::shared_ptr<host>, mdkv::preset const&, prompt_sizes const&);
template std::unique_ptr<reader> make_reader<MDKV_PYTHON_ELEMENT, host>(
    std::shared_ptr<host>, mdkv::preset const&, prompt_sizes const&, mdkv::reader_options const&);
template std::unique_ptr<layer> make_layer<MDKV_PYTHON_ELEMENT>(
    std::shared_ptr<host>, mdkv::ratio_set const&, index_t, mdkv::cpu::cache<MDKV_PYTHON_ELEMENT>, index_t);
template std::unique_ptr<layer> make_mapped_layer<MDKV_PYTHON_ELEMENT>(std::shared_ptr<host>,
    mdkv::cache_view<MDKV_PYTHON_ELEMENT const, mdkv::space::host> const&, mdkv::ratio_set const&, index_t);
template std::vector<float> log_sum_exps<MDKV_PYTHON_ELEMENT>(host&, tensor const&, tensor const&, float);

} // namespace mdkv_python
