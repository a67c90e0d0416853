#!/usr/bin/env python3
"""Compiles and runs small programs as other projects do: with their compilers, standard libraries, language versions and flags.

Each line of output begins with PASSED, FAILED or SKIPPED and names what was tried; tests/run.sh counts them. The programs
are examples/engine_hook.cpp and those beside this file. Usage: compilers.py ROOT COMPILER...
"""
import concurrent.futures
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

root, compilers = pathlib.Path(sys.argv[1]), sys.argv[2:]
here = root / "tests/build/compilers"
hook = root / "examples/engine_hook.cpp"
stages = root / "tests/build/machines/stages.cpp"
x86 = platform.machine() in ("x86_64", "AMD64")
nvcc = shutil.which("nvcc", path=os.environ["PATH"] + ":/usr/local/cuda/bin")
native = ["-march=native"] if x86 else ["-mcpu=native"]

# What a strict project asks of the headers that it includes (our own sources have their own list, cmake/build_flags.cmake).
strict = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wsign-conversion", "-Wdouble-promotion", "-Wshadow", "-Werror"]


def call(*command):
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, stdin=subprocess.DEVNULL)


def compiles(folder, compiler, source, *flags):
    """An error's text, or nothing."""
    done = call(compiler, "-std=c++20", "-I", root / "include", *flags, "-c", "-o", folder / "object.o", source)
    return "" if done.returncode == 0 else first_error(done.stderr)


def refused(message):
    """A test that the source is refused with this message."""
    def test(folder, compiler, source, *flags):
        text = call(compiler, "-std=c++20", "-I", root / "include", *flags, "-fsyntax-only", source).stderr
        return "" if message in text else f"not refused with '{message}': {first_error(text)}"
    return test


def runs(folder, compiler, source, *flags):
    """Compiles, links and runs the program, which checks its own results."""
    pthread = [] if source.suffix == ".cu" else ["-pthread"]
    done = call(compiler, "-std=c++20", "-I", root / "include", *flags, "-o", folder / "program", source, *pthread)
    if done.returncode != 0:
        return first_error(done.stderr)
    done = call(folder / "program")
    return "" if done.returncode == 0 else f"exit status {done.returncode}: {done.stdout}{done.stderr}"


def ends(message):
    """A test that the program is ended, with this message."""
    def test(folder, compiler, source, *flags):
        done = call(compiler, "-std=c++20", "-I", root / "include", *flags, "-o", folder / "program", source)
        if done.returncode != 0:
            return first_error(done.stderr)
        done = call(folder / "program")
        ended = done.returncode == -6 and f"mdkv: {message}: " in done.stderr
        return "" if ended else f"status {done.returncode}: {done.stderr}"
    return test


def captures_this_first(folder, compiler, source, *flags):
    """No closure of a header has `this` behind other captures, where g++ puts it if [&] alone captures it, and nvcc does not."""
    done = call(compiler, "-std=c++20", "-I", root / "include", *flags, "-gdwarf-4", "-c", "-o", folder / "object.o", source)
    if done.returncode != 0:
        return first_error(done.stderr)
    lines, info = (call("readelf", f"--debug-dump={one}", folder / "object.o").stdout for one in ("rawline", "info"))
    names = dict(re.findall(r"^ +(\d+)\t\d+\t0\t0\t(\S+)$", lines, re.M))
    found = [one for one in info.split("(DW_TAG_") if one.startswith("member)") and re.search(r"DW_AT_name.* _*this$", one, re.M)]
    found = [dict(re.findall(r"DW_AT_(\w+) *:.*?(\S+)$", one, re.M)) for one in found]
    found = [(names[one["decl_file"]], one["decl_line"], one["data_member_location"]) for one in found]
    late = [f"{file}:{line}" for file, line, at in found if at != "0" and list((root / "include").rglob(file))]
    return f"write [&, this] in {', '.join(sorted(set(late)))}" if late else "" if found else "no closure was found"


