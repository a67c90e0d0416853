// The promises that all stages share, each checked over one table of all stages. An entry of the table is a call and its operands:
// a new stage gets every promise by its entry. Errors that only one stage has are in the stage's own file.
#include <mdkv/mdkv.hpp>

#include "support/decoding.hpp"
#include "support/failing_resource.hpp"
#include "support/host.hpp"
#include "support/operands.hpp"
#include "support/packed.hpp"
#include "support/random.hpp"
#include "support/strange_environment.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cfenv>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <regex>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace
{

using namespace mdkv;
using namespace support;
using host  = cpu::backend;
using cache = cpu::cache<half>;

/// The extents' values, different wherever a call could take one for another.
sizes const small{{"L", 2}, {"H", 2}, {"G", 3}, {"Q", 8}, {"C", 7}, {"n", 5}, {"N", 21}, {"S", 13}, {"W", 9}, {"D", 16},
    {"Dv", 24}, {"M", 3}, {"P", 5}, {"T", 21}, {"page_tokens", 7}, {"pages", 3}, {"slots", 60}, {"rows", 11}};

/// The operands of one call, by name.
struct arguments
{
    sizes s;
    std::map<std::string, placed> all;
    cache stored;              ///< has the layout, and the parts that are no operands
    mutable contents returned; ///< what the call makes beside its outputs

    template <class E, std::size_t Rank>
    [[nodiscard]] in_view<E, Rank, host> in(char const* name) const
    {
        return all.at(name).as<E const, Rank>();
    }
    template <class E, std::size_t Rank>
    [[nodiscard]] out_view<E, Rank, host> out(char const* name) const
    {
        return all.at(name).as<E, Rank>();
    }
    [[nodiscard]] in_view<half, 3, host> rows(char const* name) const { return in<half, 3>(name); }

    /// The stage's cache, of those parts that are operands.
    [[nodiscard]] cache_view<half, space::host> view() const
    {
        auto view          = const_cast<cache&>(stored).view();
        auto const pointer = [&](char const* name, auto*& to) {
            auto const found = all.find(name);
            if (found != all.end())
            {
                to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(found->second.shown);
            }
        };
        pointer("cache.arena", view.arena);
        pointer("cache.heads", view.heads);
        pointer("cache.tail", view.tail);
        pointer("cache.appended", view.appended);
        return view;
    }
};

/// A stage's entry in the table.
struct stage
{
    std::string name;
    std::string never_empty; ///< letters of the extents that must not be 0
    std::vector<operand> operands;
    std::function<void(host const&, arguments const&)> call;
    std::function<cache(sizes const&)> stored = {};     ///< the cache of the operands that are parts of one
    std::vector<std::string> names            = {name}; ///< with which messages begin
};

// The table

ratio_set const projected_ratios = ratio_set{drop, fraction(1, 8), full_int4, full_int8, full}.rounded(rounding::down);
ratio_set const plain_ratios{drop, full_int4, full};

contents arena_of(cache const& made)
{
    return {made.view().arena, made.view().arena + made.arena_bytes()};
}

/// A cache of random tokens, some of them appended.
cache packed(sizes const& s, index_t appended, index_t room = 3)
{
    packed_layer<half> const layer{{.heads = s.at("H"),
        .tokens                            = s.at("N"),
        .window                            = s.at("W"),
        .dims                              = {s.at("D"), s.at("Dv")},
        .rungs                             = {drop, fraction(1, 8), full_int4, full_int8, full},
        .stand_ins                         = s.at("M")}};
    cache made = layer.packed(appended + room);
    source random{"appended"};
    append_random(made, random, appended);
    return made;
}
cache packed_and_appended(sizes const& s)
{
    return packed(s, s.at("n") + 2);
}
/// A cache into which a layer is packed.
cache unpacked(sizes const& s)
{
    index_t const tokens = s.at("H") * (s.at("N") + s.at("W") + s.at("M") + 8);
    cache made{cache_layout{projected_ratios, s.at("H"), s.at("W"), {s.at("D"), s.at("Dv")}},
        tokens * (s.at("D") + s.at("Dv")) * 2 + 4 * s.at("H") * s.at("Dv") * s.at("Dv"), 1};
    std::fill_n(made.view().arena, made.arena_bytes(), std::byte{0xFF});
    return made;
}

/// A prompt of one layer in one call.
stage compressed(preset chosen)
{
    chosen.ratios = plain_ratios;
    chosen.window = 4;
    return {"compress", "G,D,Dv",
        {rows("queries", "H*G,Q=T,D"), rows("keys", "H,N=T,D"), rows("values", "H,N=T,Dv"),
            in_of<float>("lse", "H*G,Q=T", all<5>)},
        [chosen](host const& on, arguments const& x) {
            cache made;
            compress(on,
                prompt_rows<host, half>{x.rows("queries"), x.rows("keys"), x.rows("values"), x.in<float, 2>("lse")},
                chosen, budget::fraction(1, 2), made);
            x.returned = arena_of(made);
        },
        {}, {"compress", "prompt", "prompt::finish_layer"}};
}

std::vector<stage> const table{
    {"fit_basis", "D", {rows("samples", "H,S,D"), out_of<float>("basis", "H,D,D"), out_of<float>("energy", "H,D")},
        [](host const& on, arguments const& x) {
            fit_basis(on, x.rows("samples"), x.out<float, 3>("basis"), x.out<float, 2>("energy"));
        }},
    {"fit_channels", "", {rows("queries", "H*G,Q,D"), rows("keys", "H,N,D"), out_of<float>("channels", "H,3,D")},
        [](host const& on, arguments const& x) {
            fit_channels(on, x.rows("queries"), x.rows("keys"), x.out<float, 3>("channels"));
        }},
    {"score", "G,Q,D,Dv",
        {rows("queries", "H*G,Q,D"), rows("keys", "H,N,D"), rows("values", "H,N,Dv"), rows("window_keys", "H,W,D"),
            in_of<float>("key_basis", "H,D,D"), in_of<float>("value_basis", "H,Dv,Dv"),
            in_of<float>("options.channels", "H,3,D", all<1>), in_of<float>("options.lse", "H*G,Q", all<9>),
            in_of<float>("options.lse_elsewhere", "H*G,Q"), out_of<float>("loss", "H,R=5,N")},
        [](host const& on, arguments const& x) {
            score(on, x.rows("queries"), x.rows("keys"), x.rows("values"), x.rows("window_keys"),
                x.in<float, 3>("key_basis"), x.in<float, 3>("value_basis"), projected_ratios,
                {.lse              = x.in<float, 2>("options.lse"),
                    .lse_elsewhere = x.in<float, 2>("options.lse_elsewhere"),
                    .early_weight  = 0.5F,
                    .question      = 3,
                    .channels      = x.in<float, 3>("options.channels")},
                x.out<float, 3>("loss"));
        }},
    {"score", "G,Q,D,Dv", // finds the log-sum-exps itself
        {rows("queries", "H*G,Q,D"), rows("keys", "H,N,D"), rows("values", "H,N,Dv"), rows("window_keys", "H,W,D"),
            out_of<float>("loss", "H,R=3,N")},
        [](host const& on, arguments const& x) {
            score(on, x.rows("queries"), x.rows("keys"), x.rows("values"), x.rows("window_keys"),
                in_view<float, 3, host>{}, in_view<float, 3, host>{}, plain_ratios, {}, x.out<float, 3>("loss"));
        }},
    {"pool", "", {in_of<float>("loss", "H,R=5,N", positive), out_of<float>("pooled", "H,R=5,N")},
        [](host const& on, arguments const& x) { pool(on, x.in<float, 3>("loss"), {}, x.out<float, 3>("pooled")); }},
    {"pool", "", {in_of<float>("loss", "H,R=5,N", positive), out_of<float>("pooled", "H,R=5,N")},
        [](host const& on, arguments const& x) {
            pool(on, x.in<float, 3>("loss"), {7, pooling::adaptive}, x.out<float, 3>("pooled"));
        }},
    {"allocate", "",
        {in_of<float>("loss", "H,R=5,N", positive), in_of<index_t>("limits", "1 or H=1", all<1000>),
            out_of<std::uint8_t>("rung", "H,N"), out_of<allocation>("report", "1 or H=1")},
        [](host const& on, arguments const& x) {
            allocate(on, {x.in<float, 3>("loss"), x.out<std::uint8_t, 2>("rung")},
                rung_costs{projected_ratios, {16, 24}, 2}, x.in<index_t, 1>("limits"), {},
                x.out<allocation, 1>("report"));
        }},
    {"allocate", "N", // heads of different lengths
        {in_of<float>("loss", "R=5,M=N", positive),
            in_of<index_t>(
                "first", "H+1", [](source&, std::span<index_t const> at) { return 9.0 * static_cast<double>(at[0]); }),
            in_of<index_t>("limits", "1", all<1000>), out_of<std::uint8_t>("rung", "M=N"),
            out_of<allocation>("report", "1")},
        [](host const& on, arguments const& x) {
            allocate(on, {x.in<float, 2>("loss"), x.out<std::uint8_t, 1>("rung"), x.in<index_t, 1>("first"), 10},
                rung_costs{projected_ratios, {16, 24}, 2}, x.in<index_t, 1>("limits"), {},
                x.out<allocation, 1>("report"));
        }},
    {"packed_bytes", "D,Dv", {in_of<std::uint8_t>("rung", "H,N", below_five)},
        [](host const& on, arguments const& x) {
            index_t const count = packed_bytes<half>(on, x.in<std::uint8_t, 2>("rung"), x.stored.layout());
            x.returned          = contents(static_cast<std::size_t>(count));
        },
        unpacked},
    {"pack", "D,Dv",
        {rows("keys", "H,N,D"), rows("values", "H,N,Dv"), rows("window_keys", "H,W,D"), rows("window_values", "H,W,Dv"),
            in_of<float>("key_basis", "H,D,D"), in_of<float>("value_basis", "H,Dv,Dv"),
            in_of<std::uint8_t>("rung", "H,N", below_five), in_of<float>("channels", "H,3,D", all<1>),
            in_of<float>("stand_in_keys", "H,M,D"), in_of<float>("stand_in_values", "H,M,Dv"),
            part("cache.arena", true), part("cache.heads", true, alignof(head_entry))},
        [](host const& on, arguments const& x) {
            pack(on, x.rows("keys"), x.rows("values"), x.rows("window_keys"), x.rows("window_values"),
                x.in<float, 3>("key_basis"), x.in<float, 3>("value_basis"), x.in<std::uint8_t, 2>("rung"), x.view(),
                x.in<float, 3>("channels"), x.in<float, 3>("stand_in_keys"), x.in<float, 3>("stand_in_values"));
        },
        unpacked},
    {"append", "D,Dv",
        {rows("keys", "H,n,D"), rows("values", "H,n,Dv"), part("cache.tail", true),
            part("cache.appended", true, alignof(index_t))},
        [](host const& on, arguments const& x) { append(on, x.rows("keys"), x.rows("values"), x.view()); },
        [](sizes const& s) { return packed(s, 2, s.at("n") + 3); }},
    {"attend", "G,n,D,Dv",
        {rows("queries", "H*G,n,D"), part("cache.arena"), part("cache.tail"),
            in_of<float>("options.lse_elsewhere", "H*G,n"), out_of<half>("output", "H*G,n,Dv"),
            out_of<float>("lse", "H*G,n")},
        [](host const& on, arguments const& x) {
            attend(on, x.rows("queries"), x.view(), {.lse_elsewhere = x.in<float, 2>("options.lse_elsewhere")},
                x.out<half, 3>("output"), x.out<float, 2>("lse"));
        },
        packed_and_appended},
    {"attend", "G,D,Dv", // a batch of two sequences
        {rows("queries", "H*G,n,D"), part("cache.arena"), part("cache.tail"),
            in_of<float>("options.lse_elsewhere", "H*G,n"), out_of<half>("output", "H*G,n,Dv"),
            out_of<float>("lse", "H*G,n")},
        [](host const& on, arguments const& x) {
            index_t const n = x.s.at("n");
            std::vector<sequence_view<half, space::host>> const two{{x.view(), n / 2}, {x.view(), n - n / 2}};
            attend(on, x.rows("queries"), std::span{two}, {.lse_elsewhere = x.in<float, 2>("options.lse_elsewhere")},
                x.out<half, 3>("output"), x.out<float, 2>("lse"));
        },
        packed_and_appended, {"attend: sequence 0", "attend: sequence 1", "attend"}},
    {"merge_attention", "",
        {in_of<half>("output_a", "rows,Dv"), in_of<float>("lse_a", "rows"), in_of<half>("output_b", "rows,Dv"),
            in_of<float>("lse_b", "rows"), out_of<half>("output", "rows,Dv"), out_of<float>("lse", "rows")},
        [](host const& on, arguments const& x) {
            merge_attention(on, x.in<half, 2>("output_a"), x.in<float, 1>("lse_a"), x.in<half, 2>("output_b"),
                x.in<float, 1>("lse_b"), x.out<half, 2>("output"), x.out<float, 1>("lse"));
        }},
    {"expects_finite", "", {rows("keys", "H,N,D")},
        [](host const& on, arguments const& x) { expects_finite(on, "keys", x.rows("keys")); }},
    {"gather_pages", "N,page_tokens,pages",
        {rows("pages", "P,page_tokens,H,D"), in_of<std::int32_t>("table", "pages of N=pages", below_five),
            out_of<half>("to", "H,N,D")},
        [](host const& on, arguments const& x) {
            gather_pages(on, x.in<half, 4>("pages"), x.in<std::int32_t, 1>("table"), x.out<half, 3>("to"));
        }},
    {"unpack", "D,Dv,slots",
        {part("cache.arena"), part("cache.tail"), out_of<half>("keys", "H,S=slots,D"),
            out_of<half>("values", "H,S=slots,Dv"), out_of<index_t>("kept", "H")},
        [](host const& on, arguments const& x) {
            unpack(on, x.view(), x.out<half, 3>("keys"), x.out<half, 3>("values"), x.out<index_t, 1>("kept"));
        },
        packed_and_appended},
    {"advance", "",
        {rows("queries", "H*G,Q,D"), in_of<double>("encoding.frequencies", "n/2=D/2", positive),
            out_of<half>("advanced", "H*G,Q,D")},
        [](host const& on, arguments const& x) {
            advance(on, x.rows("queries"), 3,
                rotary_encoding<host>{.frequencies = x.in<double, 1>("encoding.frequencies")},
                x.out<half, 3>("advanced"));
        }},
    {"balance", "",
        {in_of<leverage_sum>("options.leverages", "N", all<1000>), out_of<float>("losses", "L,H,R=5,N", positive)},
        [](host const& on, arguments const& x) {
            balance(on, x.out<float, 4>("losses"),
                balance_options<host>{.leverage_power = 1, .leverages = x.in<leverage_sum, 1>("options.leverages")});
        }},
    {"join", "",
        {in_of<float>("first", "H,R=5,N", positive), in_of<float>("second", "H,R=5,N", positive),
            out_of<float>("joined", "H,R=5,N")},
        [](host const& on, arguments const& x) {
            join(on, x.in<float, 3>("first"), x.in<float, 3>("second"), 2, x.out<float, 3>("joined"));
        }},
    {"add_leverage", "D", {rows("keys", "H,N,D"), out_of<leverage_sum>("sums", "N", all<7>)},
        [](host const& on, arguments const& x) { add_leverage(on, x.rows("keys"), x.out<leverage_sum, 1>("sums")); }},
    {"replay", "G,C,D,Dv",
        {rows("queries", "H*G,C,D"), rows("keys", "H,C,D"), rows("values", "H,C,Dv"), rows("sinks", "H,S,D"),
            in_of<float>("options.lse_elsewhere", "H*G,C"), out_of<float>("loss", "H,R=3,C")},
        [](host const& on, arguments const& x) {
            replay(on, x.rows("queries"), x.rows("keys"), x.rows("values"), x.rows("sinks"), plain_ratios,
                {.own = true, .lse_elsewhere = x.in<float, 2>("options.lse_elsewhere")}, x.out<float, 3>("loss"));
        },
        {}, {"replay", "score"}},
    {"refit", "G,Q,N,D,Dv",
        {rows("queries", "H*G,Q,D"), rows("keys", "H,N+W,D"), rows("values", "H,N+W,Dv"),
            in_of<std::uint8_t>("rungs", "H,N", below_five), part("cache.arena"), out_of<half>("changed", "H,N,Dv")},
        [](host const& on, arguments const& x) {
            refit_options<host> options{
                .rows = {.blocks = 3, .apart = 5, .span = 4, .rows = 6}, .stand_ins = x.s.at("M")};
            refit(on, x.rows("queries"), x.rows("keys"), x.rows("values"), x.in<std::uint8_t, 2>("rungs"), x.view(),
                options, x.out<half, 3>("changed"));
        },
        [](sizes const& s) { return packed(s, 0); }},
    {"stand_in", "G,Q,D,Dv",
        {rows("queries", "H*G,Q,D"), rows("keys", "H,N,D"), rows("values", "H,N,Dv"),
            in_of<std::uint8_t>("rungs", "H,N", below_five), in_of<float>("lse", "H*G,Q", all<5>),
            out_of<float>("stand_in_keys", "H,M,D"), out_of<float>("stand_in_values", "H,M,Dv")},
        [](host const& on, arguments const& x) {
            stand_in(on, x.rows("queries"), x.rows("keys"), x.rows("values"), x.in<std::uint8_t, 2>("rungs"),
                x.in<float, 2>("lse"), x.s.at("N") + x.s.at("W"), {}, x.out<float, 3>("stand_in_keys"),
                x.out<float, 3>("stand_in_values"));
        }},
    compressed(presets::by_window),
    compressed(presets::best),
    {"recompress", "G,n,D,Dv,slots", // into another cache
        {rows("queries", "H*G,Q=n,D"), part("cache.arena"), part("cache.tail"),
            in_of<float>("options.lse_elsewhere", "H*G,Q=n"), out_of<std::int32_t>("options.sources", "H,S=slots")},
        [](host const& on, arguments const& x) {
            cache folded;
            recompress(on, x.rows("queries"), projected_ratios,
                recompress_options<host>{.limit = budget::fraction(3, 4),
                    .lse_elsewhere              = x.in<float, 2>("options.lse_elsewhere"),
                    .sources                    = x.out<std::int32_t, 2>("options.sources")},
                x.view(), folded);
            x.returned = arena_of(folded);
        },
        packed_and_appended},
    {"reader::attend", "G,T,D,Dv", // the first chunk of a prompt; the reader's state has memory of its own
        {rows("queries", "H*G,N=T,D"), rows("keys", "H,N=T,D"), rows("values", "H,N=T,Dv"),
            in_of<float>("lse_elsewhere", "H*G,N=T"), out_of<half>("output", "H*G,N=T,Dv"),
            out_of<float>("lse", "H*G,N=T")},
        [](host const& on, arguments const& x) {
            preset chosen = presets::best;
            chosen.ratios = plain_ratios;
            cache made;
            workspace state{cpu::host_memory{}};
            prompt_shape<host> const shape{.layers = 1,
                .heads                             = x.s.at("H"),
                .group                             = x.s.at("G"),
                .dims                              = {x.s.at("D"), x.s.at("Dv")},
                .tokens                            = x.s.at("T")};
            reader<host, cache> r{host{&state}, chosen, shape,
                {.limit = budget::fraction(1, 2), .chunk = std::max<index_t>(x.s.at("T"), 1)}, std::span{&made, 1}};
            r.attend(on, 0, {x.rows("queries"), x.rows("keys"), x.rows("values"), {}, x.in<float, 2>("lse_elsewhere")},
                x.out<half, 3>("output"), x.out<float, 2>("lse"));
            x.returned.assign(made.view().tail, made.view().tail + made.tail_bytes());
        },
        {}, {"reader::attend", "reader", "rung_costs"}},
};

// The promises

/// The stage's operands in memory.
/// \param shape   their extents, where they are not the stage's
arguments place(
    stage const& one, sizes const& s, placement how = {}, std::map<std::string, std::vector<index_t>> const& shape = {})
{
    arguments x{s, {}, one.stored ? one.stored(s) : cache{}, {}};
    auto const view = x.stored.view();
    std::map<std::string, std::span<std::byte const>> const parts{
        {"cache.arena", {view.arena, static_cast<std::size_t>(view.arena_bytes)}},
        {"cache.heads", std::as_bytes(std::span{view.heads, static_cast<std::size_t>(view.layout.heads)})},
        {"cache.tail", {view.tail, static_cast<std::size_t>(x.stored.tail_bytes())}},
        {"cache.appended", std::as_bytes(std::span{view.appended, view.appended == nullptr ? 0U : 1U})}};
    for (operand o : one.operands)
    {
        std::vector<index_t> extents;
        for (std::string const& extent : o.extents) { extents.push_back(value_of(extent, s)); }
        if (shape.contains(o.name)) { extents = shape.at(o.name); }
        if (o.extents.empty())
        {
            auto const part = parts.at(o.name);
            extents         = {std::ssize(part)};
            o.fill          = [part](std::byte* to, source&, std::span<index_t const> at) {
                *to = part[static_cast<std::size_t>(at[0])];
            };
        }
        x.all.emplace(o.name, placed{o, extents, how});
    }
    return x;
}

/// The elements of all operands, and what a call returned.
struct outcome
{
    std::map<std::string, contents> elements;
    contents returned;

    explicit outcome(arguments const& x)
        : returned{x.returned}
    {
        for (auto const& [name, operand] : x.all) { elements[name] = operand.elements(); }
    }
    [[nodiscard]] friend bool operator==(outcome const&, outcome const&) = default;
};

/// Makes the call, and checks that it changed its outputs alone.
outcome made(stage const& one, arguments const& x, cpu::executor_ref threads = {})
{
    outcome const before{x};
    support::run([&](host const& on) { one.call(on, x); }, threads);
    outcome const after{x};
    for (operand const& o : one.operands)
    {
        CAPTURE(std::string{o.name});
        CHECK(x.all.at(o.name).slack_is_untouched());
        CHECK((o.written || after.elements.at(o.name) == before.elements.at(o.name)));
    }
    return after;
}

char const* const nothing = "threw nothing"; // what `error_text` says then

/// What the call says if it refuses its arguments, without the stage's name, having checked that nothing was begun or changed.
std::string refusal(stage const& one, arguments const& x)
{
    counting_executor counting;
    outcome const before{x};
    workspace scratch{nan_memory{}};
    std::string const text = error_text<invalid_argument>([&] { one.call(host{&scratch, counting}, x); });
    if (text != nothing)
    {
        CHECK(counting.loops == 0);
        CHECK(outcome{x} == before);
        for (auto const& [name, operand] : x.all) { CHECK(operand.slack_is_untouched()); }
    }
    for (std::string const& name : one.names)
    {
        if (text.starts_with(name + ": ")) { return text.substr(name.size() + 2); }
    }
    return text;
}

/// Whether two texts have a letter of an extent in common.
bool share(std::string const& a, std::string const& b)
{
    return std::any_of(small.begin(), small.end(), [&](auto const& size) {
        std::regex const whole{"\\b" + size.first + "\\b"};
        return std::regex_search(a, whole) && std::regex_search(b, whole);
    });
}

/// Calls test(stage) for each one of the table.
template <class Test>
void for_each_stage(Test const& test)
{
    for (std::size_t i = 0; i < table.size(); ++i)
    {
        INFO("number ", i, ", ", table[i].name);
        test(table[i]);
    }
}

} // namespace

