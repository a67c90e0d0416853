#include <mdkv/reader.hpp>

#include <mdkv/append.hpp>
#include <mdkv/attend.hpp>
#include <mdkv/core/allocation.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/cpu/thread_pool.hpp>
#include <mdkv/engine/unpack.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/prompt.hpp>
#include <mdkv/replay/replay.hpp>
#include <mdkv/stages/allocate.hpp>
#include <mdkv/stages/pool.hpp>

#include "support/failing_resource.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::tensor;
using host   = cpu::backend;
using cache  = cpu::cache<half>;
using rows   = prompt_rows<host, half>;
using reader = mdkv::reader<host, cache>;

/// Queries, keys and values of all tokens of all layers.
struct text
{
    static constexpr index_t heads = 2, group = 3, dim = 64, value_dim = 40;

    index_t tokens;
    std::vector<support::layer<half>> all;

    text(index_t layers, index_t tokens_)
        : tokens{tokens_}
    {
        for (index_t l = 0; l < layers; ++l)
        {
            all.emplace_back(support::layer_sizes{.heads = heads,
                .group                                   = group,
                .queries                                 = tokens,
                .tokens                                  = tokens,
                .window                                  = 0,
                .dim                                     = dim,
                .value_dim                               = value_dim,
                .first_query                             = 0,
                .salt                                    = l + 1});
        }
    }

    [[nodiscard]] index_t layers() const { return std::ssize(all); }
    [[nodiscard]] rows part(index_t l, index_t first, index_t n) const
    {
        auto const& x = all[static_cast<std::size_t>(l)];
        return {slice<1>(x.queries.in(), first, n), slice<1>(x.keys.in(), first, n), slice<1>(x.values.in(), first, n)};
    }
    [[nodiscard]] prompt_shape<host> shape() const
    {
        return {.layers = layers(), .heads = heads, .group = group, .dims = {dim, value_dim}, .tokens = tokens};
    }
    [[nodiscard]] index_t layer_bytes() const { return heads * tokens * (dim + value_dim) * 2; }
};

/// A reader, and what it has made.
struct read_text
{
    text const& x;
    preset chosen;
    reader_options options;
    cpu::executor_ref threads;
    std::vector<cache> caches;
    workspace state{support::nan_memory{}};
    bool insists = false; ///< every call is made until memory suffices
    std::unique_ptr<reader> r;
    std::vector<float> outputs; // of all calls, one after another
    std::vector<reader_report> reports;

    read_text(text const& x_, preset const& chosen_, reader_options const& options_, cpu::executor_ref threads_ = {},
        std::pmr::memory_resource* resource = std::pmr::get_default_resource())
        : x{x_}
        , chosen{chosen_}
        , options{options_}
        , threads{threads_}
    {
        for (index_t l = 0; l < x.layers(); ++l) { caches.emplace_back(cache_layout{}, 0, 0, resource); }
        r = std::make_unique<reader>(host{&state}, chosen, x.shape(), options, std::span{caches});
    }

    template <class Call>
    void make(Call const& call)
    {
        if (insists) { CHECK(support::insist(call, threads) > 0); }
        else { support::run(call, threads); }
    }
    void attend(index_t l, index_t first, index_t n)
    {
        tensor<half, 3> output{{text::heads * text::group, n, text::value_dim}};
        tensor<float, 2> lse{{text::heads * text::group, n}};
        make([&](host const& on) { r->attend(on, l, x.part(l, first, n), output.out(), lse.out()); });
        for (half const one : output.elements()) { outputs.push_back(widen(one)); }
        for (float const one : lse.elements()) { outputs.push_back(one); }
    }
    reader_report end_chunk()
    {
        reader_report last;
        make([&](host const& on) { last = r->end_chunk(on); });
        reports.push_back(last);
        return last;
    }
    reader_report finish()
    {
        reader_report last;
        make([&](host const& on) { last = r->finish(on); });
        reports.push_back(last);
        return last;
    }
    [[nodiscard]] std::string finish_refused()
    {
        return error_text<invalid_argument>([&] { finish(); });
    }
    void read(index_t first, index_t end, index_t chunk)
    {
        for (; first < end; first += chunk)
        {
            index_t const n = std::min(chunk, end - first);
            for (index_t l = 0; l < x.layers(); ++l) { attend(l, first, n); }
            end_chunk();
        }
    }

