/// \file head_scores.cpp: published head scores become the recorded capacities, bad files are refused by key, quotas are exact
#include "runner/systems/head_scores.hpp"

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "runner/systems/headkv_quotas.hpp"
#include "support/message.hpp"
#include "support/random.hpp"
#include "support/scratch_folder.hpp"

namespace
{

using capacities = std::vector<mdkv::index_t>;
using support::says;

/// HeadKV's published scores, reduced to means (tests/tools/record_head_scores.py of commit 1ab9da28).
runner::head_scores published(std::string const& name)
{
    std::ifstream file{std::string{MDKV_TEST_DATA_DIR} + "/head_scores_means.json"};
    auto const recorded = nlohmann::json::parse(file);
    auto const& one     = recorded.at("files").at(name);
    runner::head_scores scores{recorded.at("layers"), recorded.at("heads"), one.at("means"), {}};
    scores.samples.assign(scores.mean.size(), one.at("samples").get<std::int64_t>());
    return scores;
}

constexpr char const* llama_r2   = "Meta-Llama-3-8B-Instruct_retrieval_reasoning_heads.json";
constexpr char const* llama_r    = "Meta-Llama-3-8B-Instruct_retrieval_heads.json";
constexpr char const* mistral_r2 = "Mistral-7B-Instruct-v0.2_retrieval_reasoning_heads.json";
constexpr char const* mistral_r  = "Mistral-7B-Instruct-v0.2_retrieval_heads.json";

mdkv::index_t total(std::span<mdkv::index_t const> values)
{
    return std::accumulate(values.begin(), values.end(), mdkv::index_t{0});
}

/// Of 32 x 32 heads: eight of a layer, from head 0 on.
capacities eight(capacities const& all, std::ptrdiff_t layer)
{
    return {all.begin() + layer * 32, all.begin() + layer * 32 + 8};
}

/// What the reader says about a file for a model of one layer with two heads.
std::string refusal(std::string const& content)
{
    scratch_folder const folder;
    std::string const file = folder.write("scores.json", content);
    try
    {
        static_cast<void>(runner::read_head_scores(file, 1, 2));
    }
    catch (runner::file_error const& error)
    {
        std::string const message = error.what();
        CHECK(message.find(file) == 0);
        return message;
    }
    return "(nothing was thrown)";
}

} // namespace

TEST_CASE("the published scores have the recorded samples, sums and zeros")
{
    struct row
    {
        char const* file;
        std::int64_t samples;
        double sum;
        std::ptrdiff_t zeros;
    };
    for (row const& want : {row{llama_r2, 74, 22.873270, 2}, row{llama_r, 107, 19.802017, 728},
             row{mistral_r2, 76, 19.827888, 4}, row{mistral_r, 148, 17.684810, 701}})
    {
        CAPTURE(want.file);
        auto const scores = published(want.file);
        REQUIRE(scores.mean.size() == 1024);
        CHECK(scores.samples[0] == want.samples);
        double const sum = std::accumulate(scores.mean.begin(), scores.mean.end(), 0.0);
        CHECK(sum == doctest::Approx(want.sum).epsilon(1e-7));
        CHECK(std::count(scores.mean.begin(), scores.mean.end(), 0.0) == want.zeros);
    }
}

