"""KV caches of language models, compressed to a budget of bytes: each token of each head takes 16, 8, 4 or 0 bits a
coordinate, such that the attention output changes least. Attention reads the compressed cache as it is.

    layer, report = mdkv.compress(queries, keys, values, 0.125)   # one layer of a prompt in an eighth of the bytes
    layer.append(key, value); layer.attend(query, output)         # each decoded token

    mdkv.save("prompt.mdkv", [layer], identity="...")             # and in another process, from the file's own pages:
    layer = mdkv.load("prompt.mdkv", identity="...").layer(0)

`Prompt` gives all layers of a prompt one budget, and with `Ranks` heads in several processes. `Reader` does so
while the prompt is read, in memory that does not grow with its length.
`mdkv.transformers.Cache` does all of it inside a model, `mdkv.kvpress` inside kvpress. Tensors are anything with
`__dlpack__` on the CPU (torch, numpy, jax): float32, float16, bfloat16, of any strides. Refused arguments are ValueErrors
with the library's message, before anything has changed; arguments of another type are TypeErrors, files OSErrors.
"""
import importlib as _importlib
import os as _os
import platform as _platform
import typing as _typing

import numpy as _numpy

if _typing.TYPE_CHECKING:
    from ._module import *  # noqa: F403


def _flags():
    """What this processor has, by Linux's names; empty without /proc."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next((set(line.split()) for line in lines if line.startswith("flags")), set())
    except OSError:
        return set()


def _best_module():
    """The extension module for most of the instructions that this processor has; for the least, x86-64-v3, if the system does not
    tell them."""
    folder = _os.path.dirname(__file__)
    there = [name for name in ("_own", "_x86_64_v4", "_x86_64_v3") if any(f.startswith(name + ".") for f in _os.listdir(folder))]
    least = set()
    if _platform.machine() in ("x86_64", "AMD64"):
        needed = {"_x86_64_v3": {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"}}
        needed["_x86_64_v4"] = needed["_x86_64_v3"] | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
        flags = _flags() or needed["_x86_64_v3"]
        least = needed["_x86_64_v3"] - flags
        there = [name for name in there if needed.get(name, set()) <= flags]
    if not there:
        lack = f"; it lacks {', '.join(sorted(least))}" if least else ""
        raise ImportError(f"mdkv: this package holds no module for this processor{lack}. x86-64-v3 (AVX2) is the least. `pip install` "
                          "its source archive or folder with -C cmake.define.MDKV_PYTHON_INSTRUCTIONS=native")
    return _importlib.import_module("." + there[0], __name__)


_module = _best_module()
__version__ = _module.library_version
__all__ = ["Backend", "Budget", "InvalidArgument", "Layer", "Preset", "Prompt", "Ranks", "RatioSet", "Reader", "Rope", "Stored",
           "build", "compiled_for", "compress", "load", "log_sum_exps", "preset", "presets", "read", "save", "write"]
compiled_for = _module.compiled_for  #: the instructions in use, such as "x86-64-v4"
Backend = _module.Backend
Budget = _module.Budget
InvalidArgument = _module.InvalidArgument
Layer = _module.Layer
Preset = _module.Preset
Prompt = _module.Prompt
Ranks = _module.Ranks
RatioSet = _module.RatioSet
Reader = _module.Reader
Rope = _module.Rope
CudaBackend = getattr(_module, "CudaBackend", None)  #: None unless the package was built with MDKV_PYTHON_CUDA
__all__ += ["CudaBackend"] if CudaBackend else []
Stored = _module.Stored


def build():
    """What this package was built for: its "version", the CPU's "instructions" that are in use, and "cuda", the compute capabilities
    of devices, e.g. "80,90", or None."""
    return {"version": __version__, "instructions": compiled_for, "cuda": getattr(_module, "compute_capabilities", None)}


log_sum_exps = _module.log_sum_exps
preset = _module.preset

from .storing import load, read, save, write  # noqa: E402  (needs _module)


class presets:
    """The library's presets by name; `presets.best.replace(window=16)` is a changed copy:

    """

    best = preset("best")
    any_question = preset("any_question")
    by_window = preset("by_window")
    paper = preset("paper")
    paper_literal = preset("paper_literal")
    evict = preset("evict")
    __doc__ += "\n    ".join(repr(one) for one in (best, any_question, by_window, paper, paper_literal, evict))


def _lse_of(queries, keys, scale, backend, sink_logits):
    if CudaBackend is None or not isinstance(backend, CudaBackend):
        lse = log_sum_exps(queries, keys, scale, backend)
        return lse if sink_logits is None else _numpy.logaddexp(lse, _numpy.asarray(sink_logits, _numpy.float32)[:, None])
    from .device import log_sum_exps as by_torch
    return by_torch(queries, keys, scale, sink_logits)


def compress(queries, keys, values, limit, preset="by_window", *, rope=None, scale=0.0, backend=None,
             ranks=None, losses=None, sink_logits=None):
    """Compresses one layer of a prompt that was read: returns its Layer, and a report as a dictionary.

    queries [H*G, Q, D] of the last Q tokens, keys [H, N, D], values [H, N, Dv], after position encoding, of one element
    type; limit: see Budget; preset: a Preset or its name; scale: the model's factor of q.k (0: 1/sqrt(D)). A preset that
    replays (`best`, `any_question`) needs the queries of all tokens, Q = N, and the model's `rope`. ranks: an `mdkv.Ranks` if other processes
    have further heads of the layer: the limit is of all heads, and an error of one rank is an error of all. losses: your
    own, float32 [H, R, N - preset.window], in the place of the preset's scores: how much is lost if a token is stored at each rung
    of preset.ratios (`Prompt.take_losses`; neither `rope` nor other queries than the last are needed then). sink_logits: float32
    [H*G], the model's, which `Layer.attend` and `Layer.recompress` take, too. Cost: all stages; the layer's memory is the budget's.
    """
    exchanges = 0 if ranks is None else ranks.exchanges
    try:
        if isinstance(preset, str):
            preset = _module.preset(preset)
        for name, rows, letters in (("queries", queries, "H*G, Q, D"), ("keys", keys, "H, N, D"), ("values", values, "H, N, Dv")):
            if len(rows.shape) != 3:
                raise InvalidArgument(f"compress: {name} must be [{letters}], they have {len(rows.shape)} dimensions")
        heads, tokens, key_dim = keys.shape
        if heads and (queries.shape[0] < heads or queries.shape[0] % heads):
            raise InvalidArgument(f"compress: queries [H*G, Q, D] have {queries.shape[0]} heads, which the {heads} KV heads of "
                                  "keys [H, N, D] do not divide")
        if sink_logits is not None and tuple(sink_logits.shape) != (queries.shape[0],):
            raise InvalidArgument(f"compress: sink_logits have the shape {list(sink_logits.shape)}; they must be [H*G], [{queries.shape[0]}]")
        sinks = {} if sink_logits is None else {"sink_logits": sink_logits}
        if losses is not None:
            preset = preset.replace(replayed={"join": 0.0})
        elif preset.replayed is not None and queries.shape[1] != tokens:
            raise InvalidArgument(f"compress: queries are of {queries.shape[1]} tokens and keys of {tokens}; a preset that "
                                  "replays needs the queries of all tokens")
        if scale:
            preset = preset.replace(scale=scale)
        prompt = Prompt(preset, layers=1, heads=heads, group=queries.shape[0] // heads if heads else 1, key_dim=key_dim,
                        value_dim=values.shape[2], tokens=tokens, dtype=str(keys.dtype).removeprefix("torch."), rope=rope,
                        backend=backend, ranks=ranks)
        if losses is not None:
            prompt.take_losses(0, losses)
        elif preset.replayed is not None:
            prompt.read_chunk(0, 0, queries, keys, values, **sinks)
        last = queries[:, max(queries.shape[1] - preset.queries, 0):]
        lse = _lse_of(last, keys, scale, backend, sink_logits) if preset.stand_ins else None
        prompt.finish_layer(0, last, keys, values, lse, **sinks)
        prompt.allocate(limit)
    except BaseException:
        if ranks is not None and ranks.exchanges == exchanges:  # no call has told the others
            ranks.refuse()
        raise
    return prompt.pack(0, last, keys, values, lse)
