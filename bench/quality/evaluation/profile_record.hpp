/// \file profile_record.hpp: one measurement of a policy at a size and a context: time, memory, and what was allocated
#pragma once

#include <mdkv/stages/allocate.hpp>

#include <nlohmann/json.hpp>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "json_lines.hpp"

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

inline constexpr json_line_kind profile_line{R"({"context":)", "measurement of mdkv_run profile"};

namespace detail
{

/// Calls visit(key, value) for everything that a line has, in its order, but for the layers.
template <class Record, class Visit>
void visit_record(Record& one, Visit const& visit)
{
    visit("context", one.key.context);
    visit("policy", one.key.policy);
    visit("size", one.key.size);
    visit("steps", one.key.steps);
    visit("element", one.key.element);
    visit("window", one.key.window);
    visit("threads", one.key.threads);
    visit("text", one.key.text);
    visit("model", one.key.model);
    visit("mapped", one.key.mapped);
    visit("sample", one.key.sample);
    visit("mixed", one.mixed);
    visit("prefill_s", one.prefill_s);
    visit("compress_s", one.compress_s);
    visit("attend_s", one.attend_s);
    visit("step_s", one.step_s);
    visit("peak_bytes", one.peak_bytes);
    visit("model_bytes", one.model_bytes);
    visit("resident_bytes", one.resident_bytes);
    visit("full_bytes", one.full_bytes);
    visit("rungs", one.rungs);
}

template <class Layer, class Visit>
void visit_layer(Layer& one, Visit const& visit)
{
    visit("status", one.status);
    visit("tokens", one.tokens);
    visit("lambda", one.multiplier);
    visit("loss", one.loss);
    visit("gap", one.gap);
}

} // namespace detail

[[nodiscard]] inline std::string line_of(profile_record const& one)
{
    auto const into = [](nlohmann::ordered_json& json) {
        return [&json](char const* key, auto const& value) { json[key] = value; };
    };
    nlohmann::ordered_json line;
    detail::visit_record(one, into(line));
    nlohmann::ordered_json& layers = line["layers"];
    layers                         = nlohmann::ordered_json::array();
    for (layer_allocation const& layer : one.layers) { detail::visit_layer(layer, into(layers.emplace_back())); }
    return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

/// \throws nlohmann::json::exception   it is no JSON, or a key is absent or of another type
[[nodiscard]] inline profile_record profile_record_of(std::string_view text)
{
    auto const from = [](nlohmann::json const& json) {
        return [&json](char const* key, auto& value) { json.at(key).get_to(value); };
    };
    nlohmann::json const line = nlohmann::json::parse(text);
    profile_record one;
    detail::visit_record(one, from(line));
    for (nlohmann::json const& layer : line.at("layers"))
    {
        detail::visit_layer(one.layers.emplace_back(), from(layer));
    }
    return one;
}

} // namespace runner
