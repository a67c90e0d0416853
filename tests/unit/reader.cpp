// What a reader alone does: rungs that never rise, stand-ins made anew, chunks taken back, last queries, slack, its errors. What it
// promises like compress, prompt and fold is in pipelines.cpp.
#include <mdkv/reader.hpp>

#include <mdkv/mdkv.hpp>

#include "support/cases.hpp"
#include "support/failing_resource.hpp"
#include "support/host.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::refused;
using support::tensor;
using host      = cpu::backend;
using cache     = cpu::cache<half>;
using text      = support::text<half>;
using read_text = support::read_text<half>;

/// A text without log-sum-exps, which a reader finds itself.
text text_of(index_t layers, index_t tokens)
{
    return text{{.layers = layers, .tokens = tokens, .group = 3, .dims = {64, 40}, .last = 0}};
}

/// One token of the straightforward reader below.
struct known_token
{
    std::size_t rung;
    std::vector<float> losses; // [R]
};

/// The rungs of any_question's tokens by padded calls of the stages, without a cache, stand-ins and leverages: per layer and head
/// the tokens in the order of their slots.
struct plain_reader
{
    text const& x;
    preset chosen;
    index_t limit; // bytes of an average layer
    std::size_t R  = chosen.ratios.size();
    index_t rungs  = static_cast<index_t>(R);
    index_t read   = 0;
    index_t window = 0;
    std::vector<double> totals{std::vector<double>(x.all.size())};
    std::vector<std::vector<known_token>> heads{std::vector<std::vector<known_token>>(x.all.size() * 2)};

    void chunk(index_t n)
    {
        for (std::size_t l = 0; l < x.all.size(); ++l)
        {
            tensor<float, 3> raw{{2, rungs, n}}, pooled{{2, rungs, n}};
            auto const part  = x.part(static_cast<index_t>(l), read, n);
            auto const sinks = slice<1>(x.all[l].keys.in(), 0, std::min(read, chosen.replayed->sinks));
            support::run([&](host const& on) {
                replay(
                    on, part.queries, part.keys, part.values, sinks, chosen.ratios, chosen.replay<host>({}), raw.out());
                pool(on, raw.in(), chosen.pooling, pooled.out());
            });
            for (index_t i = 0; i < 2 * n; ++i)
            {
                known_token token{R - 1, {}};
                for (index_t r = 0; r < rungs; ++r) { token.losses.push_back(pooled.get(i / n, r, i % n)); }
                totals[l] += double{token.losses[0]};
                heads[l * 2 + static_cast<std::size_t>(i / n)].push_back(token);
            }
        }
        read += n;
        window = std::min(chosen.window, read);
        lower();
        for (auto& head : heads)
        {
            for (known_token& token : head)
            {
                for (float& loss : token.losses) { loss = widen(narrow<bfloat16>(loss)); }
            }
        }
    }

