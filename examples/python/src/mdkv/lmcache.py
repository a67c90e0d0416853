"""lmcache.py: chunks of LMCache (0.5.6) as stored caches, for its second tier: codes of 8 and 4 bits within a share of the bytes.

    import mdkv.lmcache                                              # registers the type "mdkv"
    {"type": "fs", "base_path": "/cache", "serde": {"type": "mdkv", "head_dim": 128, "share": 0.35}}

A chunk goes back to an engine whose attention reads plain tensors, and may be read by any prompt that begins with it. All its
tokens therefore stay, and each token of each head takes 4, 8 or all bits a number, such that attention changes least. LMCache
has no queries here: the keys of eight tokens of each head stand for them, centred, each channel divided by its variance.

Channels of numbers that are nearly alike, very small or very large are shifted and scaled first, without rounding: `_levelled`.
The file's attachment then holds what brings them back.
"""
import functools
import json
import math

import numpy
import torch
from lmcache.v1.distributed.serde.async_processor import AsyncSerdeProcessor
from lmcache.v1.distributed.serde.base import Deserializer, Serializer
from lmcache.v1.distributed.serde.factory import register_serde_factory

import mdkv

_QUERIES, _CONSTANT = 8, -128
_PRESET = mdkv.presets.by_window.replace(name="chunk", ratios=mdkv.RatioSet("int4", "int8", "full"), window=0, queries=_QUERIES,
                                         pooling={"width": 1}, stand_ins=0, uniform=0.0, early_weight=0.0)


class MdkvSerializer(Serializer):
    """Chunks [2, L, T, H*D] of keys and values, float16, bfloat16 or float32, on the CPU.

    head_dim   D
    share      bytes of the serialized chunk, everything included, divided by those of the tensor. 4 bits take 0.28 and more of 16,
               records 456 bytes a layer's head and 4 bytes each of its tokens
    threads    of each call; the calls of LMCache's own threads take turns
    Cost: one pass over the chunk for losses, one for codes. Raises ValueError, before anything is written, for another shape, a
    share that does not hold 4 bits of all tokens, and numbers that are not finite.
    """

    def __init__(self, head_dim, share=0.35, threads=1):
        if head_dim < 1 or not 0 < share <= 1.1:
            raise ValueError(f"mdkv: head_dim is {head_dim}, share {share}; they must be at least 1, and in (0, 1.1]")
        self.head_dim, self.share, self.backend = head_dim, share, mdkv.Backend(threads)

    def serialize(self, src, dst, key):
        """Writes `dst`'s first bytes and returns their number, at most estimate_serialized_size."""
        tensor, to = _tensor(src), _bytes(dst)
        layers, tokens, heads = _sizes(tensor.shape, self.head_dim)
        size = self._size(tensor.shape, tensor.dtype)
        prompt = mdkv.Prompt(_PRESET, layers=layers, heads=heads, key_dim=self.head_dim, tokens=tokens,
                             dtype=str(tensor.dtype).removeprefix("torch."), backend=self.backend)
        parts = [_levelled(tensor[j].reshape(layers, tokens, heads, -1), together=j == 1) for j in (0, 1)]
        level = [one.view(torch.uint8).numpy().tobytes() for part in parts for one in part[1:]]
        level = b"".join(level) if any(map(any, level)) else b""
        limit = (size - _records(tensor.shape, self.head_dim) - len(level)) // layers // 64 * 64
        rows = [tuple(part[0][i].transpose(0, 1) for part in parts) for i in range(layers)]
        queries = _queries(parts[0][0])
        for i, one in enumerate(rows):
            prompt.finish_layer(i, queries[i], *one)
        prompt.allocate(mdkv.Budget.bytes(max(limit, 0)))
        packed = [prompt.pack(i, queries[i], *one)[0] for i, one in enumerate(rows)]
        positions = [numpy.argsort(prompt.rungs_of(i), axis=1, kind="stable").astype(numpy.int32) for i in range(layers)]
        made = mdkv.write(packed, positions=positions, tokens=tokens, attachment=level, identity=_identity(key))
        if len(made) > len(to):
            raise ValueError(f"mdkv: the chunk takes {len(made)} bytes; dst has {len(to)}")
        to[:len(made)] = torch.from_numpy(made)
        return len(made)

    def estimate_serialized_size(self, layout_desc):
        """An upper bound of the bytes of a chunk of this layout, some hundred bytes a layer above them."""
        return sum(self._size(shape, dtype) for shape, dtype in zip(layout_desc.shapes, layout_desc.dtypes))

    def _size(self, shape, dtype):
        layers, tokens, heads = _sizes(shape, self.head_dim)
        size = int(self.share * math.prod(shape) * dtype.itemsize) // 64 * 64
        codes = (self.head_dim + 1) // 2 + 4 * -(-self.head_dim // 64)
        least = _records(shape, self.head_dim) + _level_bytes(shape, dtype)
        least += layers * (2 * heads * (tokens * codes + self.head_dim * dtype.itemsize) + 64)
        if size < least:
            raise ValueError(f"mdkv: share {self.share} of a chunk {tuple(shape)} is {size} bytes; 4 bits of all tokens take "
                             f"{least}, a share of {least / (math.prod(shape) * dtype.itemsize):.3f}")
        return size


