// Ranks over Python's functions, as a class of Python's.
#include <mdkv/core/error.hpp>
#include <mdkv/core/ranks.hpp>
#include <mdkv/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "interpreter.hpp"
#include "module.hpp"
#include "ranks.hpp"
#include "tensors.hpp"

namespace mdkv_python
{

namespace
{

/// mdkv.Ranks: its functions are called with the interpreter's lock, and get arrays that outlive the call.
class python_ranks final : public rank_group
{
public:
    python_ranks(int rank, int size, nb::object sum, nb::object least, mdkv::rank_heads const& own,
        std::optional<index_t> layers)
        : rank_{rank}
        , size_{size}
        , own_{own}
        , layers_{layers}
        , sum_{std::move(sum)}
        , least_{std::move(least)}
    {
        mdkv::expects(size >= 1, "Ranks: size is ", size, "; it must be at least 1");
        mdkv::expects(rank >= 0 && rank < size, "Ranks: rank is ", rank, "; it must be from 0 to ", size - 1);
        mdkv::expects(own.first_head >= 0 && own.first_head <= own.heads, "Ranks: first_head is ", own.first_head,
            "; it must be from 0 to ", own.heads, ", the heads of a layer on all ranks");
        mdkv::expects(own.first_layer >= 0 && own.first_layer <= layers.value_or(0), "Ranks: first_layer is ",
            own.first_layer, "; it must be from 0 to ", layers.value_or(0), ", the layers on all ranks (layers)");
    }

    [[nodiscard]] int rank() const noexcept override { return rank_; }
    [[nodiscard]] int size() const noexcept override { return size_; }
    void sum(std::int64_t* numbers, index_t n) const override { exchange(sum_, "sum", numbers, n); }
    void least(std::uint64_t* numbers, index_t n) const override { exchange(least_, "least", numbers, n); }
    [[nodiscard]] mdkv::rank_heads place(index_t layers) const noexcept override
    {
        mdkv::rank_heads here = own_;
        here.layers           = layers_.value_or(layers);
        return here;
    }

    [[nodiscard]] index_t exchanges() const noexcept { return exchanges_; }
    [[nodiscard]] index_t bytes() const noexcept { return bytes_; }

    // Python's search for cycles: an object whose methods are the functions may hold the ranks.
    static int traverse(PyObject* self, visitproc visit, void* arg)
    {
        Py_VISIT(Py_TYPE(self));
        if (nb::inst_ready(self))
        {
            auto const* const x = nb::inst_ptr<python_ranks>(self);
            Py_VISIT(x->sum_.ptr());
            Py_VISIT(x->least_.ptr());
        }
        return 0;
    }
    static int clear(PyObject* self)
    {
        if (nb::inst_ready(self))
        {
            auto* const x = nb::inst_ptr<python_ranks>(self);
            x->sum_.reset();
            x->least_.reset();
        }
        return 0;
    }

private:
    template <class V>
    void exchange(nb::object const& function, char const* name, V* numbers, index_t n) const
    {
        interpreter_lock const lock;
        auto const count      = static_cast<std::size_t>(n);
        nb::object const mine = numpy(std::vector<V>(numbers, numbers + count), {count});
        exchanges_ += 1;
        bytes_ += n * index_t{sizeof(V)};
        nb::object const returned = called(function, mine);
        if (!returned.is_none())
        {
            throw nb::type_error(("Ranks: the function " + std::string{name}
                                  + " must change the numbers in place, be done when it returns, and return None; it "
                                    "returned "
                                  + nb::cast<std::string>(nb::repr(returned.type())))
                                     .c_str());
        }
        V const* const changed = nb::cast<nb::ndarray<nb::numpy, V, nb::ndim<1>>>(mine).data();
        std::copy(changed, changed + count, numbers);
    }

    int rank_;
    int size_;
    mdkv::rank_heads own_;
    std::optional<index_t> layers_;
    nb::object sum_, least_;
    mutable index_t exchanges_ = 0;
    mutable index_t bytes_     = 0;
};

PyType_Slot const ranks_slots[]{{Py_tp_traverse, reinterpret_cast<void*>(&python_ranks::traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(&python_ranks::clear)}, {0, nullptr}};

} // namespace

rank_group const* ranks_of(nb::handle ranks)
{
    if (ranks.is_none()) { return nullptr; }
    if (!nb::isinstance<python_ranks>(ranks)) { throw nb::type_error("ranks: an mdkv.Ranks or None is needed"); }
    return nb::inst_ptr<python_ranks>(ranks);
}

void bind_ranks(nb::module_& m)
{
    nb::class_<python_ranks>(m, "Ranks", nb::type_slots(ranks_slots),
        "This process among those over which the heads of prompts and layers are spread, and its transport. Prompts "
        "and folds with ranks share one budget over all heads, and choose bit for bit what one process with all heads "
        "does: see docs/ranks.md. mdkv.distributed makes them of torch.distributed's groups.")
        .def(
            "__init__",
            [](python_ranks* self, int rank, int size, nb::callable sum, nb::callable least, index_t first_head,
                index_t heads, index_t first_layer, std::optional<index_t> layers, bool replica) {
                new (self) python_ranks{rank, size, std::move(sum), std::move(least),
                    {.first_head = first_head, .heads = heads, .first_layer = first_layer, .replica = replica}, layers};
            },
            nb::arg("rank"), nb::arg("size"), nb::kw_only(), nb::arg("sum"), nb::arg("least"), nb::arg("first_head"),
            nb::arg("heads"), nb::arg("first_layer") = 0, nb::arg("layers") = nb::none(), nb::arg("replica") = false,
            "rank: this one's number, from 0, of `size` ranks. sum(numbers): each of int64 [n] becomes its sum over "
            "all "
            "ranks; least(numbers): each of uint64 [n] becomes the least. Both change the NumPy array in place and "
            "return None when they are done; their exceptions leave the call that exchanges. All ranks make the same "
            "calls in the same order, each with a backend of its own. first_head: number of this rank's first KV head "
            "among the `heads` of a layer on all ranks. first_layer and layers: of this rank's first layer and on all "
            "ranks; None: all ranks have all layers. replica: another rank has the same heads, bitwise, and its losses "
            "count.")
        .def_prop_ro("rank", &python_ranks::rank, "This rank's number, from 0.")
        .def_prop_ro("size", &python_ranks::size, "Number of ranks.")
        .def_prop_ro(
            "first_head", [](python_ranks const& x) { return x.place(1).first_head; },
            "Number of this rank's first KV head.")
        .def_prop_ro(
            "heads", [](python_ranks const& x) { return x.place(1).heads; }, "KV heads of a layer, on all ranks.")
        .def_prop_ro("exchanges", &python_ranks::exchanges, "Calls of the functions so far.")
        .def_prop_ro("bytes", &python_ranks::bytes, "Bytes that this rank has given to the functions so far.")
        .def(
            "refuse", [](python_ranks const& x) { refuse(x); }, nb::call_guard<others_run>(),
            "Tells the other ranks that this one does not make its next call: theirs raises. Calls of a prompt, and "
            "folds, whose arguments are refused do it themselves.");
}

} // namespace mdkv_python
