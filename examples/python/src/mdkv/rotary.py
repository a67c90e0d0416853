"""rotary.py: a transformers model's rotary position encoding as an `mdkv.Rope`, read from its configuration."""
import sys

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import mdkv

_UNROTATED = ("cohere2", "exaone4")  # models whose layers that see all tokens have no position encoding
_HINT = "; pass rope=mdkv.Rope(...), or a preset that does not replay, such as preset=\"by_window\""


def rope_of(config, module, dim):
    """The encoding of a decoder's layers that see all tokens.

    config  the decoder's configuration, with `rope_parameters`; without them nothing is rotated
    module  one of its attentions: the source of its class says which coordinates rotate together
    dim     D, numbers of a head's key
    Raises NotImplementedError, with the reason, if an `mdkv.Rope` cannot express the encoding.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kind = {"layer_type": "full_attention"} if "full_attention" in rope else {}
    rope = rope["full_attention"] if kind else rope
    rotated = [bool(one) for one in getattr(config, "no_rope_layers", None) or [config.model_type not in _UNROTATED]]
    if "rope_theta" not in rope or not any(rotated):
        return mdkv.Rope(frequencies=[0.0] * (dim // 2))
    if not all(rotated):
        raise NotImplementedError("mdkv: only some layers have a rotary encoding (no_rope_layers)" + _HINT)
    half = getattr(sys.modules[type(module).__module__], "rotate_half", None)
    if half is None:
        raise NotImplementedError(f"mdkv: {type(module).__module__} does not tell which coordinates rotate together" + _HINT)
    pairs = "neighbours" if half(torch.tensor([1.0, 2.0, 3.0, 4.0]))[0] == -2 else "halves"  # halves: -3 -4 1 2
    name = rope.get("rope_type", "default")
    if name in ("dynamic", "longrope"):
        raise NotImplementedError(f"mdkv: frequencies of rope_type \"{name}\" depend on the text's length" + _HINT)
    if name == "default":
        factor = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
        return mdkv.Rope(base=float(rope["rope_theta"]), rotating=int(dim * factor), pairs=pairs)
    frequencies, _ = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), **kind)
    return mdkv.Rope(rotating=2 * len(frequencies), pairs=pairs, frequencies=frequencies.double().tolist())
