"""cache_file.py: a cache of transformers as a stored cache, and back."""
import hashlib
import json

import torch

import mdkv
from mdkv.cache_layer import CacheLayer
from mdkv.storing import as_bytes, shown

_KIND = "mdkv.transformers 1"


def save(cache, path, tokens, identity):
    """See Cache.save."""
    layers = _layers_of(cache)
    first = layers[0]
    if not first.is_initialized or not layers[-1].packed:
        raise NotImplementedError("mdkv: a cache cannot be saved before its prompt's end")
    if first.batch != 1:
        raise NotImplementedError(f"mdkv: a file holds one sequence; the cache has {first.batch}")
    tokens = _list_of(tokens)
    if len(tokens) != first.lengths()[0]:
        raise ValueError(f"mdkv: there are {len(tokens)} tokens; the cache holds {first.lengths()[0]}, without padding. The last "
                         "token that generate returns is in no cache yet")
    queries = [layer.queries for layer in layers if layer.queries is not None]
    beside = {"kind": _KIND, "text": _text_of(tokens), "limits": [layer.limits[0] for layer in layers],
              "queries": [list(one.shape) for one in queries], "options": _options_of(cache)}
    beside = [json.dumps(beside).encode() + b"\n", *(one.contiguous().view(torch.uint8).cpu().numpy().tobytes() for one in queries)]
    mdkv.save(path, [layer.packed[0] for layer in layers], tokens=len(tokens), attachment=b"".join(beside),
              identity=_identity(cache.config, identity))


def load(cache, path, tokens, verify, identity, options):
    """See Cache.load; `cache` is empty, and was made with `options`."""
    layers, name = _layers_of(cache), shown(path)
    try:
        stored = mdkv.load(path, verify=verify, backend=cache.backend, identity=_identity(cache.config, identity))
    except mdkv.InvalidArgument as problem:
        hint = f"; save's identity= takes the place of the model's name, now {cache.config._name_or_path!r}, and commit"
        raise type(problem)(f"{problem}{hint if 'of the identity' in str(problem) else ''}") from None
    heads = getattr(cache.config, "num_key_value_heads", None) or cache.config.num_attention_heads
    if stored.first_layer or stored.first_head or (len(stored), stored.heads) != (len(layers), heads):
        raise ValueError(f"{name}: holds {len(stored)} layers from {stored.first_layer} on of {stored.heads} heads from "
                         f"{stored.first_head} on; the model has {len(layers)} layers of {heads} heads")
    packed = [stored.layer(i) for i in range(len(layers))]
    if any(one.tokens != stored.tokens for one in packed):
        raise ValueError(f"{name}: was written without its {packed[0].tokens} tokens")
    dtype = getattr(torch, stored.dtype)
    text, limits, queries, saved = _beside(name, stored.attachment, packed, dtype)
    if tokens is not None and text is None:
        raise ValueError(f"{name}: mdkv.transformers did not write it, and its tokens are unknown; tokens=None compares none")
    if tokens is not None and text != _text_of(_list_of(tokens)[:stored.tokens]):
        raise ValueError(f"{name}: the text does not begin with the {stored.tokens} tokens of the file; `load` takes ids of the whole text")
    cache = type(cache)(cache.config, **{"backend": cache.backend, **saved, **options})
    for layer, one, limit, last in zip(cache.compressed, packed, limits, queries):
        layer.batch, layer.heads, layer.key_dim, layer.value_dim = 1, heads, one.key_dim, one.value_dim
        layer.dtype, layer.device, layer.is_initialized = dtype, None, True  # the next keys say where
        layer.tokens, layer.pads, layer.packed, layer.limits, layer.queries = stored.tokens, [0], [one], [limit], None
        if cache.tail is not None:
            one.reserve(cache.tail + 1)
            layer.queries = last
    return cache


def _layers_of(cache):
    other = next((one for one in cache.layers if not isinstance(one, CacheLayer)), None)
    if other is not None:
        raise NotImplementedError(f"mdkv: models with layers that stay transformers' own ({type(other).__name__}) have no files")
    return cache.compressed


def _identity(config, given):
    """The configuration's encoding of positions, and the identity that was given, or the model's name and commit."""
    if given is None and not config._name_or_path:
        raise ValueError("mdkv: the model's configuration has no name; say identity=")
    if given is None:
        given = json.dumps([config._name_or_path, getattr(config, "_commit_hash", None) or ""])
    rope = json.dumps(getattr(config, "rope_parameters", None) or {}, sort_keys=True, default=str)
    return rope.encode() + b"\n" + as_bytes(given)


def _list_of(tokens):
    return torch.as_tensor(tokens).reshape(-1).tolist()


def _text_of(tokens):
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def _options_of(cache):
    """Options of a cache that a file holds; a budget if it is a share."""
    members = {name: getattr(cache.preset, name) for name in dir(cache.preset) if name != "replace"}
    share = {"budget": cache.budget} if isinstance(cache.budget, float) else {}
    return {"preset": {**members, "ratios": list(members["ratios"])}, "tail": cache.tail, "least": cache.least, **share}


def _options_from(saved):
    """The options that `_options_of` made into a dictionary; none of a file of an older version. Raises what damage makes."""
    if not saved:
        return {}
    types = {"preset": dict, "tail": (int, type(None)), "least": int, "budget": float}
    if not all(isinstance(value, types[name]) for name, value in saved.items()):
        raise TypeError
    ratios = mdkv.RatioSet(*saved["preset"]["ratios"])
    return {**saved, "preset": mdkv.presets.best.replace(**{**saved["preset"], "ratios": ratios})}


def _beside(name, attachment, packed, dtype):
    """The text's SHA-256, limits of the layers' bytes, their last queries [1, H*G, n, D] or None, and the cache's options, of an
    attachment that `save` made; for any other file no text and no options, and the limits that it has."""
    none = None, [one.bytes["arena"] for one in packed], [None] * len(packed), {}
    head, _, rest = attachment.partition(b"\n")
    try:
        beside = json.loads(head)
        if beside["kind"] != _KIND:
            return none
        text, limits, shapes = beside["text"], beside["limits"], beside["queries"]
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape in shapes]
        good = len(limits) == len(packed) and len(shapes) in (0, len(packed)) and sum(sizes) == len(rest)
        good = good and all(isinstance(limit, int) for limit in limits) and all(size > 0 for size in sizes)
    except (ValueError, TypeError, KeyError, RuntimeError):
        return none
    try:
        options = _options_from(beside.get("options"))
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError):
        good = False
    if not good:
        raise ValueError(f"{name}: what mdkv.transformers wrote beside the caches is damaged")
    queries, data = [], torch.frombuffer(bytearray(rest), dtype=torch.uint8) if rest else None
    for shape, size in zip(shapes, sizes):
        queries.append(data[:size].view(dtype).reshape(shape).clone())
        data = data[size:]
    return text, limits, queries or none[2], options
