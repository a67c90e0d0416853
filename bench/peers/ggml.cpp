// Decode attention beside ggml's: ggml_flash_attn_ext with f16, q8_0 and q4_0 keys and values (and two products with a softmax
// between them, f16, which are faster) against attend over the full cache, int8, int4, the mix of rungs that `best` chooses,
// and KV 512.
//
// All run in one process with the same tokens, queries and number of threads. They take turns, each followed by a plain read
// of as many bytes, in rounds that begin with another one each time; the figures are medians. Layers have Llama-3-8B's shape
// and are rotated so that none stays in the caches. All memory is on huge pages. Before any timing the outputs are compared:
// exit status 1 where ggml's differ from mdkv's by more than the storage explains.
//
//   peers_ggml [--tokens N,N] [--threads N,N] [--rounds N] [--json FILE]
//
// ggml gets its fastest configuration: no mask, keys and values contiguous for each head, graph and plan made once, a pool of
// threads that lives on and polls for work during ggml's turn (and sleeps during others').
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ggml-cpu.h>
#include <ggml.h>

#include "bench.hpp"
#include "ggml_rival.hpp"
#include "mdkv_rival.hpp"
#include "rival.hpp"

namespace
{

using namespace mdkv;
using namespace peers;

constexpr index_t turn_bytes = index_t{1} << 25; // at least, so that threads are awake for most of a turn
constexpr double f16_limit   = 1e-2;             // relative difference: ggml sums values in f16
constexpr double code8_limit = 5e-2;

// --- measuring ---------------------------------------------------------------------------------------------------------

using rivals = std::vector<std::unique_ptr<rival>>;

constexpr std::size_t ggml_f16 = 0; // places among the rivals
constexpr std::size_t ggml_q4  = 3;
constexpr std::size_t our_full = 4;

[[nodiscard]] rivals all_of(source const& from)
{
    cpu::thread_pool pool = pool_apart(static_cast<int>(std::max(1U, std::thread::hardware_concurrency())));
    auto const threads    = std::make_shared<ggml_threads>();
    rivals all;
    auto const add_theirs = [&](char const* name, ggml_type type, by way, double allowed) {
        all.push_back(std::make_unique<ggml_rival>(name, from, type, way, threads));
        all.back()->allowed = allowed;
    };
    auto const add_ours = [&](std::string name, std::vector<std::uint8_t> const& rung, double allowed) {
        all.push_back(std::make_unique<mdkv_rival>(std::move(name), from, packed(from, rung, pool)));
        all.back()->allowed = allowed;
    };
    add_theirs("ggml flash_attn_ext f16", GGML_TYPE_F16, by::flash_attention, f16_limit);
    add_theirs("ggml mul_mat, soft_max f16", GGML_TYPE_F16, by::products, f16_limit);
    add_theirs("ggml flash_attn_ext q8_0", GGML_TYPE_Q8_0, by::flash_attention, code8_limit);
    add_theirs("ggml flash_attn_ext q4_0", GGML_TYPE_Q4_0, by::flash_attention, 0);
    index_t const n = from.tokens;
    add_ours("mdkv full cache, f16", rungs_in({0, 0, 0, 1000}, n), f16_limit);
    add_ours("mdkv int8", rungs_in({0, 0, 1000, 0}, n), code8_limit);
    add_ours("mdkv int4", rungs_in({0, 1000, 0, 0}, n), 0);
    add_ours("mdkv best, a quarter", rungs_in(best_quarter, n), 0);
    add_ours("mdkv best, KV 512", rungs_of_size(n < 32768 ? best_32nd : best_128th, n, 512), 0);
    return all;
}

/// Compares outputs over caches that keep every token with that over the full cache, and names those that differ too much.
[[nodiscard]] bool agree(rivals& all)
{
    cpu::thread_pool two = pool_apart(2);
    auto const run       = [&](rival& one) {
        one.use_threads(two);
        one.begin_turn();
        one.attend_to(0);
        one.end_turn();
    };
    run(*all[our_full]);
    std::vector<float> const truth = all[our_full]->output();
    bool good                      = true;
    for (std::size_t i = 0; i < our_full + 3; ++i)
    {
        rival& one = *all[i];
        run(one);
        double apart = 0;
        double size  = 0;
        for (std::size_t j = 0; j < truth.size(); ++j)
        {
            apart += std::pow(one.output()[j] - truth[j], 2);
            size += std::pow(truth[j], 2);
        }
        one.differs = std::sqrt(apart / size);
        if (one.allowed > 0 && !(one.differs <= one.allowed)) // NaN, too
        {
            good = false;
            std::fprintf(stderr,
                "peers_ggml: the output of %s is %.2g away from that of the full cache, %.2g is allowed\n",
                one.name.c_str(), one.differs, one.allowed);
        }
    }
    return good;
}

void measure(rivals& all, int threads, int rounds)
{
    cpu::thread_pool pool = pool_apart(threads); // one for all of mdkv and the plain reads, as an engine has one
    for (auto& one : all) { one->use_threads(pool); }
    std::vector<std::vector<double>> times(all.size());
    std::vector<std::vector<double>> reads(all.size());
    for (int round = -1; round < rounds; ++round) // the first one faults pages in
    {
        for (std::size_t i = 0; i < all.size(); ++i)
        {
            std::size_t const place = (i + static_cast<std::size_t>(round + 1)) % all.size();
            rival& one              = *all[place];
            auto const calls        = std::max<index_t>(1, turn_bytes / one.bytes);
            auto const a_call       = [&](auto const& call) {
                return bench::seconds([&] {
                    for (index_t c = 0; c < calls; ++c) { call(); }
                }) / static_cast<double>(calls);
            };
            one.begin_turn();
            double const time = a_call([&] { one.attend_to(one.rotate()); });
            one.end_turn();
            wake(pool);
            double const read = a_call([&] { bench::plain_read(pool, one.memory(one.rotate()), one.bytes); });
            if (round < 0) { continue; }
            times[place].push_back(time);
            reads[place].push_back(read);
        }
    }
    for (std::size_t i = 0; i < all.size(); ++i)
    {
        all[i]->seconds   = bench::median(times[i]);
        all[i]->read_only = bench::median(reads[i]);
    }
}

// --- reporting ---------------------------------------------------------------------------------------------------------

void print_configuration(int rounds)
{
    std::printf("ggml %s, commit %s: FMA %d, AVX2 %d, AVX-512 %d, VNNI %d, llamafile's products %d\n", ggml_version(),
        ggml_commit(), ggml_cpu_has_fma(), ggml_cpu_has_avx2(), ggml_cpu_has_avx512(),
        static_cast<int>(ggml_cpu_has_avx512_vnni() != 0 || ggml_cpu_has_avx_vnni() != 0), ggml_cpu_has_llamafile());
    std::printf(
        "  flash_attn_ext: q [128, 1, 32] f32, k and v [128, tokens, 8] of one type, contiguous; no mask, default "
        "precision\n");
    std::printf(
        "  mul_mat, soft_max: q [128, 4, 8], so that a head's four queries share its keys; v [tokens, 128, 8]\n");
    std::printf(
        "  graph and plan made once; a pool of ggml's own threads, polling during its turns, asleep in others'\n");
    std::printf("mdkv: %s; rungs 0, int4, int8, f16\n", bench::instruction_set().c_str());
    std::printf("8 KV heads, 4 query heads each, D = 128; medians of %d rounds in turn; each rotates through %lld MiB "
                "of layers;\n"
                "the calling thread stays on one processor, all others on the rest\n",
        rounds, static_cast<long long>(beyond_caches >> 20));
}

void print_heading()
{
    std::printf(
        "of a read: the time of a plain read of as many bytes, over the time; difference: relative, from the full "
        "cache's output\n\n");
    std::printf(
        "| tokens | threads | %-26s |    MB |     ms | GB/s | of a read | x ggml f16 | x ggml q4_0 | difference |\n",
        "attention");
    std::printf("|--:|--:|:--|--:|--:|--:|--:|--:|--:|--:|\n");
}

void print(rivals const& all, index_t tokens, int threads, std::FILE* json, bool& first)
{
    for (auto const& one : all)
    {
        double const over_f16 = all[ggml_f16]->seconds / one->seconds;
        double const over_q4  = all[ggml_q4]->seconds / one->seconds;
        double const speed    = static_cast<double>(one->bytes) / one->seconds / 1e9;
        char differs[16]      = "-";
        if (one->differs > 0) { std::snprintf(differs, sizeof differs, "%.1e", one->differs); }
        std::printf("| %6lld | %7d | %-26s | %5.1f | %6.3f | %4.1f | %9.2f | %10.1f | %11.1f | %10s |\n",
            static_cast<long long>(tokens), threads, one->name.c_str(), static_cast<double>(one->bytes) / 1e6,
            one->seconds * 1e3, speed, one->read_only / one->seconds, over_f16, over_q4, differs);
        if (json == nullptr) { continue; }
        std::fprintf(json,
            "%s\n  {\"name\": \"%s\", \"tokens\": %lld, \"threads\": %d, \"bytes\": %lld, \"seconds\": %.9g, "
            "\"gb_per_s\": %.5g, \"read_seconds\": %.9g, \"of_read\": %.4g, \"times_ggml_f16\": %.5g, "
            "\"times_ggml_q4_0\": %.5g, \"difference\": %.4g}",
            first ? "" : ",", one->name.c_str(), static_cast<long long>(tokens), threads,
            static_cast<long long>(one->bytes), one->seconds, speed, one->read_only, one->read_only / one->seconds,
            over_f16, over_q4, one->differs);
        first = false;
    }
    std::fflush(stdout);
}

struct options
{
    std::vector<index_t> tokens{16384, 65536};
    std::vector<index_t> threads{1, 2};
    index_t rounds   = 21;
    char const* json = nullptr;
};

[[nodiscard]] std::vector<index_t> numbers(char const* text, index_t least)
{
    std::vector<index_t> read;
    for (char const* at = text;; ++at)
    {
        char* end = nullptr;
        read.push_back(std::strtoll(at, &end, 10));
        if (end == at || (*end != ',' && *end != '\0') || read.back() < least)
        {
            fail(std::string{"not a list of numbers from "} + std::to_string(least) + ": " + text);
        }
        at = end;
        if (*end == '\0') { return read; }
    }
}

[[nodiscard]] options read_options(int count, char** arguments)
{
    options read;
    for (int i = 1; i < count; i += 2)
    {
        std::string const name = arguments[i];
        if (i + 1 == count) { fail(name + " lacks its value (--tokens, --threads, --rounds, --json)"); }
        char const* const value = arguments[i + 1];
        if (name == "--tokens") { read.tokens = numbers(value, 4096); }
        else if (name == "--threads") { read.threads = numbers(value, 1); }
        else if (name == "--rounds") { read.rounds = numbers(value, 1)[0]; }
        else if (name == "--json") { read.json = value; }
        else { fail("unknown option: " + name + " (--tokens, --threads, --rounds, --json)"); }
    }
    return read;
}

} // namespace