    /// Tokens of a head before the window at a rung.
    [[nodiscard]] index_t tokens_at(std::size_t head, std::size_t rung) const
    {
        auto const& all = heads[head];
        return std::count_if(all.begin(), all.end() - window, [&](known_token const& t) { return t.rung == rung; });
    }

private:
    void lower()
    {
        rung_costs const costs{chosen.ratios, x.dims, 2};
        index_t bytes = 0, most = 0;
        bool channels = false;
        for (auto const& head : heads)
        {
            most = std::max(most, std::ssize(head) - window);
            for (known_token const& token : head)
            {
                bytes += costs.bytes[token.rung];
                channels = channels || token.rung + 1 < R;
            }
        }
        if (!channels && bytes <= limit * x.layers) { return; }
        index_t const count = std::ssize(heads);
        tensor<float, 3> losses{{count, rungs, most}};
        losses.assign(std::vector<float>(static_cast<std::size_t>(losses.count()))); // padding
        for (index_t g = 0; g < count; ++g)
        {
            auto const& head = heads[static_cast<std::size_t>(g)];
            double const late =
                std::exp(double{chosen.shared->depth} * static_cast<double>(g / 2) / static_cast<double>(x.layers));
            double const unit = late * static_cast<double>(2 * read) / totals[static_cast<std::size_t>(g / 2)];
            for (index_t i = 0; i < std::ssize(head) - window; ++i)
            {
                known_token const& token = head[static_cast<std::size_t>(i)];
                for (std::size_t r = 0; r < R; ++r)
                {
                    double const loss = double{token.losses[std::min(r, token.rung)]} * unit;
                    losses.set(static_cast<float>(loss), g, static_cast<index_t>(r), i);
                }
            }
        }
        tensor<std::uint8_t, 2> rung{{count, most}};
        index_t const spend = x.layers * (limit - window * x.token_bytes());
        allocation report;
        support::run([&](host const& on) {
            allocate(on, {losses.in(), rung.out()}, costs, in(on, &spend, 1),
                {.charge = chosen.charge, .layers = x.layers}, out(on, &report, 1));
        });
        for (index_t g = 0; g < count; ++g)
        {
            auto& head = heads[static_cast<std::size_t>(g)];
            std::vector<known_token> next;
            for (std::size_t r = 1; r < R; ++r)
            {
                for (index_t i = 0; i < std::ssize(head) - window; ++i)
                {
                    known_token& token = head[static_cast<std::size_t>(i)];
                    if (rung.get(g, i) != r) { continue; }
                    CHECK(r <= token.rung);
                    token.rung = r;
                    next.push_back(token);
                }
            }
            next.insert(next.end(), head.end() - window, head.end());
            head = next;
        }
    }
};

} // namespace

TEST_CASE("rungs are those of a straightforward reader, and never rise; the limit holds after every chunk")
{
    preset p                 = presets::any_question;
    p.stand_ins              = 0;
    p.shared->leverage_power = 0;
    for (auto const& [layers, tokens, chunk] : {std::array<index_t, 3>{1, 300, 100}, {3, 700, 64}, {2, 400, 33}})
    {
        CAPTURE(chunk);
        text const x        = text_of(layers, tokens);
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
            for (std::size_t i = 0; i < want.heads.size() * 3; ++i)
            {
                auto const head = static_cast<index_t>(i / 3);
                CHECK(want.tokens_at(i / 3, i % 3 + 1) == got.tokens_at(head / 2, head % 2, i % 3 + 1));
            }
        }
        CHECK(got.reports.back().chosen.tokens[0] > 0);
        index_t const held = got.reports.back().held_bytes;
        CHECK(held > got.reports.back().limit_bytes * 95 / 100);
        CHECK(got.finish().held_bytes == held); // nothing is left to lower
        CHECK(error_text<invalid_argument>([&] { got.finish(); }) == "reader::finish: the prompt is finished");
    }
}

TEST_CASE("limits hold with stand-ins and slack, which is gone at the end, whatever the limit; losses take a tenth "
          "more at most")
{
    text const x = text_of(3, 400);
    preset own   = presets::any_question;
    own.shared.reset();
    for (preset const& p : {presets::any_question, presets::best, own})
    {
        for (index_t const part : {2, 5, 8, 13})
        {
            INFO(p.name, " ", part);
            index_t const limit = x.layer_bytes() / part;
            read_text one{x, p, {.limit = budget::bytes(limit), .chunk = 128}};
            one.read(0, 400, 128);
            one.finish();
            for (std::size_t i = 0; i < one.reports.size(); ++i)
            {
                reader_report const& report = one.reports[i];
                bool const last             = i + 1 == one.reports.size();
                CHECK(report.limit_bytes == 3 * limit + (last ? 0 : 3 * limit / 4));
                CHECK(report.held_bytes <= report.limit_bytes);
                // at most six bytes a token and head, of at least 60 bytes
                CHECK(report.losses_bytes * 10 < report.held_bytes);
                CHECK((report.losses_bytes > 0) == !last);
            }
            for (cache& c : one.caches)
            {
                CHECK(c.tail_capacity() == 0);
                CHECK((p.shared || (c.arena_bytes() <= limit && c.fold_limit == limit)));
                cache_layout const& form = c.layout();
                bool const coded   = form.stand_in_run < form.rungs; // at the prompt's end, if most kept tokens are
                index_t const most = p.most_stand_ins(coded, limit, 2, form.stand_in_bytes(sizeof(half)));
                CHECK((part < 8 || !p.last_queries_score() || coded));
                CHECK(most > 0);
                bool const in_codes = p.window_part > 0; // the window's tokens, at each of these limits
                CHECK(form.window == (in_codes ? 0 : p.window));
                for (index_t h = 0; h < 2 && part >= 8; ++h)
                {
                    index_t const made = c.view().heads[h].stand_ins;
                    CHECK((made == most || (in_codes && made >= most / 4 && made < most))); // few are dropped last
                    index_t fine = 0;                                                       // in 8 bits or whole
                    for (std::size_t r = 2; r < form.rungs; ++r)
                    {
                        fine += detail::slots_of_head(c.view(), h, r).tokens;
                    }
                    CHECK((!in_codes || fine >= p.window));
                }
            }
        }
    }
}