    [[nodiscard]] std::vector<std::byte> bytes() const
    {
        std::vector<std::byte> all;
        for (cache const& one : caches)
        {
            auto const v = one.view();
            all.insert(all.end(), v.arena, v.arena + v.arena_bytes);
            auto const* const heads = reinterpret_cast<std::byte const*>(v.heads);
            all.insert(all.end(), heads, heads + v.layout.heads * index_t{sizeof(head_entry)});
        }
        return all;
    }
    [[nodiscard]] index_t tokens_at(index_t l, index_t h, std::size_t rung) const
    {
        auto const v            = caches[static_cast<std::size_t>(l)].view();
        head_entry const& entry = v.heads[h];
        return rung < v.layout.full_rung ? entry.runs[rung].tokens
                                         : entry.exact.tokens - v.layout.window - entry.stand_ins;
    }
};

/// One token of the straightforward reader below.
struct known_token
{
    index_t place;
    std::size_t rung;
    std::vector<float> losses; // [R]
};

/// The rungs of any_question's tokens by padded calls of the stages, without a cache: per layer and head the tokens in the
/// order of their slots.
struct plain_reader
{
    text const& x;
    preset chosen;
    index_t limit; // bytes of an average layer
    std::vector<std::vector<known_token>> heads{};
    std::vector<double> totals{};
    index_t read = 0;

    void chunk(index_t n)
    {
        std::size_t const L  = x.all.size();
        std::size_t const H  = text::heads;
        std::size_t const R  = chosen.ratios.size();
        index_t const window = std::min(chosen.window, read + n);
        heads.resize(L * H);
        totals.resize(L);
        for (std::size_t l = 0; l < L; ++l)
        {
            tensor<float, 3> raw{{text::heads, static_cast<index_t>(R), n}};
            tensor<float, 3> pooled{{text::heads, static_cast<index_t>(R), n}};
            rows const part  = x.part(static_cast<index_t>(l), read, n);
            auto const sinks = slice<1>(x.all[l].keys.in(), 0, std::min(read, chosen.replayed->sinks));
            support::run([&](host const& on) {
                replay(
                    on, part.queries, part.keys, part.values, sinks, chosen.ratios, chosen.replay<host>({}), raw.out());
                pool(on, raw.in(), chosen.pooling, pooled.out());
            });
            double sum = 0;
            for (std::size_t h = 0; h < H; ++h)
            {
                double of_head = 0;
                for (index_t i = 0; i < n; ++i)
                {
                    known_token token{read + i, R - 1, {}};
                    for (std::size_t r = 0; r < R; ++r)
                    {
                        token.losses.push_back(pooled.get(static_cast<index_t>(h), static_cast<index_t>(r), i));
                    }
                    of_head += double{token.losses[0]};
                    heads[l * H + h].push_back(token);
                }
                sum += of_head;
            }
            totals[l] += sum;
        }
        read += n;
        lower(window);
        for (auto& head : heads)
        {
            for (known_token& token : head)
            {
                for (float& loss : token.losses) { loss = widen(narrow<bfloat16>(loss)); }
            }
        }
    }