int main(int count, char** arguments)
{
    options const chosen = read_options(count, arguments);
    int const rounds     = static_cast<int>(chosen.rounds);
    std::FILE* json      = nullptr;
    if (chosen.json != nullptr && (json = std::fopen(chosen.json, "w")) == nullptr)
    {
        fail(std::string{"cannot write "} + chosen.json);
    }
    ggml_cpu_init();
    print_configuration(rounds);
    if (json != nullptr)
    {
        std::fprintf(json, "{\"ggml\": \"%s\", \"commit\": \"%s\", \"mdkv\": \"%s\", \"rounds\": %d, \"results\": [",
            ggml_version(), ggml_commit(), bench::instruction_set().c_str(), rounds);
    }
    print_heading();
    bool first = true;
    bool good  = true;
    for (index_t const tokens : chosen.tokens)
    {
        rivals all = all_of(source{tokens});
        if (!agree(all))
        {
            good = false;
            continue;
        }
        for (index_t const threads : chosen.threads)
        {
            measure(all, static_cast<int>(threads), rounds);
            print(all, tokens, static_cast<int>(threads), json, first);
        }
    }
    if (json != nullptr)
    {
        std::fprintf(json, "\n]}\n");
        std::fclose(json);
    }
    return good ? 0 : 1;
}
