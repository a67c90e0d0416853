// The module: prompts and layers as Python's classes. Compiled once for each set of instructions, under the name
// MDKV_PYTHON_MODULE.
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/version.hpp>
#include <mdkv/presets.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "engine.hpp"
#include "host.hpp"
#include "module.hpp"
#include "names.hpp"
#include "ranks.hpp"
#include "tensors.hpp"

namespace mdkv_python
{

namespace
{

template <class Tokens>
[[nodiscard]] nb::dict tokens_by_rung(mdkv::ratio_set const& ratios, Tokens const& tokens)
{
    nb::dict dict;
    for (std::size_t r = 0; r < ratios.size(); ++r) { dict[name_of(ratios[r]).c_str()] = tokens[r]; }
    return dict;
}

} // namespace

nb::dict choice_of(mdkv::allocation const& x, mdkv::ratio_set const& ratios)
{
    nb::dict dict;
    dict["status"]        = name_in(x.status);
    dict["multiplier"]    = x.multiplier;
    dict["loss"]          = x.loss;
    dict["dual"]          = x.dual;
    dict["limit"]         = x.limit;
    dict["token_bytes"]   = x.token_bytes;
    dict["charged_bytes"] = x.charged_bytes;
    dict["tokens"]        = tokens_by_rung(ratios, x.tokens);
    return dict;
}

namespace
{

[[nodiscard]] nb::dict report_of(mdkv::compress_report const& x, mdkv::ratio_set const& ratios)
{
    nb::dict dict, chosen; // a packed layer knows its own part of the choice, and no more
    chosen["multiplier"]   = x.chosen.multiplier;
    chosen["tokens"]       = tokens_by_rung(ratios, x.chosen.tokens);
    dict["status"]         = name_in(x.status);
    dict["budget_bytes"]   = x.budget_bytes;
    dict["window_bytes"]   = x.window_bytes;
    dict["resident_bytes"] = x.resident_bytes;
    dict["full_bytes"]     = x.full_bytes;
    dict["chosen"]         = chosen;
    return dict;
}

[[nodiscard]] nb::dict report_of(mdkv::recompress_report const& x, mdkv::ratio_set const& ratios)
{
    nb::dict dict;
    dict["limit_bytes"]    = x.limit_bytes;
    dict["window_bytes"]   = x.window_bytes;
    dict["stand_in_bytes"] = x.stand_in_bytes;
    dict["resident_bytes"] = x.resident_bytes;
    dict["kept"]           = x.kept;
    dict["lowered"]        = x.lowered;
    dict["dropped"]        = x.dropped;
    dict["chosen"]         = choice_of(x.chosen, ratios);
    return dict;
}

/// mdkv.Prompt.
struct prompt_object
{
    std::unique_ptr<prompt> of;
    std::string dtype;
    mdkv::preset preset;
    index_t heads;
    bool rotates;     ///< whether the model's position encoding was given
    nb::object ranks; ///< mdkv.Ranks that the prompt refers to
};

using released = nb::call_guard<others_run>;

[[nodiscard]] layer_facts facts_of(layer_object const& x)
{
    return unlocked([&] { return x.of->facts(); });
}
[[nodiscard]] rung_counts counts_of(layer_object const& x)
{
    return unlocked([&] { return x.of->counts(); });
}

/// A layer's copy on the place of a backend.
template <class Place>
[[nodiscard]] std::unique_ptr<layer> copied_to(std::shared_ptr<Place> const& to, layer const& of)
{
    if constexpr (std::is_same_v<Place, host>) { return of.on_host(to); }
    else
    {
        auto const facts  = of.facts();
        auto const here   = facts.on_host ? nullptr : of.on_host(std::make_shared<host>(1));
        layer const& from = here ? *here : of;
        auto const turn   = from.turn();
        return std::visit(
            [&](auto const& stored) -> std::unique_ptr<layer> {
                if constexpr (std::is_same_v<decltype(stored), std::monostate const&>) { return nullptr; }
                else { return make_layer(to, facts, stored); }
            },
            from.view());
    }
}

void bind_layer(nb::module_& m)
{
    nb::class_<layer_object>(m, "Layer",
        "One layer's compressed cache of one sequence: a compressed part and a tail of appended tokens, which "
        "are stored uncompressed.")
        .def_ro("dtype", &layer_object::dtype, "Element type: \"float32\", \"float16\" or \"bfloat16\".")
        .def_prop_ro(
            "heads", [](layer_object const& x) { return facts_of(x).heads; }, "KV heads H.")
        .def_prop_ro(
            "key_dim", [](layer_object const& x) { return facts_of(x).dims.keys; }, "Numbers of a key D.")
        .def_prop_ro(
            "value_dim", [](layer_object const& x) { return facts_of(x).dims.values; }, "Numbers of a value Dv.")
        .def_prop_ro(
            "tokens",
            [](layer_object const& x) {
                auto const facts = facts_of(x);
                return facts.read + facts.appended;
            },
            "Tokens of the text so far, dropped ones included.")
        .def_prop_ro(
            "compressed_tokens", [](layer_object const& x) { return facts_of(x).read; },
            "Tokens of the text in the compressed part, dropped ones included.")
        .def_prop_ro(
            "appended", [](layer_object const& x) { return facts_of(x).appended; }, "Tokens in the tail.")
        .def_prop_ro(
            "window", [](layer_object const& x) { return facts_of(x).window; },
            "Last tokens of the compressed part, which stay as they are: the preset's window, or a shorter prompt.")
        .def_prop_ro(
            "stand_ins", [](layer_object const& x) { return counts_of(x).stand_ins; },
            "Stand-ins for dropped tokens, over all heads.")
        .def_prop_ro(
            "ratios", [](layer_object const& x) { return facts_of(x).ratios; }, "The rungs.")
        .def_prop_ro(
            "rungs", [](layer_object const& x) { return tokens_by_rung(facts_of(x).ratios, counts_of(x).tokens); },
            "Tokens of the compressed part by the name of their rung, over all heads. \"full\" counts the window.")
        .def_prop_ro(
            "rungs_of_heads",
            [](layer_object const& x) {
                auto const ratios = facts_of(x).ratios;
                nb::list heads;
                for (auto const& tokens : counts_of(x).heads) { heads.append(tokens_by_rung(ratios, tokens)); }
                return heads;
            },
            "The same for each head.")
        .def_prop_ro(
            "bytes",
            [](layer_object const& x) {
                auto const facts = facts_of(x);
                nb::dict dict;
                dict["arena"]        = facts.arena;
                dict["tail"]         = facts.tail;
                dict["directory"]    = facts.directory;
                dict["total"]        = facts.arena + facts.tail + facts.directory;
                dict["uncompressed"] = (facts.read + facts.appended) * facts.heads
                                       * (facts.dims.keys + facts.dims.values) * facts.element_bytes;
                return dict;
            },
            "Bytes that the cache takes: \"arena\" (the compressed part), \"tail\" (its room), \"directory\", "
            "\"total\"; and \"uncompressed\", those of the same tokens in plain tensors.")
        .def(
            "append",
            [](layer_object& x, input const& keys, input const& values) {
                viewed const k{keys}, v{values};
                others_run const meanwhile;
                x.of->append(*k, *v);
            },
            nb::arg("keys"), nb::arg("values"),
            "Adds n tokens to the tail, which grows if it is full: keys [H, n, D] after position encoding, "
            "values [H, n, Dv].")
        .def(
            "attend",
            [](layer_object& x, input const& queries, output const& to, std::optional<output> const& lse, float scale,
                std::optional<input> const& sink_logits) {
                viewed const q{queries}, o{to, "attend: output"};
                std::optional<viewed> l, sinks;
                if (lse) { l.emplace(*lse, "attend: lse"); }
                if (sink_logits) { sinks.emplace(*sink_logits); }
                others_run const meanwhile;
                x.of->attend(*q, *o, tensor_of(l), scale, tensor_of(sinks));
            },
            nb::arg("queries"), nb::arg("output"), nb::arg("lse") = nb::none(), nb::arg("scale") = 0.0F, nb::kw_only(),
            nb::arg("sink_logits") = nb::none(),
            "Attention over the whole cache: queries [H*G, n, D] of the last n appended tokens, each of which "
            "sees the tokens up to its own; n = 1 may be any token after the text. Writes output [H*G, n, Dv], "
            "of the queries' type, and lse [H*G, n] in float32, the log-sum-exps. scale: factor of q.k (0: the "
            "cache's). sink_logits: float32 [H*G], which take their part of each softmax and have no value. Reads "
            "every "
            "stored byte once.")
        .def(
            "unpack",
            [](layer_object const& x, output const& keys, output const& values) {
                viewed const k{keys, "unpack: keys"}, v{values, "unpack: values"};
                std::vector<index_t> rows;
                {
                    others_run const meanwhile;
                    rows = x.of->unpack(*k, *v);
                }
                return numpy(std::move(rows), {rows.size()});
            },
            nb::arg("keys"), nb::arg("values"),
            "Plain keys [H, S, D] and values [H, S, Dv] of all tokens, with what their rungs left of them: the "
            "rungs in turn, those of one in the order of the text, the window, the tail, then stand-ins. Returns "
            "the rows of each head [H]; those behind them are zeros. S: at least the most rows of a head.")
        .def(
            "truncate", [](layer_object& x, index_t n) { x.of->truncate(n); }, nb::arg("appended"), released{},
            "Takes the last tokens of the tail back: at most so many stay.")
        .def(
            "reserve", [](layer_object& x, index_t n) { x.of->reserve(n); }, nb::arg("appended"), released{},
            "Room in the tail for so many tokens in all.")
        .def(
            "recompress",
            [](layer_object& x, input const& queries, nb::handle limit, std::optional<mdkv::preset> const& chosen,
                std::optional<output> const& sources, std::optional<input> const& sink_logits) {
                mdkv::preset const by = chosen.value_or(mdkv::presets::by_window);
                auto const bytes      = limit.is_none() ? std::nullopt : std::optional{budget_of(limit)};
                viewed const q{queries};
                std::optional<viewed> from, sinks;
                if (sources) { from.emplace(*sources, "recompress: sources"); }
                if (sink_logits) { sinks.emplace(*sink_logits); }
                return report_of(
                    unlocked([&] { return x.of->recompress(*q, bytes, by, tensor_of(from), tensor_of(sinks)); }),
                    by.ratios);
            },
            nb::arg("queries"), nb::arg("limit") = nb::none(), nb::arg("preset") = nb::none(), nb::kw_only(),
            nb::arg("sources") = nb::none(), nb::arg("sink_logits") = nb::none(),
            "Folds the tail into the compressed part, within a limit, by default the bytes that the layer got when its "
            "prompt was compressed: queries [H*G, Q, D] of the last Q tokens, from 1 to all of the window and the "
            "tail. The preset (by_window if none is given) has the "
            "rungs that the cache has. Returns a report. sources: int32 [H, S] receives for each token of the new "
            "cache, in the order of unpack without stand-ins, its place in the old one, -1 behind a head's last; S: at "
            "least the tokens of the text. sink_logits: see attend.")
        .def(
            "copy",
            [](layer_object const& x) {
                return layer_object{unlocked([&] { return x.of->copy(); }), x.dtype, x.bytes};
            },
            "An equal cache in memory of its own.")
        .def_prop_ro(
            "device", [](layer_object const& x) { return facts_of(x).on_host ? "cpu" : "cuda"; },
            "Where its bytes are: \"cpu\" or \"cuda\".")
        .def(
            "to",
            [](layer_object const& x, nb::handle backend) {
                auto made = on_place(
                    backend, "Layer.to", [&](auto to) { return unlocked([&] { return copied_to(to, *x.of); }); });
                return layer_object{std::move(made), x.dtype, x.bytes};
            },
            nb::arg("backend"), "An equal cache on another backend, in memory of its own.")
        .def("__reduce__", [](layer_object const&) -> nb::object {
            throw nb::type_error(
                "mdkv: a Layer cannot be pickled; mdkv.save writes layers to a file that other processes "
                "map, mdkv.write to bytes, and copy() copies one");
        });
}

void bind_prompt(nb::module_& m)
{
    nb::class_<prompt_object>(m, "Prompt",
        "All layers of one prompt, compressed by a preset: read_chunk for each chunk of each layer while the "
        "prompt is read (presets that replay), finish_layer for each layer, allocate, pack for each layer. The "
        "package's README has the calls under \"A layer\", include/mdkv/prompt.hpp the contract.")
        .def(
            "__init__",
            [](prompt_object* self, mdkv::preset const& chosen, index_t layers, index_t heads, index_t group,
                index_t key_dim, std::optional<index_t> value_dim, index_t tokens, std::string const& dtype,
                std::optional<rope> const& encoding, bool check_finite, nb::handle on, nb::object ranks) {
                prompt_sizes const sizes{layers, heads, group, {key_dim, value_dim.value_or(key_dim)}, tokens,
                    encoding.value_or(rope{}), check_finite, ranks_of(ranks)};
                auto made = on_place(on, "Prompt", [&](auto place) {
                    return unlocked([&] {
                        return with_element(
                            dtype, [&](auto type) { return make_prompt<decltype(type)>(place, chosen, sizes); });
                    });
                });
                new (self) prompt_object{std::move(made), dtype, chosen, heads, encoding.has_value(), std::move(ranks)};
            },
            nb::arg("preset"), nb::kw_only(), nb::arg("layers"), nb::arg("heads"), nb::arg("group") = 1,
            nb::arg("key_dim"), nb::arg("value_dim") = nb::none(), nb::arg("tokens"), nb::arg("dtype"),
            nb::arg("rope") = nb::none(), nb::arg("check_finite") = true, nb::arg("backend") = nb::none(),
            nb::arg("ranks") = nb::none(),
            "layers L, heads H (KV heads), group G (query heads per KV head), key_dim D, value_dim Dv (D if "
            "none is given), tokens: the prompt's, or the most that it may have; dtype: \"float32\", "
            "\"float16\" or \"bfloat16\", of queries, keys and values. rope: the model's, for read_chunk "
            "if the preset replays. check_finite: search for NaNs and infinities first. ranks: an mdkv.Ranks if other "
            "processes have further heads of the prompt; the sizes are then this one's, limit and choice of `allocate` "
            "are of all heads.")
        .def(
            "read_chunk",
            [](prompt_object& x, index_t layer, index_t first, input const& q, input const& k, input const& v,
                std::optional<input> const& sink_logits) {
                mdkv::expects(!x.preset.replayed || x.rotates, "Prompt: rope is missing; the preset \"", x.preset.name,
                    "\" rotates queries to later positions, for which it needs the model's, e.g. Rope(base=1e6)");
                viewed_rows const all{q, k, v, std::nullopt, sink_logits};
                others_run const meanwhile;
                x.of->read_chunk(layer, first, *all);
            },
            nb::arg("layer"), nb::arg("first"), nb::arg("queries"), nb::arg("keys"), nb::arg("values"), nb::kw_only(),
            nb::arg("sink_logits") = nb::none(),
            "Scores n tokens of a layer, the prompt's tokens first, first + 1, ..., by their own queries [H*G, "
            "n, D], keys [H, n, D] and values [H, n, Dv]. The presets were measured with first and n that are "
            "multiples of preset.replayed[\"chunk\"], but for the last n; others give other losses. sink_logits: "
            "float32 "
            "[H*G], the model's.")
        .def(
            "take_losses",
            [](prompt_object& x, index_t layer, input const& losses) {
                viewed const given{losses};
                others_run const meanwhile;
                x.of->take_losses(layer, *given);
            },
            nb::arg("layer"), nb::arg("losses"),
            "Losses of your own in the place of read_chunk, for a preset that replays: float32 [H, R, N - window], "
            "how much is lost if a token is stored at each rung of preset.ratios, 0 if nothing is. finish_layer pools "
            "them, and joins them with those of the last queries if preset.replayed[\"join\"] is above 0; allocate "
            "balances the layers' losses unless preset.shared is None.")
        .def(
            "finish_layer",
            [](prompt_object& x, index_t layer, input const& q, input const& k, input const& v,
                std::optional<input> const& lse, std::optional<input> const& sink_logits) {
                viewed_rows const all{q, k, v, lse, sink_logits};
                others_run const meanwhile;
                x.of->finish_layer(layer, *all);
            },
            nb::arg("layer"), nb::arg("queries"), nb::arg("keys"), nb::arg("values"), nb::arg("lse") = nb::none(),
            nb::kw_only(), nb::arg("sink_logits") = nb::none(),
            "Finds a layer's losses once it was read: queries [H*G, Q, D] of the last Q tokens, keys [H, N, D] "
            "and values [H, N, Dv] of all, and the queries' log-sum-exps [H*G, Q], sink logits included, needed if the "
            "preset makes stand-ins. sink_logits: float32 [H*G], the model's.")
        .def(
            "allocate",
            [](prompt_object& x, nb::handle limit, std::optional<input> const& quotas) {
                if (quotas)
                {
                    mdkv::expects(limit.is_none(), "prompt::allocate: there are both a limit and quotas; give one");
                    viewed const given{*quotas};
                    return choice_of(unlocked([&] { return x.of->allocate(*given); }), x.preset.ratios);
                }
                auto const bytes = before_exchange(ranks_of(x.ranks), [&] { return budget_of(limit); });
                return choice_of(unlocked([&] { return x.of->allocate(bytes); }), x.preset.ratios);
            },
            nb::arg("limit") = nb::none(), nb::arg("quotas") = nb::none(),
            "Chooses every token's rung within a limit, for all layers at once if the preset is shared, or within "
            "quotas, int64 [L, H]: the bytes that each head may spend on tokens, projections and channels, beside its "
            "window. "
            "May be called again with another limit. Returns the choice over all layers: status, multiplier (of "
            "the limit), loss, dual (no choice loses less), limit (of the tokens before the window, without "
            "stand-ins), token_bytes, charged_bytes (of projections), and tokens by the name of their rung.")
        .def(
            "pack",
            [](prompt_object& x, index_t layer, input const& q, input const& k, input const& v,
                std::optional<input> const& lse) {
                viewed_rows const all{q, k, v, lse};
                packed_layer packed;
                {
                    others_run const meanwhile;
                    packed = x.of->pack(layer, *all);
                }
                return nb::make_tuple(
                    layer_object{std::move(packed.first), x.dtype, {}}, report_of(packed.second, x.preset.ratios));
            },
            nb::arg("layer"), nb::arg("queries"), nb::arg("keys"), nb::arg("values"), nb::arg("lse") = nb::none(),
            "A layer's Layer and report, from the rows that finish_layer had. lse is needed if the preset "
            "makes stand-ins. The report: status, budget_bytes (of an average layer), window_bytes, "
            "resident_bytes (of the arena), full_bytes (uncompressed), and chosen: the multiplier and the "
            "layer's tokens by the name of their rung.")
        .def(
            "rungs_of",
            [](prompt_object const& x, index_t layer) {
                auto rungs       = unlocked([&] { return x.of->rungs_of(layer); });
                auto const count = static_cast<std::size_t>(x.of->rung_tokens(layer));
                return numpy(std::move(rungs), {static_cast<std::size_t>(x.heads), count});
            },
            nb::arg("layer"),
            "[H, N - window]  the chosen rung of each token of a layer, an index of preset.ratios; [H, N] if the "
            "window is stored in codes (Preset.window_part).")
        .def(
            "losses_of",
            [](prompt_object const& x, index_t layer) {
                auto const past = static_cast<std::size_t>(x.of->past_tokens(layer));
                return numpy(unlocked([&] { return x.of->losses_of(layer); }),
                    {static_cast<std::size_t>(x.heads), x.preset.ratios.size(), past});
            },
            nb::arg("layer"), "[H, R, N - window]  a layer's losses at each rung.")
        .def_ro("preset", &prompt_object::preset, "The preset.")
        .def_ro("dtype", &prompt_object::dtype, "Element type of queries, keys and values.")
        .def_prop_ro(
            "state_bytes", [](prompt_object const& x) { return x.of->state_bytes(); },
            "Bytes that the prompt takes beside the tensors, until it is deleted.")
        .def("__reduce__", [](prompt_object const&) -> nb::object {
            throw nb::type_error(
                "mdkv: a Prompt cannot be pickled; mdkv.save writes the layers that it packs to a file");
        });

    m.def(
        "log_sum_exps",
        [](input const& queries, input const& keys, float scale, std::shared_ptr<host> on) {
            viewed const q{queries}, k{keys};
            if (!on) { on = std::make_shared<host>(1); }
            std::vector<float> lse;
            {
                others_run const meanwhile;
                lse = with_element(
                    element_name(queries), [&](auto type) { return log_sum_exps<decltype(type)>(*on, *q, *k, scale); });
            }
            return numpy(std::move(lse), {queries.shape(0), queries.shape(1)});
        },
        nb::arg("queries"), nb::arg("keys"), nb::arg("scale") = 0.0F, nb::arg("backend") = nb::none(),
        "[H*G, Q]  log-sum-exps of the last Q of N tokens' queries [H*G, Q, D] over the keys [H, N, D] that "
        "each one sees. scale: factor of q.k (0: 1/sqrt(D)).");
}

/// Gives a module that a program removed from sys.modules and imports again what the first one has, whose classes nanobind
/// knows; false for the first one.
[[nodiscard]] bool imported_before(nb::module_& m)
{
    auto first         = nb::borrow<nb::dict>(PyInterpreterState_GetDict(PyInterpreterState_Get()));
    nb::str const name = nb::borrow<nb::str>(m.attr("__name__"));
    if (!first.contains(name))
    {
        first[name] = m;
        return false;
    }
    for (auto const [key, value] : nb::borrow<nb::dict>(nb::object{first[name]}.attr("__dict__")))
    {
        if (!nb::cast<std::string>(key).starts_with("__")) { nb::setattr(m, key, value); }
    }
    return true;
}

} // namespace

} // namespace mdkv_python

NB_MODULE(MDKV_PYTHON_MODULE, m)
{
    if (mdkv_python::imported_before(m)) { return; }
    nanobind::exception<mdkv::invalid_argument>(m, "InvalidArgument", PyExc_ValueError);
    m.attr("library_version") = std::to_string(MDKV_VERSION_MAJOR) + "." + std::to_string(MDKV_VERSION_MINOR) + "."
                                + std::to_string(MDKV_VERSION_PATCH);
    m.attr("compiled_for") = MDKV_PYTHON_INSTRUCTIONS;
    mdkv_python::bind_values(m);
    mdkv_python::bind_ranks(m);
#if defined(MDKV_PYTHON_CUDA)
    m.attr("compute_capabilities") = MDKV_PYTHON_CUDA;
    mdkv_python::bind_device(m);
#endif
    mdkv_python::bind_layer(m);
    mdkv_python::bind_prompt(m);
    mdkv_python::bind_reader(m);
    mdkv_python::bind_storing(m);
}
