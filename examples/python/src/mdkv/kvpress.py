"""kvpress.py: a press for NVIDIA's kvpress (0.5, with transformers 5.2) whose bytes are freed:

    pipe = pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)
    pipe(context, questions=questions, press=mdkv.kvpress.MdkvPress(compression_ratio=0.875))

kvpress' presses drop whole tokens of all heads, or hide keys and free nothing. This one gives each token of each head 16, 8, 4
or 0 bits a coordinate. With the data sets of kvpress' evaluation, one line in its evaluate_registry.py is enough:

    PRESS_REGISTRY.update(mdkv.kvpress.presses())

and then, in its folder: python evaluate.py --dataset ruler --data_dir 4096 --press_name mdkv --compression_ratio 0.875
"""
from contextlib import contextmanager
from dataclasses import dataclass

from kvpress import BasePress
from transformers import cache_utils

from mdkv.cache_layer import CacheLayer
from mdkv.transformers import CACHE_ARGUMENT, CHUNK, Cache


@dataclass
class MdkvPress(BasePress):
    """Compresses the cache of the first call of the model to 1 - compression_ratio of its bytes.

    compression_ratio  share of the bytes that is freed, 0 to 1
    preset             preset of mdkv; `any_question` is made for questions that come after the context, as in kvpress
    while_reading      True: the press cuts the call into calls of 256 tokens, and the context is compressed while it is read
                       (best, any_question), in memory that does not grow with it; the call returns the last part's output
    Later calls, outside of the press, go on with the same cache object. See `mdkv.transformers.Cache` for what is not served.
    """

    compression_ratio: float = 0.0
    preset: str = "any_question"
    while_reading: bool = False

    @contextmanager
    def __call__(self, model):
        """Within it, an empty cache that the model is called with becomes a compressed one, `self.cache`."""
        def replace_layers(module, args, kwargs):
            cache = kwargs.get(CACHE_ARGUMENT)
            if cache is None or cache.get_seq_length() > 0:
                raise ValueError("mdkv: the press compresses the model's first call with an empty cache")
            self.cache = Cache(model.config, budget=1 - self.compression_ratio, preset=self.preset, while_reading=self.while_reading)
            # kvpress' pipeline slices sliding layers like all others, which only layers that keep everything survive
            cache.layers = [cache_utils.DynamicLayer() if type(one) is cache_utils.DynamicSlidingWindowLayer else one
                            for one in self.cache.layers]
            cache.layer_class_to_replicate = None
            if self.while_reading:
                return (), _read_but_last(module, self.cache, args, kwargs)

        decoder = getattr(model.model, "language_model", model.model)
        hook = decoder.register_forward_pre_hook(replace_layers, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


def _read_but_last(module, cache, args, kwargs):
    """Cuts a decoder's call into calls of CHUNK tokens, makes all of them but the last, and returns the arguments for that."""
    ids, mask, end = kwargs.get("input_ids"), kwargs.get("attention_mask"), 0
    if ids is None or args:
        raise ValueError("mdkv: with while_reading the press cuts input_ids, which the call must give by its name")
    cache.prompt_tokens = ids.shape[1]
    for part in ids.split(CHUNK, dim=1):
        end += part.shape[1]
        kwargs = {**kwargs, "input_ids": part, **({} if mask is None else {"attention_mask": mask[:, :end]})}
        if end < ids.shape[1]:
            module.forward(**kwargs)
    return kwargs


def presses():
    """Presses for kvpress' PRESS_REGISTRY by name: mdkv, for questions that come later, and one of each other preset."""
    others = ("best", "by_window", "paper", "evict")
    return {"mdkv": MdkvPress(), **{f"mdkv_{name}": MdkvPress(preset=name) for name in others}}


def cache_bytes(cache):
    """Measured bytes of a cache that kvpress' pipeline used: compressed layers, and tensors of all others."""
    return sum(one.report()["bytes"]["total"] if isinstance(one, CacheLayer) else one.keys.nbytes + one.values.nbytes
               for one in cache.layers)
