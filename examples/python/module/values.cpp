// Budgets, ratio sets, presets and backends as Python's classes.
#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/presets.hpp>

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "engine.hpp"
#include "host.hpp"
#include "module.hpp"
#include "names.hpp"

namespace mdkv_python
{

using mdkv::expects;

namespace
{

/// "drop", "int4", "int8", "full", "1/4", "1/4:int8"; mdkv_run's "0", "1", "1:int4" as well.
[[nodiscard]] mdkv::rung rung_of(std::string const& text)
{
    for (mdkv::rung const& known : mdkv::bit_ratios)
    {
        if (text == name_of(known)) { return known; }
    }
    int num = 0, den = 1, end = 0;
    bool const fraction = std::sscanf(text.c_str(), "%9d/%9d%n", &num, &den, &end) == 2;
    bool const whole    = !fraction && std::sscanf(text.c_str(), "%9d%n", &num, &end) == 1;
    mdkv::rung rung{num, whole ? 1 : den};
    std::string const rest = text.substr(static_cast<std::size_t>(end));
    if (rest == ":int8") { rung.kind = mdkv::storage::int8; }
    if (rest == ":int4") { rung.kind = mdkv::storage::int4; }
    expects((fraction || whole) && (rest.empty() || rung.kind != mdkv::storage::plain), "RatioSet: rung \"", text,
        "\" is none of drop, int4, int8, full, a fraction such as 1/4, or one in codes such as 1/4:int8");
    return rung;
}

[[nodiscard]] mdkv::ratio_set ratios_of(std::vector<std::string> const& names)
{
    std::vector<mdkv::rung> rungs;
    for (std::string const& name : names) { rungs.push_back(rung_of(name)); }
    return mdkv::ratio_set{rungs};
}

[[nodiscard]] std::vector<std::string> names_of(mdkv::ratio_set const& ratios)
{
    std::vector<std::string> names;
    for (mdkv::rung const& rung : ratios) { names.push_back(name_of(rung)); }
    return names;
}

/// A C string with this text that lives as long as the module.
[[nodiscard]] char const* kept_text(std::string const& text)
{
    static std::set<std::string> all;
    return all.insert(text).first->c_str();
}

/// A member of a preset, or of a part of it: how it is read, and changed by its name.
template <class Part>
struct member
{
    nb::object (*get)(Part const&);
    void (*set)(Part&, nb::handle value, char const* name);
};

template <class Part>
using members = std::map<std::string, member<Part>, std::less<>>;

template <class Part, class Value>
Part part_of(Value Part::*);

/// The number of Python's that has the shortest text of all that are this float: 0.2, not 0.20000000298.
[[nodiscard]] nb::object shortest(float value)
{
    char text[32];
    *std::to_chars(text, text + sizeof text - 1, value).ptr = '\0';
    return nb::float_(std::strtod(text, nullptr));
}

/// A member whose value Python has, too; an enumeration's by name.
template <auto Pointer>
[[nodiscard]] auto plain()
{
    using Part  = decltype(part_of(Pointer));
    using Value = std::remove_cvref_t<decltype(std::declval<Part>().*Pointer)>;
    return member<Part>{[](Part const& p) {
                            if constexpr (std::is_enum_v<Value>) { return nb::cast(name_in(p.*Pointer)); }
                            else if constexpr (std::is_same_v<Value, float>) { return shortest(p.*Pointer); }
                            else { return nb::cast(p.*Pointer); }
                        },
        [](Part& p, nb::handle value, [[maybe_unused]] char const* name) {
            if constexpr (std::is_enum_v<Value>) { p.*Pointer = value_of<Value>(nb::cast<std::string>(value), name); }
            else { p.*Pointer = nb::cast<Value>(value); }
        }};
}

members<mdkv::pool_options> const pool_members{
    {"width", plain<&mdkv::pool_options::width>()}, {"kind", plain<&mdkv::pool_options::kind>()}};
members<mdkv::replay_part> const replay_members{{"norm", plain<&mdkv::replay_part::norm>()},
    {"chunk", plain<&mdkv::replay_part::chunk>()}, {"sinks", plain<&mdkv::replay_part::sinks>()},
    {"ahead", plain<&mdkv::replay_part::ahead>()}, {"own", plain<&mdkv::replay_part::own>()},
    {"join", plain<&mdkv::replay_part::join>()}, {"last", plain<&mdkv::replay_part::last>()}};
members<mdkv::sharing_part> const sharing_members{
    {"depth", plain<&mdkv::sharing_part::depth>()}, {"leverage_power", plain<&mdkv::sharing_part::leverage_power>()}};
members<mdkv::refit_part> const refit_members{{"blocks", plain<&mdkv::refit_part::blocks>()},
    {"apart", plain<&mdkv::refit_part::apart>()}, {"span", plain<&mdkv::refit_part::span>()},
    {"rows", plain<&mdkv::refit_part::rows>()}, {"ridge", plain<&mdkv::refit_part::ridge>()},
    {"most", plain<&mdkv::refit_part::most>()}};

template <class Part>
[[nodiscard]] nb::dict dict_of(Part const& part, members<Part> const& all)
{
    nb::dict dict;
    for (auto const& [name, one] : all) { dict[name.c_str()] = one.get(part); }
    return dict;
}

template <class Part>
void change(Part& part, members<Part> const& all, nb::dict const& changes, char const* what)
{
    for (auto const [key, value] : changes)
    {
        auto const name  = nb::cast<std::string>(key);
        auto const found = all.find(name);
        if (found == all.end())
        {
            std::string known;
            for (auto const& [one, unused] : all) { known += (known.empty() ? "" : ", ") + one; }
            throw mdkv::invalid_argument{std::string{what} + " has no member \"" + name + "\"; there are " + known};
        }
        try
        {
            found->second.set(part, value, name.c_str());
        }
        catch (nb::cast_error const&)
        {
            throw mdkv::invalid_argument{std::string{what} + ": " + name + " is "
                                         + nb::cast<std::string>(nb::repr(value)) + ", which has another type"};
        }
    }
}

template <class Part>
[[nodiscard]] nb::object optional_dict(std::optional<Part> const& part, members<Part> const& all)
{
    return part ? nb::object{dict_of(*part, all)} : nb::none();
}

/// A part given as a dictionary of changes to the present one; none takes the part away.
template <class Part>
void set_optional(std::optional<Part>& part, nb::handle value, members<Part> const& all, char const* what)
{
    if (value.is_none()) { return part.reset(); }
    Part changed = part.value_or(Part{});
    change(changed, all, nb::cast<nb::dict>(value), what);
    part = changed;
}

/// A part that may be missing, as a dictionary.
template <auto Pointer, auto const& Members>
[[nodiscard]] auto optional_part()
{
    return member<mdkv::preset>{[](mdkv::preset const& p) { return optional_dict(p.*Pointer, Members); },
        [](mdkv::preset& p, nb::handle value, char const* name) { set_optional(p.*Pointer, value, Members, name); }};
}

members<mdkv::preset> const preset_members{
    {"name",
        {[](mdkv::preset const& p) { return nb::cast(std::string{p.name}); },
            [](mdkv::preset& p, nb::handle value, char const*) { p.name = kept_text(nb::cast<std::string>(value)); }}},
    {"ratios", plain<&mdkv::preset::ratios>()}, {"charge", plain<&mdkv::preset::charge>()},
    {"window", plain<&mdkv::preset::window>()}, {"queries", plain<&mdkv::preset::queries>()},
    {"question", plain<&mdkv::preset::question>()}, {"early_weight", plain<&mdkv::preset::early_weight>()},
    {"uniform", plain<&mdkv::preset::uniform>()}, {"stand_ins", plain<&mdkv::preset::stand_ins>()},
    {"stand_in_part", plain<&mdkv::preset::stand_in_part>()},
    {"coded_stand_ins", plain<&mdkv::preset::coded_stand_ins>()}, {"window_part", plain<&mdkv::preset::window_part>()},
    {"scale", plain<&mdkv::preset::scale>()},
    {"pooling", {[](mdkv::preset const& p) { return nb::object{dict_of(p.pooling, pool_members)}; },
                    [](mdkv::preset& p, nb::handle value, char const* name) {
                        change(p.pooling, pool_members, nb::cast<nb::dict>(value), name);
                    }}},
    {"replayed", optional_part<&mdkv::preset::replayed, replay_members>()},
    {"shared", optional_part<&mdkv::preset::shared, sharing_members>()},
    {"refitted", optional_part<&mdkv::preset::refitted, refit_members>()}};

[[nodiscard]] mdkv::budget fraction(double share)
{
    expects(share >= 0 && share <= 1, "budget: ", share,
        " is no share of the uncompressed bytes, from 0 to 1; bytes are Budget.bytes(n), tokens of each head "
        "Budget.kv_size(n)");
    nb::object const given = called(nb::module_::import_("fractions").attr("Fraction"), nb::float_(share));
    nb::object const exact = called(given.attr("limit_denominator"), nb::int_(1000000));
    nb::object const pair  = called(exact.attr("as_integer_ratio"));
    return mdkv::budget::fraction(nb::cast<index_t>(pair[0]), nb::cast<index_t>(pair[1]));
}

} // namespace

mdkv::budget budget_of(nb::handle limit)
{
    mdkv::budget const* given = nullptr;
    if (nb::try_cast(limit, given) && given != nullptr) { return *given; }
    double share = 0;
    if (!nb::try_cast(limit, share))
    {
        throw nb::type_error("budget: a share from 0 to 1 or an mdkv.Budget is needed");
    }
    return fraction(share);
}

void bind_values(nb::module_& m)
{
    nb::class_<mdkv::budget>(m, "Budget",
        "The limit of an average layer's bytes: window, tokens, projections, channels and stand-ins, without "
        "the tail of decoded tokens. Where a limit is asked for, a number from 0 to 1 is a share of the bytes of the "
        "prompt's uncompressed keys and values, in their own element type.")
        .def_static("bytes", &mdkv::budget::bytes, nb::arg("n"), "n bytes.")
        .def_static("kv_size", &mdkv::budget::kv_size, nb::arg("tokens"),
            "The bytes of so many uncompressed tokens of every KV head.")
        .def_static("fraction", &fraction, nb::arg("share"), "A share of the uncompressed bytes, from 0 to 1.");

    nb::class_<mdkv::ratio_set>(m, "RatioSet",
        "The ways in which a token may be stored, cheapest first: RatioSet(\"drop\", \"int4\", \"int8\", "
        "\"full\"). \"1/4\" is the leading quarter of its coordinates in the head's own basis, \"1/4:int8\" "
        "the same in codes of 8 bits. Iterates over the names.")
        .def("__init__",
            [](mdkv::ratio_set* self, nb::args const& rungs) {
                std::vector<std::string> names;
                for (nb::handle const rung : rungs) { names.push_back(nb::cast<std::string>(nb::str(rung))); }
                new (self) mdkv::ratio_set{ratios_of(names)};
            })
        .def("__len__", &mdkv::ratio_set::size)
        .def("__iter__", [](mdkv::ratio_set const& x) { return nb::iter(nb::cast(names_of(x))); })
        .def("__repr__", [](mdkv::ratio_set const& x) {
            std::string text;
            for (std::string const& name : names_of(x)) { text += (text.empty() ? "\"" : ", \"") + name + "\""; }
            return "RatioSet(" + text + ")";
        });

    nb::class_<mdkv::preset>(m, "Preset",
        "All options of a prompt, a value: dir shows its members, repr their values, and the package's README, under "
        "\"A policy of your own\", their meanings.")
        .def(
            "replace",
            [](mdkv::preset const& x, nb::kwargs const& changes) {
                mdkv::preset changed = x;
                change(changed, preset_members, changes, "Preset");
                return changed;
            },
            "A copy with other members: replace(window=16, pooling={\"width\": 5}, shared=None). A dictionary "
            "changes the members that it names.")
        .def(
            "__getattr__",
            [](mdkv::preset const& x, std::string const& name) {
                auto const found = preset_members.find(name);
                if (found == preset_members.end()) { throw nb::attribute_error(name.c_str()); }
                return found->second.get(x);
            },
            nb::sig("def __getattr__(self, name: str) -> typing.Any"))
        .def("__dir__",
            [](mdkv::preset const&) {
                nb::list all;
                for (auto const& [name, unused] : preset_members) { all.append(name); }
                all.append("replace");
                return all;
            })
        .def("__repr__", [](mdkv::preset const& x) {
            std::string text = "Preset(" + std::string{x.name};
            for (auto const& [name, one] : preset_members)
            {
                if (name != "name") { text += ", " + name + "=" + nb::cast<std::string>(nb::repr(one.get(x))); }
            }
            return text + ")";
        });
    m.def(
        "preset",
        [](std::string const& name) {
            for (mdkv::preset const* const known :
                {&mdkv::presets::best, &mdkv::presets::any_question, &mdkv::presets::by_window, &mdkv::presets::paper,
                    &mdkv::presets::paper_literal, &mdkv::presets::evict})
            {
                if (name == known->name) { return *known; }
            }
            throw mdkv::invalid_argument{
                "preset \"" + name
                + "\" is unknown; there are best, any_question, by_window, paper, paper_literal, evict"};
        },
        nb::arg("name"),
        "The library's preset of this name: best, any_question, by_window, paper, paper_literal or evict.");

    nb::class_<rope>(m, "Rope",
        "A model's rotary position encoding: at position p, pair i is rotated by p * base^(-2 i / n) radians, "
        "n the first `rotating` coordinates of a head (0: all), or by p * frequencies[i]. pairs: \"halves\" (i "
        "and i + n/2, as transformers stores them) or \"neighbours\" (2 i and 2 i + 1).")
        .def(
            "__init__",
            [](rope* self, double base, index_t rotating, std::string const& pairs,
                std::vector<double> const& frequencies) {
                expects(std::isfinite(base) && base > 0, "Rope: base is ", base, "; it must be finite and above 0");
                expects(rotating >= 0 && rotating % 2 == 0, "Rope: rotating is ", rotating,
                    "; it must be even, and not negative");
                expects(frequencies.empty() || rotating == 0 || rotating == 2 * std::ssize(frequencies),
                    "Rope: there are ", frequencies.size(), " frequencies for ", rotating,
                    " rotating coordinates, of which two have one");
                for (std::size_t i = 0; i < frequencies.size(); ++i)
                {
                    expects(std::isfinite(frequencies[i]), "Rope: frequencies[", i, "] is ", frequencies[i],
                        "; it must be finite");
                }
                new (self) rope{base, rotating, value_of<mdkv::rotary_pairs>(pairs, "Rope: pairs"), frequencies};
            },
            nb::arg("base") = 10000.0, nb::arg("rotating") = 0, nb::arg("pairs") = "halves",
            nb::arg("frequencies") = std::vector<double>{});

    nb::class_<host>(m, "Backend",
        "Threads of the CPU and scratch memory, which grows to the largest need until a prompt's last layer is packed. "
        "Calls from several threads "
        "take turns; separate backends work side by side. In a process that is forked while another thread is in a "
        "call on a backend, the backend and all that was made on it raise RuntimeError.")
        .def(nb::new_([](int threads) { return std::make_shared<host>(threads); }), nb::arg("threads") = 1)
        .def_prop_ro("threads", &host::threads, "Threads that share each call, the calling one included.")
        .def_prop_ro(
            "scratch_bytes", [](host& x) { return unlocked([&] { return x.scratch_bytes(); }); },
            "Bytes of the scratch memory.")
        .def(
            "release_scratch", [](host& x) { unlocked([&] { x.release_scratch(); }); },
            "Gives the scratch memory back, as the last layer's Prompt.pack and Reader.finish do; the next call takes "
            "what it "
            "needs.")
        .def("__reduce__", [](host const&) -> nb::object {
            throw nb::type_error("mdkv: a Backend cannot be pickled; another process makes its own, Backend(threads)");
        });
}

} // namespace mdkv_python
