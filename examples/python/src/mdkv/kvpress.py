"""kvpress.py: a press for NVIDIA's kvpress (0.5, with transformers 5.2) whose bytes are freed:

    pipe = pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)
    pipe(context, questions=questions, press=mdkv.kvpress.MdkvPress(compression_ratio=0.875))

or, as kvpress' README has it, with press(model): model.generate(**inputs)

kvpress' presses drop whole tokens of all heads, or hide keys and free nothing. This one gives each token of each head 16, 8, 4
or 0 bits a coordinate. With the data sets of kvpress' evaluation, one line in its evaluate_registry.py is enough:

    PRESS_REGISTRY.update(mdkv.kvpress.presses())

and then, in its folder: python evaluate.py --dataset ruler --data_dir 4096 --press_name mdkv --compression_ratio 0.875
"""
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real

import torch
from kvpress import BasePress
from transformers import cache_utils

from mdkv.cache_layer import CacheLayer
from mdkv.transformers import CACHE_ARGUMENT, CHUNK, Cache

#: a decoder's arguments that have a number or a row for each token of a call, and the dimension of tokens in them
_TOKENS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "cache_position": -1, "token_type_ids": 1, "mm_token_type_ids": 1}


@dataclass
class MdkvPress(BasePress):
    """Compresses the cache of the first call of the model to 1 - compression_ratio of its bytes.

    compression_ratio  share of the bytes that is freed, 0 to 1
    preset             preset of mdkv; `any_question` is made for questions that come after the context, as in kvpress
    while_reading      True: the press cuts the call into calls of 256 tokens, and the context is compressed while it is read
                       (best, any_question), in memory that does not grow with it; the call returns the last part's output
    prompt_tokens      length of the context, padding included, if several calls read it, as generate(prefill_chunk_size=...) does,
                       or if a call reads more, as assisted generation does. None: the first call reads the context alone
    Later calls, within the press or outside of it, go on with the same cache object, and a call with another empty cache, or none, is
    a first one again. See `mdkv.transformers.Cache` for what is not served.
    """

    compression_ratio: float = 0.0
    preset: str = "any_question"
    while_reading: bool = False
    prompt_tokens: int | None = None

    @contextmanager
    def __call__(self, model):
        """Within it, an empty cache that the model is called with becomes a compressed one, `self.cache`."""
        if not isinstance(self.compression_ratio, Real) or not 0 <= self.compression_ratio <= 1:
            raise ValueError(f"mdkv: compression_ratio is {self.compression_ratio!r}; it must be from 0 to 1")

        def replace_layers(module, args, kwargs):
            cache, used = kwargs.get(CACHE_ARGUMENT), kwargs.get("use_cache")
            if cache is None:
                if not (getattr(model.config.get_text_config(), "use_cache", True) if used is None else used):
                    raise ValueError("mdkv: use_cache is False; the press compresses a cache, so it must be True")
                cache = kwargs[CACHE_ARGUMENT] = cache_utils.DynamicCache()
            if not isinstance(cache, cache_utils.DynamicCache):
                raise ValueError(f"mdkv: {CACHE_ARGUMENT} is of type {type(cache).__module__}.{type(cache).__name__}; the press replaces "
                                 "the layers of a transformers.DynamicCache: give one, or leave it and cache_implementation out")
            if cache.get_seq_length() == 0:
                self._replace_layers(model, cache)
            elif not any(isinstance(one, CacheLayer) for one in cache.layers):
                raise ValueError(f"mdkv: {CACHE_ARGUMENT} has {cache.get_seq_length()} tokens that the press has not read; it compresses "
                                 "from the model's first call with an empty cache on")
            first = next(one for one in cache.layers if isinstance(one, CacheLayer))
            if first.cache.while_reading and not first.packed:
                kwargs = _read_but_last(module, first, args, kwargs)
            return args, kwargs

        decoder = getattr(model.model, "language_model", model.model)
        hook = decoder.register_forward_pre_hook(replace_layers, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _replace_layers(self, model, cache):
        self.cache = Cache(model.config, budget=1 - self.compression_ratio, preset=self.preset, while_reading=self.while_reading,
                           prompt_tokens=self.prompt_tokens)
        # kvpress' pipeline slices sliding layers like all others, which only layers that keep everything survive
        cache.layers = [cache_utils.DynamicLayer() if type(one) is cache_utils.DynamicSlidingWindowLayer else one
                        for one in self.cache.layers]
        cache.layer_class_to_replicate = None
        state = {"mdkv_cache": self.cache, **vars(cache)}  # before the layers: copy.deepcopy copies them with their cache
        vars(cache).clear()
        vars(cache).update(state)

    def compress(self, *_):
        raise NotImplementedError("mdkv: MdkvPress replaces the layers of a cache and cannot be a part of another press; use it by itself")


def _read_but_last(module, layer, args, kwargs):
    """Cuts a decoder's call into calls of CHUNK tokens, makes all of them but the last, and returns the arguments for that."""
    given = {name: one for name, one in kwargs.items() if isinstance(one, (torch.Tensor, dict, list, tuple))}
    rows = given.get("input_ids", given.get("inputs_embeds"))
    if rows is None or args:
        raise ValueError("mdkv: with while_reading the press cuts inputs_embeds or input_ids, which the call must give by its name")
    before, new = layer.tokens, rows.shape[1]
    layer.cache.prompt_tokens = layer.cache.prompt_tokens or new
    for first in range(0, new, CHUNK):
        end = min(first + CHUNK, new)
        part = {**kwargs, **{name: _part(name, one, before, new, first, end) for name, one in given.items()}}
        if end < new:
            module.forward(**part)
    return part


def _part(name, one, before, new, first, end):
    """The part of an argument that tokens `first` to `end` take, of `new` tokens after `before`; masks are [B, N] or [B, H, n, N]."""
    shape = tuple(getattr(one, "shape", ()))
    if name in _TOKENS and shape and shape[_TOKENS[name]] == new:
        return one.narrow(_TOKENS[name], first, end - first).contiguous()
    if name == "attention_mask" and (len(shape) == 2 and shape[1] == before + new or shape[2:] == (new, before + new)):
        return (one if len(shape) == 2 else one[:, :, first:end])[..., : before + end].contiguous()
    raise ValueError(f"mdkv: with while_reading the press cuts {new} tokens after {before} into calls of {CHUNK}, but cannot cut {name}, "
                     f"{f'of shape {shape}' if shape else f'a {type(one).__name__}'}; leave {name} out, or while_reading")


def presses():
    """Presses for kvpress' PRESS_REGISTRY by name: mdkv, for questions that come later, and one of each other preset."""
    others = ("best", "by_window", "paper", "evict")
    return {"mdkv": MdkvPress(), **{f"mdkv_{name}": MdkvPress(preset=name) for name in others}}


def cache_bytes(cache):
    """Measured bytes of a cache that kvpress' pipeline used: compressed layers, and tensors of all others."""
    return sum(one.report()["bytes"]["total"] if isinstance(one, CacheLayer) else one.keys.nbytes + one.values.nbytes
               for one in cache.layers)