TEST_CASE("stand-ins take over the attention of tokens dropped in any chunk")
{
    text const x = text_of(1, 1024);
    // How far the last chunk's log-sum-exps are below those over all tokens, on average.
    auto const lacking = [&](index_t stand_ins) {
        preset p    = presets::any_question;
        p.stand_ins = stand_ins;
        read_text held{x, p, {.limit = budget::fraction(1, 1), .chunk = 256}};
        read_text small{x, p, {.limit = budget::fraction(1, 10), .chunk = 256, .slack = 0}};
        held.read(0, 1024, 256);
        small.read(0, 1024, 256);
        double sum = 0;
        for (std::size_t i = held.outputs.size() - 2 * 3 * 256; i < held.outputs.size(); ++i)
        {
            sum += double{held.outputs[i]} - double{small.outputs[i]};
        }
        return sum / (2 * 3 * 256);
    };
    double const without = lacking(0);
    CHECK(without > 0);
    CHECK(std::fabs(lacking(8)) < 0.6 * without);
}

TEST_CASE("refitted values bring the outputs of later chunks nearer to those over all tokens")
{
    text x = text_of(1, 768);
    for (index_t i = 0; i < 6 * 768 * 64; ++i) // five queries again and again, in coordinates that hardly turn
    {
        auto& queries    = x.all[0].queries;
        bool const turns = i % 32 < 24;
        queries.set(turns ? half{} : queries.get(i / 64 / 768, i / 64 % 5, i % 64), i / 64 / 768, i / 64 % 768, i % 64);
    }
    auto const afar = [&](bool refits, index_t chunk) { // mean square of the last chunk's errors
        preset p = presets::any_question;
        if (!refits) { p.refitted.reset(); }
        read_text held{x, p, {.limit = budget::fraction(1, 1), .chunk = chunk}};
        read_text small{x, p, {.limit = budget::fraction(1, 10), .chunk = chunk, .slack = 0}};
        held.read(0, 768, chunk);
        small.read(0, 768, chunk);
        double sum               = 0;
        std::size_t const begin  = held.outputs.size() - static_cast<std::size_t>(6 * chunk * 41);
        std::size_t const values = static_cast<std::size_t>(6 * chunk * 40);
        for (std::size_t i = begin; i < begin + values; ++i)
        {
            sum += std::pow(double{held.outputs[i]} - double{small.outputs[i]}, 2);
        }
        return sum / static_cast<double>(values);
    };
    CHECK(afar(true, 256) < 0.9 * afar(false, 256));
    CHECK(afar(true, 48) == afar(false, 48)); // a chunk of one block has no rows that judge
}

TEST_CASE("a chunk that was taken back leaves no trace")
{
    text const x = text_of(2, 384);
    for (preset const& p : {presets::any_question, presets::best})
    {
        auto const read = [&](index_t end, bool takes_back) {
            read_text r{x, p, {.limit = budget::fraction(1, 6), .chunk = 128}};
            r.read(0, 128, 128);
            for (index_t l = 0; l < 2 && takes_back; ++l) { r.attend(l, 128 + l, 77); }
            support::run([&](host const& on) { r.r->forget_chunk(on); });
            r.read(128, end, 128);
            CHECK(r.finish().tokens == end);
            return r.made().caches;
        };
        CHECK(read(384, true) == read(384, false));
        if (!p.last_queries_score()) { CHECK(read(128, true) == read(128, false)); } // their room has been used
    }
}