class MdkvDeserializer(Deserializer):
    """Gives all tokens of a chunk back, in their order, to a tensor [2, L, T, H*D] of the type that was serialized. Bytes of
    strangers are refused with a ValueError, or give other numbers; they lead to no access outside of them."""

    def __init__(self, head_dim, threads=1):
        self.head_dim, self.backend = head_dim, mdkv.Backend(threads)

    def deserialize(self, src, dst, key):
        """`src` may be longer than what serialize wrote."""
        tensor, data = _tensor(dst), _bytes(src).numpy()
        layers, tokens, heads = _sizes(tensor.shape, self.head_dim)
        stored = mdkv.read(data[:int.from_bytes(data[16:24].tobytes(), "little")], identity=_identity(key),
                           backend=self.backend)
        if (len(stored), stored.heads, stored.tokens) != (layers, heads, tokens) or stored.dtype != str(tensor.dtype).removeprefix("torch."):
            raise ValueError(f"mdkv: the bytes are of {len(stored)} layers, {stored.heads} heads, {stored.tokens} tokens in "
                             f"{stored.dtype}; the chunk is of {layers}, {heads}, {tokens} in {tensor.dtype}")
        levels = _levels(stored.attachment, tensor)
        for i in range(layers):
            positions, layer = torch.from_numpy(numpy.array(stored.positions(i), numpy.int64)), stored.layer(i)
            dims = (layer.key_dim, layer.value_dim)
            if positions.shape != (heads, tokens) or dims != (self.head_dim, self.head_dim):
                raise ValueError(f"mdkv: layer {i} has positions {tuple(positions.shape)} and dimensions {dims}; "
                                 f"{(heads, tokens)} and {self.head_dim} are needed")
            if not torch.equal(positions.sort(dim=1).values, torch.arange(tokens).expand(heads, tokens)):
                raise ValueError(f"mdkv: the positions of layer {i} are not those of all tokens")
            rows = torch.empty((2, heads, tokens, self.head_dim), dtype=tensor.dtype)
            layer.unpack(rows[0], rows[1])
            for one, to in zip(rows, tensor[:, i]):
                to.view(tokens, heads, -1).transpose(0, 1).scatter_(1, positions[..., None].expand_as(one), one)
        for part, level in zip(tensor, levels):
            _restore(part, level)


def _records(shape, head_dim):
    """Most bytes of a file beside the arenas and the level."""
    layers, _, heads = _sizes(shape, head_dim)
    positions = 4 * math.prod(shape) // (2 * head_dim)
    return 4 * 64 + layers * (232 + 456 * heads + 2 * 64) + positions


def _level_bytes(shape, dtype):
    """Bytes of the levels of all keys and values."""
    return 2 * shape[1] * shape[3] * (dtype.itemsize + 1)


def _levels(attachment, tensor):
    """[2, bytes]  levels of keys and values; none if the file has none."""
    need = _level_bytes(tensor.shape, tensor.dtype)
    if len(attachment) not in (0, need):
        raise ValueError(f"mdkv: the attachment has {len(attachment)} bytes; the levels of a chunk {tuple(tensor.shape)} have {need}")
    return torch.frombuffer(bytearray(attachment), dtype=torch.uint8).view(2, -1) if attachment else ()


def _sizes(shape, head_dim):
    if len(shape) != 4 or shape[0] != 2 or shape[3] % head_dim or not min(shape):
        raise ValueError(f"mdkv: a chunk is [2, L, T, H*D] with D = head_dim = {head_dim}, not {tuple(shape)}")
    return shape[1], shape[2], shape[3] // head_dim


