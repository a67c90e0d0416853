"""rotary.py: a transformers model's rotary position encoding as an `mdkv.Rope`. The model's frequencies and its configuration are
the candidates; what one token's query and key are at several positions, measured in each layer's own attention, decides between
them."""
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


class Measurement:
    """The measurement of a layer's encoding, in the first call by which a sequence has two tokens."""

    def __init__(self):
        self._first = None  # arguments of the attention at the first token, if an earlier call has read that alone

    def rope(self, config, module, dim, pads, tokens):
        """The encoding as arguments of `mdkv.Rope`; no frequencies but 0 if nothing is rotated, and None before two tokens.

        config  the decoder's configuration, whose attention is "mdkv"
        module  the layer's attention, whose `forward` is running. It is called again up to the cache, with copies of the last
                token in the places of the first ones. Cost: queries and keys of a few tokens
        dim     D, numbers of a head's key
        pads    hidden first tokens of each sequence
        tokens  number of tokens of this call and all before it, padding included
        Raises NotImplementedError, with the reason, if it cannot be called so, and if queries and keys are not rotated alike, or
        not by an encoding that the model's buffers or its configuration tell and that an `mdkv.Rope` can express.
        """
        if tokens == min(pads):
            return None
        arguments, modules = _running(module)
        hidden, first = next(iter(arguments.values())), min(pads)
        start = tokens - hidden.shape[1]  # place of the call's first token
        offsets = [one for one in _PLACES if start <= first + one < tokens]
        places = torch.tensor([first + one - start for one in offsets], device=hidden.device)
        rows = {name: None if value is hidden else _rows(value, hidden.shape[1], places) for name, value in arguments.items()}
        before, self._first = self._first, None
        if before is not None:
            rows, offsets = _joined(before, rows), [0, *offsets]
        if len(offsets) < 2:
            self._first = rows
            return None
        rows = {name: hidden[:, -1:].repeat(1, len(offsets), 1) if arguments[name] is hidden else value for name, value in rows.items()}
        return _encoding(config, module, dim, list(pads).index(first), _seen(module, rows), offsets, modules)


