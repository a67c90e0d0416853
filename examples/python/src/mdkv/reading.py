"""reading.py: the layers of a cache whose prompt is compressed while it is read."""
import mdkv

CHUNK = 256  #: tokens of a chunk, with which the presets were measured


class ReadingGroup:
    """All compressed layers of a `Cache`, while their prompt is read: an `mdkv.Reader` of each sequence. A call of the model is a
    chunk of it."""

    def __init__(self, cache, layers):
        self.cache, self.layers, self.waiting = cache, layers, len(layers)  # waiting: layers that this call has not reached
        self.readers, self.chunk = [], 0  # of each sequence, or None before its first token; most tokens of a call
        self.firsts, self.single = [], []  # each layer's rows of one call's last token, and the sequences that had no other before it

    def attend(self, layer, preset, rows, later, output):
        """Attention of a call's rows in a layer: queries [B, H*G, n, D], keys [B, H, n, D], values [B, H, n, Dv], output
        [B, n, H*G, Dv]. later: tokens of the prompt that the next calls read, as a negative number, or the number of the n
        tokens that come after the prompt, which the readers do not keep. Before two tokens of a sequence the layer's encoding is
        not known, and rows of a single one are kept here."""
        if layer.rope is None:
            self.single = [b for b, length in enumerate(layer.lengths()) if length == 1]
            self.firsts += [[one[:, :, -1:].clone() for one in rows]] if self.single else []
            for b in self.single:
                values = rows[2][b, :, -1].repeat_interleave(output.shape[2] // layer.heads, 0)
                output[b, -1] = values * self._share(layer, preset.scale, *(one[b, :, -1] for one in rows[:2]))
            return
        new, place, last, later = rows[0].shape[2], self.layers.index(layer), later >= 0, max(later, 0)
        if not self.readers:
            self.readers, most = [None] * layer.batch, self.cache.prompt_tokens or new
            self.chunk = max(new, min(max(self.cache.while_reading, CHUNK), most))
        if new - later > self.chunk:
            raise ValueError(f"mdkv: a call reads {new - later} tokens of the prompt, and the cache has room for {self.chunk}; "
                             f"generate(prefill_chunk_size={self.chunk}) reads fewer, Cache(while_reading={new - later}) takes more")
        for b, length in enumerate(layer.lengths()):
            reader = self.readers[b]
            before = reader.tokens if reader else int(b in self.single)
            unread = length - before
            if unread > new or before and unread < new:
                raise NotImplementedError("mdkv: not served: a sequence whose padding changes while its prompt is read")
            if reader is None and (unread > 0 or last):
                reader = self.readers[b] = self._reader(layer, b, preset, rows[0].shape[1] // layer.heads)
            prompt = max(new - later, new - unread)  # the first row after it
            for first, end in ((new - unread, prompt), (prompt, new)):
                if first < end:
                    part = (one[b, :, first:end] for one in rows)
                    reader.attend(place, *part, output[b, first:end].transpose(0, 1), ahead=first == prompt, **layer.sinks)

    def _share(self, layer, scale, query, key):
        """What sink logits leave of a single token's attention: 1 without them, otherwise [H*G, 1]; query [H*G, D], key [H, D]."""
        if not layer.sinks:
            return 1
        logits = (query.unflatten(0, (layer.heads, -1)) * key[:, None]).float().sum(-1).flatten() * scale
        return (logits - layer.sinks["sink_logits"]).sigmoid()[:, None].to(query)

    def end_call(self, last):
        """Counts a layer that has read its rows; after the last one, ends the chunk or, in the prompt's last call, the prompt."""
        self.waiting -= 1
        if self.waiting > 0:
            return
        self.waiting = len(self.layers)
        self.firsts, self.single = ([], []) if self.readers else (self.firsts, self.single)
        if not last:
            for reader in self.readers:
                if reader is not None:
                    reader.end_chunk()
            return
        layers = []
        while self.readers:  # the state of each one is freed before the next one ends
            layers.append(self.readers.pop(0).finish()[0])
        for place, one in enumerate(self.layers):
            one.take([of_all[place] for of_all in layers])

    def bytes(self):
        """Bytes that the readers hold, by the names of `mdkv.Reader.bytes`."""
        found = [reader.bytes for reader in self.readers if reader is not None]
        return {name: sum(one[name] for one in found) for name in ("arena", "tail", "directory", "losses", "state", "total")}

    def _reader(self, layer, b, preset, group):
        """A sequence's reader, which has read its first token if an earlier call had that alone."""
        rope = mdkv.Rope(**layer.rope) if isinstance(layer.rope, dict) else layer.rope
        tokens = max((self.cache.prompt_tokens or layer.tokens) - layer.pads[b], 0)
        reader = mdkv.Reader(preset, layers=len(self.layers), heads=layer.heads, group=group, key_dim=layer.key_dim,
                             value_dim=layer.value_dim, tokens=tokens, dtype=str(layer.dtype).removeprefix("torch."), rope=rope,
                             backend=self.cache.backends[layer.device], limit=self.cache._limit(tokens), chunk=max(min(self.chunk, tokens), 1))
        if b in self.single:
            for place, rows in enumerate(self.firsts):
                query, keys, values = (one[b] for one in rows)
                to, sinks = query.new_empty((query.shape[0], 1, values.shape[2])), self.layers[place].sinks
                reader.attend(place, query, keys, values, to, **sinks)
            reader.end_chunk()
        return reader
