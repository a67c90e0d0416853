"""Writes the types of an extension module, for editors and type checkers; the build runs it:  make_stub.py MODULE.so FILE.pyi"""
import importlib.util
import pathlib
import re
import sys

from nanobind.stubgen import StubGen

path, to = map(pathlib.Path, sys.argv[1:])
spec = importlib.util.spec_from_file_location(path.name.partition(".")[0], path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
made = StubGen(module)
made.put(module)
text = re.sub(r"Annotated\[NDArray, dict\(writable=False\)\]|\bNDArray\b", "Tensor", made.get())
text = re.sub(r"^(compiled_for: str) = .*$", r"\1", text, flags=re.MULTILINE)
tensor = "from typing import Any\nTensor = Any  # anything with __dlpack__, of rank and type as said\n"
to.write_text(text.replace("from numpy.typing import Tensor\n", tensor))
