/// \file long_layer.cpp: the memory that compressing one very long layer takes beside its keys and values
///
///   bench_long_layer [TOKENS [THREADS]]      default: 1,048,576 tokens, as many threads as the machine has
///
/// Keys and values (2 KV heads, D = 64, half) are made block by block and lie where an engine would have them. Each preset
/// compresses them to a sixteenth in a copy of the process, whose peak begins at what it holds. `best` as an engine does it
/// with one layer: the losses of replayed queries are scored chunk by chunk, whose queries are gone then, and joined with
/// those of the last ones. A `reader` gets the tokens in chunks and holds no input; its prompts have at most 262,144 tokens,
/// because every chunk attends to what is kept.
#include <mdkv/mdkv.hpp>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <malloc.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.hpp"

namespace
{

using namespace mdkv;
using host = cpu::backend;

constexpr index_t heads = 2;
constexpr index_t group = 4;
constexpr index_t dim   = 64;

constexpr index_t longest_read = 262144; // tokens

/// Near a normal distribution, drawn from 4,096 numbers of one; strength falls from coordinate to coordinate.
class row_source
{
public:
    explicit row_source(std::uint32_t seed)
        : state_{seed}
        , drawn_(4096)
    {
        std::mt19937 random{seed};
        std::normal_distribution<float> normal;
        for (float& x : drawn_) { x = normal(random); }
    }

    void fill(std::span<half> rows)
    {
        for (std::size_t i = 0; i < rows.size(); ++i)
        {
            state_           = state_ * 6364136223846793005U + 1442695040888963407U;
            auto const faded = 3.0F / (1.0F + 0.1F * static_cast<float>(i % dim));
            rows[i]          = narrow<half>(faded * drawn_[state_ >> 52U]);
        }
    }

private:
    std::uint64_t state_;
    std::vector<float> drawn_;
};

/// [heads, tokens, D], made in blocks.
std::vector<half> made_rows(index_t tokens, std::uint32_t seed)
{
    constexpr std::size_t block = 4096 * dim;
    row_source source{seed};
    std::vector<half> all(static_cast<std::size_t>(heads * tokens * dim));
    for (std::size_t i = 0; i < all.size(); i += block)
    {
        source.fill(std::span{all}.subspan(i, std::min(block, all.size() - i)));
    }
    return all;
}

struct long_prompt
{
    index_t tokens;
    std::vector<half> keys   = made_rows(tokens, 1);
    std::vector<half> values = made_rows(tokens, 2);
};

/// Bytes that compressing takes beside keys and values.
struct taken
{
    index_t scratch     = 0; // the largest need of a call, and of a reader's state
    index_t losses      = 0; // and what else a prompt or reader keeps from call to call
    index_t arena       = 0;
    std::int64_t peak   = 0; // of the process, above what it held before
    double seconds      = 0;
};

/// Calls stages with scratch that grows.
struct stage_runner
{
    cpu::executor_ref executor;
    workspace scratch{cpu::host_memory{}};

