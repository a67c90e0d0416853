// Prompts that are compressed while they are read, as a class of Python's.
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/reader.hpp>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "engine.hpp"
#include "module.hpp"
#include "tensors.hpp"

namespace mdkv_python
{

namespace
{

/// mdkv.Reader.
struct reader_object
{
    std::unique_ptr<reader> of;
    std::string dtype;
    mdkv::preset preset;
};

[[nodiscard]] nb::dict report_of(mdkv::reader_report const& x, mdkv::ratio_set const& ratios)
{
    nb::dict dict;
    dict["tokens"]       = x.tokens;
    dict["limit_bytes"]  = x.limit_bytes;
    dict["held_bytes"]   = x.held_bytes;
    dict["losses_bytes"] = x.losses_bytes;
    dict["chosen"]       = choice_of(x.chosen, ratios);
    return dict;
}

[[nodiscard]] nb::dict bytes_of(reader_object const& x)
{
    auto const bytes = unlocked([&] { return x.of->bytes(); });
    nb::dict dict;
    dict["arena"]     = bytes.arena;
    dict["tail"]      = bytes.tail;
    dict["directory"] = bytes.directory;
    dict["losses"]    = bytes.losses;
    dict["state"]     = bytes.state;
    dict["total"]     = bytes.arena + bytes.tail + bytes.directory + bytes.losses + bytes.state;
    return dict;
}

} // namespace

void bind_reader(nb::module_& m)
{
    nb::class_<reader_object>(m, "Reader",
        "A prompt that is compressed while it is read, in memory that does not grow with its length: attend for each "
        "layer and end_chunk for each chunk, then finish. For presets that replay. See include/mdkv/reader.hpp.")
        .def(
            "__init__",
            [](reader_object* self, mdkv::preset const& chosen, index_t layers, index_t heads, index_t group,
                index_t key_dim, std::optional<index_t> value_dim, index_t tokens, std::string const& dtype,
                std::optional<rope> const& encoding, bool check_finite, nb::handle on, nb::handle limit, index_t chunk,
                float slack) {
                mdkv::expects(!chosen.replayed || encoding, "Reader: rope is missing; the preset \"", chosen.name,
                    "\" rotates queries to later positions, for which it needs the model's, e.g. Rope(base=1e6)");
                prompt_sizes const sizes{layers, heads, group, {key_dim, value_dim.value_or(key_dim)}, tokens,
                    encoding.value_or(rope{}), check_finite};
                mdkv::reader_options const options{.limit = budget_of(limit), .chunk = chunk, .slack = slack};
                auto made = on_place(on, "Reader", [&](auto place) {
                    return unlocked([&] {
                        return with_element(dtype,
                            [&](auto type) { return make_reader<decltype(type)>(place, chosen, sizes, options); });
                    });
                });
                new (self) reader_object{std::move(made), dtype, chosen};
            },
            nb::arg("preset"), nb::kw_only(), nb::arg("layers"), nb::arg("heads"), nb::arg("group") = 1,
            nb::arg("key_dim"), nb::arg("value_dim") = nb::none(), nb::arg("tokens"), nb::arg("dtype"),
            nb::arg("rope") = nb::none(), nb::arg("check_finite") = true, nb::arg("backend") = nb::none(),
            nb::arg("limit"), nb::arg("chunk") = 256, nb::arg("slack") = 0.25F,
            "layers L, heads H (KV heads), group G (query heads per KV head), key_dim D, value_dim Dv (D if none is "
            "given), tokens: the most that the prompt may have; dtype: \"float32\", \"float16\" or \"bfloat16\", of "
            "queries, keys and values. rope: the model's. check_finite: search for NaNs and infinities first. limit: "
            "of an average layer, for window and all tokens, see Budget; a share is one of `tokens`. chunk: the most "
            "tokens of a chunk, which are held uncompressed beside the limit. slack: share of the limit that stored "
            "tokens may take beside it before the prompt's end.")
        .def(
            "attend",
            [](reader_object& x, index_t layer, input const& q, input const& k, input const& v, output const& to,
                std::optional<output> const& lse, bool ahead, std::optional<input> const& sink_logits) {
                viewed_rows const all{q, k, v, std::nullopt, sink_logits};
                viewed const o{to, "attend: output"};
                std::optional<viewed> l;
                if (lse) { l.emplace(*lse, "attend: lse"); }
                others_run const meanwhile;
                x.of->attend(layer, *all, *o, tensor_of(l), ahead);
            },
            nb::arg("layer"), nb::arg("queries"), nb::arg("keys"), nb::arg("values"), nb::arg("output"),
            nb::arg("lse") = nb::none(), nb::kw_only(), nb::arg("ahead") = false, nb::arg("sink_logits") = nb::none(),
            "Attention of the chunk's next n tokens in one layer, causal over the chunk and over what is kept of the "
            "tokens before it: queries [H*G, n, D], keys [H, n, D], values [H, n, Dv]. Writes output [H*G, n, Dv], of "
            "the queries' type, and lse [H*G, n] in float32, the log-sum-exps. ahead: the tokens come behind the "
            "chunk, e.g. drafts behind a prompt's end, and the reader does not keep them. sink_logits: float32 [H*G], "
            "the "
            "model's.")
        .def(
            "end_chunk",
            [](reader_object& x) { return report_of(unlocked([&] { return x.of->end_chunk(); }), x.preset.ratios); },
            "Brings all layers, which have the chunk's tokens, within the limit and its slack. Returns a report: "
            "tokens "
            "(read so far), limit_bytes and held_bytes of all layers' arenas, losses_bytes beside them, chosen.")
        .def(
            "forget_chunk", [](reader_object& x) { x.of->forget_chunk(); }, nb::call_guard<others_run>(),
            "Takes the tokens of the present chunk back from all layers, e.g. after an error in one of them.")
        .def(
            "finish",
            [](reader_object& x) {
                auto done = unlocked([&] { return x.of->finish(); });
                nb::list layers;
                for (auto& one : done.first) { layers.append(layer_object{std::move(one), x.dtype, {}}); }
                return nb::make_tuple(layers, report_of(done.second, x.preset.ratios));
            },
            nb::sig("def finish(self) -> tuple[list[Layer], dict]"),
            "Ends the prompt: brings all layers within the limit. Returns the Layer of each, and a report as "
            "end_chunk's.")
        .def_prop_ro(
            "tokens", [](reader_object const& x) { return unlocked([&] { return x.of->tokens(); }); },
            "Tokens read and stored; those of the present chunk do not count.")
        .def_ro("preset", &reader_object::preset, "The preset.")
        .def_ro("dtype", &reader_object::dtype, "Element type of queries, keys and values.")
        .def_prop_ro(
            "state_bytes", [](reader_object const& x) { return unlocked([&] { return x.of->bytes(); }).state; },
            "Bytes that the reader takes beside the caches and their losses, until it is deleted.")
        .def_prop_ro("bytes", &bytes_of,
            "Bytes that the reader holds now: \"arena\" (compressed parts of all layers), \"tail\" (room for a chunk), "
            "\"directory\", \"losses\" (of stored tokens), \"state\", \"total\".")
        .def("__reduce__", [](reader_object const&) -> nb::object {
            throw nb::type_error(
                "mdkv: a Reader cannot be pickled; mdkv.save writes the layers that finish returns to a file");
        });
}

} // namespace mdkv_python
