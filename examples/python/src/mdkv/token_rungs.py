"""token_rungs.py: the rung of every token of a layer, through folds."""
import numpy as np


class TokenRungs:
    """The rungs of an `mdkv.Layer` of H heads that was packed from a prompt of N tokens, the last W of which are the window.

    rungs   uint8 [H, N - W], the rung of each token before the window, an index of layer.ratios; N grows with folds
    """

    def __init__(self, layer, rungs):
        self.rungs, self._window = rungs.copy(), layer.compressed_tokens - rungs.shape[1]
        names = list(layer.ratios)
        self._order = sorted((r for r in range(len(names)) if names[r] != "drop"), key=lambda r: names[r] == "full")
        window = np.arange(rungs.shape[1], layer.compressed_tokens)
        self._places = [np.concatenate([*(np.flatnonzero(head == r) for r in self._order), window]) for head in rungs]

    def fold(self, layer, *arguments, **options):
        """Calls layer.recompress(*arguments, **options), and follows each token to its new rung."""
        names, tail = list(layer.ratios), np.arange(layer.compressed_tokens, layer.tokens)
        sources = np.empty((layer.heads, layer.tokens), np.int32)
        if layer.device == "cuda":
            import torch
            sources = torch.empty(sources.shape, dtype=torch.int32, device=arguments[0].device)
        layer.recompress(*arguments, **options, sources=sources)
        sources = sources if layer.device == "cpu" else sources.cpu().numpy()
        self._window = layer.window
        self.rungs = np.zeros((layer.heads, layer.tokens - self._window), np.uint8)
        for h, counts in enumerate(layer.rungs_of_heads):
            places = np.concatenate([self._places[h], tail])[sources[h, sources[h] >= 0]]  # in the order of the cache: by rung
            before = places[: places.size - self._window]
            own = [counts[names[r]] - (self._window if names[r] == "full" else 0) for r in self._order]
            self.rungs[h, before] = np.repeat(np.array(self._order, np.uint8), own)
            self._places[h] = places
