"""transformers.py: compressed caches for Hugging Face's transformers, 5.2 and newer, on the CPU and on CUDA devices:

    cache = mdkv.transformers.Cache(model.config, budget=0.125)
    model.generate(**inputs, cache=cache)                   # past_key_values=cache before transformers named it so

`Cache` sets the attention of the configuration that it is given to "mdkv", so the configuration must be the model's own,
`model.config`. With every other cache the attention "mdkv" is sdpa. Layers that see all tokens hold keys and values of the
prompt as they are until it has been read; then an `mdkv.Layer` of each sequence takes their place. Presets without a shared
budget (by_window, paper, evict) compress within each layer's attention, so that peak memory falls, too; `best` and
`any_question` compress after the last layer or, with `while_reading=True`, after each call that reads a part of the prompt.
Sliding and linear layers stay transformers' own.
"""
import copy
import inspect
import numbers
import sys

import torch
from transformers import cache_utils
from transformers.generation import GenerationMixin

import mdkv
import mdkv.distributed
from mdkv import cache_file, device
from mdkv.cache_layer import NAME, CacheLayer
from mdkv.reading import CHUNK, ReadingGroup

#: the name of the argument by which models and `generate` of this version take a cache: "cache", in older ones "past_key_values"
CACHE_ARGUMENT = next(name for name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
                      if name in ("cache", "past_key_values"))

#: kinds of models that have no sdpa because of their sink logits, which the attention "mdkv" takes
WITH_SINKS = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash")