TEST_CASE("every stage gives the same bits for 1, 2, 3 and 7 threads")
{
    sizes large    = small;
    large["N"]     = 5040;
    large["T"]     = 600;
    large["S"]     = 3000;
    large["pages"] = 720;
    large["slots"] = 5200;
    large["rows"]  = 22000;
    for_each_stage([&](stage const& one) {
        outcome const serial = made(one, place(one, large));
        for (int const threads : {1, 2, 3, 7})
        {
            CAPTURE(threads);
            cpu::thread_pool pool{threads};
            CHECK(made(one, place(one, large), pool) == serial);
        }
    });
}

TEST_CASE("every stage takes operands of any strides, with NaN between rows, at odd addresses and beside forbidden "
          "pages, with the "
          "same bits, and writes its outputs' elements alone")
{
    for (auto const& [dim, value_dim] :
        {std::pair{10, 7}, {16, 24}, {40, 70}}) // less than a vector, whole ones, and more
    {
        CAPTURE(dim);
        sizes s = small;
        s["D"]  = dim;
        s["Dv"] = value_dim;
        for_each_stage([&](stage const& one) {
            outcome const plain = made(one, place(one, s));
            for (placement const how :
                {placement{.swapped = true}, placement{.slack = 3}, placement{.swapped = true, .slack = 1},
                    placement{.misalign = 1}, placement{.slack = 5, .misalign = 3}, placement{.fence = guard::before},
                    placement{.fence = guard::after}})
            {
                INFO(how.swapped, how.misalign, how.fence.has_value(), " (swapped, misaligned, fenced), slack ",
                    how.slack);
                CHECK(made(one, place(one, s, how)) == plain);
            }
        });
    }
}