TEST_CASE("HeadKV's capacities of the published scores are those its authors' arithmetic gives")
{
    struct row
    {
        char const* file;
        std::int64_t kv_size, window;
        mdkv::index_t total, least, most;
        std::ptrdiff_t most_at;
        capacities first_layer, layer_16;
    };
    std::vector<row> const rows = {
        {llama_r2, 128, 8, 122863, 11, 1691, 15 * 32 + 30, {11, 13, 12, 19, 12, 13, 13, 12},
            {387, 1480, 195, 104, 20, 15, 13, 18}},
        {llama_r2, 128, 32, 98289, 9, 1350, 15 * 32 + 30, {9, 11, 10, 16, 10, 10, 11, 10},
            {309, 1182, 156, 83, 16, 12, 11, 14}},
        {llama_r2, 512, 32, 491514, 44, 6764, 15 * 32 + 30, {44, 54, 48, 77, 50, 50, 54, 48},
            {1549, 5920, 780, 415, 81, 59, 54, 70}},
        {llama_r, 128, 8, 122872, 11, 5697, 15 * 32 + 30, {11, 11, 11, 11, 11, 11, 11, 11},
            {1587, 3005, 53, 48, 11, 11, 11, 11}},
        {mistral_r2, 128, 8, 122880, 11, 1801, 18 * 32, {21, 23, 19, 19, 15, 13, 14, 15},
            {12, 59, 15, 105, 29, 111, 46, 767}},
        {mistral_r2, 512, 32, 491515, 44, 7204, 18 * 32, {82, 93, 78, 76, 59, 53, 56, 59},
            {47, 235, 59, 422, 117, 443, 182, 3067}},
        {mistral_r, 128, 8, 122885, 11, 5596, 18 * 32, {11, 11, 11, 11, 11, 11, 11, 11},
            {11, 15, 11, 29, 11, 14, 11, 266}},
    };
    for (row const& want : rows)
    {
        CAPTURE(want.file);
        CAPTURE(want.kv_size);
        CAPTURE(want.window);
        auto const got = runner::headkv_capacities(published(want.file), want.kv_size, want.window);
        REQUIRE(got.size() == 1024);
        CHECK(total(got) == want.total);
        CHECK(*std::min_element(got.begin(), got.end()) == want.least);
        auto const most = std::max_element(got.begin(), got.end());
        CHECK(*most == want.most);
        CHECK(most - got.begin() == want.most_at);
        CHECK(eight(got, 0) == want.first_layer);
        CHECK(eight(got, 16) == want.layer_16);
    }
}

TEST_CASE("the sure part is what Python's // leaves of the budget, not what the rounded quotient would")
{
    runner::head_scores const one_takes_all{1, 2, {1, 0}, {1, 1}};
    // 110 / 1.1 rounds to 100, but 1.1 is above 11/10 in binary: 110 // 1.1 is 99.
    for (auto const& [past, pooled] : std::vector<std::pair<std::int64_t, mdkv::index_t>>{
             {120, 109}, {112, 101}, {96, 87}, {224, 203}, {480, 436}, {992, 901}, {110, 99}, {1, 0}})
    {
        CAPTURE(past);
        auto const got = runner::headkv_capacities(one_takes_all, past + 8, 8, 1.1);
        CHECK(got == capacities{2 * pooled + past - pooled, past - pooled});
    }
    CHECK(runner::headkv_capacities(one_takes_all, 128, 8, 1.0) == capacities{240, 0});
    CHECK(runner::headkv_capacities(one_takes_all, 128, 8, 200) == capacities{120, 120});
}

TEST_CASE("shares are scores over their sum; halves are rounded to even")
{
    runner::head_scores const scores{1, 2, {1, 3}, {1, 1}};
    CHECK(runner::head_shares(scores) == std::vector<double>{0.25, 0.75});
    // beta 1 and 5 tokens: 10 of them shared, 2.5 and 7.5; 7 tokens: 3.5 and 10.5
    CHECK(runner::headkv_capacities(scores, 5, 0, 1) == capacities{2, 8});
    CHECK(runner::headkv_capacities(scores, 7, 0, 1) == capacities{4, 10});
}

TEST_CASE(
    "the published scores' groups of four have the recorded sums, and means that are often below a projection's price")
{
    auto const scores  = published(llama_r2);
    auto const of_size = [&](std::int64_t kv_size, std::int64_t window) {
        return runner::headkv_capacities(scores, kv_size, window);
    };
    capacities const all = of_size(128, 8);
    capacities sums(256);
    for (std::size_t q = 0; q < all.size(); ++q) { sums[q / 4] += all[q]; }
    CHECK(*std::min_element(sums.begin(), sums.end()) == 44);
    CHECK(*std::max_element(sums.begin(), sums.end()) == 2726);

    auto const below_32 = [&](std::int64_t kv_size, std::int64_t window) {
        auto const means = runner::headkv_capacities_of_kv_heads(of_size(kv_size, window), 4);
        REQUIRE(means.size() == 256);
        return std::count_if(means.begin(), means.end(), [](mdkv::index_t tokens) { return tokens < 32; });
    };
    CHECK(below_32(128, 8) == 122);
    CHECK(below_32(128, 32) == 131);
    CHECK(below_32(256, 32) == 69);
    CHECK(below_32(512, 32) == 0);
}

