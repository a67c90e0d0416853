/// \file interpreter.hpp: the interpreter's lock, and calls of Python's functions, in threads that a program's end finds there
#pragma once

#include <nanobind/nanobind.h>

#include <unistd.h>

namespace mdkv_python
{

namespace nb = nanobind;

/// Calls a function in C that may wait for the interpreter's lock. When a program ends, Python before 3.14 ends its other threads
/// while they wait, through frames of C++ that let nothing pass: here they sleep until the process is gone, as since 3.14.
template <class Call>
auto with_interpreter(Call const& call)
{
    try
    {
        return call();
    }
    catch (...) // a thread's end: functions in C throw nothing
    {
        nb::set_leak_warnings(false); // the thread keeps the objects of its call
        for (;;) { ::pause(); }
    }
}

/// Lets other threads of Python's run during its scope.
class others_run
{
public:
    others_run() = default;
    ~others_run()
    {
        with_interpreter([&] { PyEval_RestoreThread(own_); });
    }
    others_run(others_run const&)            = delete;
    others_run& operator=(others_run const&) = delete;

private:
    PyThreadState* own_ = PyEval_SaveThread();
};

/// Has the interpreter's lock during its scope.
class interpreter_lock
{
public:
    interpreter_lock() = default;
    ~interpreter_lock() { PyGILState_Release(state_); }
    interpreter_lock(interpreter_lock const&)            = delete;
    interpreter_lock& operator=(interpreter_lock const&) = delete;

private:
    PyGILState_STATE state_ = with_interpreter([] { return PyGILState_Ensure(); });
};

/// function(arguments...), of Python's own functions, in which other threads may run.
template <class... Arguments>
[[nodiscard]] nb::object called(nb::handle function, Arguments const&... arguments)
{
    auto const result = nb::steal(
        with_interpreter([&] { return PyObject_CallFunctionObjArgs(function.ptr(), arguments.ptr()..., nullptr); }));
    if (!result.is_valid()) { nb::raise_python_error(); }
    return result;
}

} // namespace mdkv_python
