/// \file profile_record.hpp: one measurement of a policy at a size and a context: time, memory, and what was allocated
#pragma once

#include <mdkv/allocate.hpp>

#include <nlohmann/json.hpp>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace runner
{

/// What makes two measurements measurements of the same.
struct profile_key
{
    std::int64_t context = 0; // tokens of the prompt
    std::string policy{};     // its label
    std::string size{};       // KV size or fraction; "whole" for the whole cache
    std::int64_t steps = 0;   // tokens fed after the prompt
    std::string element{};
    std::int64_t window  = 0;
    std::int64_t threads = 0;
    std::string text{};  // file name and a mark of its tokens
    std::string model{}; // file name
    bool mapped = false;

    std::int64_t sample = 0; // which stretch of the text

    auto operator<=>(profile_key const&) const = default;
};

/// One layer's allocation.
struct layer_allocation
{
    std::string status{};               // of the allocation
    std::vector<std::int64_t> tokens{}; // by rung
    double multiplier = 0, loss = 0, gap = 0;

    /// How far the loss can be from the least possible one, as a share of the loss.
    [[nodiscard]] double relative_gap() const noexcept { return loss > 0 ? gap / loss : 0; }
};

struct profile_record
{
    profile_key key{};
    bool mixed       = false; // made by an allocation: multiplier, loss and gap mean something
    double prefill_s = 0, compress_s = 0, attend_s = 0;
    std::vector<double> step_s{}; // of each token fed
    // Resident bytes of the process at its peak, and of them those of the model and the program.
    std::int64_t peak_bytes = 0, model_bytes = 0;
    std::int64_t resident_bytes = 0, full_bytes = 0; // of the cache; of the uncompressed one
    std::vector<std::string> rungs{};
    std::vector<layer_allocation> layers{};

    /// Seconds until so many tokens are made, the first of them from the prompt itself; -1 where it was not measured.
    [[nodiscard]] double latency(std::int64_t generated) const noexcept
    {
        if (generated - 1 > static_cast<std::int64_t>(step_s.size())) { return -1; }
        double sum = prefill_s + compress_s;
        for (std::int64_t i = 0; i + 1 < generated; ++i) { sum += step_s[static_cast<std::size_t>(i)]; }
        return sum;
    }
    /// Mean seconds of a token fed; 0 without any.
    [[nodiscard]] double step() const noexcept
    {
        double sum = 0;
        for (double const one : step_s) { sum += one; }
        return step_s.empty() ? 0 : sum / static_cast<double>(step_s.size());
    }
    /// Peak bytes beside the model: activations, keys and values of a layer, scratch memory, the cache.
    [[nodiscard]] std::int64_t working_bytes() const noexcept { return peak_bytes - model_bytes; }
};

[[nodiscard]] inline std::string text_of(mdkv::allocation_status status)
{
    switch (status)
    {
        case mdkv::allocation_status::optimal:
            return "optimal";
        case mdkv::allocation_status::everything_kept:
            return "everything_kept";
        case mdkv::allocation_status::unprojected_only:
            return "unprojected_only";
        case mdkv::allocation_status::non_finite_loss:
            return "non_finite_loss";
        case mdkv::allocation_status::over_limit:
            break;
    }
    return "over_limit";
}

/// The first key of every line, by which a line that was cut short is told from another file's.
inline constexpr char const* profile_line_begin = R"({"context":)";

[[nodiscard]] inline std::string line_of(profile_record const& one)
{
    nlohmann::ordered_json layers = nlohmann::ordered_json::array();
    for (layer_allocation const& layer : one.layers)
    {
        layers.push_back({{"status", layer.status}, {"tokens", layer.tokens}, {"lambda", layer.multiplier},
            {"loss", layer.loss}, {"gap", layer.gap}});
    }
    nlohmann::ordered_json const line{{"context", one.key.context}, {"policy", one.key.policy}, {"size", one.key.size},
        {"steps", one.key.steps}, {"element", one.key.element}, {"window", one.key.window},
        {"threads", one.key.threads}, {"text", one.key.text}, {"model", one.key.model}, {"mapped", one.key.mapped},
        {"sample", one.key.sample}, {"mixed", one.mixed}, {"prefill_s", one.prefill_s}, {"compress_s", one.compress_s},
        {"attend_s", one.attend_s}, {"step_s", one.step_s}, {"peak_bytes", one.peak_bytes},
        {"model_bytes", one.model_bytes}, {"resident_bytes", one.resident_bytes}, {"full_bytes", one.full_bytes},
        {"rungs", one.rungs}, {"layers", layers}};
    return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

/// \throws nlohmann::json::exception   it is no JSON, or a key is absent or of another type
[[nodiscard]] inline profile_record profile_record_of(std::string const& text)
{
    nlohmann::json const line = nlohmann::json::parse(text);
    profile_record one;
    auto const read = [&](char const* key, auto& value) { line.at(key).get_to(value); };
    read("context", one.key.context);
    read("policy", one.key.policy);
    read("size", one.key.size);
    read("steps", one.key.steps);
    read("element", one.key.element);
    read("window", one.key.window);
    read("threads", one.key.threads);
    read("text", one.key.text);
    read("model", one.key.model);
    read("mapped", one.key.mapped);
    read("sample", one.key.sample);
    read("mixed", one.mixed);
    read("prefill_s", one.prefill_s);
    read("compress_s", one.compress_s);
    read("attend_s", one.attend_s);
    read("step_s", one.step_s);
    read("peak_bytes", one.peak_bytes);
    read("model_bytes", one.model_bytes);
    read("resident_bytes", one.resident_bytes);
    read("full_bytes", one.full_bytes);
    read("rungs", one.rungs);
    for (nlohmann::json const& layer : line.at("layers"))
    {
        layer_allocation& added = one.layers.emplace_back();
        layer.at("status").get_to(added.status);
        layer.at("tokens").get_to(added.tokens);
        layer.at("lambda").get_to(added.multiplier);
        layer.at("loss").get_to(added.loss);
        layer.at("gap").get_to(added.gap);
    }
    return one;
}

} // namespace runner
