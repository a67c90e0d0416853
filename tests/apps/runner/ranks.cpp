#include <mdkv/core/ranks.hpp>

#include <mdkv/core/budget.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/thread_pool.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/prompt.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "runner/gguf.hpp"
#include "runner/language_model.hpp"
#include "runner/prefill.hpp"
#include "runner/systems/policy_prompt.hpp"
#include "runner/tokenizer.hpp"
#include "support/host.hpp"
#include "support/ranks.hpp"
#include "support/reference_model.hpp"

namespace
{

using namespace mdkv;
using host = cpu::backend;

/// Keys, values, queries and log-sum-exps of all tokens of all layers of a prompt.
class recorded_prompt
{
public:
    recorded_prompt(runner::language_model const& model, std::vector<std::int32_t> const& tokens)
        : model_{&model}
        , tokens_{std::ssize(tokens)}
    {
        auto const [Hq, H] = sizes();
        cpu::thread_pool two{2};
        static_cast<void>(runner::prefill<half>(
            model, tokens, tokens_, two,
            [&](runner::layer_kv<half> const& kv) {
                index_t const keys   = tokens_ * model.shape().key_dim;
                index_t const values = tokens_ * model.shape().value_dim;
                layers_.push_back({{kv.queries, kv.queries + Hq * keys}, {kv.keys, kv.keys + H * keys},
                    {kv.values, kv.values + H * values}, {kv.lse, kv.lse + Hq * tokens_}});
            },
            [](std::int64_t, std::int64_t) { return true; }));
    }

    [[nodiscard]] runner::model_shape const& model() const { return model_->shape(); }
    [[nodiscard]] index_t tokens() const { return tokens_; }

    /// The prompt's shape on a rank with some of the heads and layers.
    [[nodiscard]] prompt_shape<host> shape(index_t layers, index_t heads) const
    {
        return {.layers = layers,
            .heads      = heads,
            .group      = model().query_heads / model().kv_heads,
            .dims       = {model().key_dim, model().value_dim},
            .tokens     = tokens_,
            .encoding   = runner::encoding_of(model_->rotation())};
    }

    /// Some heads of a layer, and some of its tokens.
    [[nodiscard]] prompt_rows<host, half> rows(
        index_t layer, index_t first_head, index_t heads, index_t first, index_t count) const
    {
        layer_rows const& x = layers_[static_cast<std::size_t>(layer)];
        auto const [Hq, H]  = sizes();
        index_t const G     = Hq / H;
        host const on{};
        auto const some = [&](auto const& all, index_t group, index_t dim) {
            return slice<1>(
                slice<0>(in(on, all.data(), H * group, tokens_, dim), first_head * group, heads * group), first, count);
        };
        return {some(x.queries, G, model().key_dim), some(x.keys, 1, model().key_dim),
            some(x.values, 1, model().value_dim),
            slice<1>(slice<0>(in(on, x.lse.data(), Hq, tokens_), first_head * G, heads * G), first, count)};
    }

private:
    struct layer_rows
    {
        std::vector<half> queries, keys, values; // [heads, tokens, D]
        std::vector<float> lse;                  // [query heads, tokens]
    };
    struct head_counts
    {
        index_t query, kv;
    };
    [[nodiscard]] head_counts sizes() const { return {model().query_heads, model().kv_heads}; }