TEST_CASE("capacities of query heads become their mean, rounded half to even")
{
    capacities const query{1, 2, 3, 4, 5, 6, 7, 7};
    CHECK(runner::headkv_capacities_of_kv_heads(query, 2) == capacities{2, 4, 6, 7}); // 1.5, 3.5, 5.5, 7
    CHECK(runner::headkv_capacities_of_kv_heads(query, 4) == capacities{2, 6});       // 2.5, 6.25
}

TEST_CASE("MixedDimKV-H splits the bytes of the whole model exactly, whatever the scores")
{
    support::source random{"mixed head quotas"};
    CAPTURE(support::seed());
    for (int round = 0; round < 200; ++round)
    {
        std::int64_t const group = 1 + random.below(3);
        runner::head_scores scores{1 + random.below(5), group * (1 + random.below(4)), {}, {}};
        for (std::int64_t i = 0; i < scores.layers * scores.heads; ++i)
        {
            scores.mean.push_back(i > 0 && random.below(3) == 0 ? 0.0 : random.uniform(0.001, 1));
        }
        auto const cached = scores.mean.size() / static_cast<std::size_t>(group);
        capacities room(cached);
        for (auto& bytes : room) { bytes = random.below(5000); }
        mdkv::index_t const bytes = random.below(6000 * static_cast<mdkv::index_t>(cached));
        auto const quotas         = runner::mixed_head_quotas(scores, group, bytes, room, random.uniform(1, 3));
        REQUIRE(quotas.size() == cached);
        REQUIRE(total(quotas) == std::min(bytes, total(room)));
        for (std::size_t h = 0; h < cached; ++h)
        {
            REQUIRE(quotas[h] >= 0);
            REQUIRE(quotas[h] <= room[h]);
        }
    }
}

TEST_CASE("MixedDimKV-H gives a cached head its equal part and its query heads' shares of the pool")
{
    // Two cached heads of two query heads each; shares 0.4 + 0.2 and 0.1 + 0.3; beta 2: half is shared by score.
    runner::head_scores const scores{1, 4, {4, 2, 1, 3}, {1, 1, 1, 1}};
    capacities const room(2, 1000000);
    CHECK(runner::mixed_head_quotas(scores, 2, 10000, room, 2) == capacities{2500 + 3000, 2500 + 2000});
    // 11 bytes do not divide: the largest remainder gets the last one. 6.05 and 4.95.
    CHECK(runner::mixed_head_quotas(scores, 2, 11, room, 2) == capacities{6, 5});
    // What the first head cannot use goes to the second.
    CHECK(runner::mixed_head_quotas(scores, 2, 10000, capacities{5000, 9000}, 2) == capacities{5000, 5000});
    CHECK(runner::mixed_head_quotas(scores, 2, 10000, capacities{5000, 100}, 2) == capacities{5000, 100});
}

TEST_CASE("a parameter out of range is named with its value")
{
    runner::head_scores const scores{1, 2, {1, 3}, {1, 1}};
    auto const message = [](auto const& call) {
        try
        {
            static_cast<void>(call());
        }
        catch (mdkv::invalid_argument const& error)
        {
            return std::string{error.what()};
        }
        return std::string{"(nothing was thrown)"};
    };
    says(message([&] { return runner::headkv_capacities(scores, 8, 8); }), "kv_size is 8");
    says(message([&] { return runner::headkv_capacities(scores, 8, -1); }), "window is -1");
    says(message([&] { return runner::headkv_capacities(scores, 128, 8, 0.5); }), "beta is 0.5");
    says(message([&] { return runner::head_shares({1, 2, {0, 0}, {}}); }), "add up to 0");
    says(message([&] { return runner::head_shares({1, 2, {1, -1}, {}}); }), "scores.mean[1] is -1");
    says(message([&] { return runner::head_shares({1, 2, {1}, {}}); }), "scores has 1 values");
    capacities const room(2, 100);
    says(message([&] { return runner::mixed_head_quotas(scores, 3, 10, room); }), "group is 3");
    says(message([&] { return runner::mixed_head_quotas(scores, 2, 10, room); }), "capacity_bytes has 2");
    says(message([&] { return runner::mixed_head_quotas(scores, 1, -10, room); }), "total_bytes is -10");
    says(message([&] { return runner::headkv_capacities_of_kv_heads(capacities{1, 2, 3}, 2); }), "groups of 2");
}

