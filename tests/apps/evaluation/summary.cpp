#include "evaluation/summary.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "evaluation/answer_log.hpp"
#include "evaluation/heatmap.hpp"
#include "evaluation/sample.hpp"
#include "runner/terminal.hpp"
#include "support/scratch_folder.hpp"

namespace
{

runner::answer_origin const origin{"model.gguf", "f16", 32};

/// A log in a folder of its own, filled by hand.
class made_log
{
public:
    made_log()
        : log_{folder_.file("answers.jsonl")}
    {}

    void add(runner::sample const& one, std::string const& policy, std::int64_t size, double score,
        std::string const& question = "window", runner::answer_origin const& from = origin)
    {
        runner::answer const given{{one.task, one.id, runner::sample_mark(one), policy, size, question, from}, "text",
            {{"score", score}}, size == 0 ? 1000 : size, 1000, one.about};
        log_.add(std::span{&given, 1});
    }

    [[nodiscard]] runner::answer_log const& log() const { return log_; }

private:
    scratch_folder folder_;
    runner::answer_log log_;
};

runner::sample some_sample(std::string const& task, std::string const& id)
{
    runner::sample one;
    one.task    = task;
    one.id      = id;
    one.context = "context of " + task + id;
    return one;
}

runner::summary_request request_of(std::vector<runner::sample> const& samples)
{
    runner::summary_request request{samples, origin, "score"};
    request.policies = {"paper", "snapkv"};
    return request;
}

/// Two tasks of two samples each; the full cache fails on the second task.
struct two_tasks
{
    std::vector<runner::sample> samples{
        some_sample("s1", "a"), some_sample("s1", "b"), some_sample("vt", "a"), some_sample("vt", "b")};
    made_log made;

    two_tasks()
    {
        auto const add = [&](std::string const& policy, std::int64_t size, std::vector<double> const& scores) {
            for (std::size_t i = 0; i < scores.size(); ++i) { made.add(samples[i], policy, size, scores[i]); }
        };
        add("full", 0, {100, 80, 10, 20});
        add("snapkv", 64, {50, 60, 90, 90});
        // Not {75, 75, 0, 0}: of that list g++ 12 makes four 75s with -O3 -march=native on a machine with AVX-512.
        add("paper", 64, {74, 76, 0, 0});
        add("paper", 128, {79, 81, 0, 0});
        add("another", 64, {1, 2, 3}); // not among the policies asked for, and one answer is missing
    }
};

} // namespace

TEST_CASE("a running mean is the mean, and its standard error the spread's estimate over the root of the count")
{
    runner::running_mean mean;
    CHECK(mean.count() == 0);
    mean.add(2);
    CHECK(mean.mean() == 2);
    CHECK_FALSE(mean.standard_error().has_value());
    for (double const value : {4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0}) { mean.add(value); }
    CHECK(mean.mean() == doctest::Approx(5));
    CHECK(mean.standard_error().value() == doctest::Approx(std::sqrt(32.0 / 7 / 8)));
}

TEST_CASE("a summary has the full cache on top, then a block for every size, its systems in the order asked for")
{
    two_tasks const given;
    auto const tables = runner::summarise(given.made.log(), request_of(given.samples));
    REQUIRE(tables.size() == 1);
    CHECK(runner::table_of(tables[0]).text()
          == "policy      s1   (vt)  average  bytes %\n"
             "---------------------------------------\n"
             "full     90.00  15.00    90.00   100.00\n"
             "-- KV size 64 -------------------------\n"
             "paper    75.00   0.00    75.00     6.40\n"
             "snapkv   55.00  90.00    55.00     6.40\n"
             "another   1.50  3.00*     1.50     6.40\n"
             "-- KV size 128 ------------------------\n"
             "paper    80.00   0.00    80.00    12.80\n");
    CHECK(runner::table_of(tables[0]).markdown()
          == "| policy | s1 | (vt) | average | bytes % |\n"
             "|:--|--:|--:|--:|--:|\n"
             "| full | 90.00 | 15.00 | 90.00 | 100.00 |\n"
             "| **KV size 64** | | | | |\n"
             "| paper | 75.00 | 0.00 | 75.00 | 6.40 |\n"
             "| snapkv | 55.00 | 90.00 | 55.00 | 6.40 |\n"
             "| another | 1.50 | 3.00* | 1.50 | 6.40 |\n"
             "| **KV size 128** | | | | |\n"
             "| paper | 80.00 | 0.00 | 80.00 | 12.80 |\n");
    CHECK(runner::csv_of(tables)
          == "group,question,metric,policy,kv_size,s1,vt,average,bytes_percent\n"
             ",window,score,full,,90.0000,15.0000,90.0000,100.0000\n"
             ",window,score,paper,64,75.0000,0.0000,75.0000,6.4000\n"
             ",window,score,snapkv,64,55.0000,90.0000,55.0000,6.4000\n"
             ",window,score,another,64,1.5000,3.0000,1.5000,6.4000\n"
             ",window,score,paper,128,80.0000,0.0000,80.0000,12.8000\n");
}

TEST_CASE("tasks that the full cache fails are named and left out of averages; the threshold is an option")
{
    two_tasks const given;
    auto request = request_of(given.samples);
    auto tables  = runner::summarise(given.made.log(), request);
    auto notes   = runner::notes_of(tables.at(0), 25);
    REQUIRE(notes.size() == 2);
    CHECK(notes[0] == "In parentheses and left out of averages, since the full cache itself is below 25: vt 15.00.");
    CHECK(notes[1] == "*, -: some or all answers are missing; such rows have no average.");

    request.least_full = 10;
    tables             = runner::summarise(given.made.log(), request);
    CHECK(tables.at(0).left_out == std::vector<bool>{false, false});
    CHECK(tables[0].rows[0].average.value() == doctest::Approx(52.5));
    CHECK(tables[0].rows[2].policy == "snapkv");
    CHECK(tables[0].rows[2].average.value() == doctest::Approx(72.5));
    CHECK_FALSE(tables[0].rows[3].average.has_value()); // an answer is missing

    request.least_full = 95; // nothing is left
    tables             = runner::summarise(given.made.log(), request);
    CHECK_FALSE(tables.at(0).rows[0].average.has_value());
    CHECK(runner::notes_of(tables[0], 95).at(1) == "The full cache fails on every column: this table ranks nothing.");
}