    void lower(index_t window)
    {
        std::size_t const R = chosen.ratios.size();
        rung_costs const costs{chosen.ratios, {text::dim, text::value_dim}, 2};
        index_t longest = 0;
        index_t bytes   = 0;
        for (auto const& head : heads)
        {
            longest = std::max(longest, std::ssize(head) - window);
            for (known_token const& token : head) { bytes += costs.bytes[token.rung]; }
        }
        bool const channels = std::any_of(heads.begin(), heads.end(), [&](auto const& head) {
            return std::any_of(head.begin(), head.end(), [&](known_token const& t) { return t.rung + 1 < R; });
        });
        if (!channels && bytes <= limit * x.layers()) { return; }
        index_t const own = text::heads * window * (text::dim + text::value_dim) * 2;
        tensor<float, 3> losses{{std::ssize(heads), static_cast<index_t>(R), longest}};
        for (std::size_t g = 0; g < heads.size(); ++g)
        {
            std::size_t const l = g / text::heads;
            double const late =
                std::exp(double{chosen.shared->depth} * static_cast<double>(l) / static_cast<double>(x.layers()));
            double const unit = late * static_cast<double>(text::heads * read) / totals[l];
            for (index_t i = 0; i < longest; ++i)
            {
                for (std::size_t r = 0; r < R; ++r)
                {
                    bool const padding             = i >= std::ssize(heads[g]) - window;
                    known_token const* const token = padding ? nullptr : &heads[g][static_cast<std::size_t>(i)];
                    float const loss               = padding ? 0.0F : token->losses[std::min(r, token->rung)];
                    losses.set(
                        static_cast<float>(double{loss} * unit), static_cast<index_t>(g), static_cast<index_t>(r), i);
                }
            }
        }
        tensor<std::uint8_t, 2> rung{{std::ssize(heads), longest}};
        index_t const spend = x.layers() * (limit - own);
        allocation report;
        support::run([&](host const& on) {
            allocate(on, {losses.in(), rung.out()}, costs, in(on, &spend, 1),
                {.charge = chosen.charge, .layers = x.layers()}, out(on, &report, 1));
        });
        for (std::size_t g = 0; g < heads.size(); ++g)
        {
            std::vector<known_token> next;
            for (std::size_t r = 1; r < R; ++r)
            {
                for (index_t i = 0; i < std::ssize(heads[g]) - window; ++i)
                {
                    known_token token     = heads[g][static_cast<std::size_t>(i)];
                    std::size_t const got = rung.get(static_cast<index_t>(g), i);
                    CHECK(got <= token.rung);
                    token.rung = got;
                    if (got == r) { next.push_back(token); }
                }
            }
            next.insert(next.end(), heads[g].end() - window, heads[g].end());
            heads[g] = next;
        }
    }
};

[[nodiscard]] preset without_stand_ins(preset p)
{
    p.stand_ins = 0;
    return p;
}

[[nodiscard]] preset plain_question()
{
    preset p                 = without_stand_ins(presets::any_question);
    p.shared->leverage_power = 0;
    return p;
}

} // namespace

TEST_CASE("a prompt that fits is stored uncompressed, bit for bit, whatever its chunks; every chunk sees all before it")
{
    text const x{2, 150};
    for (index_t const chunk : {1, 7, 64, 150})
    {
        CAPTURE(chunk);
        read_text whole{x, presets::best, {.limit = budget::fraction(1, 1), .chunk = 150}};
        whole.read(0, 150, 150);
        read_text parts{x, presets::best, {.limit = budget::fraction(1, 1), .chunk = chunk}};
        parts.read(0, 150, chunk);
        for (read_text* one : {&whole, &parts})
        {
            CHECK(one->reports.back().chosen.status == allocation_status::everything_kept);
            CHECK(one->finish().held_bytes == 2 * x.layer_bytes());
        }
        CHECK(whole.bytes() == parts.bytes());
        tensor<half, 3> keys{{text::heads, 150, text::dim}};
        tensor<half, 3> values{{text::heads, 150, text::value_dim}};
        tensor<index_t, 1> kept{{text::heads}};
        for (std::size_t l = 0; l < 2; ++l)
        {
            support::run(
                [&](host const& on) { unpack(on, parts.caches[l].view(), keys.out(), values.out(), kept.out()); });
            CHECK(keys.elements() == x.all[l].keys.elements());
            CHECK(values.elements() == x.all[l].values.elements());
            CHECK(parts.caches[l].layout().window == presets::best.window);
            CHECK(parts.caches[l].tail_capacity() == 0);
        }
        if (chunk == 1) { continue; }
        // the last query of all, from the last chunk's call
        index_t const last = (150 - 1) % chunk;
        index_t const n    = last + 1;
        for (index_t q = 0; q < text::heads * text::group; ++q)
        {
            double sum = 0;
            for (index_t t = 0; t < 150; ++t)
            {
                double logit = 0;
                for (index_t d = 0; d < text::dim; ++d)
                {
                    logit += double{widen(x.all[1].queries.get(q, 149, d))}
                             * double{widen(x.all[1].keys.get(q / text::group, t, d))};
                }
                sum += std::exp(logit * x.all[1].scale());
            }
            auto const at = parts.outputs.end() - text::heads * text::group * n + q * n + last;
            CHECK(double{*at} == doctest::Approx(std::log(sum)).epsilon(1e-4));
        }
    }
}

