"""Writes src/mdkv/_module.pyi, the types of the extension module, from the module that is installed: run it after a change of
module/ and `pip install .` at the repository's root; a test compares the two. Needs nanobind."""
import pathlib
import re

import mdkv


def stub():
    from nanobind.stubgen import StubGen

    made = StubGen(mdkv._module)
    made.put(mdkv._module)
    text = re.sub(r"Annotated\[NDArray, dict\(writable=False\)\]|\bNDArray\b", "Tensor", made.get())
    text = re.sub(r"^(compiled_for: str) = .*$", r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"^from typing import Annotated$", "from typing import Any", text, flags=re.MULTILINE)
    return text.replace("from numpy.typing import Tensor\n", "Tensor = Any  # anything with __dlpack__, of rank and type as said\n")


if __name__ == "__main__":
    (pathlib.Path(__file__).parent / "src" / "mdkv" / "_module.pyi").write_text(stub())