    runner::language_model const* model_;
    index_t tokens_;
    std::vector<layer_rows> layers_;
};

/// A rank's heads of each of its layers.
struct rank_part
{
    index_t first_head, heads, first_layer, layers;
};

/// The rungs and the bytes of a rank's layers.
struct made_layers
{
    std::vector<std::vector<std::uint8_t>> rungs;
    std::vector<std::vector<std::byte>> arenas;
};

/// \param all       ranks of all heads and layers, or null
/// \param of_layer  ranks of a layer's heads, or null
made_layers compressed(recorded_prompt const& x, preset const& chosen, rank_part const& own,
    ranks<space::host> const* all, ranks<space::host> const* of_layer)
{
    made_layers made;
    support::run([&](host on) {
        made = {};
        prompt<host, half> p{on, chosen, x.shape(own.layers, own.heads)};
        auto const rows = [&](index_t l, index_t first, index_t count) {
            return x.rows(own.first_layer + l, own.first_head, own.heads, first, count);
        };
        on.ranks = of_layer;
        for (index_t l = 0; l < own.layers; ++l)
        {
            for (index_t first = 0; first < x.tokens(); first += 512)
            {
                p.read_chunk(on, l, first, rows(l, first, std::min<index_t>(512, x.tokens() - first)));
            }
            p.finish_layer(on, l, rows(l, 0, x.tokens()));
        }
        on.ranks = all;
        p.allocate(on, budget::fraction(1, 8));
        for (index_t l = 0; l < own.layers; ++l)
        {
            cpu::cache<half> cache;
            p.pack(on, l, rows(l, 0, x.tokens()), cache);
            if (on.scratch->counting()) { continue; }
            auto const arena = cache.view();
            auto const rungs = p.rungs_of(l);
            made.arenas.emplace_back(arena.arena, arena.arena + arena.arena_bytes);
            made.rungs.emplace_back();
            for (index_t h = 0; h < own.heads; ++h)
            {
                made.rungs.back().insert(made.rungs.back().end(), rungs.row(h), rungs.row(h) + rungs.extent(1));
            }
        }
    });
    return made;
}

} // namespace

TEST_CASE("the reference model's prompt over three ranks, by heads and by layers, has the rungs and bytes of one rank")
{
    if (skipped_without_reference_model("ranks: the reference model's prompt")) { return; }
    auto const file  = runner::gguf_file::open(reference_model_path());
    auto const model = runner::language_model::load(file);
    std::string text;
    for (int i = 0; i < 40; ++i)
    {
        text += "Section " + std::to_string(i * 37 % 101) + ": the harbour master wrote that the tide of day "
                + std::to_string(i) + " had come " + std::to_string(i * 13 % 29) + " minutes late. ";
    }
    auto tokens = runner::tokenizer{file}.encode(text);
    REQUIRE(tokens.size() > 600);
    tokens.resize(600);
    recorded_prompt const x{model, tokens};
    index_t const L = model.shape().layers, H = model.shape().kv_heads;
    REQUIRE(H == 3);
    REQUIRE(L % 3 == 0);
    for (preset const& chosen : {presets::best, presets::any_question, presets::by_window})
    {
        CAPTURE(chosen.name);
        auto const one = compressed(x, chosen, {0, H, 0, L}, nullptr, nullptr);
        for (bool const by_heads : {true, false})
        {
            CAPTURE(by_heads);
            support::rank_team team{3};
            std::vector<made_layers> parts(3);
            auto const errors = support::on_ranks(team, [&](support::thread_rank const& transport) {
                index_t const r     = transport.number;
                rank_part const own = by_heads ? rank_part{r, 1, 0, L} : rank_part{0, H, r * (L / 3), L / 3};
                ranks const all{transport, {own.first_head, H, own.first_layer, L}};
                ranks const of_layer{transport, {own.first_head, H}};
                parts[static_cast<std::size_t>(r)] = compressed(x, chosen, own, &all, by_heads ? &of_layer : nullptr);
            });
            for (std::string const& error : errors) { CHECK(error == ""); }
            made_layers whole;
            for (made_layers const& part : parts)
            {
                for (std::size_t l = 0; l < part.rungs.size(); ++l)
                {
                    if (!by_heads || whole.rungs.size() < static_cast<std::size_t>(L))
                    {
                        whole.rungs.push_back(part.rungs[l]);
                        whole.arenas.push_back(part.arenas[l]);
                        continue;
                    }
                    whole.rungs[l].insert(whole.rungs[l].end(), part.rungs[l].begin(), part.rungs[l].end());
                    whole.arenas[l].insert(whole.arenas[l].end(), part.arenas[l].begin(), part.arenas[l].end());
                }
            }
            CHECK(whole.rungs == one.rungs);
            CHECK(whole.arenas == one.arenas);
        }
    }
}