TEST_CASE("rungs are those of a straightforward reader, and never rise; the limit holds after every chunk")
{
    for (auto const& [layers, tokens, chunk] : {std::array<index_t, 3>{1, 300, 100}, {3, 700, 64}, {2, 400, 33}})
    {
        CAPTURE(chunk);
        text const x{layers, tokens};
        preset const p      = plain_question();
        index_t const limit = x.layer_bytes() / 7;
        read_text got{x, p, {.limit = budget::bytes(limit), .chunk = chunk, .slack = 0}};
        plain_reader want{x, p, limit};
        for (index_t first = 0; first < tokens; first += chunk)
        {
            index_t const n = std::min(chunk, tokens - first);
            for (index_t l = 0; l < layers; ++l) { got.attend(l, first, n); }
            reader_report const report = got.end_chunk();
            want.chunk(n);
            CHECK(report.tokens == first + n);
            CHECK(report.limit_bytes == layers * limit);
            CHECK(report.held_bytes <= report.limit_bytes);
            index_t different = 0;
            for (index_t g = 0; g < layers * text::heads; ++g)
            {
                for (std::size_t r = 1; r < p.ratios.size(); ++r)
                {
                    auto const& head  = want.heads[static_cast<std::size_t>(g)];
                    index_t const own = std::count_if(head.begin(), head.end() - std::min(p.window, first + n),
                        [&](known_token const& token) { return token.rung == r; });
                    different += own == got.tokens_at(g / text::heads, g % text::heads, r) ? 0 : 1;
                }
            }
            CHECK(different == 0);
        }
        CHECK(got.reports.back().chosen.tokens[0] > 0);
        index_t const held = got.reports.back().held_bytes;
        CHECK(held > got.reports.back().limit_bytes * 95 / 100);
        CHECK(got.finish().held_bytes == held); // nothing is left to lower
        CHECK(got.finish_refused() == "reader::finish: the prompt is finished");
    }
}

TEST_CASE("presets as they are: limits hold with stand-ins, and bits do not depend on threads or on a prompt's "
          "greatest length")
{
    text const x{3, 640};
    cpu::thread_pool pool{3};
    for (preset const& p : {presets::any_question, presets::best})
    {
        CAPTURE(p.name);
        reader_options const options{.limit = budget::bytes(x.layer_bytes() / 8), .chunk = 128};
        read_text one{x, p, options};
        read_text other{x, p, options, pool};
        for (read_text* r : {&one, &other})
        {
            r->read(0, 640, 128);
            r->finish();
        }
        CHECK(one.bytes() == other.bytes());
        CHECK(one.outputs == other.outputs);
        for (std::size_t i = 0; i < one.reports.size(); ++i)
        {
            reader_report const& report = one.reports[i];
            bool const last             = i + 1 == one.reports.size();
            bool const slack            = !last && p.last_queries_score();
            CHECK(report.limit_bytes == x.layer_bytes() / 8 * 3 * (slack ? 5 : 4) / 4);
            CHECK(report.held_bytes <= report.limit_bytes);
            CHECK(report.losses_bytes == (last ? 0 : report.losses_bytes));
            if (!last)
            {
                // at most six bytes a token and head, of at least 60 bytes
                CHECK(report.losses_bytes * 10 < report.held_bytes);
                CHECK(report.losses_bytes > 0);
            }
        }
        for (cache const& c : one.caches)
        {
            cache_layout const& form = c.layout();
            bool const coded = form.stand_in_run < form.rungs; // at the prompt's end, if most kept tokens are
            CHECK(coded == p.last_queries_score());
            index_t const most =
                p.most_stand_ins(coded, x.layer_bytes() / 8, text::heads, form.stand_in_bytes(sizeof(half)));
            CHECK(most > 0);
            for (index_t h = 0; h < text::heads; ++h) { CHECK(c.view().heads[h].stand_ins == most); }
        }
    }
}

