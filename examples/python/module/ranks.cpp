// Ranks over a function of Python's, as a class of Python's.
#include <mdkv/core/error.hpp>
#include <mdkv/core/ranks.hpp>
#include <mdkv/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "interpreter.hpp"
#include "module.hpp"
#include "ranks.hpp"
#include "tensors.hpp"

namespace mdkv_python
{

namespace
{

/// mdkv.Ranks: its function is called with the interpreter's lock, and gets arrays that outlive the call.
class python_ranks
{
public:
    python_ranks(nb::object sum, index_t first_head, index_t heads)
        : ranks_{first_head, heads,
            [](void* self, std::int64_t* numbers, index_t n) {
                static_cast<python_ranks*>(self)->exchange(numbers, n);
            },
            this}
        , sum_{std::move(sum)}
    {
        mdkv::expects(first_head >= 0 && first_head <= heads, "Ranks: first_head is ", first_head,
            "; it must be from 0 to ", heads, ", the heads of a layer on all ranks");
    }
    python_ranks(python_ranks const&)            = delete;
    python_ranks& operator=(python_ranks const&) = delete;

    [[nodiscard]] mdkv::ranks const& get() const noexcept { return ranks_; }
    [[nodiscard]] index_t exchanges() const noexcept { return exchanges_; }
    [[nodiscard]] index_t bytes() const noexcept { return bytes_; }

    // Python's search for cycles: an object whose method is the function may hold the ranks.
    static int traverse(PyObject* self, visitproc visit, void* arg)
    {
        Py_VISIT(Py_TYPE(self));
        if (nb::inst_ready(self))
        {
            auto const* const x = nb::inst_ptr<python_ranks>(self);
            Py_VISIT(x->sum_.ptr());
        }
        return 0;
    }
    static int clear(PyObject* self)
    {
        if (nb::inst_ready(self)) { nb::inst_ptr<python_ranks>(self)->sum_.reset(); }
        return 0;
    }

private:
    void exchange(std::int64_t* numbers, index_t n)
    {
        interpreter_lock const lock;
        auto const count      = static_cast<std::size_t>(n);
        nb::object const mine = numpy(std::vector<std::int64_t>(numbers, numbers + count), {count});
        exchanges_ += 1;
        bytes_ += n * index_t{sizeof(std::int64_t)};
        nb::object const returned = called(sum_, mine);
        if (!returned.is_none())
        {
            throw nb::type_error(
                ("Ranks: the function sum must change the numbers in place, be done when it returns, and "
                 "return None; it returned "
                    + nb::cast<std::string>(nb::repr(returned.type())))
                    .c_str());
        }
        auto const* const changed = nb::cast<nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>>(mine).data();
        std::copy(changed, changed + count, numbers);
    }

    mdkv::ranks ranks_;
    nb::object sum_;
    index_t exchanges_ = 0;
    index_t bytes_     = 0;
};

PyType_Slot const ranks_slots[]{{Py_tp_traverse, reinterpret_cast<void*>(&python_ranks::traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(&python_ranks::clear)}, {0, nullptr}};

} // namespace

mdkv::ranks const* ranks_of(nb::handle ranks)
{
    if (ranks.is_none()) { return nullptr; }
    if (!nb::isinstance<python_ranks>(ranks)) { throw nb::type_error("ranks: an mdkv.Ranks or None is needed"); }
    return &nb::inst_ptr<python_ranks>(ranks)->get();
}

void bind_ranks(nb::module_& m)
{
    nb::class_<python_ranks>(m, "Ranks", nb::type_slots(ranks_slots),
        "This process among those over which the heads of prompts are spread, and its transport. Prompts with ranks "
        "share one budget over all heads, and choose bit for bit what one process with all heads does: see "
        "docs/ranks.md. mdkv.distributed makes them of torch.distributed's groups.")
        .def(
            "__init__",
            [](python_ranks* self, nb::callable sum, index_t first_head, index_t heads) {
                new (self) python_ranks{std::move(sum), first_head, heads};
            },
            nb::arg("sum"), nb::kw_only(), nb::arg("first_head"), nb::arg("heads"),
            "sum(numbers): each of int64 [n] becomes its sum over all ranks; it changes the NumPy array in place and "
            "returns None when it is done; its exceptions leave the call that exchanges. All ranks make the same calls "
            "in the same order, each with a backend of its own. first_head: number of this rank's first KV head among "
            "the `heads` of a layer on all ranks.")
        .def_prop_ro(
            "first_head", [](python_ranks const& x) { return x.get().first_head; },
            "Number of this rank's first KV head.")
        .def_prop_ro(
            "heads", [](python_ranks const& x) { return x.get().heads; }, "KV heads of a layer, on all ranks.")
        .def_prop_ro("exchanges", &python_ranks::exchanges, "Calls of the function so far.")
        .def_prop_ro("bytes", &python_ranks::bytes, "Bytes that this rank has given to the function so far.")
        .def(
            "refuse", [](python_ranks const& x) { refuse(x.get()); }, nb::call_guard<others_run>(),
            "Tells the other ranks that this one does not make its next call: theirs raises. finish_layer and allocate "
            "of a prompt whose arguments are refused do it themselves.");
}

} // namespace mdkv_python