def _encoding(config, module, dim, sequence, seen, offsets, modules):
    """The encoding of a sequence's queries and keys in a `_Recorder`; see `Measurement.rope`."""
    rows = [one[sequence].double().cpu() for one in (seen.query, seen.keys)]
    kind = seen.keys.device.type
    lower = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else seen.keys.dtype
    tolerance, offsets = _TOLERANCE.get(lower, 2e-4), torch.tensor(offsets, dtype=torch.float64, device="cpu")
    unrotated = {"frequencies": [0.0] * (dim // 2)}
    if all(_error(one, unrotated, "halves", offsets) < 0.2 * tolerance for one in rows):  # slow frequencies turn little in a position
        return unrotated
    for options in _candidates(config, dim, modules):
        for pairs in ("halves", "neighbours"):
            if all(_error(one, options, pairs, offsets) < tolerance for one in rows):
                return {**options, "pairs": pairs}
    raise NotImplementedError(f"mdkv: queries and keys of layer {_name(module)} depend on positions in another way than by the rotation "
                              "that the configuration tells" + HINT)


def _name(module):
    return getattr(module, "layer_idx", type(module).__name__)


def _seen(module, rows):
    """The `_Recorder` of a call of an attention with these arguments, by their names."""
    recorder = None
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


def _running(module):
    """Arguments of the running call of module.forward by their names, hidden states [B, n, C] first; and the modules whose
    `forward` is running, this one first and the whole model last."""
    frame, modules, arguments = sys._getframe(1), [], None
    while frame is not None:
        # before Python 3.13 a frame keeps the locals that it was asked for: a caller's, its cache, too
        names, _, more, values = inspect.getargvalues(frame) if frame.f_code.co_name == "forward" else (None,) * 4
        if names and isinstance(values.get(names[0]), torch.nn.Module):
            if arguments is None and values[names[0]] is module:
                arguments = {**{name: values[name] for name in names[1:] if name in values}, **(values[more] if more else {})}
            modules.append(values[names[0]])
        frame = frame.f_back
    if arguments is not None:
        return arguments, modules
    raise NotImplementedError(f"mdkv: the rotary encoding cannot be measured: {type(module).__name__}.forward is not running" + HINT)


def _place_of_rows(value):
    """The dimension of rows in numbers [..., new, D] and in indices [..., new]; negative if there is none."""
    return value.ndim - (2 if value.is_floating_point() or value.is_complex() else 1)


def _joined(before, rows):
    """Rows of an earlier call, and after them the same argument's of this one; other values are this call's."""
    if isinstance(rows, dict):
        return {name: _joined(before.get(name), one) for name, one in rows.items()} if isinstance(before, dict) else rows
    if isinstance(rows, (tuple, list)):
        alike = isinstance(before, (tuple, list)) and len(before) == len(rows)
        return type(rows)(_joined(*pair) for pair in zip(before, rows)) if alike else rows
    if not isinstance(rows, torch.Tensor) or not isinstance(before, torch.Tensor) or before.ndim != rows.ndim:
        return rows
    place = _place_of_rows(rows)
    others = all(a == b for i, (a, b) in enumerate(zip(before.shape, rows.shape)) if i != place)
    return torch.cat([before, rows], place) if place >= 0 and others and before.shape[place] == 1 else rows


def _rows(value, new, places):
    """The rows at some places of tensors with `new` rows, see `_place_of_rows`; other values as they are."""
    if isinstance(value, (tuple, list)):
        return type(value)(_rows(one, new, places) for one in value)
    if isinstance(value, dict):  # a copy, in which an attention may leave keys for others
        return {name: _rows(one, new, places) for name, one in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    place = _place_of_rows(value)
    return value.index_select(place, places) if place >= 0 and value.shape[place] == new else value


def _candidates(config, dim, modules):
    """Arguments of `mdkv.Rope`, without pairs, for all encodings that running modules keep, and that a decoder's configuration
    has. `model.to` may have rounded the frequencies of modules, which are the ones in use then."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_type = {name: one for name, one in rope.items() if isinstance(one, dict)} or {None: rope}
    for layer_type, one in sorted(by_type.items(), key=lambda item: item[0] != "full_attention"):
        name = one.get("rope_type", "default")
        if name in ("dynamic", "longrope"):
            raise NotImplementedError(f"mdkv: frequencies of rope_type \"{name}\" depend on the text's length" + HINT)
        told = [(options, _frequencies(options)) for options in _told(config, dim, layer_type, one, name)]
        for own in _kept(modules):
            if 2 * len(own) <= dim:
                same = (one for one, known in told if len(known) == len(own) and known.allclose(own, rtol=1e-5, atol=0))
                yield next(same, {"rotating": 2 * len(own), "frequencies": own.tolist()})
        yield from (one for one, _ in told)


def _kept(modules):
    """Frequencies, float64, that modules keep in buffers; each one once."""
    known = []
    for module in modules:
        for name, one in module.named_buffers():
            one = one.double().cpu() if name.endswith("inv_freq") and one.ndim == 1 and not one.is_meta else None
            if one is not None and not any(torch.equal(one, other) for other in known):
                known.append(one)
                yield one


def _told(config, dim, layer_type, one, name):
    """Arguments of `mdkv.Rope`, without pairs, that a configuration has for a type of layers: its parameters `one`, of rope_type
    `name`."""
    if name in ROPE_INIT_FUNCTIONS:
        frequencies, _ = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), **({"layer_type": layer_type} if layer_type else {}))
        yield {"rotating": 2 * len(frequencies), "frequencies": frequencies.double().tolist()}
        return
    factor = one.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    widths = [int(dim * factor), getattr(config, "rotary_dim", None), dim]
    for width in dict.fromkeys(width for width in widths if width and width <= dim and width % 2 == 0):
        yield {"base": float(one.get("rope_theta") or 10000.0), "rotating": width}


def _frequencies(options):
    """Angles [count / 2] a position, float64, of arguments of `mdkv.Rope`."""
    if "frequencies" in options:
        return torch.tensor(options["frequencies"], dtype=torch.float64, device="cpu")
    return options["base"] ** (-torch.arange(0, options["rotating"], 2, dtype=torch.float64, device="cpu") / options["rotating"])


def _error(rows, options, pairs, offsets):
    """How far rows [H, m, D] of one token are from the rotation of the first one by offsets [m], as a share of a pair's length: the
    worst pair, and the coordinates that stay."""
    frequencies = _frequencies(options)
    angles, count = frequencies * offsets[:, None], 2 * len(frequencies)
    half = count // 2
    one, other = (slice(0, count, 2), slice(1, count, 2)) if pairs == "neighbours" else (slice(0, half), slice(half, count))
    found, start = torch.complex(rows[..., one], rows[..., other]), rows[:, :1]
    turned = torch.complex(start[..., one], start[..., other]) * torch.polar(torch.ones_like(angles), angles)
    scale = float(start.square().mean().sqrt().clamp_min(1e-30))

    def share(off, length):
        length = length.square().mean(dim=(0, 1)).sqrt().clamp_min(0.05 * scale)
        return float((off.square().mean(dim=0).sqrt().amax(dim=0) / length).max()) if off.numel() else 0.0

    return max(share((found - turned).abs(), turned.abs()), share((rows - start)[..., count:].abs(), start[..., count:].abs()))