TEST_CASE("stand-ins take over the attention of tokens dropped in any chunk")
{
    text const x{1, 1024};
    // How far the last chunk's log-sum-exps are below those over all tokens, on average.
    auto const lacking = [&](index_t stand_ins) {
        preset p    = presets::any_question;
        p.stand_ins = stand_ins;
        read_text held{x, p, {.limit = budget::fraction(1, 1), .chunk = 256}};
        read_text small{x, p, {.limit = budget::fraction(1, 10), .chunk = 256, .slack = 0}};
        held.read(0, 1024, 256);
        small.read(0, 1024, 256);
        double sum          = 0;
        index_t const count = text::heads * text::group * 256;
        for (auto i = static_cast<std::ptrdiff_t>(held.outputs.size()) - count; i < std::ssize(held.outputs); ++i)
        {
            auto const at = static_cast<std::size_t>(i);
            sum += double{held.outputs[at]} - double{small.outputs[at]};
        }
        return sum / static_cast<double>(count);
    };
    double const without = lacking(0);
    double const with    = lacking(8);
    CAPTURE(without);
    CAPTURE(with);
    CHECK(without > 0);
    CHECK(std::fabs(with) < 0.6 * without);
}

TEST_CASE("a chunk that was taken back leaves no trace")
{
    text const x{2, 384};
    preset const p = presets::any_question;
    reader_options const options{.limit = budget::fraction(1, 6), .chunk = 128};
    read_text one{x, p, options};
    read_text other{x, p, options};
    one.read(0, 384, 128);
    other.read(0, 128, 128);
    for (index_t l = 0; l < 2; ++l) { other.attend(l, 128 + l, 77); }
    support::run([&](host const& on) { other.r->forget_chunk(on); });
    other.read(128, 384, 128);
    read_text third{x, p, options}; // ended after a chunk was taken back
    third.read(0, 128, 128);
    for (index_t l = 0; l < 2; ++l) { third.attend(l, 128, 5); }
    support::run([&](host const& on) { third.r->forget_chunk(on); });
    for (read_text* r : {&one, &other, &third}) { r->finish(); }
    CHECK(one.bytes() == other.bytes());
    CHECK(third.reports.back().held_bytes <= third.reports.back().limit_bytes);
}

TEST_CASE("a chunk may come in several calls of a layer, cut differently in each")
{
    text const x{2, 300};
    read_text r{x, presets::best, {.limit = budget::fraction(1, 6), .chunk = 150}};
    for (index_t first = 0; first < 300; first += 150)
    {
        for (index_t l = 0; l < 2; ++l)
        {
            r.attend(l, first, 100 - 30 * l);
            r.attend(l, first + 100 - 30 * l, 50 + 30 * l);
        }
        CHECK(r.end_chunk().tokens == first + 150);
    }
    CHECK(r.finish().tokens == 300);
}

TEST_CASE(
    "the last queries are the prompt's, however it is cut into chunks and calls, after a chunk was taken back, too")
{
    text const x{2, 403};
    preset p         = presets::best;
    p.replayed->join = 1e9F; // the last queries alone choose
    auto const read  = [&](std::vector<index_t> const& cuts, bool takes_back) {
        read_text r{x, p, {.limit = budget::fraction(1, 6), .chunk = 300, .slack = 100.0F}};
        index_t first = 0;
        for (index_t const n : cuts)
        {
            if (takes_back)
            {
                for (index_t l = 0; l < 2; ++l) { r.attend(l, first, n); }
                support::run([&](host const& on) { r.r->forget_chunk(on); });
            }
            r.read(first, first + n, n);
            first += n;
        }
        r.finish();
        std::vector<index_t> tokens;
        for (index_t l = 0; l < 2; ++l)
        {
            for (index_t h = 0; h < text::heads; ++h)
            {
                for (std::size_t rung = 1; rung < 4; ++rung) { tokens.push_back(r.tokens_at(l, h, rung)); }
            }
        }
        return tokens;
    };
    auto const want = read({103, 300}, false);
    for (auto const& cuts : {std::vector<index_t>{203, 200}, {300, 100, 3}, {300, 102, 1}, {300, 63, 40}})
    {
        for (bool const takes_back : {false, true})
        {
            auto const got = read(cuts, takes_back);
            for (std::size_t i = 0; i < got.size(); ++i)
            {
                CAPTURE(cuts.size());
                CAPTURE(i);
                CHECK(std::abs(got[i] - want[i]) <= 6); // queries before the last chunk see all that is stored
            }
        }
    }
}