#if defined(MDKV_TEST_ENVIRONMENTS)
TEST_CASE("every stage gives the same bits in any floating-point environment, on any thread, and raises no exception")
{
    for_each_stage([&](stage const& one) {
        outcome const expected = made(one, place(one, small));
        for (std::uint64_t const bits : {control::flush, control::up, control::down, control::trapped})
        {
            CAPTURE(bits);
            arguments const serial = place(one, small), shared = place(one, small);
            strange_environment const strange{bits};
            cpu::thread_pool pool{2}; // its thread has the environment of the one that starts it
            std::feclearexcept(FE_ALL_EXCEPT);
            CHECK(made(one, serial) == expected);
            CHECK(made(one, shared, pool) == expected);
            CHECK(std::fetestexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW) == 0);
        }
    });
}
#endif

TEST_CASE("a stage that lacks memory for its scratch changes nothing, and one that was made before takes none")
{
    for_each_stage([&](stage const& one) {
        outcome const before{place(one, small)};
        outcome const after = made(one, place(one, small));
        failing_resource memory;
        for (failure const how : {failure::once, failure::from_on})
        {
            bool failed = true;
            for (int k = 0; failed; ++k)
            {
                CAPTURE(k);
                memory.arm(how, k);
                workspace scratch{cpu::host_memory{&memory}};
                arguments const x      = place(one, small);
                std::string const text = error_text<std::bad_alloc>([&] { one.call(host{&scratch}, x); });
                failed                 = memory.attempts() > k;
                CHECK((text == nothing || text == "std::bad_alloc"));
                CHECK(outcome{x} == (text == nothing ? after : before));
                memory.arm(failure::never);
                arguments const again = place(one, small);
                one.call(host{&scratch}, again);
                CHECK(outcome{again} == after);
                int const taken = memory.attempts();
                one.call(host{&scratch}, place(one, small));
                CHECK(memory.attempts() == taken);
                CHECK(scratch.held() >= scratch.peak());
            }
        }
        CHECK(memory.outstanding() == 0);
        CHECK(error_text<invalid_argument>([&] { one.call(host{}, place(one, small)); })
              == "backend: it has no workspace");
    });
}

