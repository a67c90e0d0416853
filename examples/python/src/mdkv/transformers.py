"""transformers.py: compressed caches for Hugging Face's transformers, 5.2 and newer, on the CPU:

    cache = mdkv.transformers.Cache(model.config, budget=0.125)
    model.generate(**inputs, past_key_values=cache)

`Cache` sets the attention of the configuration that it is given to "mdkv", so the configuration must be the model's own,
`model.config`. With every other cache the attention "mdkv" is sdpa. Layers that see all tokens hold keys and values of the
prompt as they are until it has been read; then an `mdkv.Layer` of each sequence takes their place. Presets without a shared
budget (by_window, paper, evict) compress within each layer's attention, so that peak memory falls, too; `best` and
`any_question` compress after the last layer. Sliding and linear layers stay transformers' own.
"""
import copy
import inspect
import weakref

import torch
from transformers import cache_utils
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import mdkv
from mdkv.rotary import rope_of

NAME = "mdkv"  #: in transformers' table of attentions
_CROPS_TO_LENGTH = "max_length" in inspect.signature(cache_utils.DynamicLayer.crop).parameters  # before 5.23
_NOT_SERVED = {"softcap": "soft caps on logits", "s_aux": "sink logits", "position_bias": "biases of positions",
               "output_attentions": "attention weights as output", "cu_seq_lens_q": "packed sequences"}