def _levelled(rows, together):
    """Keys or values [L, T, H, D] without their level, and the level [L, 1, H, D]: of each channel a number that was subtracted,
    and an exponent e; the rest was divided by 2^e. Both are 0 for most channels. Otherwise the spread is then from 1 to 2^10, and
    equal numbers have e = _CONSTANT. together: the channels of a head have one e, because errors of values count alike. Bits are
    lost by numbers below 2^-14 alone, in channels with a spread above 2^10."""
    least, most = rows.amin(dim=1, keepdim=True).float(), rows.amax(dim=1, keepdim=True).float()
    middle, reach = (least / 2 + most / 2).to(rows.dtype), most / 2 - least / 2
    near = 16 * reach >= middle.abs()
    if together:
        reach = reach.amax(3, keepdim=True)
    usual = near & (reach >= (2**-8 if together else 2**-3)) & (reach <= (2**12 if together else 2**6))
    if usual.all():
        return rows, torch.zeros_like(middle), torch.zeros_like(middle, dtype=torch.int8)
    ends = torch.stack([least, most]) / middle
    middle[usual | ~((ends >= 0.5) & (ends <= 2)).all(0)] = 0  # differences from other numbers are exact
    x, largest = rows.float() - middle, torch.frexp(torch.maximum(most - middle, middle - least)).exponent.clamp(-126, 126)
    exponents = torch.frexp((x * _power(-largest)).std(dim=1, keepdim=True, correction=0)).exponent - 1 + largest
    exponents = exponents.amax(3, keepdim=True).expand_as(exponents) if together else exponents
    exponents = torch.where(exponents < 0, exponents, (exponents - 9).clamp(min=0)).clamp(-126, 126)
    exponents[usual.all(3, keepdim=True).expand_as(usual) if together else usual] = 0
    x *= _power(-exponents)
    exponents[least == most] = _CONSTANT
    return x.to(rows.dtype), middle, exponents.to(torch.int8)


def _restore(rows, level):
    """Brings keys or values [L, T, H*D] back to their level, a part of the attachment."""
    count = rows.shape[0] * rows.shape[2]
    middle = level[:-count].view(rows.dtype).view(-1, 1, rows.shape[2])
    exponents = level[-count:].view(torch.int8).view_as(middle)
    most = torch.finfo(rows.dtype).max
    rows.copy_((rows * torch.where(exponents == _CONSTANT, 0, _power(exponents)) + middle).clamp(-most, most))


def _power(exponents):
    """2^e in float."""
    return torch.exp2(exponents.double()).float()


def _queries(keys):
    """[L, H, _QUERIES, D] that stand for a model's, of levelled keys [L, T, H, D]: the centred keys of tokens at even distances,
    each channel divided by its variance, in a length at which logits of centred keys have a spread of about 1. A channel in which
    they are under half or above twice as large as over all tokens is brought to that; one in which they are about 0 has signs."""
    x = keys.float()
    x = x - x.mean(dim=1, keepdim=True)
    spread = torch.linalg.vector_norm(x, dim=1, keepdim=True) / x.shape[1] ** 0.5
    inverse = torch.where(spread > 0, 1 / spread, 0)
    found = x[:, torch.linspace(0, x.shape[1] - 1, _QUERIES).long()] * inverse.square()
    found *= inverse.norm(dim=-1, keepdim=True) / found.norm(dim=-1, keepdim=True).clamp_min(1e-20)
    size = (found * spread).square().mean(dim=1, keepdim=True).sqrt()
    found *= size.clamp(0.5, 2) / size
    return torch.where(size > 0.01, found, _signs(x.shape[3])[:, None] * inverse).transpose(1, 2).to(keys.dtype)


@functools.cache
def _signs(dim):
    """[_QUERIES, D]  1 and -1, of which no two rows have the same."""
    return torch.tensor([[1.0 - 2 * (bin(i & d).count("1") % 2) for d in range(dim)] for i in range(_QUERIES)])


def _identity(key):
    return json.dumps([key.model_name, key.cache_salt])


def _tensor(of):
    if of.tensor is None:
        raise ValueError("mdkv: a memory object has no tensor")
    return of.tensor


def _bytes(of):
    return _tensor(of).reshape(-1).view(torch.uint8)


def _create(options):
    if "head_dim" not in options:
        raise ValueError("mdkv: the serde needs head_dim, the numbers of a head's key")
    head_dim, threads = int(options["head_dim"]), int(options.get("threads", 1))
    return AsyncSerdeProcessor(MdkvSerializer(head_dim, float(options.get("share", 0.35)), threads),
                               MdkvDeserializer(head_dim, threads), max_workers=int(options.get("max_workers", 1)))


register_serde_factory("mdkv", _create)
