"""cache_layer.py: one layer of an mdkv cache inside transformers, and the attention that reads it."""
import copy
import functools
import inspect
import weakref

import torch
from transformers import cache_utils
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import mdkv
import mdkv.distributed
from mdkv import device, rotary
from mdkv.token_rungs import TokenRungs

NAME = "mdkv"  #: in transformers' table of attentions
CROPS_TO_LENGTH = "max_length" in inspect.signature(cache_utils.DynamicLayer.crop).parameters  #: before 5.23
_NOT_SERVED = {"softcap": "soft caps on logits", "position_bias": "biases of positions",
               "output_attentions": "attention weights as output", "cu_seq_lens_q": "packed sequences",
               "sliding_window": "sliding windows in layers whose configuration has none"}


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
        self.token_rungs = []                   # TokenRungs of each sequence, if Cache.keep_rungs and tail are given
        self.rope = None                        # encoding, if the preset replays: an mdkv.Rope, its arguments, or not known yet
        self.measurement = rotary.Measurement() # measures it
        self.given = None                       # keys and values of this call, if the prompt is compressed while it is read
        self.sinks = {}                         # "sink_logits": float32 [H*G], if the model has them
        self.later = []                         # queries, keys and values of tokens that the prompt's last call had after it

    def __deepcopy__(self, memo):
        if id(self.cache) not in memo:
            raise NotImplementedError("mdkv: a layer was copied without its cache, as models do that read a layer several times; they "
                                      "are not served")
        memo[id(self)] = other = type(self).__new__(type(self))
        vars(other).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return other

    # Called by transformers.

    def lazy_initialization(self, key_states, value_states):
        self.batch, self.heads, _, self.key_dim = key_states.shape
        self.value_dim, self.dtype, self.device = value_states.shape[3], key_states.dtype, key_states.device
        first = self.group.layers[0]
        if first.is_initialized and first.device != self.device:
            raise NotImplementedError(f"mdkv: keys of layer {first.index} are on {first.device} and of layer {self.index} on {self.device}; "
                                      "layers that share a budget must be on one device. With by_window, paper and evict each one has its own")
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Appends keys [B, H, n, D] and values [B, H, n, Dv]. Only the attention "mdkv" can read the tensors it returns."""
        if torch.compiler.is_compiling():
            raise NotImplementedError("mdkv: torch.compile is not served; call the model without it")
        self.cache.backends[key_states.device]  # which it refuses if there is none
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise NotImplementedError("mdkv: gradients are not served; call the model under torch.no_grad()")
        kind = key_states.device.type
        if torch.is_autocast_enabled(kind):  # sdpa would do it for each call
            key_states, value_states = (one.to(torch.get_autocast_dtype(kind)) for one in (key_states, value_states))
        all_layers = self.cache.compressed
        if self is all_layers[0] and (self.cache._broken or any(one.tokens != self.tokens for one in all_layers)):
            raise ValueError("mdkv: a call of the model before this one ended by an exception; the cache must be reset()")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.batch:
            raise ValueError(f"mdkv: keys are of {key_states.shape[0]} sequences; the cache is of {self.batch}")
        if not key_states.dtype == value_states.dtype == self.dtype:
            raise NotImplementedError(f"mdkv: keys are {key_states.dtype} and values {value_states.dtype} in a cache of {self.dtype}; one "
                                      "element type is served, and autocast for all calls or for none")
        self.tokens += key_states.shape[2]
        new = key_states, value_states
        if self.packed:
            if key_states.device != self.device:  # a loaded cache's is not known yet
                self.packed = self.cache.backends.moved(self.packed, key_states.device)
                self.device = key_states.device
                self.queries = None if self.queries is None else self.queries.to(self.device)
            with device.current(self.device):
                for layer, keys, values in zip(self.packed, *new):
                    layer.append(keys, values)
        elif self.cache.while_reading:
            self.given = new
        elif self.held is None:  # a slice, e.g. of a fused projection, would keep the larger tensor
            self.held = tuple(one if one.untyped_storage().nbytes() == one.nbytes else one.clone() for one in new)
        else:
            self.held = tuple(torch.cat(pair, dim=2) for pair in zip(self.held, new))
        return _Rows.of(self, self.key_dim), _Rows.of(self, self.value_dim)

    def get_seq_length(self):
        return self.tokens

    def get_mask_sizes(self, query_length):
        if isinstance(query_length, int) and query_length < 1:  # generate left out what the cache has, and nothing stayed
            raise ValueError(f"mdkv: the call has no token after the {self.tokens} of the cache; generate takes ids of the whole text")
        return self.tokens + (query_length if isinstance(query_length, int) else query_length.shape[0]), 0

    def get_max_length(self):
        return -1

    get_max_cache_shape = get_max_length  # before 5.23

    def crop(self, tokens_to_remove):
        self.truncate(self.tokens - self.to_remove(tokens_to_remove))

    def reorder_cache(self, beam_idx):
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats):
        self.batch_select_indices(torch.arange(self.batch, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices):
        """Sequence b becomes a copy of the sequence indices[b]."""
        if self.tokens and not self.packed:
            raise NotImplementedError("mdkv: sequences cannot be reordered before their prompt's end")
        if self.packed:
            order = torch.arange(self.batch, device="cpu")[indices.cpu()].tolist()
            self.packed = [self.packed[i].copy() if i in order[:b] else self.packed[i] for b, i in enumerate(order)]
            self.limits, self.pads = [self.limits[i] for i in order], [self.pads[i] for i in order]
            self.token_rungs = [copy.deepcopy(self.token_rungs[i]) for i in order if self.token_rungs]
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
        if tokens_to_remove > 0 and not CROPS_TO_LENGTH:
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

    def attend(self, *arguments):
        """Attention of queries [B, H*G, n, D] of the tokens that `update` was given last: [B, n, H*G, Dv]."""
        try:
            with device.current(self.device):
                return self._attend(*arguments)
        except BaseException:
            self.cache._broken = True
            raise

    def _attend(self, module, query, mask, scaling, dropout, others):
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
        query = query.to(self.dtype) if torch.is_autocast_enabled(self.device.type) else query
        if query.dtype != self.dtype:
            unserved.append(f"queries in {query.dtype} on keys in {self.dtype}")
        pads = self._padding(mask, query.shape[2]) if not unserved else None
        if pads is None:
            unserved.append("an attention mask that is not causal with padding on the left of the prompt"
                            + ("; prompt_tokens says where it ends if several calls read it" if self.packed else ""))
        if unserved:
            raise NotImplementedError("mdkv: not served: " + unserved[0])
        logits = others.get("s_aux")
        self.sinks = {} if logits is None else {"sink_logits": logits.detach().float().contiguous()}
        if self.packed:
            return self._attend_packed(query)
        self.pads = pads
        preset = self.cache.preset.replace(scale=scaling if scaling is not None else self.key_dim ** -0.5)
        if self.cache.while_reading:
            return self._attend_reading(module, query, preset)
        output, _ = _sdpa(module, query, *self.held, mask, dropout=dropout, scaling=scaling, **others)
        self._read_prompt(module, query, preset)
        return output

    def _padding(self, mask, new):
        """Number of hidden first tokens of each sequence by a mask [B, 1, new, N], True where a token is seen, or None. Its
        last query must see everything else, and after the prompt all others what precedes them; otherwise None."""
        if self is self.cache.compressed[0]:  # a mask's numbers may be others in the next call
            self.cache._checked = None, None, []
        known, version, pads = self.cache._checked
        if mask is None:
            pads = [0] * self.batch
        elif known is None or known() is not mask or version != _version(mask):  # one mask serves all layers of a call
            if mask.shape[1:] != (1, new, self.tokens):
                return None
            seen = mask if mask.dtype == torch.bool else mask == 0
            found = self.tokens - seen[:, 0, -1].sum(-1)
            places = torch.arange(self.tokens, device=mask.device)
            right = places >= found[:, None, None]
            rows = new if self.packed else 1
            right = right & (places <= (self.tokens - rows + places[:rows])[:, None])
            biased = mask.dtype != torch.bool and not ((mask == 0) | (mask < -1e4)).all()
            if biased or not torch.equal(seen[:, 0, -rows:], right):
                return None
            pads = found.expand(self.batch).tolist()
            self.cache._checked = weakref.ref(mask), _version(mask), pads
        return None if self.packed and pads != self.pads else pads

    def _attend_packed(self, query):
        tail, preset = self.cache.tail, self.cache.preset
        output = query.new_empty((self.batch, query.shape[2], query.shape[1], self.value_dim))
        for layer, rows, to in zip(self.packed, query, output):
            layer.attend(rows, to.transpose(0, 1), **self.sinks)
        if tail is not None:
            self.queries = self._joined(query)[:, :, -preset.queries:].clone()
            if self.packed[0].appended > tail:
                self._fold(preset)
        return output

    def _attend_reading(self, module, query, preset):
        """Attention of what one more call reads of the prompt, by the readers, which keep its tokens."""
        rows, self.given = (query, *self.given), None
        later = self.tokens - (self.cache.prompt_tokens or self.tokens)
        self._find_rope(module, later >= 0)
        output = query.new_zeros((self.batch, query.shape[2], query.shape[1], self.value_dim))
        self.group.attend(self, preset, rows, later, output)
        if later > 0:
            self.later = [one[:, :, -later:].clone() for one in rows]
            query = query[:, :, :-later]
            self.tokens -= later
        if self.cache.tail is not None:
            self.queries = self._joined(query)[:, :, -preset.queries:].clone()
        self.group.end_call(later >= 0)
        return output

    def _fold(self, preset):
        """Folds the tails of all sequences."""
        all_rungs = self.token_rungs or [None] * self.batch
        for layer, rows, limit, rungs in zip(self.packed, self.queries, self.limits, all_rungs):
            fold = layer.recompress if rungs is None else functools.partial(rungs.fold, layer)
            rows = rows[:, -min(rows.shape[1], layer.window + layer.appended):]
            fold(rows, mdkv.Budget.bytes(limit), preset, **self.sinks)
        if self is self.cache.compressed[-1]:
            self.cache.backends.release_scratch()
        if self.token_rungs:
            self.cache.rungs[self.cache.compressed.index(self)] = [one.rungs for one in self.token_rungs]

    def _joined(self, query):
        """The remembered queries and these, [B, H*G, n, D]."""
        return query if self.queries is None else torch.cat([self.queries, query], dim=2)

    def _read_prompt(self, module, query, preset):
        """Replays what one more call has read of the prompt, and finishes the layer after the last call."""
        group, later = self.group, self.tokens - (self.cache.prompt_tokens or self.tokens)
        if later > 0:  # tokens after the prompt in its last call, e.g. drafts
            self.later = [one[:, :, -later:].clone() for one in (query, *self.held)]
            query, *self.held = (one[:, :, :-later] for one in (query, *self.held))
            self.tokens -= later
        replays = preset.replayed and self.cache.losses is None
        if replays:
            self._find_rope(module, later >= 0)
        if not group.prompts and (self.rope is not None or not replays):
            group.begin(preset, self.rope, query, *self.held, self.pads)
        self.replayed = self.replayed or [0] * self.batch
        queries = self._joined(query)
        unread = [0] * self.batch
        for b, length in enumerate(self.lengths() if replays else []):
            unread[b], chunk = length - self.replayed[b], preset.replayed["chunk"]
            for count in (unread[b] // chunk * chunk, unread[b] % chunk if later >= 0 else 0):  # the rest is read at the end
                rows = [one[b, :, one.shape[2] - unread[b] :][:, :count] for one in (queries, *self.held)]
                if count > 0 and group.prompts:
                    group.prompts[b].read_chunk(group.layers.index(self), length - unread[b], *rows, **self.sinks)
                unread[b] -= count
            self.replayed[b] = length - unread[b]
        self.queries = queries[:, :, -max(preset.queries, *unread):].clone()
        if later >= 0:
            self.scale = preset.scale
            group.finish(self)

    def _find_rope(self, module, last):
        """Measures the encoding as soon as a sequence has two tokens; all layers of a group have the same."""
        if self.rope is not None:
            return
        self.rope = self.cache.rope or self._measured_rope(module, last)
        other = self.rope and next((one for one in self.group.layers if one.rope is not None and one.rope != self.rope), None)
        if other is not None:
            raise NotImplementedError(f"mdkv: layers {other.index} and {self.index} have different rotary encodings" + rotary.HINT)

    def _measured_rope(self, module, last):
        """Arguments of `mdkv.Rope`; `last`: this call reads the prompt's end. A single token has no other position."""
        if last and max(self.lengths()) < 2:
            return {"frequencies": [0.0] * (self.key_dim // 2)}
        return self.measurement.rope(self.cache.config, module, self.key_dim, self.pads, self.tokens)

    def rows(self):
        """For each sequence its last queries, its keys, values, and the queries' log-sum-exps, which are found once."""
        for b, length in enumerate(self.lengths()):
            queries, keys, values = (one[b, :, max(one.shape[2] - length, 0):] for one in (self.queries, *self.held))
            if len(self.lse) <= b:
                found = self.cache.backends.log_sum_exps(queries, keys, self.scale)
                self.lse.append(torch.logaddexp(found, self.sinks["sink_logits"][:, None]) if self.sinks else found)
            yield queries, keys, values, self.lse[b]

    def take(self, packed, rungs=()):
        """Puts the packed layers of all sequences in the place of keys and values; rungs: of their tokens, if folds keep them."""
        self.packed, self.limits, self.held, self.lse = packed, [one.bytes["arena"] for one in packed], None, []
        tail, (query, *new) = self.cache.tail, self.later or [None]
        for layer in packed if tail else []:
            layer.reserve(tail + 1)
        self.token_rungs = [TokenRungs(*one) for one in zip(packed, rungs)] if tail else []
        self.later, self.queries = [], self.queries if tail else None
        if new:
            for layer, keys, values in zip(packed, *new):
                layer.append(keys, values)
            if tail:
                self.queries = self._joined(query)[:, :, -self.queries.shape[2]:].clone()
            self.tokens += query.shape[2]


class _Rows(torch.Tensor):
    """Keys or values on their way from `CacheLayer.update` to the attention "mdkv". They have a shape and refuse everything
    else, because another attention would see tokens that are not there."""

    _ALLOWED = {getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")} | {
        torch.Tensor.size, torch.Tensor.dim}

    @staticmethod
    def of(layer, width):
        rows = torch.empty(1, dtype=layer.dtype, device=layer.device).expand(layer.batch, layer.heads, layer.tokens, width)
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


def _version(tensor):
    """Changes when torch writes to the tensor, unless it was made in inference mode."""
    return None if tensor.is_inference() else tensor._version


def _sdpa(module, query, key, value, mask, s_aux=None, scaling=None, **kwargs):
    """sdpa, which knows no sink logits: they are one more key, whose value is zero, and one more number of queries and keys."""
    if s_aux is not None:
        scaling, seen = query.shape[-1] ** -0.5 if scaling is None else scaling, key.shape[-2]
        mask = _causal(query, seen) if mask is None and query.shape[-2] > 1 else mask
        logits = (s_aux.to(query) / scaling).reshape(1, -1, 1, 1).expand(*query.shape[:3], 1)
        query, key = torch.cat([query, logits], -1), torch.nn.functional.pad(key, (0, 1, 0, 1))
        key[:, :, seen, -1], value = 1, torch.nn.functional.pad(value, (0, 0, 0, 1))
        if mask is not None:
            mask = torch.nn.functional.pad(mask[..., :seen], (0, 1), value=True if mask.dtype == torch.bool else 0.0)
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]  # looked up late, because packages replace it
    return attend(module, query, key, value, mask, scaling=scaling, **kwargs)


def _causal(query, seen):
    """The mask that sdpa has for queries [B, H*G, n, D] of the last n tokens if it is given none."""
    return torch.ones(query.shape[-2], seen, dtype=torch.bool).tril(seen - query.shape[-2])[None, None].to(query.device)


def _sum(dictionaries):
    return {name: sum(one[name] for one in dictionaries) for name in (dictionaries or [{}])[0]}


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