def throws_nothing(folder, compiler, source, *flags):
    """No header has an exception's keyword, not even in a template, which compilers look at only where it is used."""
    done = call(compiler, "-std=c++20", "-I", root / "include", *flags, "-E", source)
    header, found = "", []
    for line in done.stdout.splitlines():
        if line.startswith("#"):
            header = (line.split('"') + [header])[1]
        elif "include/mdkv/" in header and re.search(r"\b(throw|try|catch)\b", re.sub(r'"[^"]*"', "", line)):
            found.append(f"{header}: {line.strip()}")
    return (found + [""])[0] if done.returncode == 0 else first_error(done.stderr)


def first_error(text):
    found = [line for line in text.splitlines() if re.search(r"error|undefined", line)]
    return (found or text.splitlines() or ["no message"])[0]


def cases(compiler):
    clang = "clang" in call(compiler, "--version").stdout
    fast = refused("mdkv computes wrong results with -ffast-math")
    yield "C++20", runs, hook, "-O2"
    yield "C++23", runs, hook, "-std=c++2b", "-O2"
    yield "warnings, this processor", compiles, stages, *strict, "-O0", *native
    yield "macros of other headers", compiles, here / "macros.cpp", "-O0"
    yield "closures", captures_this_first, stages, "-O0"
    yield "exceptions", runs, here / "bad_input.cpp", "-O1"
    yield ("no exceptions", ends("merge_attention"), here / "bad_input.cpp", "-O1", "-fno-exceptions", "-Werror", "-pthread")
    yield "no exceptions in headers", throws_nothing, here / "bad_input.cpp", "-fno-exceptions"
    for flag in ("-ffast-math", "-Ofast", "-ffinite-math-only"):
        yield f"{flag} refused", fast, here / "macros.cpp", flag
    if clang:  # which has no macro for it
        yield "-fassociative-math", runs, hook, "-O2", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"
        libcxx = call(compiler, "-stdlib=libc++", "-fsyntax-only", "-x", "c++", "-include", "vector", "/dev/null").returncode == 0
        for standard in ("c++20", "c++2b"):
            # Linked statically: a package of Debian's has the headers of one version and the shared library of another.
            yield (f"libc++, {standard}", runs if libcxx else None, hook, "-stdlib=libc++", "-static-libstdc++",
                   f"-std={standard}", "-O2")
    else:
        for flags in (["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"], ["-freciprocal-math"]):
            yield f"{flags[0]} refused", fast, here / "macros.cpp", *flags
    if x86:
        for processor in ("x86-64-v3", "alderlake", "icelake-server"):  # builtins come and go with compilers
            yield processor, compiles, stages, "-O0", f"-march={processor}"
        if not clang:  # which has no such arithmetic on x86-64
            yield "x87 arithmetic refused", refused("mdkv computes wrong results where"), here / "macros.cpp", "-mfpmath=387"
            yield "warnings, AVX-512 VNNI", compiles, stages, "-Wall", "-Wextra", "-Werror", "-O3", "-march=icelake-server"
            yield "warnings, -mavx512f alone", compiles, stages, "-Wall", "-Wextra", "-Werror", "-O1", "-mavx512f"


def cases_of_cuda():
    without = ["-Xcompiler=-fno-exceptions"]
    for title, test, *flags in (("exceptions", runs), ("no exceptions", ends("pool_resource"), *without),
                                ("no exceptions in headers", throws_nothing, *without)):
        yield title, test if nvcc else None, here / "failed_call.cu", *flags
    yield "macros of other headers", compiles if nvcc else None, here / "macros.cpp", "-x", "cu"


def tried(job):
    compiler, (name, test, *arguments) = job
    title = f"compilers/{os.path.basename(compiler)}: {name}"
    if test is None:
        return f"SKIPPED: {title}: " + ("there is no nvcc" if compiler == "nvcc" else "it has no libc++")
    with tempfile.TemporaryDirectory() as folder:
        error = test(pathlib.Path(folder), compiler, *arguments)
    return f"FAILED: {title}: {error}" if error else f"PASSED: {title}"


jobs = [(compiler, case) for compiler in compilers for case in cases(compiler)]
jobs += [(nvcc or "nvcc", case) for case in cases_of_cuda()]
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    lines = list(pool.map(tried, jobs))
print("\n".join(lines))
sys.exit(any(line.startswith("FAILED") for line in lines))