TEST_CASE("an extent of 0 is served or refused by name in every stage, whichever extent it is")
{
    for_each_stage([&](stage const& one) {
        for (auto const& [letter, size] : small)
        {
            CAPTURE(letter);
            sizes s                = small;
            s[letter]              = 0;
            std::string const text = error_text<invalid_argument>([&] {
                arguments const x = place(one, s); // there may be no such cache
                support::run([&](host const& on) { one.call(on, x); });
            });
            CAPTURE(text);
            bool named = one.stored && text.starts_with("cache_layout: ");
            for (std::string const& name : one.names) { named = named || text.starts_with(name + ": "); }
            bool const refused = text != nothing;
            CHECK((named || !refused));
            CHECK(refused == share(letter, one.never_empty));
        }
    });
}

TEST_CASE("every stage refuses each operand that is null, misaligned, or over itself or another's "
          "last or first byte")
{
    for_each_stage([&](stage const& one) {
        for (operand const& o : one.operands)
        {
            CAPTURE(std::string{o.name});
            std::string const name = o.name;
            arguments x            = place(one, small);
            placed& own            = x.all.at(name);
            std::byte* const right = own.shown;
            own.shown              = nullptr;
            CHECK(refusal(one, x)
                  == (name == "cache.appended" ? "cache has no directory" : name + " is null but not empty"));
            if (o.alignment > 1 && !o.extents.empty())
            {
                own.shown = right + 1;
                CHECK(refusal(one, x) == name + " is not aligned to " + std::to_string(o.alignment) + " bytes");
            }
            own.shown = right;
            if (!o.written) { continue; }
            for (std::size_t i = 0; i + 1 < own.extents().size(); ++i)
            {
                std::string const least = std::to_string(own.strides[i]--); // contiguous so far
                CHECK(refusal(one, x)
                      == name + " overlaps itself: stride " + std::to_string(own.strides[i]) + " of dimension "
                             + std::to_string(i) + " is below " + least);
                ++own.strides[i];
            }
            for (operand const& p : one.operands)
            {
                std::string const other = p.name;
                if (other == name) { continue; }
                CAPTURE(other);
                placed const& theirs = x.all.at(other);
                auto const aligned   = [&](std::size_t length) { return (length - 1) / o.alignment * o.alignment; };
                for (std::byte* const over :
                    {theirs.data() + aligned(theirs.length()), theirs.data() - aligned(own.length())})
                {
                    own.shown              = over;
                    std::string const text = refusal(one, x);
                    CAPTURE(text);
                    CHECK((text == name + " overlaps " + other || text == other + " overlaps " + name));
                }
            }
        }
    });
}