TEST_CASE("a slack beyond all bytes holds everything until the end")
{
    text const x{2, 300};
    for (float const slack : {1e10F, 1e16F, 3e38F})
    {
        read_text r{x, presets::any_question, {.limit = budget::fraction(1, 6), .chunk = 100, .slack = slack}};
        r.read(0, 300, 100);
        CHECK(r.reports.back().held_bytes == 2 * x.layer_bytes());
        CHECK(r.finish().held_bytes <= 2 * x.layer_bytes() / 6);
    }
}

TEST_CASE("a prompt of any length that its limit holds is stored uncompressed")
{
    for (index_t const n : {1, 4, 8, 9, 10})
    {
        text const x{2, n};
        read_text r{x, presets::best, {.limit = budget::fraction(1, 1), .chunk = 16}};
        r.read(0, n, 16);
        CHECK(r.finish().held_bytes == 2 * x.layer_bytes());
    }
}

TEST_CASE("nothing but windows is enough for a reader without tokens, or with few of them")
{
    text const x{2, 20};
    for (index_t const n : {0, 1, 5, 20})
    {
        CAPTURE(n);
        read_text r{x, presets::best, {.limit = budget::fraction(4, 5), .chunk = 20}};
        for (index_t l = 0; l < 2 && n > 0; ++l) { r.attend(l, 0, n); }
        reader_report const report = r.finish();
        CHECK(report.tokens == n);
        CHECK(report.held_bytes == std::min<index_t>(report.held_bytes, report.limit_bytes));
        CHECK(r.caches[1].layout().window == std::min<index_t>(n, presets::best.window));
        CHECK(r.caches[1].tail_capacity() == 0);
    }
}

TEST_CASE("a reader names what is wrong before anything is changed")
{
    text const x{2, 200};
    auto const made = [&](preset const& p, reader_options const& options, prompt_shape<host> const& shape) {
        std::vector<cache> caches(2);
        return error_text<invalid_argument>([&] {
            workspace state{support::nan_memory{}};
            mdkv::reader<host, cache>{host{&state}, p, shape, options, std::span{caches}};
        });
    };
    reader_options const options{.limit = budget::bytes(20000), .chunk = 64};
    CHECK(made(presets::by_window, options, x.shape())
          == "reader: preset \"by_window\" does not replay; its losses are not known before the last queries");
    CHECK(made(presets::paper, options, x.shape()).starts_with("reader: preset \"paper\" does not replay"));
    preset projected = presets::best;
    projected.ratios = paper_ratios;
    CHECK(made(projected, options, x.shape()).starts_with("prompt: preset.ratios has a projected rung"));
    CHECK(made(presets::best, {.limit = budget::bytes(100), .chunk = 64}, x.shape())
          == "reader: a limit of 100 bytes a layer cannot hold the window of 8 tokens; at least 3328 bytes are needed");
    CHECK(made(presets::best, {.limit = budget::bytes(20000), .chunk = 0}, x.shape())
          == "reader: reader_options::chunk is 0; it must be at least 1");
    CHECK(made(presets::best, {.limit = budget::bytes(20000), .chunk = 64, .slack = -1}, x.shape())
          == "reader: reader_options::slack is -1; it must be finite and not negative");
    for (float const depth : {-41.0F, 1e4F, std::numeric_limits<float>::quiet_NaN()}) // as prompt refuses it
    {
        preset steep        = presets::best;
        steep.shared->depth = depth;
        CHECK(made(steep, options, x.shape()).starts_with("prompt: preset.shared.depth is "));
    }
    preset even        = presets::any_question;
    even.pooling.width = 4;
    CHECK(made(even, options, x.shape()) == "prompt: preset.pooling.width is 4; it must be odd and at least 1");
    prompt_shape<host> three = x.shape();
    three.layers             = 3;
    CHECK(made(presets::best, options, three) == "reader: there are 2 caches for 3 layers");

    read_text r{x, presets::best, options};
    CHECK(error_text<invalid_argument>([&] { r.attend(0, 0, 65); })
          == "reader::attend: layer 0 has 0 tokens of the chunk, and 65 more; from 1 to reader_options::chunk = 64 "
             "make a chunk");
    r.attend(0, 0, 64);
    CHECK(error_text<invalid_argument>([&] { r.end_chunk(); })
          == "reader::end_chunk: layer 1 has 0 tokens of the chunk, layer 0 has 64");
    text bad{2, 200};
    bad.all[1].keys.set(narrow<half>(std::numeric_limits<float>::infinity()), 1, 5, 3);
    tensor<half, 3> output{{text::heads * text::group, 64, text::value_dim}};
    tensor<float, 2> lse{{text::heads * text::group, 64}};
    CHECK(error_text<non_finite_input>([&] {
        support::run([&](host const& on) { r.r->attend(on, 1, bad.part(1, 0, 64), output.out(), lse.out()); });
    }) == "keys: NaN or infinity in layer 1, head 1, row 5");
    CHECK(error_text<invalid_argument>([&] {
        support::run([&](host const& on) { r.r->attend(on, 2, x.part(1, 0, 64), output.out(), lse.out()); });
    }) == "reader::attend: layer is 2; it must be from 0 to 1");
    r.attend(1, 0, 64);
    r.end_chunk();
    r.read(64, 192, 64);
    CHECK(error_text<invalid_argument>([&] { r.attend(0, 150, 10); })
          == "reader::attend: the prompt gets longer than the 200 tokens of prompt_shape::tokens");
}