class Cache(cache_utils.Cache):
    """The cache of a decoder and a batch of sequences.

    config         the model's own configuration, `model.config`; its attention is set to "mdkv"
    budget         a share of the uncompressed bytes, 0 to 1, or an `mdkv.Budget`: of one sequence and an average layer
    preset         a name or an `mdkv.Preset`, whose factor of q.k the model's replaces
    tail           tokens after the prompt that stay as they are; when there are more, all of them are folded into the
                   compressed part, whose bytes do not grow, and cannot be cropped any more. None: all stay
    prompt_tokens  length of the prompt, padding included, if several calls read it, as generate(prefill_chunk_size=...) does,
                   or if a call reads more, as assisted generation does. None: the first call reads the prompt alone
    least          for short prompts: a budget that is a share never falls below the bytes of so many tokens
    rope           `mdkv.Rope` for presets that replay (best, any_question); None: from the configuration
    backend        `mdkv.Backend`; None: one of torch.get_num_threads() threads
    keep_rungs     True: after the prompt `rungs` lists for each compressed layer and each sequence the rung of every token
                   before the window, uint8 [H, N - window]

    Raises ValueError for arguments and NotImplementedError, with the reason, for models that are not served. After an
    exception during a call of the model only `reset` may be called.
    """

    def __init__(self, config, budget=0.125, preset="best", *, tail=None, prompt_tokens=None, least=64, rope=None,
                 backend=None, keep_rungs=False):
        for name, value in (("tail", tail), ("prompt_tokens", prompt_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"mdkv: {name} is {value}; it must be at least 1, or None")
        if isinstance(budget, (int, float)) and not 0 <= budget <= 1:
            raise ValueError(f"mdkv: budget is {budget}; a share is from 0 to 1, and other limits are an mdkv.Budget")
        text = config.get_text_config(decoder=True)
        if getattr(config, "is_encoder_decoder", False):
            raise NotImplementedError("mdkv: models with an encoder are not served")
        if getattr(text, "kv_lora_rank", None):
            raise NotImplementedError("mdkv: multi-head latent attention (kv_lora_rank) is not served")
        if text._attn_implementation not in (None, "sdpa", "eager", NAME):
            raise NotImplementedError(f"mdkv: the layouts of the model's attention, {text._attn_implementation}, are not "
                                      "served; load the model with attn_implementation=\"sdpa\"")
        self.preset = mdkv.preset(preset) if isinstance(preset, str) else preset
        self.budget, self.tail, self.prompt_tokens, self.least = budget, tail, prompt_tokens, least
        self.config, self.rope, self.keep_rungs = text, rope, keep_rungs
        self.backend = backend or mdkv.Backend(torch.get_num_threads())
        layers = cache_utils.DynamicCache(config=config).layers
        layers = [CacheLayer(self, i) if type(one) is cache_utils.DynamicLayer else one for i, one in enumerate(layers)]
        self.compressed = [one for one in layers if isinstance(one, CacheLayer)]  #: the layers that see all tokens
        if not self.compressed:
            raise NotImplementedError("mdkv: the model has no layer that only sees all tokens")
        super().__init__(layers=layers)
        self._restart()
        text._attn_implementation = NAME

    def report(self):
        """Measured bytes as a dictionary: `tokens` with padding; `bytes` of all layers; `compressed_bytes` of compressed
        layers and `uncompressed_bytes` of the same tokens; `other_bytes` of layers that stay transformers' own;
        `scratch_bytes` of the backend, which lie beside `bytes` and stay for later calls; and `layers`, for each compressed one its `index`, `bytes` (arena, tail, directory, queries, total; tensors and total
        before the prompt's end) and `rungs`, the number of tokens at each."""
        layers = [one.report() for one in self.compressed]
        compressed = sum(one["bytes"]["total"] for one in layers)
        other = sum(_bytes_of(vars(one)) for one in self.layers if not isinstance(one, CacheLayer))
        return {"tokens": self.compressed[0].tokens, "bytes": compressed + other, "compressed_bytes": compressed,
                "uncompressed_bytes": sum(one.token_bytes() * sum(one.lengths()) for one in self.compressed),
                "other_bytes": other, "scratch_bytes": self.backend.scratch_bytes, "layers": layers}

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
        memo.update({id(one): one for one in (self.config, self.budget, self.preset, self.rope, self.backend)})
        memo.update({id(one): one.copy() for layer in self.compressed for one in layer.packed})
        memo[id(self)] = other = type(self).__new__(type(self))
        vars(other).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return other

    def _restart(self):
        together = [self.compressed] if self.preset.shared else [[one] for one in self.compressed]
        self._checked = None, []  # the last mask and its padding
        self.rungs = []
        for layers in together:
            for layer in layers:
                layer.group = _Group(self, layers) if layer is layers[0] else layers[0].group

    def _limit(self, tokens, token_bytes):
        """The budget of a layer of so many tokens."""
        least = min(self.least, tokens)
        share = isinstance(self.budget, (int, float))
        return mdkv.Budget.bytes(least * token_bytes) if share and self.budget * tokens < least else self.budget


class _Group:
    """Layers that share one budget, while their prompt is read: an `mdkv.Prompt` of each sequence."""

    def __init__(self, cache, layers):
        self.cache, self.layers, self.prompts, self.unfinished = cache, layers, [], len(layers)

    def begin(self, module, preset, query, keys, values, pads):
        """Makes the prompts when the first layer's first rows are there: query [B, H*G, n, D], keys [B, H, n, D]."""
        cache, heads, dim = self.cache, keys.shape[1], keys.shape[3]
        rope = cache.rope or rope_of(cache.config, module, dim) if preset.replayed else None
        self.prompts = [mdkv.Prompt(preset, layers=len(self.layers), heads=heads, group=query.shape[1] // heads, key_dim=dim,
                                    value_dim=values.shape[3], tokens=(cache.prompt_tokens or keys.shape[2]) - pad,
                                    dtype=str(keys.dtype).removeprefix("torch."), rope=rope, backend=cache.backend)
                        for pad in pads]

    def finish(self, layer):
        """Takes a layer whose prompt was read; after the last one, packs all of them and frees their tensors."""
        for prompt, rows in zip(self.prompts, layer.rows()):
            prompt.finish_layer(self.layers.index(layer), *rows)
        self.unfinished -= 1
        if self.unfinished > 0:
            return
        for prompt, tokens in zip(self.prompts, layer.lengths()):
            prompt.allocate(self.cache._limit(tokens, layer.token_bytes()))
        for place, one in enumerate(self.layers):
            if self.cache.keep_rungs:
                self.cache.rungs.append([prompt.rungs_of(place).copy() for prompt in self.prompts])
            one.take([prompt.pack(place, *rows)[0] for prompt, rows in zip(self.prompts, one.rows())])
        self.prompts = []


class CacheLayer(cache_utils.CacheLayerMixin):
    """One layer of a `Cache`: keys and values as they are until the prompt was read, then an `mdkv.Layer` of each sequence.
    Shapes: B sequences, H KV heads of G query heads each, N tokens, D and Dv numbers of a key and a value."""

    is_sliding = False
    is_compileable = False
    supports_early_init = False
    is_croppable = property(lambda self: self.cache.tail is None)

    def __init__(self, cache, index):
        self.cache, self.index = cache, index
        self.reset()
        super().__init__()

    def reset(self):
        self.is_initialized, self.tokens, self.pads = False, 0, []  # tokens with padding; padding of each sequence
        self.packed, self.limits = [], []       # mdkv.Layer of each sequence; bytes of its arena after the prompt
        self.held, self.queries = None, None    # keys [B, H, N, D], values [B, H, N, Dv]; last queries [B, H*G, n, D]
        self.replayed, self.lse = [], []        # tokens of each sequence that were replayed; log-sum-exps [H*G, n]
        self.later = []                         # queries, keys and values of tokens that the prompt's last call had after it

    # Called by transformers.

    def lazy_initialization(self, key_states, value_states):
        self.batch, self.heads, _, self.key_dim = key_states.shape
        self.value_dim, self.dtype, self.device = value_states.shape[3], key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Appends keys [B, H, n, D] and values [B, H, n, Dv]. Only the attention "mdkv" can read the tensors it returns."""
        if torch.compiler.is_compiling():
            raise NotImplementedError("mdkv: torch.compile is not served; call the model without it")
        if key_states.device.type != "cpu":
            raise NotImplementedError(f"mdkv: keys are on {key_states.device}; only the CPU is served")
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise NotImplementedError("mdkv: gradients are not served; call the model under torch.no_grad()")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.batch:
            raise ValueError(f"mdkv: keys are of {key_states.shape[0]} sequences; the cache is of {self.batch}")
        self.tokens += key_states.shape[2]
        new = key_states, value_states
        if self.packed:
            for layer, keys, values in zip(self.packed, *new):
                layer.append(keys, values)
        elif self.held is None:  # a slice, e.g. of a fused projection, would keep the larger tensor
            self.held = tuple(one if one.untyped_storage().nbytes() == one.nbytes else one.clone() for one in new)
        else:
            self.held = tuple(torch.cat(pair, dim=2) for pair in zip(self.held, new))
        return _Rows.of(self, self.key_dim), _Rows.of(self, self.value_dim)

    def get_seq_length(self):
        return self.tokens

    def get_mask_sizes(self, query_length):
        return self.tokens + (query_length if isinstance(query_length, int) else query_length.shape[0]), 0

    def get_max_length(self):
        return -1

    get_max_cache_shape = get_max_length  # before 5.23

    def crop(self, tokens_to_remove):
        self.truncate(self.tokens - self.to_remove(tokens_to_remove))

    def reorder_cache(self, beam_idx):
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats):
        self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices):
        """Sequence b becomes a copy of the sequence indices[b]."""
        if self.tokens and not self.packed:
            raise NotImplementedError("mdkv: sequences cannot be reordered before their prompt's end")
        if self.packed:
            order = torch.arange(self.batch)[indices.cpu()].tolist()
            self.packed = [self.packed[i].copy() if i in order[:b] else self.packed[i] for b, i in enumerate(order)]
            self.limits, self.pads = [self.limits[i] for i in order], [self.pads[i] for i in order]
            self.batch, self.queries = len(order), None if self.queries is None else self.queries[order]

    # Programs that look inside see the prompt's tensors, later tensors of the right length and width 0. Shorter ones that
    # are assigned crop the cache: kvpress' pipeline does it after each answer.
    @property
    def keys(self):
        return self._shown(0)

    @property
    def values(self):
        return self._shown(1)

    def _shown(self, which):
        if self.packed:
            return torch.empty((self.batch, self.heads, self.tokens, 0), dtype=self.dtype)
        return None if self.held is None else self.held[which]

    def _assign(self, rows):
        if rows is not None:
            self.truncate(rows.shape[2])

    keys, values = keys.setter(_assign), values.setter(_assign)

    # Sizes.

    def lengths(self):
        """Number of tokens of each sequence, without padding."""
        return [self.tokens - pad for pad in self.pads]

    def token_bytes(self):
        """Bytes of an uncompressed token; 0 before the first."""
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize if self.is_initialized else 0

    def report(self):
        """See Cache.report."""
        counts = [_sum([one.bytes for one in self.packed]), _sum([one.rungs for one in self.packed])]
        queries = 0 if self.queries is None else self.queries.nbytes
        tensors = sum(one.nbytes for one in self.held or ())
        kept = {"arena": 0, "tail": 0, "directory": 0, **counts[0], "tensors": tensors, "queries": queries}
        kept["total"] = sum(kept[name] for name in ("arena", "tail", "directory", "tensors", "queries"))
        return {"index": self.index, "bytes": kept, "rungs": counts[1]}

    def to_remove(self, tokens_to_remove):
        """Number of tokens that crop(tokens_to_remove) removes."""
        if tokens_to_remove > 0 and not _CROPS_TO_LENGTH:
            raise ValueError(f"mdkv: crop({tokens_to_remove}): a negative number -n removes the last n tokens")
        return -tokens_to_remove if tokens_to_remove <= 0 else max(self.tokens - tokens_to_remove, 0)

    def expects_removable(self, removed):
        after = self.packed[0].appended if self.packed else 0
        if removed > after:
            raise ValueError(f"mdkv: {removed} tokens cannot be removed: all but the last {after} are compressed. If drafts were "
                             "read with the prompt, prompt_tokens says where it ends")

    def truncate(self, tokens):
        """Keeps the first `tokens` tokens. Raises ValueError if compressed ones are among the others."""
        removed = self.tokens - tokens
        self.expects_removable(removed)
        if removed > 0:
            for layer in self.packed:
                layer.truncate(layer.appended - removed)
            self.queries = None if self.queries is None else self.queries[:, :, : max(self.queries.shape[2] - removed, 0)]
            self.tokens = tokens

    # Called by the attention.

    def attend(self, module, query, mask, scaling, dropout, others):
        """Attention of queries [B, H*G, n, D] of the tokens that `update` was given last: [B, n, H*G, Dv]."""
        unserved = [f"{why} ({name})" for name, why in _NOT_SERVED.items()
                    if others.get(name) is not None and others[name] is not False]
        if getattr(module, "layer_idx", self.index) != self.index:
            unserved.append(f"layer {module.layer_idx}, which attends to the keys of layer {self.index},")
        if others.get("is_causal") is False or not getattr(module, "is_causal", True):
            unserved.append("attention that is not causal")
        if query.shape[1] != self.heads * getattr(module, "num_key_value_groups", query.shape[1] // self.heads):
            unserved.append("keys whose heads were repeated before the cache")
        if dropout > 0 and module.training:
            unserved.append("dropout")
        pads = self._padding(mask, query.shape[2]) if not unserved else None
        if pads is None:
            unserved.append("an attention mask that is not causal with padding on the left of the prompt")
        if unserved:
            raise NotImplementedError("mdkv: not served: " + unserved[0])
        if self.packed:
            return self._attend_packed(query)
        self.pads = pads
        output, _ = _sdpa(module, query, *self.held, mask, dropout=dropout, scaling=scaling, **others)
        preset = self.cache.preset.replace(scale=scaling if scaling is not None else self.key_dim ** -0.5)
        self._read_prompt(module, query, preset)
        return output

    def _padding(self, mask, new):
        """Number of hidden first tokens of each sequence by a mask [B, 1, new, N], True where a token is seen, or None. Its
        last query must see everything else, and after the prompt all others what precedes them; otherwise None."""
        known, pads = self.cache._checked
        if mask is None:
            pads = [0] * self.batch
        elif known is None or known() is not mask:  # one mask serves all layers of a call
            if mask.shape[1:] != (1, new, self.tokens):
                return None
            seen = mask if mask.dtype == torch.bool else mask == 0
            found = self.tokens - seen[:, 0, -1].sum(-1)
            places = torch.arange(self.tokens)
            right = places >= found[:, None, None]
            rows = new if self.packed else 1
            right = right & (places <= (self.tokens - rows + torch.arange(rows))[:, None])
            biased = mask.dtype != torch.bool and not ((mask == 0) | (mask < -1e4)).all()
            if biased or not torch.equal(seen[:, 0, -rows:], right):
                return None
            pads = found.expand(self.batch).tolist()
            self.cache._checked = weakref.ref(mask), pads
        return None if self.packed and pads != self.pads else pads

    def _attend_packed(self, query):
        tail, preset = self.cache.tail, self.cache.preset
        output = query.new_empty((self.batch, query.shape[2], query.shape[1], self.value_dim))
        for layer, rows, to in zip(self.packed, query, output):
            layer.attend(rows, to.transpose(0, 1))
        if tail is not None:
            self._remember(query, preset.queries)
            if self.packed[0].appended > tail:
                for layer, rows, limit in zip(self.packed, self.queries, self.limits):
                    rows = rows[:, -min(rows.shape[1], preset.window + layer.appended):]
                    layer.recompress(rows, mdkv.Budget.bytes(limit), preset)
        return output

    def _remember(self, query, most):
        """Appends queries [B, H*G, n, D] and keeps the last `most`, in memory of their own."""
        before = [] if self.queries is None else [self.queries]
        self.queries = torch.cat([*before, query], dim=2)[:, :, -most:].clone()

    def _read_prompt(self, module, query, preset):
        """Replays what one more call has read of the prompt, and finishes the layer after the last call."""
        group, later = self.group, self.tokens - (self.cache.prompt_tokens or self.tokens)
        if later > 0:  # tokens after the prompt in its last call, e.g. drafts
            self.later = [one[:, :, -later:].clone() for one in (query, *self.held)]
            query, *self.held = (one[:, :, :-later] for one in (query, *self.held))
            self.tokens -= later
        if not group.prompts:
            group.begin(module, preset, query, *self.held, self.pads)
        self.replayed = self.replayed or [0] * self.batch
        unread = [length - done for length, done in zip(self.lengths(), self.replayed)] if preset.replayed else [0]
        self._remember(query, max(preset.queries, *unread))
        for b, count in enumerate(unread if preset.replayed else []):
            chunk = preset.replayed["chunk"]
            for count in (count // chunk * chunk, count % chunk if later >= 0 else 0):  # full chunks, the rest at the end
                first, to_end = self.replayed[b], self.lengths()[b] - self.replayed[b]
                rows = [one[b, :, one.shape[2] - to_end : one.shape[2] - to_end + count] for one in (self.queries, *self.held)]
                if count > 0:
                    group.prompts[b].read_chunk(group.layers.index(self), first, *rows)
                self.replayed[b] += count
        if later >= 0:
            self.queries = self.queries[:, :, -preset.queries:].clone()
            self.scale = preset.scale
            group.finish(self)

    def rows(self):
        """For each sequence its last queries, its keys, values, and the queries' log-sum-exps, which are found once."""
        for b, length in enumerate(self.lengths()):
            queries, keys, values = (one[b, :, -length:] for one in (self.queries, *self.held))
            if len(self.lse) <= b:
                self.lse.append(mdkv.log_sum_exps(queries, keys, self.scale, self.cache.backend))
            yield queries, keys, values, self.lse[b]

    def take(self, packed):
        """Puts the packed layers of all sequences in the place of keys and values."""
        self.packed, self.limits, self.held, self.lse = packed, [one.bytes["arena"] for one in packed], None, []
        tail, (query, *new) = self.cache.tail, self.later or [None]
        for layer in packed if tail else []:
            layer.reserve(tail + 1)
        if new:
            for layer, keys, values in zip(packed, *new):
                layer.append(keys, values)
            self._remember(query, self.queries.shape[2])
            self.tokens += query.shape[2]
        self.later, self.queries = [], self.queries if tail else None


class _Rows(torch.Tensor):
    """Keys or values on their way from `CacheLayer.update` to the attention "mdkv". They have a shape and refuse everything
    else, because another attention would see tokens that are not there."""

    _ALLOWED = {getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")} | {
        torch.Tensor.size, torch.Tensor.dim}

    @staticmethod
    def of(layer, width):
        rows = torch.empty(1, dtype=layer.dtype).expand(layer.batch, layer.heads, layer.tokens, width)
        rows = torch.Tensor._make_subclass(_Rows, rows)
        rows.mdkv_layer = layer
        return rows

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func not in cls._ALLOWED:
            raise NotImplementedError(
                f"mdkv: {getattr(func, '__name__', func)} was called with keys or values of an mdkv cache, which only its "
                "attention can read. Make the cache from the model's own configuration, mdkv.transformers.Cache(model.config). "
                "Models that compute attention themselves, change keys between cache and attention, or run by torch.compile, "
                "are not served")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """The attention "mdkv" of transformers' AttentionInterface, [B, n, H*G, Dv] and None, of queries [B, H*G, n, D]: for
    compressed layers of a `Cache` their own, otherwise sdpa."""
    layer = getattr(key, "mdkv_layer", None)
    if layer is None:
        return _sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    return layer.attend(module, query, attention_mask, scaling, dropout, kwargs), None


def _sdpa(*args, **kwargs):
    return ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)  # looked up late, because packages replace it


def _sum(dictionaries):
    return {name: sum(one[name] for one in dictionaries) for name in (dictionaries or [{}])[0]}


def _bytes_of(value):
    """Bytes of all tensors within dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(_bytes_of(one) for one in values)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