TEST_CASE("keys are read in any order, and every list is averaged")
{
    scratch_folder const folder;
    std::string const file =
        folder.write("scores.json", R"({"1-0": [4], "0-1": [1, 2, 6], "0-0": [0, 0.5], "1-1": [1e-3]})");
    auto const scores = runner::read_head_scores(file, 2, 2);
    CHECK(scores.mean == std::vector<double>{0.25, 3, 4, 1e-3});
    CHECK(scores.samples == std::vector<std::int64_t>{2, 3, 1, 1});
}

TEST_CASE("a bad file is refused with the key at fault")
{
    CHECK(refusal(R"({"0-0": [1], "0-1": [2]})") == "(nothing was thrown)");
    says(refusal(R"({"0-0": [1], "0-1": [2], "0-0": [3]})"), R"(key "0-0" stands there twice)");
    says(refusal(R"({"0-1": [1]})"), R"(key "0-0" is missing)");
    says(refusal(R"({"0-0": [1], "0-1": [1], "0-2": [1]})"), R"(key "0-2" is outside the model)");
    says(refusal(R"({"1-0": [1]})"), R"(key "1-0" is outside the model, which has layers 0 to 0)");
    for (char const* const key : {"", "0", "0-", "-0", "0-0-0", "0--1", "0- 1", "00-1", "a-b", "0-1x", "0-99999999999"})
    {
        says(refusal("{\"" + std::string{key} + "\": [1]}"), "\"" + std::string{key} + "\" is no head");
    }
    for (char const* const list : {"[]", "2", "{}", "null", "\"2\""})
    {
        says(refusal(R"({"0-0": [1], "0-1": )" + std::string{list} + "}"), R"(key "0-1" has no list of numbers)");
    }
    for (char const* const value : {"-0.5", "\"2\"", "true", "null"})
    {
        says(refusal(R"({"0-1": [1], "0-0": [1, )" + std::string{value} + "]}"),
            R"(key "0-0" has in its list no number of at least 0)");
    }
    says(refusal(R"({"0-0": [1e308, 1e308], "0-1": [1]})"), R"(key "0-0" has values whose sum is not finite)");
    for (char const* const text : {"", R"({"0-0": [NaN], "0-1": [1]})", R"({"0-0": [1], "0-1": [1e999]})",
             R"({"0-0": [1], "0-1": [2])", R"({"0-0": [1], "0-1": [2]} {})"})
    {
        says(refusal(text), "is no JSON that could be read");
    }
    for (char const* const text : {"[1, 2]", "3"}) { says(refusal(text), "is no object of lists"); }
    says(refusal(R"({"0-0": [1, [2]], "0-1": [1]})"), "has lists in its lists");
    says(refusal(std::string(100000, '[')), "has lists in its lists");
    CHECK_THROWS_WITH_AS(static_cast<void>(runner::read_head_scores("/nowhere/scores.json", 1, 2)),
        doctest::Contains("/nowhere/scores.json: cannot be opened: "), runner::file_error);
    CHECK_THROWS_AS(static_cast<void>(runner::read_head_scores("scores.json", 0, 2)), mdkv::invalid_argument);
}

TEST_CASE("a file larger than any head scores is refused by its size")
{
    scratch_folder const folder;
    std::string const file = folder.write("scores.json", "");
    std::filesystem::resize_file(file, std::uintmax_t{257} << 20U); // a hole; takes no room
    CHECK_THROWS_WITH_AS(static_cast<void>(runner::read_head_scores(file, 1, 2)),
        doctest::Contains("file is too large: 269484032 bytes (limit 268435456)"), runner::file_error);
}
