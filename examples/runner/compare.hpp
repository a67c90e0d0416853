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
#include <fstream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "decode.hpp"
#include "divergence.hpp"
#include "prefill.hpp"
#include "sequence_cache.hpp"
#include "session.hpp"
#include "terminal.hpp"

namespace runner
{

struct compare_options
{
    std::vector<std::string> text_paths; // each by itself; with more than one the means are shown, too
    std::int64_t context      = 2048;
    std::int64_t continuation = 128;
    std::vector<std::int64_t> kv_sizes{64, 128, 256, 512};
    std::string policies = "full,paper,paper_literal,evict";
    std::string json_path;
    bool markdown = false; // the table of means
};

namespace detail
{

/// One policy at one size.
template <mdkv::element T>
struct contestant
{
    std::int64_t kv_size; // tokens per KV head; the context for the full cache
    sequence_cache<T> cache;
    divergence difference{};
};

/// The full cache first: it is what the others are measured against, asked for or not.
template <mdkv::element T>
[[nodiscard]] std::vector<contestant<T>> contestants(
    llama_model const& model, common_options const& common, compare_options const& options)
{
    std::vector<contestant<T>> all;
    auto const add = [&](policy const& p, std::int64_t size) {
        all.push_back(
            {size, sequence_cache<T>{model, p, mdkv::budget::kv_size(size), common.window, options.continuation}});
    };
    add(find_policy("full"), options.context);
    for (std::string const& text : split_policies(options.policies, !common.head_scores.empty()))
    {
        policy const chosen = chosen_policy(text, common);
        if (chosen.whole()) { continue; }
        for (std::int64_t const size : options.kv_sizes) { add(chosen, size); }
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
    all.tokens.resize(cache.chosen().ratios.size());
    for (mdkv::compress_report const& report : cache.reports())
    {
        for (std::size_t r = 0; r < all.tokens.size(); ++r) { all.tokens[r] += report.chosen.tokens[r]; }
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

template <mdkv::element T>
void print_comparison(std::vector<contestant<T>> const& all, double prefill_seconds, std::int64_t steps)
{
    table shown{{"policy", "pool", "KV", "KL nats", "top-1 %", "dNLL", "resident", "of full %", "prefill s",
        "compress s", "attend ms/token", "tokens per rung %"}};
    for (contestant<T> const& one : all)
    {
        sequence_cache<T> const& cache = one.cache;
        policy const& p                = cache.chosen();
        shown.add({p.label, p.has_parameter("pool") ? std::to_string(p.pooling.width) : "-",
            std::to_string(one.kv_size), fixed(one.difference.kl(), 4), fixed(100 * one.difference.top1_agreement(), 1),
            fixed(one.difference.nll_difference(), 4), size_text(cache.resident_bytes()),
            fixed(100.0 * static_cast<double>(cache.resident_bytes()) / static_cast<double>(cache.full_bytes()), 2),
            fixed(prefill_seconds, 2), fixed(cache.compress_seconds(), 2),
            fixed(1000 * cache.attend_seconds() / static_cast<double>(steps), 2),
            p.whole() ? "-" : shares_of(summary_of(cache).tokens)});
    }
    std::fputs(shown.text().c_str(), stdout);
    for (contestant<T> const& one : all)
    {
        auto const layers = summary_of(one.cache).unprojected_layers;
        if (layers == 0) { continue; }
        std::printf(
            "%s at KV %lld: too small for projections in %lld layers; only rungs that need none were used there\n",
            one.cache.chosen().label.c_str(), static_cast<long long>(one.kv_size), static_cast<long long>(layers));
    }
}

template <mdkv::element T>
[[nodiscard]] nlohmann::json json_of(contestant<T> const& one, double prefill_seconds)
{
    sequence_cache<T> const& cache   = one.cache;
    allocation_summary const summary = summary_of(cache);
    nlohmann::json rungs             = nlohmann::json::array();
    for (std::size_t r = 0; !cache.chosen().whole() && r < summary.tokens.size(); ++r)
    {
        rungs.push_back({{"rung", text_of(cache.chosen().ratios[r])}, {"tokens", summary.tokens[r]}});
    }
    return {{"policy", cache.chosen().label}, {"kv_size", one.kv_size}, {"kl", one.difference.kl()},
        {"top1", one.difference.top1_agreement()}, {"dnll", one.difference.nll_difference()},
        {"resident_bytes", cache.resident_bytes()}, {"full_bytes", cache.full_bytes()}, {"prefill_s", prefill_seconds},
        {"compress_s", cache.compress_seconds()}, {"decode_s", cache.attend_seconds()}, {"rungs", rungs},
        {"lambda", summary.multiplier}, {"gap", summary.gap}, {"loss", summary.loss},
        {"pool", cache.chosen().pooling.width}, {"unprojected_layers", summary.unprojected_layers}};
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
    auto const total         = options.context + options.continuation + 1; // the last token fed has a successor, too
    auto const tokens        = first_tokens(run.words(), path, total,
               std::to_string(options.context) + " of context, " + std::to_string(options.continuation)
                   + " to go on, and the next");
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
        progress_bar bar{"prefill of " + std::to_string(options.context) + " tokens"};
        static_cast<void>(prefill<T>(
            run.model(), std::span{tokens}.first(static_cast<std::size_t>(options.context)), queries, run.executor(),
            [&](layer_kv<T> const& kv) {
                auto const begun = now();
                for (auto& one : all) { one.cache.compress_layer(kv, run.executor(), scratch); }
                compressing += seconds(now() - begun);
            },
            [&](std::int64_t done, std::int64_t whole) {
                bar.show(done, whole);
                if (interrupt_requested()) { throw interrupted{}; }
                return true;
            }));
    }
    result.prefill_seconds = seconds(now() - start) - compressing;

    auto const batch      = all.size();
    auto const vocabulary = static_cast<std::size_t>(shape.vocabulary);
    std::vector<float> logits(batch * vocabulary); // [batch, vocabulary]
    decode_workspace space;
    auto const begun = now();
    {
        progress_bar bar{std::to_string(options.continuation) + " tokens through " + std::to_string(batch) + " caches"};
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

/// Mean, least and largest of a figure over the texts.
struct spread
{
    double mean = 0, least = 0, most = 0;

    void add(double value)
    {
        least = count_ == 0 ? value : std::min(least, value);
        most  = count_ == 0 ? value : std::max(most, value);
        mean += (value - mean) / static_cast<double>(++count_);
    }
    [[nodiscard]] nlohmann::json json() const { return {{"mean", mean}, {"least", least}, {"most", most}}; }

private:
    std::int64_t count_ = 0;
};

/// One contestant's figures over the texts; its caches are gone by then.
struct mean_result
{
    std::string policy;
    std::int64_t kv_size = 0;
    spread kl, top1, dnll, share; // share: resident bytes of the full cache's
};

template <mdkv::element T>
void add_to_means(std::vector<mean_result>& means, std::vector<contestant<T>> const& all)
{
    means.resize(all.size());
    for (std::size_t i = 0; i < all.size(); ++i)
    {
        means[i].policy  = all[i].cache.chosen().label;
        means[i].kv_size = all[i].kv_size;
        means[i].kl.add(all[i].difference.kl());
        means[i].top1.add(all[i].difference.top1_agreement());
        means[i].dnll.add(all[i].difference.nll_difference());
        means[i].share.add(
            static_cast<double>(all[i].cache.resident_bytes()) / static_cast<double>(all[i].cache.full_bytes()));
    }
}

/// Rows are policies, columns KV sizes.
[[nodiscard]] inline table table_of(std::vector<mean_result> const& means, std::vector<std::int64_t> const& kv_sizes)
{
    std::vector<std::string> headings{"KL nats, mean (least to most)"};
    for (std::int64_t const size : kv_sizes) { headings.push_back("KV " + std::to_string(size)); }
    table shown{headings};
    for (std::size_t i = 1; i < means.size(); i += kv_sizes.size()) // the full cache is the first
    {
        std::vector<std::string> row{means[i].policy};
        for (std::size_t k = i; k < i + kv_sizes.size(); ++k)
        {
            row.push_back(fixed(means[k].kl.mean, 3) + " (" + fixed(means[k].kl.least, 3) + " to "
                          + fixed(means[k].kl.most, 3) + ")");
        }
        shown.add(row);
    }
    return shown;
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
    mdkv::expects(!options.kv_sizes.empty(), "kv-size: there are none");
    nlohmann::json texts = nlohmann::json::array();
    std::vector<detail::mean_result> means;
    for (std::string const& path : options.text_paths)
    {
        auto const result = detail::compare_on<T>(run, common, options, path);
        detail::add_to_means(means, result.all);
        std::printf("%s: %lld tokens of context, %lld fed after them; cache element %s, window %lld, %d threads\n",
            path.c_str(), static_cast<long long>(options.context), static_cast<long long>(options.continuation),
            mdkv::element_name<T>(), static_cast<long long>(common.window), run.threads());
        detail::print_comparison(result.all, result.prefill_seconds, options.continuation);
        std::printf("KL(full || policy), agreement of the likeliest token and difference in NLL: means over the fed "
                    "tokens. All caches decode in lock step: %.1f s.\n",
            result.decode_seconds);
        nlohmann::json results = nlohmann::json::array();
        for (auto const& one : result.all) { results.push_back(detail::json_of(one, result.prefill_seconds)); }
        texts.push_back({{"text", path}, {"lock_step_decode_s", result.decode_seconds}, {"results", results}});
    }
    if (options.text_paths.size() > 1 && means.size() > 1)
    {
        std::printf("\nover %zu texts:\n", options.text_paths.size());
        table const shown = detail::table_of(means, options.kv_sizes);
        std::fputs((options.markdown ? shown.markdown() : shown.text()).c_str(), stdout);
    }
    if (!options.json_path.empty())
    {
        nlohmann::json summary = nlohmann::json::array();
        for (auto const& one : means)
        {
            summary.push_back({{"policy", one.policy}, {"kv_size", one.kv_size}, {"kl", one.kl.json()},
                {"top1", one.top1.json()}, {"dnll", one.dnll.json()}, {"share_of_full", one.share.json()}});
        }
        detail::write_json(options.json_path,
            {{"model", common.model_path}, {"context", options.context}, {"continue", options.continuation},
                {"window", common.window}, {"element", mdkv::element_name<T>()}, {"threads", run.threads()},
                {"means", summary}, {"texts", texts}});
    }
    return 0;
}

} // namespace runner