class Cache(cache_utils.Cache):
    """The cache of a decoder and a batch of sequences.

    config         the model's own configuration, `model.config`; its attention is set to "mdkv"
    budget         a share of the bytes of the prompt's uncompressed keys and values, in the model's own type, 0 to 1, or an
                   `mdkv.Budget`: of one sequence and an average layer
    preset         a name or an `mdkv.Preset`, whose factor of q.k the model's replaces
    tail           tokens after the prompt that stay as they are; when there are more, all of them are folded into the
                   compressed part, whose bytes do not grow, and cannot be cropped any more. None: all stay
    prompt_tokens  length of the prompt, padding included, if several calls read it, as generate(prefill_chunk_size=...) does,
                   or if a call reads more, as assisted generation does. None: the first call reads the prompt alone
    least          for short prompts: a budget that is a share never falls below the bytes of so many tokens of each head. None:
                   the preset's window and 8 more (16 with `best`), without which a budget cannot be kept
    rope           `mdkv.Rope` for presets that replay (best, any_question); None: from the configuration
    backend        `mdkv.Backend` for layers on the CPU; None: one of torch.get_num_threads() threads. On a CUDA device layers use
                   torch's current stream and torch's memory
    group          ProcessGroup of torch.distributed over whose processes the model's KV heads are spread (tensor parallelism):
                   one budget over all of their heads, for the prompt and for each fold of the tail, the choice that one process
                   with the same keys makes. None: these heads alone; under tensor parallelism each process then gives its own
                   heads an equal share
    while_reading  True: the prompt is compressed while it is read, by `best`, `any_question` or another preset that replays. Peak
                   memory is then that of the budget (`best`: and a quarter of it) and of one call's tokens: a prompt longer than memory is
                   read by calls of 256 tokens, as `read` and generate(prefill_chunk_size=256) with prompt_tokens do. A number: the
                   most tokens of a call, if calls after the first read more than it and more than 256
    losses         your own function losses(layer, queries, keys, values) in the place of the preset's scores: the layer's index, the
                   last queries [H*G, Q, D], keys [H, N, D] and values [H, N, Dv] of one sequence, after position encoding. It
                   returns float32 [H, R, N - preset.window]: how much is lost if a token is stored at each rung of preset.ratios
                   (`mdkv.Prompt.take_losses`). Folds of the tail score by the last queries as ever
    keep_rungs     True: after the prompt, and after each fold, `rungs` lists for each compressed layer and each sequence the rung
                   of every token before the window, uint8 [H, N - window]

    `preset` and `compressed`, the layers that see all tokens, can be read. Raises ValueError for arguments and
    NotImplementedError, with the reason, for models that are not served. After an exception during a call of the model only
    `reset` may be called.
    """

    def __init__(self, config, budget=0.125, preset="best", *, tail=None, prompt_tokens=None, least=None, rope=None,
                 backend=None, group=None, keep_rungs=False, while_reading=False, losses=None):
        for name, value in (("tail", tail), ("prompt_tokens", prompt_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"mdkv: {name} is {value}; it must be at least 1, or None")
        if not isinstance(budget, mdkv.Budget):
            if not isinstance(budget, numbers.Real) or not 0 <= budget <= 1:
                raise ValueError(f"mdkv: budget is {budget!r}; a share is from 0 to 1, and other limits are an mdkv.Budget")
            budget = float(budget)
        if least is not None and least < 0:
            raise ValueError(f"mdkv: least is {least}; it must not be negative")
        if not hasattr(config, "get_text_config"):
            raise ValueError(f"mdkv: config is of type {type(config).__name__}; it must be the model's own, model.config")
        text = config.get_text_config(decoder=True)
        if getattr(config, "is_encoder_decoder", False):
            raise NotImplementedError("mdkv: models with an encoder are not served")
        values = text.to_dict()  # attributes that differ from layer to layer cannot be read
        if values.get("kv_lora_rank"):
            raise NotImplementedError("mdkv: multi-head latent attention (kv_lora_rank) is not served")
        if values.get("cross_attention_layers"):
            raise NotImplementedError("mdkv: layers that attend to another model's states (cross_attention_layers) are not served")
        models = sys.modules.get(type(text).__module__.replace("configuration_", "modeling_"))
        if models is not None and not hasattr(models, "ALL_ATTENTION_FUNCTIONS"):  # it would take another attention's name for eager
            raise NotImplementedError("mdkv: models that compute attention themselves are not served")
        if text._attn_implementation == "eager" and text.model_type not in WITH_SINKS:
            raise NotImplementedError("mdkv: the model's own attention, eager, is not served; model.set_attn_implementation(\"sdpa\") "
                                      "sets another one, which some models do not have")
        if text._attn_implementation not in (None, "sdpa", "eager", NAME):
            raise NotImplementedError(f"mdkv: the layouts of the model's attention, {text._attn_implementation}, are not "
                                      "served; load the model with attn_implementation=\"sdpa\"")
        self.preset = mdkv.preset(preset) if isinstance(preset, str) else preset
        if not isinstance(self.preset, mdkv.Preset):
            raise ValueError(f"mdkv: preset is {preset!r}; it must be a name or an mdkv.Preset")
        self.losses = losses
        if losses is not None:
            if while_reading:
                raise NotImplementedError("mdkv: losses with while_reading is not served: a function of all keys needs all of them")
            self.preset = self.preset.replace(replayed={"join": 0.0})
        self.while_reading = _expects_readable(while_reading, self.preset, group, keep_rungs)
        self.least = self.preset.window + 8 if least is None else least
        self.budget, self.tail, self.prompt_tokens = budget, tail, prompt_tokens
        self.config, self.rope, self.keep_rungs = text, rope, keep_rungs
        self.group, self._over = group, None  # _over: the group's processes as mdkv.Ranks
        self.backend = backend or mdkv.Backend(torch.get_num_threads())
        self.backends = device.Backends(self.backend)  # by the device of a layer's keys
        layers = cache_utils.DynamicCache(config=config).layers
        layers = [CacheLayer(self, i) if type(one) is cache_utils.DynamicLayer else one for i, one in enumerate(layers)]
        self.compressed = [one for one in layers if isinstance(one, CacheLayer)]  #: the layers that see all tokens
        if not self.compressed:
            raise NotImplementedError("mdkv: the model has no layer that only sees all tokens")
        if text._attn_implementation is None:
            raise ValueError("mdkv: config is of no model yet; it must be the model's own, model.config")
        super().__init__(layers=layers)
        self._restart()
        text._attn_implementation = NAME

    def __repr__(self):
        now = self.report()
        return (f"mdkv.transformers.Cache({self.preset.name}: {now['tokens']} tokens, {now['arena_bytes']:,} bytes compressed, "
                f"{now['held_bytes']:,} in all, {now['uncompressed_bytes'] + now['other_bytes']:,} uncompressed)")

    def report(self):
        """Measured bytes of this process as a dictionary: `tokens` with padding; `bytes` of all layers; `arena_bytes` of compressed
        tokens, which the budget limits; `compressed_bytes` of compressed layers, with room for later tokens and the directory
        (456 bytes a head), and `uncompressed_bytes` of the same tokens; `other_bytes` of layers that stay transformers' own;
        `scratch_bytes` of the backend, which lie beside `bytes`, and are given back at the prompt's end; `held_bytes`, both
        together; and `layers`, for each compressed one its `index`, `bytes` (arena, tail, directory, queries, total; tensors and total before the prompt's end) and `rungs`,
        the number of tokens at each. Before the end of a prompt that is compressed while it is read, `compressed_bytes` are those
        of all layers' readers (`mdkv.Reader.bytes`), and those of a layer are 0."""
        layers = [one.report() for one in self.compressed]
        readers = self.compressed[0].group.bytes() if self.while_reading else {"arena": 0, "total": 0}
        arena = sum(one["bytes"]["arena"] for one in layers) + readers["arena"]
        compressed = sum(one["bytes"]["total"] for one in layers) + readers["total"]
        other = sum(_bytes_of(vars(one)) for one in self.layers if not isinstance(one, CacheLayer))
        scratch = self.backends.scratch_bytes
        return {"tokens": self.compressed[0].tokens, "bytes": compressed + other, "held_bytes": compressed + other + scratch,
                "arena_bytes": arena, "compressed_bytes": compressed,
                "uncompressed_bytes": sum(one.token_bytes() * sum(one.lengths()) for one in self.compressed),
                "other_bytes": other, "scratch_bytes": scratch, "layers": layers}

    def save(self, path, tokens, identity=None):
        """Writes the cache of one sequence to a file, from which `load` goes on in any process.

        tokens     numbers of the tokens that the cache holds, without padding: of ids that generate returned all but the last
        identity   text or bytes that must agree when the file is loaded, as the configuration's parameters of positions must;
                   None: the name by which the model was loaded, and its commit

        Atomic: see `mdkv.save`. Raises ValueError for arguments, and NotImplementedError for several sequences, before the
        prompt's end, and for models with layers that stay transformers' own.
        """
        cache_file.save(self, path, tokens, identity)

    @classmethod
    def load(cls, path, config, tokens=None, *, verify="everything", identity=None, **options):
        """A cache that goes on where the saved one was: its compressed part lies in the mapped file (`mdkv.load`).

            cache = mdkv.transformers.Cache.load("prompt.mdkv", model.config, ids)
            model.generate(ids, cache=cache)                # ids begins with the saved tokens

        config     the model's own, as for `Cache`
        tokens     ids of the whole text, e.g. document and question, which must begin with the saved tokens; None: not compared
        identity   as it was given to `save`
        options    those of `Cache`, for folding the tail and for a prompt after `reset`. The file has preset, tail, least, and budget
                   if it is a share: each holds unless it is given
        Raises ValueError for a file of another model, text or kind, naming it, and for a damaged one.
        """
        return cache_file.load(cls(config, **options), path, tokens, verify, identity, options)

    def reset(self):
        """Forgets all tokens; the next call reads a prompt again."""
        super().reset()
        self._restart()

    def crop(self, tokens_to_remove):
        """Removes the last n tokens for -n. Before transformers 5.23 a positive number is the length to keep; since then it
        raises ValueError. So do tokens that are compressed, and nothing is changed."""
        removed = self.compressed[0].to_remove(tokens_to_remove)
        for layer in self.compressed:
            layer.expects_removable(removed)
        for layer in sorted(self.layers, key=lambda one: isinstance(one, CacheLayer)):  # others first: they may refuse
            layer.crop(tokens_to_remove)

    def __deepcopy__(self, memo):
        """A cache that goes on by itself, e.g. for another question about the same compressed text."""
        if self.compressed[0].tokens and not self.compressed[-1].packed:
            raise NotImplementedError("mdkv: a cache cannot be copied before its prompt's end")
        memo.update({id(one): one for one in (self.config, self.budget, self.preset, self.rope, self.backend, self.group,
                                                 self._over, self.losses)})
        memo.update({id(one): one.copy() for layer in self.compressed for one in layer.packed})
        memo[id(self)] = other = type(self).__new__(type(self))
        vars(other).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return other

    def __reduce__(self):
        raise TypeError("mdkv: a cache cannot be pickled; save writes it to a file that other processes load, copy.deepcopy copies it")

    def _restart(self):
        whole = self.preset.shared or self.while_reading
        together = [self.compressed] if whole else [[one] for one in self.compressed]
        kind = ReadingGroup if self.while_reading else _Group
        self._broken = False      # a call of the model ended by an exception
        self._checked = None, None, []  # the last mask of this call, its version and padding
        self.rungs = []
        for layers in together:
            for layer in layers:
                layer.group = kind(self, layers) if layer is layers[0] else layers[0].group

    def _limit(self, tokens):
        """The budget of a layer of so many tokens. A reader asks for room for the window, even if the prompt is shorter."""
        least = self.least if self.while_reading else min(self.least, tokens)
        share = isinstance(self.budget, float)
        return mdkv.Budget.kv_size(least) if share and self.budget * tokens < least else self.budget

    def _ranks(self, heads):
        """The processes of the group, this one with so many KV heads of each layer; None without a group."""
        if self.group is None or self._over is not None:
            return self._over
        ranks = mdkv.distributed.ranks(heads, self.group)
        known = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        if ranks.heads != known:
            raise NotImplementedError(f"mdkv: the processes of the group have {ranks.heads} KV heads of a layer and the "
                                      f"configuration {known}; heads that several processes have are not served")
        mdkv.distributed.expects_same("prompt_tokens", self.prompt_tokens, self.group)  # all end their prompts in the same call
        self._over = ranks
        return ranks


class _Group:
    """Layers that share one budget, while their prompt is read: an `mdkv.Prompt` of each sequence."""

    def __init__(self, cache, layers):
        self.cache, self.layers, self.prompts, self.unfinished = cache, layers, [], len(layers)

    def begin(self, preset, rope, query, keys, values, pads):
        """Makes the prompts when the first layer's first rows are there: query [B, H*G, n, D], keys [B, H, n, D]. rope: an
        `mdkv.Rope`, its arguments, or None."""
        cache, heads, dim = self.cache, keys.shape[1], keys.shape[3]
        ranks = cache._ranks(heads)
        rope = mdkv.Rope(**rope) if isinstance(rope, dict) else rope
        self.prompts = [mdkv.Prompt(preset, layers=len(self.layers), heads=heads, group=query.shape[1] // heads, key_dim=dim,
                                    value_dim=values.shape[3], tokens=(cache.prompt_tokens or keys.shape[2]) - pad,
                                    dtype=str(keys.dtype).removeprefix("torch."), rope=rope, backend=cache.backends[keys.device],
                                    ranks=ranks)
                        for pad in pads]

    def finish(self, layer):
        """Takes a layer whose prompt was read; after the last one, packs all of them and frees their tensors."""
        for prompt, rows in zip(self.prompts, layer.rows()):
            if self.cache.losses is not None:
                lost = self.cache.losses(layer.index, *(one.contiguous() for one in rows[:3]))
                if len(getattr(lost, "shape", ())) != 3:
                    raise ValueError(f"mdkv: losses returned {getattr(lost, 'shape', lost)}; it must be float32 [H, R, N - window]")
                prompt.take_losses(self.layers.index(layer), lost)
            prompt.finish_layer(self.layers.index(layer), *rows, **layer.sinks)
        self.unfinished -= 1
        if self.unfinished > 0:
            return
        for prompt, tokens in zip(self.prompts, layer.lengths()):
            prompt.allocate(self.cache._limit(tokens))
        for place, one in enumerate(self.layers):
            rungs = [prompt.rungs_of(place).copy() for prompt in self.prompts] if self.cache.keep_rungs else []
            self.cache.rungs += [rungs] if rungs else []
            one.take([prompt.pack(place, *rows)[0] for prompt, rows in zip(self.prompts, one.rows())], rungs)
        self.prompts = []


@torch.no_grad()
def read(model, ids, cache, chunk=CHUNK, attention_mask=None):
    """Reads a prompt by calls of the model of at most `chunk` tokens into a cache, with or without `while_reading`:

        cache = mdkv.transformers.Cache(model.config, budget=0.125, preset="any_question", while_reading=True)
        mdkv.transformers.read(model, document, cache)           # ids [B, n]

    attention_mask [B, n] is 0 for padding, on the left; if the cache holds m tokens already, it is [B, m + n], of all of them.
    Returns the last call's output, with the logits of the last token. Raises ValueError for arguments.
    """
    if not isinstance(cache, cache_utils.Cache):
        raise ValueError(f"mdkv: read: cache is of type {type(cache).__name__}; it must be a Cache, of mdkv or of transformers")
    before = cache.get_seq_length()
    _expects_readable_ids(ids, before, chunk, attention_mask)
    takes, tokens = inspect.signature(model.forward).parameters, ids.shape[1]
    places = None if attention_mask is None else (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
    ends = isinstance(cache, Cache) and cache.prompt_tokens is None  # nothing tells yet where the prompt ends
    try:
        if ends:
            cache.prompt_tokens = before + tokens
        for first in range(0, tokens, chunk):
            end = min(first + chunk, tokens)
            options = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
            if places is not None:
                options["attention_mask"] = attention_mask[:, : before + end].contiguous()
                options |= {"position_ids": places[:, before + first : before + end].contiguous()} if "position_ids" in takes else {}
            output = model(ids[:, first:end].contiguous(), **{CACHE_ARGUMENT: cache}, **options)
    finally:
        if ends:
            cache.prompt_tokens = None
    return output


def _expects_readable_ids(ids, before, chunk, mask):
    """Arguments of `read` into a cache of `before` tokens."""
    if not isinstance(chunk, numbers.Integral) or isinstance(chunk, bool) or chunk < 1:
        raise ValueError(f"mdkv: read: chunk is {chunk!r}; it must be a whole number of tokens, at least 1")
    if not isinstance(ids, torch.Tensor):
        raise ValueError(f"mdkv: read: ids is of type {type(ids).__name__}; it must be a tensor [B, n]")
    if ids.ndim != 2 or 0 in ids.shape:
        raise ValueError(f"mdkv: read: ids has the shape {list(ids.shape)}; it must be [B, n] of at least one sequence and one token")
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"mdkv: read: ids is of {ids.dtype}; it must be of torch.int64 or torch.int32")
    shape = [ids.shape[0], before + ids.shape[1]]
    if mask is not None and (not isinstance(mask, torch.Tensor) or list(mask.shape) != shape):
        given = f"has the shape {list(mask.shape)}" if isinstance(mask, torch.Tensor) else f"is of type {type(mask).__name__}"
        raise ValueError(f"mdkv: read: attention_mask {given}; it must be {shape}, a number for each token that the cache and ids have")


def _expects_readable(while_reading, preset, group, keep_rungs):
    """The argument while_reading: False, or a number of tokens that a chunk may have at least."""
    if while_reading is False:
        return False
    if not isinstance(while_reading, numbers.Integral) or while_reading < 1:
        raise ValueError(f"mdkv: while_reading is {while_reading!r}; it must be True, False, or the most tokens of a call")
    if not preset.replayed:
        raise ValueError(f"mdkv: while_reading: the preset \"{preset.name}\" knows no losses before the prompt's last queries; those "
                         "that replay can be read so: \"best\" and \"any_question\"")
    if group is not None:
        raise NotImplementedError("mdkv: while_reading with group is not served: an mdkv.Reader takes no ranks")
    if keep_rungs:
        raise NotImplementedError("mdkv: while_reading with keep_rungs is not served: tokens that are dropped early are not followed")
    return CHUNK if while_reading is True else int(while_reading)


def _bytes_of(value):
    """Bytes of all tensors within dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(_bytes_of(one) for one in values)