TEST_CASE(
    "the last queries are the prompt's, however it is cut into chunks and calls, after a chunk was taken back, too")
{
    text const x     = text_of(2, 403);
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
            for (index_t l = 0; l < 2; ++l) // in two calls, another cut in each layer
            {
                index_t const some = n / (2 + l);
                if (some > 0) { r.attend(l, first, some); }
                r.attend(l, first + some, n - some);
            }
            first += n;
            CHECK(r.end_chunk().tokens == first);
        }
        r.finish();
        std::vector<index_t> tokens;
        for (index_t i = 0; i < 12; ++i)
        {
            tokens.push_back(r.tokens_at(i / 6, i / 3 % 2, static_cast<std::size_t>(i % 3 + 1)));
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

TEST_CASE("sink logits take their part of a reader's attention, and of its losses by replayed and by last queries")
{
    constexpr float none = -std::numeric_limits<float>::infinity();
    for (float const join : {0.0F, 1e9F}) // replayed queries alone choose, or the last ones
    {
        text x           = text_of(2, 300);
        preset p         = presets::best;
        p.replayed->join = join;
        auto const read  = [&](std::vector<float> const& elsewhere) {
            x.elsewhere = elsewhere;
            read_text r{x, p, {.limit = budget::fraction(1, 6), .chunk = 100, .slack = 100.0F}};
            r.read(0, 300, 100);
            r.finish();
            std::vector<index_t> tokens;
            for (index_t i = 0; i < 12; ++i)
            {
                tokens.push_back(r.tokens_at(i / 6, i / 3 % 2, static_cast<std::size_t>(i % 3 + 1)));
            }
            return std::pair{r.made(), tokens};
        };
        index_t const rows = x.heads * x.group;
        std::vector<float> logits, repeated; // of heads, and for each query of a chunk
        for (index_t g = 0; g < rows; ++g)
        {
            logits.push_back(g % 2 == 0 ? 12.0F : -12.0F);
            repeated.insert(repeated.end(), 100, logits.back());
        }
        auto const plain = read({});
        auto const got   = read(logits);
        CAPTURE(join);
        CHECK(read(std::vector(static_cast<std::size_t>(rows), none)) == plain);
        CHECK(read(repeated) == got);
        CHECK(got.second != plain.second);
        CHECK(got.first.outputs != plain.first.outputs);
    }
}

TEST_CASE("a slack beyond all bytes holds everything until the end")
{
    text const x = text_of(2, 300);
    for (float const slack : {1e10F, 1e16F, 3e38F})
    {
        read_text r{x, presets::any_question, {.limit = budget::fraction(1, 6), .chunk = 100, .slack = slack}};
        r.read(0, 300, 100);
        CHECK(r.reports.back().held_bytes == 2 * x.layer_bytes());
        CHECK(r.finish().held_bytes <= 2 * x.layer_bytes() / 6);
    }
}

TEST_CASE("a reader names what is wrong before anything is changed")
{
    text const x = text_of(2, 200);
    reader_options const options{.limit = budget::bytes(20000), .chunk = 64};
    auto const made = [&](std::string const& want, preset const& p, reader_options const& with, index_t layers = 2) {
        refused(want, [&] {
            std::vector<cache> caches(2);
            workspace state{support::nan_memory{}};
            auto shape   = x.shape();
            shape.layers = layers;
            reader<host, cache>{host{&state}, p, shape, with, std::span{caches}};
        });
    };
    made("reader: preset \"by_window\" does not replay; its losses are not known before the last queries",
        presets::by_window, options);
    preset even        = presets::any_question; // prompt.cpp has the other members
    even.pooling.width = 4;
    made("prompt: preset.pooling.width is 4; it must be odd and at least 1", even, options);
    even        = presets::any_question;
    even.ratios = ratio_set{full_int4, full};
    made("reader: the ratio set has no rung that drops a token", even, options);
    made("reader: a limit of 100 bytes a layer cannot hold the window of 8 tokens; at least 3328 bytes are needed",
        presets::best, {.limit = budget::bytes(100), .chunk = 64});
    made("reader: reader_options::chunk is 0; it must be at least 1", presets::best,
        {.limit = budget::bytes(20000), .chunk = 0});
    made("reader: reader_options::slack is -1; it must be finite and not negative", presets::best,
        {.limit = budget::bytes(20000), .chunk = 64, .slack = -1});
    made("reader: there are 2 caches for 3 layers", presets::best, options, 3);

    read_text want{x, presets::best, options}, r{x, presets::best, options};
    want.read(0, 192, 64);
    refused(
        "reader::attend: layer 0 has 0 tokens of the chunk, and 65 more; from 1 to reader_options::chunk = 64 make a "
        "chunk",
        [&] { r.attend(0, 0, 65); });
    r.attend(0, 0, 64);
    refused("reader::attend: layer 0 has 64 tokens of the chunk, and 1 more; ", [&] { r.attend(0, 64, 1); });
    refused("reader::end_chunk: layer 1 has 0 tokens of the chunk, layer 0 has 64", [&] { r.end_chunk(); });
    tensor<half, 3> output{{6, 64, 40}};
    tensor<float, 2> lse{{6, 64}};
    support::run([&](host const& on) {
        refused("reader::attend: layer is 2; it must be from 0 to 1",
            [&] { r.r->attend(on, 2, x.part(1, 0, 64), output.out(), lse.out()); });
    });
    r.attend(1, 0, 64);
    r.end_chunk();
    r.read(64, 192, 64);
    refused("reader::attend: the prompt gets longer than the 200 tokens of prompt_shape::tokens",
        [&] { r.attend(0, 150, 10); });
    CHECK(r.made() == want.made());
}

TEST_CASE(
    "a chunk's or the prompt's end for which memory ran out can be called again, and changes nothing before layers "
    "are stored")
{
    text const x = text_of(3, 150);
    reader_options const options{.limit = budget::fraction(1, 6), .chunk = 80};
    for (preset const& p : {presets::best, presets::any_question})
    {
        read_text want{x, p, options};
        want.read(0, 150, 80);
        want.finish();
        int again = 0, goes_on = 0;
        for (int k = 0, failed = 1; failed > 0; ++k)
        {
            INFO(p.name, " ", k);
            support::failing_resource memory;
            {
                std::vector<cache> caches;
                for (index_t l = 0; l < 3; ++l) { caches.emplace_back(cache_layout{}, 0, 0, &memory); }
                read_text got{x, p, options, {.to = &caches}};
                bool stored = false;
                failed      = 0;
                got.make    = [&](std::string_view name, auto const& call) {
                    auto const before = support::contents_of(caches);
                    std::string said;
                    {
                        workspace scratch{cpu::host_memory{&memory}};
                        memory.arm(name == "attend" ? support::failure::never : support::failure::from_on, k);
                        said = error_text<std::bad_alloc>([&] { call(host{&scratch}); });
                        memory.arm(support::failure::never);
                    }
                    if (said == "threw nothing") { return; }
                    CHECK(said == "std::bad_alloc");
                    ++failed;
                    bool const stores = support::contents_of(caches) != before;
                    stored            = stored || stores;
                    if (stores && name == "end_chunk")
                    {
                        refused("reader::forget_chunk: layers have stored the chunk's tokens; end_chunk can be called "
                                      "again",
                               [&] { got.r->forget_chunk({}); });
                    }
                    support::run(call);
                };
                got.read(0, 150, 80);
                got.finish();
                CHECK((stored || got.made() == want.made()));
                CHECK(got.reports.back().held_bytes <= got.reports.back().limit_bytes);
                CHECK(got.reports.back().tokens == 150);
                again += failed > 0 && !stored ? 1 : 0;
                goes_on += stored ? 1 : 0;
            }
            CHECK(memory.outstanding() == 0);
        }
        CHECK(again > 5);
        CHECK(goes_on > 2);
    }
}
