"""rotary.py: a transformers model's rotary position encoding as an `mdkv.Rope`. The configuration names the candidates; what one
token's query and key are at several positions, measured in each layer's own attention, decides between them."""
import inspect
import sys

import torch
from transformers import cache_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import mdkv

HINT = "; pass rope=mdkv.Rope(...), or a preset that does not replay, such as preset=\"by_window\""
_PLACES = (0, 1, 3, 10, 40, 150)  # positions that are compared, from a prompt's first token on
_TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of a pair, beside its length


class _Seen(Exception):
    """Ends a call of an attention."""


class _Recorder:
    """Stands for a cache in a call of an attention, up to the function of AttentionInterface: `query` [B, H*G, m, D] and `keys`
    [B, H, m, D] are what that got."""

    def __init__(self, cache):
        self._cache, self.query = cache, None

    def __getattr__(self, name):
        return getattr(self._cache, name)

    def update(self, keys, values, *_, **__):
        self.keys = keys.detach()
        self.keys.mdkv_layer = self
        return self.keys, values

    def attend(self, module, query, *_):
        if self.query is not None:
            raise NotImplementedError("mdkv: not served: a layer that attends to the keys of another one")
        self.query = query
        raise _Seen


def rope_of(config, module, dim, pads=(0,)):
    """The encoding of a layer as arguments of `mdkv.Rope`; no frequencies but 0 if nothing is rotated.

    config  the decoder's configuration, whose attention is "mdkv"
    module  the layer's attention, whose `forward` is running, for at least two tokens. It is called again up to the cache, with
            copies of the last token in the places of the first ones. Cost: queries and keys of a few tokens
    dim     D, numbers of a head's key
    pads    hidden first tokens of each sequence
    Raises NotImplementedError, with the reason, if it cannot be called so, and if queries and keys are not rotated alike, or not by
    an encoding that the configuration tells and that an `mdkv.Rope` can express.
    """
    arguments = _arguments(module)
    hidden, first = next(iter(arguments.values())), min(pads)
    places = torch.tensor([first + place for place in _PLACES if first + place < hidden.shape[1]])
    if len(places) < 2:
        raise NotImplementedError("mdkv: a rotary encoding is measured in the first call, which must read two tokens" + HINT)
    seen = _seen(module, arguments, hidden, places)
    rows = [one[list(pads).index(first)].double() for one in (seen.query, seen.keys)]
    lower = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else seen.keys.dtype
    tolerance, offsets = _TOLERANCE.get(lower, 2e-4), (places - first).double()
    unrotated = {"frequencies": [0.0] * (dim // 2)}
    if all(_error(one, unrotated, "halves", offsets) < tolerance for one in rows):
        return unrotated
    for options in _candidates(config, dim):
        for pairs in ("halves", "neighbours"):
            if all(_error(one, options, pairs, offsets) < tolerance for one in rows):
                return {**options, "pairs": pairs}
    raise NotImplementedError(f"mdkv: queries and keys of layer {_name(module)} depend on positions in another way than by the rotation "
                              "that the configuration tells" + HINT)


def _name(module):
    return getattr(module, "layer_idx", type(module).__name__)


def _seen(module, arguments, hidden, places):
    """The `_Recorder` of a call with copies of one token in these places of the running call."""
    copies, recorder = hidden[:, -1:].expand(-1, len(places), -1), None
    rows = {name: copies if value is hidden else _rows(value, hidden.shape[1], places) for name, value in arguments.items()}
    for name, value in rows.items():
        if isinstance(value, cache_utils.Cache):
            rows[name] = recorder = _Recorder(value)
    problem = None
    try:
        with torch.no_grad():
            type(module).forward(module, **rows)
    except _Seen:
        return recorder
    except Exception as one:
        problem = one
    raise NotImplementedError(f"mdkv: the rotary encoding of layer {_name(module)} cannot be measured"
                              f"{f' ({problem})' if problem else ''}" + HINT) from problem


def _arguments(module):
    """Arguments of the running call of module.forward by their names, hidden states [B, n, C] first."""
    frame = sys._getframe(1)
    while frame is not None:
        names, _, more, values = inspect.getargvalues(frame)
        if frame.f_code.co_name == "forward" and names and values.get(names[0]) is module:
            return {**{name: values[name] for name in names[1:] if name in values}, **(values[more] if more else {})}
        frame = frame.f_back
    raise NotImplementedError(f"mdkv: the rotary encoding cannot be measured: {type(module).__name__}.forward is not running" + HINT)


def _rows(value, new, places):
    """The rows at some places of tensors with `new` rows: numbers [..., new, D], indices [..., new]; other values as they are."""
    if isinstance(value, (tuple, list)):
        return type(value)(_rows(one, new, places) for one in value)
    if isinstance(value, dict):  # a copy, in which an attention may leave keys for others
        return {name: _rows(one, new, places) for name, one in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    place = value.ndim - (2 if value.is_floating_point() or value.is_complex() else 1)
    return value.index_select(place, places) if place >= 0 and value.shape[place] == new else value


def _candidates(config, dim):
    """Arguments of `mdkv.Rope`, without pairs, for all encodings that a decoder's configuration has."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_type = {name: one for name, one in rope.items() if isinstance(one, dict)} or {None: rope}
    for layer_type, one in sorted(by_type.items(), key=lambda item: item[0] != "full_attention"):
        name, base = one.get("rope_type", "default"), float(one.get("rope_theta") or 10000.0)
        if name in ("dynamic", "longrope"):
            raise NotImplementedError(f"mdkv: frequencies of rope_type \"{name}\" depend on the text's length" + HINT)
        if name in ROPE_INIT_FUNCTIONS:
            frequencies, _ = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), **({"layer_type": layer_type} if layer_type else {}))
            yield {"rotating": 2 * len(frequencies), "frequencies": frequencies.double().tolist()}
            continue
        factor = one.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
        widths = [int(dim * factor), getattr(config, "rotary_dim", None), dim]
        for width in dict.fromkeys(width for width in widths if width and width <= dim and width % 2 == 0):
            yield {"base": base, "rotating": width}


def _error(rows, options, pairs, offsets):
    """How far rows [H, m, D] of one token are from the rotation of the first one by offsets [m], as a share of a pair's length: the
    worst pair, and the coordinates that stay."""
    frequencies = options.get("frequencies")
    count = 2 * len(frequencies) if frequencies is not None else options["rotating"]
    if frequencies is None:
        frequencies = options["base"] ** (-torch.arange(0, count, 2, dtype=torch.float64) / count)
    angles = torch.as_tensor(frequencies, dtype=torch.float64)[None, :] * offsets[:, None]
    half = count // 2
    one, other = (slice(0, count, 2), slice(1, count, 2)) if pairs == "neighbours" else (slice(0, half), slice(half, count))
    found, start = torch.complex(rows[..., one], rows[..., other]), rows[:, :1]
    turned = torch.complex(start[..., one], start[..., other]) * torch.polar(torch.ones_like(angles), angles)
    scale = float(start.square().mean().sqrt().clamp_min(1e-30))

    def share(off, length):
        length = length.square().mean(dim=(0, 1)).sqrt().clamp_min(0.05 * scale)
        return float((off.square().mean(dim=0).sqrt().amax(dim=0) / length).max()) if off.numel() else 0.0

    return max(share((found - turned).abs(), turned.abs()), share((rows - start)[..., count:].abs(), start[..., count:].abs()))