TEST_CASE("answers of other samples, models, elements and windows do not count")
{
    made_log made;
    std::vector<runner::sample> const samples{some_sample("s1", "a")};
    made.add(samples[0], "full", 0, 50);
    made.add(some_sample("s1", "other"), "full", 0, 100);
    runner::sample changed = samples[0];
    changed.context += "!";
    made.add(changed, "full", 0, 100);
    made.add(samples[0], "full", 0, 100, "window", {"other.gguf", "f16", 32});
    made.add(samples[0], "full", 0, 100, "window", {"model.gguf", "f32", 32});
    made.add(samples[0], "full", 0, 100, "window", {"model.gguf", "f16", 8});
    auto const tables = runner::summarise(made.log(), request_of(samples));
    REQUIRE(tables.size() == 1);
    CHECK(tables[0].rows.at(0).cells.at(0).count() == 1);
    CHECK(tables[0].rows[0].cells[0].mean() == 50);
    CHECK(runner::table_of(tables[0]).csv() == "policy,s1,bytes %\nfull,50.00,100.00\n"); // one column needs no average
}

TEST_CASE("question places and groups have tables of their own; without the full cache nothing is left out")
{
    made_log made;
    std::vector<runner::sample> const samples{some_sample("s1", "a"), some_sample("s2", "a")};
    made.add(samples[0], "paper", 64, 1, "after");
    made.add(samples[0], "paper", 64, 2, "window");
    made.add(samples[1], "paper", 64, 3, "window");
    auto request      = request_of(samples);
    request.group     = [](runner::sample const& one) { return one.task == "s1" ? "1 K" : "2 K"; };
    request.column    = [](runner::sample const&) { return "all"; };
    auto const tables = runner::summarise(made.log(), request);
    REQUIRE(tables.size() == 3);
    CHECK(runner::title_of(tables[0], "ruler") == "ruler, 1 K: score, question in the window");
    CHECK(runner::title_of(tables[1], "ruler") == "ruler, 1 K: score, question behind the compressed context");
    CHECK(runner::title_of(tables[2], "ruler") == "ruler, 2 K: score, question in the window");
    CHECK(tables[1].rows.at(0).cells.at(0).mean() == 1);
    CHECK(runner::notes_of(tables[0], 25).at(0) == "The full cache was not run: nothing is left out of averages.");
    CHECK(runner::csv_of(tables).find("2 K,window,score,paper,64,3.0000,3.0000,6.4000\n") != std::string::npos);
}

TEST_CASE("the summary's JSON has counts, means and standard errors, null where there is none")
{
    two_tasks const given;
    auto const json = runner::summary_json(runner::summarise(given.made.log(), request_of(given.samples)).at(0));
    CHECK(json["columns"] == nlohmann::json({"s1", "vt"}));
    CHECK(json["samples"] == nlohmann::json({2, 2}));
    CHECK(json["left_out"] == nlohmann::json({"vt"}));
    nlohmann::json const& another = json["rows"].at(3);
    CHECK(another["policy"] == "another");
    CHECK(another["cells"][0]["count"] == 2);
    CHECK(another["cells"][0]["mean"] == 1.5);
    CHECK(another["cells"][0]["standard_error"] == doctest::Approx(0.5));
    CHECK(another["cells"][1]["count"] == 1);
    CHECK(another["cells"][1]["standard_error"].is_null());
}

TEST_CASE("a table's cells are escaped where Markdown and CSV would read more into them")
{
    runner::table t{{"policy", "a,b"}};
    t.add({"paper[ratios=0,1|\"x\"]", "1"});
    CHECK(t.markdown() == "| policy | a,b |\n|:--|--:|\n| paper[ratios=0,1\\|\"x\"] | 1 |\n");
    CHECK(t.csv() == "policy,\"a,b\"\n\"paper[ratios=0,1|\"\"x\"\"]\",1\n");
}

TEST_CASE("a heatmap has depths down and lengths across")
{
    made_log made;
    std::vector<runner::sample> samples;
    for (std::int64_t const length : {512, 1024})
    {
        for (double const depth : {0.0, 99.5})
        {
            samples.push_back(some_sample("needle", std::to_string(length) + "-" + std::to_string(depth)));
            samples.back().about = {{"length", length}, {"depth", depth}};
        }
    }
    made.add(samples[0], "snapkv", 128, 100);
    made.add(samples[1], "snapkv", 128, 99.9);
    made.add(samples[3], "snapkv", 128, 0);
    auto const maps = runner::heatmaps_of(made.log(), request_of(samples));
    REQUIRE(maps.size() == 1);
    CHECK(runner::heatmap_text(maps[0], false)
          == "snapkv, KV size 128, question in the window: 66.63\n"
             "    0 % | * .|\n"
             " 99.5 % | 9 0|\n"
             "         512 to 1024 tokens\n");
    std::string const coloured = runner::heatmap_text(maps[0], true);
    CHECK(coloured.find("\033[48;2;0;190;60m  \033[0m .|") != std::string::npos);
    CHECK(coloured.find("\033[48;2;220;0;60m  \033[0m|") != std::string::npos);
}
