/// \file map.hpp: mdkv_run map: how many bytes each token got, layer by layer and head by head
#pragma once

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include <unistd.h>

#include "common_options.hpp"
#include "prefill.hpp"
#include "sequence_cache.hpp"
#include "session.hpp"
#include "terminal.hpp"

namespace runner
{

struct map_options
{
    std::string text_path;
    std::int64_t context    = 2048;
    std::int64_t kv_size    = 256;
    std::string policy_name = "paper";
    std::string csv_path;
    std::int64_t columns = 96;
};

/// Coordinates of every token: [layers, KV heads, tokens].
struct byte_map
{
    std::int64_t layers, heads, tokens, most;
    std::vector<std::int64_t> bytes;

    [[nodiscard]] std::int64_t at(std::int64_t layer, std::int64_t head, std::int64_t token) const
    {
        return bytes[static_cast<std::size_t>((layer * heads + head) * tokens + token)];
    }
};

template <mdkv::element T>
[[nodiscard]] byte_map make_map(session& run, common_options const& common, map_options const& options)
{
    auto const tokens =
        first_tokens(run.words(), options.text_path, options.context, std::to_string(options.context) + " of context");
    model_shape const& shape = run.model().shape();
    policy const chosen      = chosen_policy(options.policy_name, common);
    sequence_cache<T> cache{run.model(), chosen, mdkv::budget::kv_size(options.kv_size), common.window, 0};
    mdkv::head_dims const dims{shape.key_dim, shape.value_dim};
    std::int64_t const whole = (dims.keys + dims.values) * std::int64_t{sizeof(T)}; // bytes of a token as it is
    byte_map map{shape.layers, shape.kv_heads, options.context, whole,
        std::vector<std::int64_t>(static_cast<std::size_t>(shape.layers * shape.kv_heads * options.context), whole)};
    std::int64_t const past = options.context - std::min(cache.window(), options.context);
    auto const of_layer     = static_cast<std::size_t>(shape.kv_heads * past);
    std::vector<std::uint8_t> rungs(static_cast<std::size_t>(shape.layers) * of_layer); // [layers, kv_heads, past]
    scratch_memory scratch;
    progress_bar bar{"prefill of " + std::to_string(options.context) + " tokens"};
    static_cast<void>(prefill<T>(
        run.model(), tokens, queries_to_keep(chosen, common.window, options.context), run.executor(),
        [&](layer_kv<T> const& kv) {
            cache.compress_layer(
                kv, run.executor(), scratch, rungs.data() + static_cast<std::size_t>(kv.layer) * of_layer);
        },
        [&](std::int64_t done, std::int64_t total) {
            bar.show(done, total);
            if (interrupt_requested()) { throw interrupted{}; }
            return true;
        },
        [&](layer_chunk<T> const& chunk) { cache.score_chunk(chunk, chunk.tokens, run.executor(), scratch); }));
    for (std::int64_t head = 0; head < shape.layers * shape.kv_heads; ++head)
    {
        for (std::int64_t t = 0; t < past; ++t)
        {
            std::size_t const rung = rungs[static_cast<std::size_t>(head * past + t)];
            map.bytes[static_cast<std::size_t>(head * options.context + t)] =
                rung < chosen.ratios.size() ? chosen.ratios.bytes(rung, dims, std::int64_t{sizeof(T)}) : whole;
        }
    }
    return map;
}

namespace detail
{

/// One cell: the mean share of its tokens' bytes, from 0 to 1. Colours on a terminal, letters elsewhere.
[[nodiscard]] inline std::string cell(double share, bool colours)
{
    if (!colours)
    {
        constexpr std::string_view shades = " .:-=+*#%@";
        auto const i                      = static_cast<std::size_t>(std::clamp(share * 9.0 + 0.999, 0.0, 9.0));
        return std::string(1, shades[i]);
    }
    // From near black through violet and orange to pale yellow; the square root shows low shares.
    double const x = std::sqrt(share);
    auto const mix = [&](double low, double middle, double high) {
        return static_cast<int>(x < 0.5 ? low + (middle - low) * 2 * x : middle + (high - middle) * (2 * x - 1));
    };
    return "\033[48;2;" + std::to_string(mix(10, 190, 252)) + ";" + std::to_string(mix(10, 55, 250)) + ";"
           + std::to_string(mix(30, 90, 180)) + "m \033[0m";
}

} // namespace detail

inline void print_map(byte_map const& map, std::int64_t columns)
{
    bool const colours        = isatty(STDOUT_FILENO) != 0;
    std::int64_t const across = std::min(columns, map.tokens);
    for (std::int64_t layer = 0; layer < map.layers; ++layer)
    {
        for (std::int64_t head = 0; head < map.heads; ++head)
        {
            std::string line;
            for (std::int64_t c = 0; c < across; ++c)
            {
                std::int64_t const begin = map.tokens * c / across;
                std::int64_t const end   = map.tokens * (c + 1) / across;
                std::int64_t total       = 0;
                for (std::int64_t t = begin; t < end; ++t) { total += map.at(layer, head, t); }
                line +=
                    detail::cell(static_cast<double>(total) / static_cast<double>((end - begin) * map.most), colours);
            }
            std::printf("%2lld.%lld |%s|\n", static_cast<long long>(layer), static_cast<long long>(head), line.c_str());
        }
    }
}

/// layer,head,token,bytes
/// \throws mdkv::error   the file cannot be written
inline void write_map(byte_map const& map, std::string const& path)
{
    std::ofstream file{path};
    file << "layer,head,token,bytes\n";
    for (std::int64_t layer = 0; layer < map.layers; ++layer)
    {
        for (std::int64_t head = 0; head < map.heads; ++head)
        {
            for (std::int64_t t = 0; t < map.tokens; ++t)
            {
                file << layer << ',' << head << ',' << t << ',' << map.at(layer, head, t) << '\n';
            }
        }
    }
    if (!file.flush()) { throw mdkv::error{path + ": cannot be written"}; }
}

template <mdkv::element T>
int run_map(session& run, common_options const& common, map_options const& options)
{
    mdkv::expects(options.context >= 1, "context: ", options.context, " is not positive");
    mdkv::expects(options.columns >= 1, "columns: ", options.columns, " is not positive");
    byte_map const map = make_map<T>(run, common, options);
    print_map(map, options.columns);
    std::printf("layer.head down, %lld tokens across; the brighter a cell, the more of its tokens' %lld bytes are kept "
                "(policy %s, KV size %lld)\n",
        static_cast<long long>(map.tokens), static_cast<long long>(map.most), options.policy_name.c_str(),
        static_cast<long long>(options.kv_size));
    if (!options.csv_path.empty()) { write_map(map, options.csv_path); }
    return 0;
}

} // namespace runner