TEST_CASE("a call for whose scratch memory ran out has changed nothing, unless a chunk's layers were being stored")
{
    text const x{2, 200};
    for (preset const& p : {presets::best, presets::any_question})
    {
        CAPTURE(p.name);
        reader_options const options{.limit = budget::fraction(1, 6), .chunk = 128};
        read_text want{x, p, options};
        want.read(0, 200, 128);
        want.finish();
        int again = 0;
        for (int k = 0, failed = 1; failed == 1; ++k)
        {
            CAPTURE(k);
            read_text got{x, p, options};
            got.insists = true;
            for (index_t l = 0; l < 2; ++l) { got.attend(l, 0, 128); }
            got.insists = false;
            support::failing_resource memory{support::failure::from_on, k};
            workspace scratch{cpu::host_memory{&memory}};
            failed = error_text<std::bad_alloc>([&] { got.r->end_chunk(host{&scratch}); }) == "threw nothing" ? 0 : 1;
            bool stored = false;
            if (failed == 1)
            {
                stored = error_text<invalid_argument>([&] { got.attend(0, 128, 1); }).find("has not ended")
                         != std::string::npos;
                got.end_chunk();
            }
            got.read(128, 200, 128);
            got.finish();
            CHECK((stored || got.outputs == want.outputs));
            CHECK((stored || got.bytes() == want.bytes()));
            again += failed == 1 && !stored ? 1 : 0;
        }
        CHECK(again > 10);
    }
}

TEST_CASE("after memory has run out the same call goes on where it stopped")
{
    text const x{3, 256};
    reader_options const options{.limit = budget::fraction(1, 6), .chunk = 128};
    read_text want{x, presets::best, options};
    want.read(0, 256, 128);
    want.finish();
    CHECK(want.caches[0].layout().stand_in_run < presets::best.ratios.size()); // stand-ins in codes stay after a failure
    int failures = 0;
    for (int k = 0; k < 24; ++k)
    {
        CAPTURE(k);
        support::failing_resource memory;
        {
            read_text got{x, presets::best, options, {}, &memory};
            got.read(0, 128, 128);
            for (index_t l = 0; l < 3; ++l) { got.attend(l, 128, 128); }
            bool failed     = false;
            auto const goes = [&](auto const& call) {
                memory.arm(support::failure::once, k);
                try
                {
                    call();
                }
                catch (std::bad_alloc const&)
                {
                    failed = true;
                    call();
                }
            };
            goes([&] { got.end_chunk(); });
            goes([&] { got.finish(); });
            for (std::size_t l = 0; l < 3; ++l)
            {
                CHECK(got.caches[l].arena_bytes() <= want.reports.back().limit_bytes);
            }
            CHECK((failed || got.bytes() == want.bytes()));
            failures += failed ? 1 : 0;
        }
        CHECK(memory.outstanding() == 0);
    }
    CHECK(failures > 10);
}
