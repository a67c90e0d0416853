// Stored caches: layers as bytes of a file, and files whose bytes layers attend to.
#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/engine/stored.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "engine.hpp"
#include "file_replacement.hpp"
#include "host.hpp"
#include "module.hpp"
#include "tensors.hpp"
#include "turn_lock.hpp"

namespace mdkv_python
{

namespace
{

using bytes_array = nb::ndarray<std::uint8_t const, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

/// The 32 bytes that mdkv.storing makes of an identity.
[[nodiscard]] mdkv::cache_identity identity_of(nb::bytes const& digest)
{
    mdkv::cache_identity made{};
    mdkv::expects(digest.size() == made.size(), "mdkv: an identity has ", digest.size(), " bytes, not ", made.size());
    std::memcpy(made.data(), digest.data(), made.size());
    return made;
}

/// [H, S] of each layer.
using positions_list =
    std::optional<std::vector<input_of<std::int32_t const, nb::ndim<2>, nb::c_contig, nb::device::cpu>>>;

/// The bytes of a path as Python's own functions take it: a text, bytes, or an object that has one of them.
[[nodiscard]] std::string path_of(nb::handle given)
{
    PyObject* made = nullptr;
    if (PyUnicode_FSConverter(given.ptr(), &made) == 0) { throw nb::python_error(); }
    auto const bytes = nb::steal<nb::bytes>(made);
    return {bytes.c_str(), bytes.size()};
}

/// Calls call(span of mdkv::layer_to_write) for the layers of a Python sequence, which no other call changes
/// meanwhile. Python's other threads may run.
template <class Call>
auto with_layers(nb::sequence const& given, positions_list const& positions, Call const& call)
{
    mdkv::expects(!positions || positions->size() == nb::len(given), "write: positions are of ",
        positions ? positions->size() : 0, " layers, not of the ", nb::len(given), " that are written");
    nb::tuple const kept{given}; // the sequence may change while others run
    std::vector<layer const*> layers;
    for (nb::handle const one : kept)
    {
        if (!nb::isinstance<layer_object>(one)) { throw nb::type_error("write: layers are no sequence of mdkv.Layer"); }
        layers.push_back(nb::cast<layer_object const&>(one).of.get());
    }
    others_run const meanwhile;
    std::vector<turn_lock*> places;
    for (layer const* const one : layers) { places.push_back(one->turn().mutex()); }
    std::ranges::sort(places); // two calls take several turns in one order
    places.erase(std::ranges::unique(places).begin(), places.end());
    std::vector<std::unique_lock<turn_lock>> turns;
    for (auto* const one : places) { turns.emplace_back(*one); }

    readable_cache const first =
        layers.empty() ? readable_cache{mdkv::cache_view<float const, mdkv::space::host>{}} : layers.front()->view();
    return std::visit(
        [&]<class View>(View const&) -> decltype(call(std::span<mdkv::layer_to_write<float>>{})) {
            if constexpr (std::is_same_v<View, std::monostate>)
            {
                throw mdkv::invalid_argument{"write: layer 0 lies on a device; only layers in host memory are written"};
            }
            else
            {
                std::vector<mdkv::layer_to_write<typename View::element_type>> all;
                for (std::size_t i = 0; i < layers.size(); ++i)
                {
                    readable_cache const cache = layers[i]->view();
                    mdkv::expects<mdkv::mismatch>(std::holds_alternative<View>(cache), "write: layer ", i,
                        " has another element type than layer 0, or lies on a device");
                    all.push_back({std::get<View>(cache), {}});
                    if (!positions) { continue; }
                    auto const& given    = (*positions)[i];
                    auto const slots     = static_cast<index_t>(given.shape(1));
                    all.back().positions = {given.data(), {static_cast<index_t>(given.shape(0)), slots}, {slots, 1}};
                }
                return call(std::span{all});
            }
        },
        first);
}

/// Writes a file, which takes the place of an older one all at once.
template <class Layers>
void write_file(
    std::string const& path, mdkv::cache_identity const& identity, mdkv::cache_place const& place, Layers layers)
{
    file_replacement file{path};
    mdkv::write([&](std::span<std::byte const> bytes) { file.write(bytes); }, identity, place, layers);
    file.commit();
}

/// The bytes of such a file; their number is a multiple of the memory's alignment.
template <class Layers>
[[nodiscard]] std::unique_ptr<host_bytes> written(
    mdkv::cache_identity const& identity, mdkv::cache_place const& place, Layers layers)
{
    auto to    = std::make_unique<host_bytes>(mdkv::stored_bytes(place, layers), mdkv::cpu::host_memory{});
    auto* next = to->data();
    mdkv::write(
        [&](std::span<std::byte const> bytes) { next = std::ranges::copy(bytes, next).out; }, identity, place, layers);
    return to;
}

/// The ratio set of a cache that was read, as far as coordinates tell it.
[[nodiscard]] mdkv::ratio_set ratios_of(mdkv::cache_layout const& layout)
{
    if (layout.rungs == 0) { return mdkv::ratio_set{mdkv::full}; }
    std::vector<mdkv::rung> rungs;
    for (std::size_t r = 0; r < layout.rungs; ++r)
    {
        auto const kept  = static_cast<std::int32_t>(layout.key_coordinates[r]);
        auto const all   = static_cast<std::int32_t>(std::max<index_t>(layout.dims.keys, 1));
        auto const whole = std::gcd(kept, all);
        rungs.push_back({kept / whole, all / whole, layout.kinds[r]});
    }
    return mdkv::ratio_set{rungs};
}

/// mdkv.Stored.
class stored_object
{
public:
    stored_object(bytes_array bytes, mdkv::cache_identity const& identity, mdkv::verify how, std::shared_ptr<host> on)
        : on_{on ? std::move(on) : std::make_shared<host>(1)}
        , given_{std::move(bytes)}
    {
        std::span file{reinterpret_cast<std::byte const*>(given_.data()), given_.size()};
        if (reinterpret_cast<std::uintptr_t>(file.data()) % mdkv::workspace::alignment != 0)
        {
            copy_ = host_bytes{std::ssize(file), {}};
            std::ranges::copy(file, copy_.data());
            file   = {copy_.data(), file.size()};
            given_ = {};
        }
        std::uint32_t element = 0;
        constexpr auto where  = offsetof(mdkv::detail::file_header, element);
        if (file.size() >= where + sizeof element) { std::memcpy(&element, file.data() + where, sizeof element); }
        others_run const meanwhile;
        if (element == 2) { caches_ = mdkv::read<mdkv::half>(file, identity, how); }
        else if (element == 3) { caches_ = mdkv::read<mdkv::bfloat16>(file, identity, how); }
        else { caches_ = mdkv::read<float>(file, identity, how); } // which refuses everything else
    }

