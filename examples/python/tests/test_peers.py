"""test_peers.py: kvpress computes queries, keys and window attention from hidden states by itself; the prompt that
mdkv.transformers captures, and mdkv's log-sum-exps, must say the same. mdkv's policies of other systems are C++ programs
(examples/runner) without bindings, so kvpress' scores are not compared with theirs here."""
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed")
from transformers import DynamicCache

import mdkv.transformers
from mdkv.transformers import CACHE_ARGUMENT

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from test_transformers import small, text

TOKENS, WINDOW = 150, 64


class Captured(mdkv.transformers.Cache):
    """A cache that keeps what each layer's prompt is scored by."""

    def __init__(self, config):
        super().__init__(config, budget=0.5, preset="by_window")
        self.seen = {}
        for layer in self.compressed:
            layer.rows = lambda layer=layer, rows=layer.rows: self.seen.setdefault(layer.index, list(rows()))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_window_attention_is_snapkvs(kind):
    model, ids = small(kind), text(TOKENS)
    theirs = {}

    def note(module, args, kwargs, output):
        keys = kwargs[CACHE_ARGUMENT].layers[module.layer_idx].keys
        theirs[module.layer_idx] = kvpress.SnapKVPress.compute_window_attention(
            module, kwargs["hidden_states"], keys, WINDOW, kwargs["position_embeddings"])

    hooks = [layer.self_attn.register_forward_hook(note, with_kwargs=True) for layer in model.model.layers]
    with torch.no_grad():
        model(ids, **{CACHE_ARGUMENT: DynamicCache(config=model.config)})
        for hook in hooks:
            hook.remove()
        cache = Captured(model.config)
        model(ids, **{CACHE_ARGUMENT: cache})
    for index, expected in theirs.items():
        [(queries, keys, values, lse)] = cache.seen[index]
        assert queries.shape[1] == WINDOW and keys.shape[1] == TOKENS == values.shape[1]
        logits = queries @ keys.repeat_interleave(2, dim=0).transpose(1, 2) * 16**-0.5
        ours = torch.exp(logits - torch.as_tensor(lse)[..., None])[..., : TOKENS - WINDOW]
        torch.testing.assert_close(ours, expected[0], rtol=1e-4, atol=1e-6)
