/// \file compare.hpp: mdkv_run compare: one prefill, then the same text fed through every policy's cache beside the full one
#pragma once

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "common_options.hpp"
#include "compare_means.hpp"
#include "compare_options.hpp"
#include "decode.hpp"
#include "divergence.hpp"
#include "policies.hpp"
#include "prefill.hpp"
#include "sequence_cache.hpp"
#include "session.hpp"
#include "terminal.hpp"

namespace runner
{

namespace detail
{

/// One policy at one budget.
template <mdkv::element T>
struct contestant
{
    std::string budget;
    sequence_cache<T> cache;
    divergence difference{};
};

/// The full cache first: it is what the others are measured against, asked for or not.
template <mdkv::element T>
[[nodiscard]] std::vector<contestant<T>> contestants(
    language_model const& model, common_options const& common, compare_options const& options)
{
    std::vector<contestant<T>> all;
    auto const add = [&](policy const& p, named_budget const& given) {
        all.push_back({given.text, sequence_cache<T>{model, p, given.limit, common.window, options.continuation}});
    };
    add(find_policy("full"), {"all", mdkv::budget::kv_size(options.context)});
    model_shape const& own = model.shape();
    mdkv::layer_shape const layer{own.kv_heads, own.query_heads / own.kv_heads, options.context, 0,
        {own.key_dim, own.value_dim}, std::int64_t{sizeof(T)}};
    auto const add_folding = [&](policy const& p, named_budget const& given) {
        all.push_back({given.text, sequence_cache<T>::folding(model, p, own.layers * given.limit.in_bytes(layer),
                                       options.fold_every, common.window, "--fold-every at " + given.text)});
    };
    auto const budgets = budgets_of(options);
    for (policy const& chosen : measured_policies(common, options))
    {
        for (named_budget const& given : budgets)
        {
            if (options.fold_every > 0) { add_folding(chosen, given); }
            else { add(chosen, given); }
        }
    }
    return all;
}

/// What the layers' reports add up to.
struct allocation_summary
{
    std::vector<std::int64_t> tokens;    // by rung
    double multiplier               = 0; // mean over the layers
    double loss                     = 0;
    double gap                      = 0;
    std::int64_t unprojected_layers = 0; // whose budget could not hold the projections
};

template <mdkv::element T>
[[nodiscard]] allocation_summary summary_of(sequence_cache<T> const& cache)
{
    allocation_summary all;
    all.tokens = cache.tokens_by_rung();
    for (mdkv::compress_report const& report : cache.reports())
    {
        all.multiplier += report.chosen.multiplier / static_cast<double>(cache.reports().size());
        all.loss += report.chosen.loss;
        all.gap += report.chosen.gap();
        all.unprojected_layers += report.chosen.status == mdkv::allocation_status::unprojected_only ? 1 : 0;
    }
    return all;
}

[[nodiscard]] inline std::string shares_of(std::vector<std::int64_t> const& tokens)
{
    std::int64_t total = 0;
    for (std::int64_t const n : tokens) { total += n; }
    std::string text;
    for (std::int64_t const n : tokens)
    {
        double const share = total == 0 ? 0.0 : 100.0 * static_cast<double>(n) / static_cast<double>(total);
        text += (text.empty() ? "" : " ") + fixed(share, 1);
    }
    return text;
}

/// Whether the policy distributes tokens among rungs.
[[nodiscard]] inline bool has_rungs(policy const& p)
{
    return !p.whole() && p.kind != cache_kind::low_rank;
}

/// What the rows and columns of `print_comparison` are.
/// \param policies   those of its rows
[[nodiscard]] inline std::string legend(std::vector<policy> const& policies, std::int64_t window)
{
    std::string text =
        "bytes: those of the compressed context in all layers.\n"
        "KL nats: divergence of the next token's distribution from the full cache's. top-1 %: tokens at which\n"
        "both find the same token likeliest. added NLL: nats by which the text's own next token is less likely.\n"
        "All are means over the fed tokens.\n"
        "attend ms/token: attention in all layers, each cache on one thread.\n"
        "tokens per rung %: of the context's tokens, from the policy's first rung to its last; the last "
        + std::to_string(window)
        + " are\nleft out where they are stored whole. Rung 0 drops a token, 1 keeps it as it is, 1/4 keeps a quarter "
          "of\n"
          "its coordinates, 1:int4 keeps all of them in 4 bits each.\n";
    for (policy const& p : policies)
    {
        bool const published = p.source.starts_with("arXiv") || p.source.find(", arXiv") != std::string::npos;
        text += "  " + p.label + ": " + p.keeps + (published ? "; " + p.source : "")
                + (has_rungs(p) ? "; rungs " + text_of(p.options.ratios) : "") + "\n";
    }
    return text;
}

template <mdkv::element T>
void print_comparison(std::vector<contestant<T>> const& all, std::int64_t steps)
{
    table shown{{"policy", "budget", "bytes", "% of full", "KL nats", "top-1 %", "added NLL", "compress s",
        "attend ms/token", "tokens per rung %"}};
    for (contestant<T> const& one : all)
    {
        sequence_cache<T> const& cache = one.cache;
        policy const& p                = cache.chosen();
        shown.add({p.label, one.budget, size_text(cache.resident_bytes()),
            fixed(100.0 * static_cast<double>(cache.resident_bytes()) / static_cast<double>(cache.full_bytes()), 2),
            fixed(one.difference.kl(), 4), fixed(100 * one.difference.top1_agreement(), 1),
            fixed(one.difference.nll_difference(), 4), fixed(cache.compress_seconds(), 2),
            fixed(1000 * cache.attend_seconds() / static_cast<double>(steps), 2),
            has_rungs(p) ? shares_of(cache.tokens_by_rung()) : "-"});
    }
    std::fputs(shown.text().c_str(), stdout);
    for (contestant<T> const& one : all)
    {
        auto const layers = summary_of(one.cache).unprojected_layers;
        if (layers == 0) { continue; }
        std::printf("%s at %s: too small for projections in %lld layers; only rungs that need none were used there\n",
            one.cache.chosen().label.c_str(), one.budget.c_str(), static_cast<long long>(layers));
    }
}

template <mdkv::element T>
[[nodiscard]] nlohmann::json json_of(contestant<T> const& one, double prefill_seconds)
{
    sequence_cache<T> const& cache   = one.cache;
    allocation_summary const summary = summary_of(cache);
    nlohmann::json rungs             = nlohmann::json::array();
    for (std::size_t r = 0; has_rungs(cache.chosen()) && r < summary.tokens.size(); ++r)
    {
        rungs.push_back({{"rung", text_of(cache.chosen().options.ratios[r])}, {"tokens", summary.tokens[r]}});
    }
    return {{"policy", cache.chosen().label}, {"budget", one.budget}, {"kl", one.difference.kl()},
        {"top1", one.difference.top1_agreement()}, {"dnll", one.difference.nll_difference()},
        {"resident_bytes", cache.resident_bytes()}, {"full_bytes", cache.full_bytes()}, {"prefill_s", prefill_seconds},
        {"compress_s", cache.compress_seconds()}, {"decode_s", cache.attend_seconds()}, {"rungs", rungs},
        {"lambda", summary.multiplier}, {"gap", summary.gap}, {"loss", summary.loss},
        {"pool", cache.chosen().options.pooling.width}, {"unprojected_layers", summary.unprojected_layers}};
}

/// What one text gave.
template <mdkv::element T>
struct text_result
{
    std::string path;
    std::vector<contestant<T>> all;
    double prefill_seconds = 0;
    double decode_seconds  = 0;
};

template <mdkv::element T>
[[nodiscard]] text_result<T> compare_on(
    session& run, common_options const& common, compare_options const& options, std::string const& path)
{
    std::string const name   = std::filesystem::path{path}.filename().string() + ": "; // begins lines of progress
    auto const total         = options.context + options.continuation + 1; // the last token fed has a successor, too
    auto const tokens        = first_tokens(run.words(), path, total,
               std::to_string(options.context) + " of context, " + std::to_string(options.continuation)
                   + " to go on, and the next",
               options.control_tokens);
    model_shape const& shape = run.model().shape();
    mdkv::expects(total - 1 <= shape.context, "context: ", options.context, " + ", options.continuation,
        " tokens are more than the model's ", shape.context);
    text_result<T> result{path, contestants<T>(run.model(), common, options)};
    auto& all          = result.all;
    auto const now     = [] { return std::chrono::steady_clock::now(); };
    auto const seconds = [](auto span) { return std::chrono::duration<double>(span).count(); };

    std::int64_t queries = 0;
    for (auto const& one : all)
    {
        queries = std::max(queries, queries_to_keep(one.cache.chosen(), common.window, options.context));
    }
    scratch_memory scratch;
    double compressing = 0;
    auto const start   = now();
    {
        progress_bar bar{name + "prefill of " + std::to_string(options.context) + " tokens"};
        static_cast<void>(prefill<T>(
            run.model(), std::span{tokens}.first(static_cast<std::size_t>(options.context)), queries, run.executor(),
            [&](layer_kv<T> const& kv) {
                auto const begun = now();
                for (auto& one : all)
                {
                    bar.again();
                    one.cache.compress_layer(kv, run.executor(), scratch);
                }
                compressing += seconds(now() - begun);
            },
            [&](std::int64_t done, std::int64_t whole) {
                bar.show(done, whole);
                if (interrupt_requested()) { throw interrupted{}; }
                return true;
            },
            [&](layer_chunk<T> const& chunk) {
                auto const begun = now();
                for (auto& one : all) { one.cache.score_chunk(chunk, chunk.tokens, run.executor(), scratch); }
                compressing += seconds(now() - begun);
            }));
    }
    result.prefill_seconds = seconds(now() - start) - compressing;
    for (auto& one : all)
    {
        if (!one.cache.chosen().while_reading) { continue; }
        read_showing_progress(
            one.cache, std::span{tokens}.first(static_cast<std::size_t>(options.context)), run.executor(), name);
    }

    auto const batch      = all.size();
    auto const vocabulary = static_cast<std::size_t>(shape.vocabulary);
    std::vector<float> logits(batch * vocabulary); // [batch, vocabulary]
    decode_workspace space;
    auto const begun = now();
    {
        progress_bar bar{
            name + std::to_string(options.continuation) + " tokens through " + std::to_string(batch) + " caches"};
        for (std::int64_t step = 0; step < options.continuation; ++step)
        {
            if (interrupt_requested()) { throw interrupted{}; }
            auto const place = static_cast<std::size_t>(options.context + step);
            std::vector<std::int32_t> const fed(batch, tokens[place]);
            std::vector<std::int64_t> const positions(batch, options.context + step);
            decode_step(
                run.model(), fed, positions, run.executor(),
                [&](std::int64_t layer, std::int64_t b, float const* query, float const* key, float const* value,
                    float* out) { all[static_cast<std::size_t>(b)].cache.attend(layer, query, key, value, out, {}); },
                logits, space);
            std::span<float const> const reference{logits.data(), vocabulary};
            run.executor().parallel_for(static_cast<std::int64_t>(batch), [&](std::int64_t b) {
                auto const i = static_cast<std::size_t>(b);
                all[i].difference.add(reference, {logits.data() + i * vocabulary, vocabulary}, tokens[place + 1]);
            });
            bar.show(step + 1, options.continuation);
        }
    }
    result.decode_seconds = seconds(now() - begun);
    return result;
}

/// The full cache's figures are left out: they are 0, or 1.
template <mdkv::element T>
void add_to_means(std::vector<mean_cell>& cells, std::vector<contestant<T>> const& all)
{
    cells.resize(all.size() - 1);
    for (std::size_t i = 1; i < all.size(); ++i)
    {
        sequence_cache<T> const& cache = all[i].cache;
        mean_cell& cell                = cells[i - 1];
        cell.policy                    = cache.chosen().label;
        cell.budget                    = all[i].budget;
        cell.kl.add(all[i].difference.kl());
        cell.top1.add(all[i].difference.top1_agreement());
        cell.dnll.add(all[i].difference.nll_difference());
        cell.share.add(static_cast<double>(cache.resident_bytes()) / static_cast<double>(cache.full_bytes()));
    }
}

inline void print_means(std::vector<mean_cell> const& cells, compare_options const& options)
{
    std::size_t const budgets = budgets_of(options).size();
    std::printf("\nover %zu texts:\n%s\n%s\n", options.text_paths.size(), table_of_means(cells, budgets).text().c_str(),
        table_of_shares(cells, budgets).text().c_str());
}

inline void write_json(std::string const& path, nlohmann::json const& record)
{
    std::ofstream file{path};
    file << record.dump(2) << "\n";
    if (!file.flush()) { throw mdkv::error{path + ": cannot be written"}; }
}

} // namespace detail

/// \throws mdkv::error, and what the stages throw
template <mdkv::element T>
int run_compare(session& run, common_options const& common, compare_options const& options)
{
    mdkv::expects(options.context >= 1, "context: ", options.context, " is not positive");
    mdkv::expects(options.continuation >= 1, "continue: ", options.continuation, " is not positive");
    static_cast<void>(budgets_of(options)); // mistakes in options show before the work
    auto const policies  = measured_policies(common, options);
    nlohmann::json texts = nlohmann::json::array();
    std::vector<mean_cell> means;
    for (std::string const& path : options.text_paths)
    {
        auto const result = detail::compare_on<T>(run, common, options, path);
        detail::add_to_means(means, result.all);
        std::printf("%s: %lld tokens of context, %lld fed after them; cache element %s, window %lld, %d threads%s\n",
            path.c_str(), static_cast<long long>(options.context), static_cast<long long>(options.continuation),
            mdkv::element_name<T>(), static_cast<long long>(common.window), run.threads(),
            parse_backend(common.backend) == backend_kind::cuda ? ", policies on the GPU" : "");
        detail::print_comparison(result.all, options.continuation);
        std::printf("Seconds: %.1f of prefill, %.1f for the fed tokens through all caches together.\n",
            result.prefill_seconds, result.decode_seconds);
        nlohmann::json results = nlohmann::json::array();
        for (auto const& one : result.all) { results.push_back(detail::json_of(one, result.prefill_seconds)); }
        texts.push_back({{"text", path}, {"lock_step_decode_s", result.decode_seconds}, {"results", results}});
    }
    std::fputs(("\n" + detail::legend(policies, common.window)).c_str(), stdout);
    if (options.text_paths.size() > 1 && !means.empty()) { detail::print_means(means, options); }
    std::fputs(("\n" + conclusion(means, budgets_of(options).size())).c_str(), stdout);
    if (!options.json_path.empty())
    {
        nlohmann::json summary = nlohmann::json::array();
        for (mean_cell const& cell : means) { summary.push_back(json_of(cell)); }
        detail::write_json(options.json_path,
            {{"model", common.model_path}, {"context", options.context}, {"continue", options.continuation},
                {"window", common.window}, {"element", mdkv::element_name<T>()}, {"threads", run.threads()},
                {"backend", common.backend}, {"means", summary}, {"texts", texts}});
    }
    return 0;
}

} // namespace runner