TEST_CASE("every stage refuses an extent that is one more or less than the others say, naming an operand, its shape "
          "and the extent")
{
    auto const must_be = [](operand const& o) { return std::string{o.name} + " must be [" + o.letters + "] = ["; };
    int named          = 0;
    for_each_stage([&](stage const& one) {
        arguments const right = place(one, small);
        for (operand const& o : one.operands)
        {
            for (std::size_t i = 0; i < o.extents.size(); ++i)
            {
                for (index_t const by : {-1, 1})
                {
                    std::vector<index_t> extents = right.all.at(o.name).extents();
                    std::string list;
                    for (index_t const extent : extents)
                    {
                        list += (list.empty() ? "" : ", ") + std::to_string(extent);
                    }
                    extents[i] += by;
                    std::string const wrong = std::to_string(extents[i]);
                    std::string const text  = refusal(one, place(one, small, {}, {{o.name, extents}}));
                    INFO(o.name, " ", i, " by ", by, ": ", text);
                    bool good  = text == must_be(o) + list + "], its extent " + std::to_string(i) + " is " + wrong;
                    bool alone = true; // no other extent has its letters
                    for (operand const& p : one.operands)
                    {
                        for (std::size_t j = 0; j < p.extents.size(); ++j)
                        {
                            if ((p.name == o.name && i == j) || !share(o.extents[i], p.extents[j])) { continue; }
                            alone = false;
                            good  = good
                                   || (text.starts_with(must_be(p))
                                       && text.ends_with("], its extent " + std::to_string(j) + " is "
                                                         + std::to_string(right.all.at(p.name).extents()[j])));
                        }
                    }
                    named += good ? 1 : 0;
                    CHECK((good || alone || text.find(wrong) != std::string::npos));
                }
            }
        }
    });
    CHECK(named > 300);
}

TEST_CASE(
    "an executor's exception passes through every stage, and the next call in the same workspace has the same bits")
{
    int passed = 0;
    for_each_stage([&](stage const& one) {
        outcome const whole = made(one, place(one, small));
        workspace scratch{nan_memory{}};
        for (int k = 0, refused = 1; refused == 1; ++k)
        {
            counting_executor executor{.thrown = k};
            arguments const x      = place(one, small);
            std::string const text = error_text<std::runtime_error>([&] { one.call(host{&scratch, executor}, x); });
            refused                = text == nothing ? 0 : 1;
            passed += refused;
            REQUIRE(k < 1000);
            CHECK((refused == 0 || text == "no more threads"));
            arguments const again = place(one, small);
            one.call(host{&scratch}, again);
            CHECK(outcome{again} == whole);
        }
    });
    CHECK(passed > 50);
}