    void operator()(auto const& stage) { stage(host{&scratch, executor}); }
};

/// Most resident bytes of this process since it began.
[[nodiscard]] index_t peak_bytes()
{
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    return index_t{1024} * used.ru_maxrss;
}

/// Calls body() in a copy of this process, whose peak begins at what the copy holds.
/// \throws mdkv::error   the copy did not come to its end
void in_child_process(auto const& body)
{
    malloc_trim(0); // freed pages of earlier work would count as the copy's
    std::fflush(nullptr);
    pid_t const child = fork();
    if (child == 0)
    {
        body();
        std::fflush(nullptr);
        _exit(0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    expects(child > 0 && status == 0, "bench_long_layer: the measuring process ended with status ", status);
}

taken compress_layer(long_prompt const& of, preset chosen, int threads)
{
    index_t const before = peak_bytes();
    cpu::thread_pool pool{threads};
    stage_runner run{pool};
    chosen.stand_ins = 0; // they need log-sum-exps
    std::vector<half> queries(static_cast<std::size_t>(heads * group * chosen.queries * dim));
    row_source{3}.fill(queries);
    taken found;
    cpu::cache<half> cache;
    workspace state{cpu::host_memory{}};
    found.seconds = bench::seconds([&] {
        host const on;
        auto const keys   = in(on, of.keys.data(), heads, of.tokens, dim);
        auto const values = in(on, of.values.data(), heads, of.tokens, dim);
        prompt_rows<host, half> const all{in(on, queries.data(), heads * group, chosen.queries, dim), keys, values};
        prompt<host, half> p{host{&state}, chosen,
            {.layers = 1, .heads = heads, .group = group, .dims = {dim, dim}, .tokens = of.tokens}};
        row_source source{4};
        index_t const chunk = chosen.replayed ? chosen.replayed->chunk : of.tokens;
        std::vector<half> asked(static_cast<std::size_t>(chosen.replayed ? heads * group * chunk * dim : 0));
        for (index_t first = 0; chosen.replayed && first < of.tokens; first += chunk)
        {
            index_t const n = std::min(chunk, of.tokens - first);
            source.fill(asked);
            run([&](host const& with) {
                p.read_chunk(with, 0, first,
                    {in(with, std::as_const(asked).data(), heads * group, n, dim), slice<1>(keys, first, n),
                        slice<1>(values, first, n)});
            });
        }
        run([&](host const& with) { p.finish_layer(with, 0, all); });
        run([&](host const& with) { p.allocate(with, budget::fraction(1, 16)); });
        run([&](host const& with) { p.pack(with, 0, all, cache); });
    });
    found.scratch = run.scratch.peak();
    found.losses  = state.peak();
    found.arena   = cache.arena_bytes();
    found.peak    = peak_bytes() - before;
    return found;
}

/// Reads the same layer chunk by chunk, made as it is read.
/// \throws mdkv::error   a chunk's end leaves more than the limit, and the slack of a preset that has some
taken read_layer(index_t tokens, preset const& chosen, int threads)
{
    index_t const before = peak_bytes();
    cpu::thread_pool pool{threads};
    stage_runner run{pool};
    reader_options const options{.limit = budget::fraction(1, 16)};
    prompt_shape<host> const shape{.layers = 1, .heads = heads, .group = group, .dims = {dim, dim}, .tokens = tokens};
    std::vector<cpu::cache<half>> caches(1);
    using layer_reader = reader<host, cpu::cache<half>>;
    workspace state{cpu::host_memory{}};
    layer_reader r{host{&state}, chosen, shape, options, std::span{caches}};
    row_source sources[3]{row_source{1}, row_source{2}, row_source{4}};
    std::vector<half> rows[3];
    std::vector<half> output(static_cast<std::size_t>(heads * group * options.chunk * dim));
    std::vector<float> lse(static_cast<std::size_t>(heads * group * options.chunk));
    taken found;
    found.seconds = bench::seconds([&] {
        for (index_t first = 0; first < tokens; first += options.chunk)
        {
            index_t const n = std::min(options.chunk, tokens - first);
            for (std::size_t i = 0; i < 3; ++i)
            {
                rows[i].resize(static_cast<std::size_t>((i == 2 ? heads * group : heads) * n * dim));
                sources[i].fill(rows[i]);
            }
            run([&](host const& on) {
                r.attend(on, 0,
                    {in(on, std::as_const(rows[2]).data(), heads * group, n, dim),
                        in(on, std::as_const(rows[0]).data(), heads, n, dim),
                        in(on, std::as_const(rows[1]).data(), heads, n, dim)},
                    out(on, output.data(), heads * group, n, dim), out(on, lse.data(), heads * group, n));
            });
            reader_report report;
            run([&](host const& on) { report = first + n < tokens ? r.end_chunk(on) : r.finish(on); });
            expects(report.held_bytes <= report.limit_bytes, "bench_long_layer: ", report.held_bytes, " bytes of ",
                report.limit_bytes, " are held after ", report.tokens, " tokens");
            found.losses = std::max(found.losses, report.losses_bytes);
            found.arena  = std::max(found.arena, report.held_bytes);
        }
    });
    found.scratch = run.scratch.peak() + state.peak();
    found.peak    = peak_bytes() - before;
    return found;
}

[[nodiscard]] index_t number(char const* text)
{
    index_t value         = 0;
    char const* const end = text + std::strlen(text);
    bool const read       = std::from_chars(text, end, value).ptr == end;
    expects(read && value >= 1, "bench_long_layer [TOKENS [THREADS]]: ", text, " is no positive number");
    return value;
}

int run_all(int count, char** arguments)
{
    index_t const tokens = count > 1 ? number(arguments[1]) : index_t{1} << 20;
    auto const threads   = count > 2 ? static_cast<int>(number(arguments[2]))
                                     : static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
    double const input   = 2.0 * static_cast<double>(heads * tokens * dim) * sizeof(half);
    std::printf("%lld tokens, %lld KV heads, %lld query heads, D = %lld: keys and values %.1f MB; %s, %d threads\n",
        static_cast<long long>(tokens), static_cast<long long>(heads), static_cast<long long>(heads * group),
        static_cast<long long>(dim), input / 1e6, bench::instruction_set().c_str(), threads);
    std::printf(
        "| preset | scratch MB | losses at hand MB | cache MB | peak above the input MB | of the input | bytes a "
        "token and head | seconds |\n|:--|--:|--:|--:|--:|--:|--:|--:|\n");
    auto const print = [&](std::string const& name, auto const& measure) {
        in_child_process([&] {
            taken const x = measure();
            std::printf("| %s | %.1f | %.1f | %.1f | %.1f | %.1f %% | %.1f | %.2f |\n", name.c_str(),
                static_cast<double>(x.scratch) / 1e6, static_cast<double>(x.losses) / 1e6,
                static_cast<double>(x.arena) / 1e6, static_cast<double>(x.peak) / 1e6,
                100 * static_cast<double>(x.peak) / input,
                static_cast<double>(x.peak) / static_cast<double>(heads * tokens), x.seconds);
        });
    };
    for (preset const& chosen : {presets::any_question, presets::best})
    {
        if (tokens <= longest_read)
        {
            print(std::string{chosen.name} + ", while it is read", [&] { return read_layer(tokens, chosen, threads); });
        }
    }
    long_prompt const layer{tokens};
    for (preset const& chosen : {presets::paper, presets::by_window, presets::best})
    {
        print(chosen.name, [&] { return compress_layer(layer, chosen, threads); });
    }
    return 0;
}

} // namespace

int main(int count, char** arguments)
{
    try
    {
        return run_all(count, arguments);
    }
    catch (std::exception const& problem)
    {
        std::fprintf(stderr, "bench_long_layer: %s\n", problem.what());
        return 1;
    }
}