    /// Calls call(stored_caches).
    template <class Call>
    auto with(Call const& call) const
    {
        return std::visit(call, *caches_);
    }

    [[nodiscard]] std::string dtype() const
    {
        return caches_->index() == 0 ? "float32" : caches_->index() == 1 ? "float16" : "bfloat16";
    }

    [[nodiscard]] std::unique_ptr<layer> make_layer(index_t i, index_t head, index_t count) const
    {
        return with([&]<mdkv::element T>(mdkv::stored_caches<T> const& caches) {
            auto const cache       = caches.layer(i, head, count);
            index_t const appended = cache.layout.heads == 0 ? 0 : *cache.appended;
            index_t const stored   = mdkv::most_slots(cache) - appended;
            return make_mapped_layer<T>(
                on_, cache, ratios_of(cache.layout), std::max(caches.place().tokens - appended, stored));
        });
    }

private:
    std::shared_ptr<host> on_;
    bytes_array given_;
    host_bytes copy_;
    std::optional<
        std::variant<mdkv::stored_caches<float>, mdkv::stored_caches<mdkv::half>, mdkv::stored_caches<mdkv::bfloat16>>>
        caches_;
};

/// A property that is a number of the file's place.
template <auto Number>
[[nodiscard]] index_t number_of(stored_object const& x)
{
    return x.with([](auto const& caches) { return caches.place().*Number; });
}

void bind_stored(nb::module_& m)
{
    nb::class_<stored_object>(m, "Stored",
        "Caches in the bytes of a file: checked once, and attended where they lie. The bytes must not change.")
        .def(
            "__init__",
            [](stored_object* self, bytes_array const& bytes, nb::bytes const& identity, bool everything,
                std::shared_ptr<host> on) {
                new (self) stored_object{bytes, identity_of(identity),
                    everything ? mdkv::verify::everything : mdkv::verify::bounds, std::move(on)};
            },
            nb::arg("bytes"), nb::arg("identity"), nb::kw_only(), nb::arg("everything") = true,
            nb::arg("backend") = nb::none(),
            "bytes: the whole file as uint8, which is copied if it does not lie at a multiple of 64. identity: 32 "
            "bytes. everything: compare the checksum, which reads all bytes; bounds are checked in either case.")
        .def(
            "__len__",
            [](stored_object const& x) { return x.with([](auto const& caches) { return caches.layers(); }); },
            "Layers of the file.")
        .def_prop_ro(
            "heads", [](stored_object const& x) { return x.with([](auto const& caches) { return caches.heads(); }); },
            "KV heads of the file.")
        .def_prop_ro("tokens", &number_of<&mdkv::cache_place::tokens>,
            "Tokens of the text, if they were given when it was written; otherwise 0.")
        .def_prop_ro("first_layer", &number_of<&mdkv::cache_place::first_layer>,
            "The file's first layer among those of the model.")
        .def_prop_ro("model_layers", &number_of<&mdkv::cache_place::model_layers>, "Layers of the model.")
        .def_prop_ro("first_head", &number_of<&mdkv::cache_place::first_head>,
            "The file's first KV head among those of the model.")
        .def_prop_ro("model_heads", &number_of<&mdkv::cache_place::model_heads>, "KV heads of the model.")
        .def_prop_ro("dtype", &stored_object::dtype, "Element type: \"float32\", \"float16\" or \"bfloat16\".")
        .def("__reduce__",
            [](stored_object const&) -> nb::object {
                throw nb::type_error(
                    "mdkv: Stored cannot be pickled; another process maps the same file, mdkv.load(path)");
            })
        .def_prop_ro(
            "attachment",
            [](stored_object const& x) {
                auto const all = x.with([](auto const& caches) { return caches.place().attachment; });
                return nb::bytes(all.data(), all.size());
            },
            "Bytes of the program that wrote the file, which nothing has checked.")
        .def(
            "positions",
            [](nb::pointer_and_handle<stored_object> self, index_t i) {
                return self.p->with([&](auto const& caches) {
                    auto const all = caches.positions(i);
                    std::array<std::size_t, 2> const shape{
                        static_cast<std::size_t>(all.extent(0)), static_cast<std::size_t>(all.extent(1))};
                    return nb::cast(nb::ndarray<nb::numpy, std::int32_t const>{
                        all.data_handle(), shape.size(), shape.data(), self.h});
                });
            },
            nb::arg("i"),
            "[H, S] places in the text of the rows that unpack gives of layer i, int32, -1 behind a head's last "
            "one; [H, 0] if they were not given when the file was written.")
        .def(
            "layer",
            [](nb::pointer_and_handle<stored_object> self, index_t i, index_t head, index_t count) {
                return layer_object{self.p->make_layer(i, head, count), self.p->dtype(), nb::borrow(self.h)};
            },
            nb::arg("i"), nb::arg("head") = 0, nb::arg("count") = -1,
            "A Layer of heads [head, head + count) of the file's layer i (-1: all that follow), whose compressed "
            "part lies in the file's bytes. Its tail is its own: append, truncate and attend as with any other "
            "Layer. recompress puts it into memory of its own. Each call makes another Layer.");
}

} // namespace

void bind_storing(nb::module_& m)
{
    nb::register_exception_translator([](std::exception_ptr const& thrown, void*) {
        try
        {
            std::rethrow_exception(thrown);
        }
        catch (file_error const& error)
        {
            std::string const text = error.what(); // names a path, which may be any bytes
            nb::object const message =
                nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
            PyErr_SetObject(PyExc_OSError, message.ptr());
        }
    });
    bind_stored(m);
    m.def(
        "write",
        [](nb::handle path, nb::sequence const& layers, nb::bytes const& digest, index_t tokens,
            positions_list const& positions, nb::bytes const& attachment, index_t first_layer,
            std::optional<index_t> model_layers, index_t first_head, std::optional<index_t> model_heads) -> nb::object {
            mdkv::cache_identity const identity = identity_of(digest);
            mdkv::cache_place const place{first_layer, model_layers.value_or(0), first_head, model_heads.value_or(0),
                tokens, {static_cast<std::byte const*>(attachment.data()), attachment.size()}};
            if (!path.is_none())
            {
                with_layers(layers, positions,
                    [&, to = path_of(path)](auto const& all) { write_file(to, identity, place, all); });
                return nb::none();
            }
            auto made = with_layers(layers, positions, [&](auto const& all) { return written(identity, place, all); });
            std::size_t const size = static_cast<std::size_t>(made->size());
            auto* const data       = reinterpret_cast<std::uint8_t*>(made->data());
            nb::capsule const owner{made.get(), [](void* p) noexcept { delete static_cast<host_bytes*>(p); }};
            static_cast<void>(made.release());
            return nb::cast(nb::ndarray<nb::numpy, std::uint8_t>{data, {size}, owner});
        },
        nb::arg("path").none(), nb::arg("layers"), nb::arg("identity"), nb::kw_only(), nb::arg("tokens") = 0,
        nb::arg("positions") = nb::none(), nb::arg("attachment") = nb::bytes("", 0), nb::arg("first_layer") = 0,
        nb::arg("model_layers") = nb::none(), nb::arg("first_head") = 0, nb::arg("model_heads") = nb::none(),
        "See mdkv.save and mdkv.write: to a file, or, if path is None, to memory, which is returned.");
}

} // namespace mdkv_python
