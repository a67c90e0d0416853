"""every_decoder.py: does mdkv.transformers serve every kind of decoder that transformers has, or say why not?

    python every_decoder.py                    # all kinds of AutoModelForCausalLM, in a table
    python every_decoder.py llama gpt2         # these kinds

A model of each kind is made small, with random weights, in a process of its own. At a budget of 1 everything stays as it is, so that
logits of a prompt's later calls and generated tokens must be those of DynamicCache (`by_window`, `best`). The rotary encoding that
`best` measured must turn the keys of one token at position 0 into its keys at position 5, where the model takes positions. A kind is

    same       with both presets; the rotation is in the table
    by_window  the same with by_window; best refuses it with the reason in the table
    refused    with a NotImplementedError, whose text is in the table
    not tried  no small model could be made of it, or DynamicCache fails with it, or its logits do not depend on the cache
    WRONG      everything else; the exit status is 1 then
"""
import argparse
import inspect
import multiprocessing
import os
import re
import sys
import time
import warnings

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import mdkv.transformers

PROMPT, LATER, POSITION, VOCABULARY = 40, (1, 3, 1), 5, 99
MOST_PARAMETERS = 200_000_000

#: sizes by the names that they have in configurations
SIZES = {
    64: "hidden_size n_embd d_model dim embed_dim word_embed_proj_dim embedding_size intermediate_size ffn_dim decoder_ffn_dim n_inner "
        "encoder_ffn_dim d_ff ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp dff lru_width "
        "feed_forward_size mlp_hidden_size block_ff_dim",
    8: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers rotary_dim qk_rope_head_dim qk_nope_head_dim",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads num_experts num_local_experts "
       "n_routed_experts moe_num_experts global_num_attention_heads index_n_heads mamba_n_heads",
    2: "num_key_value_heads num_kv_heads kv_n_heads num_experts_per_tok moe_topk moe_top_k top_k_experts encoder_layers "
       "num_encoder_layers num_global_key_value_heads experts_per_token",
    16: "head_dim attention_head_dim kv_channels global_head_dim v_head_dim q_lora_rank kv_lora_rank index_head_dim mamba_d_state mamba_chunk_size",
    512: "max_position_embeddings n_positions n_ctx max_seq_len",
    VOCABULARY: "vocab_size text_vocab_size vocab_size_per_layer_input",
    1: "n_group topk_group bos_token_id n_shared_experts",
    0: "pad_token_id",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()} | {"eos_token_id": None, "is_decoder": True}

#: changes of SMALL that are tried in turn, until DynamicCache works; LEFT: the configuration's own
LEFT = object()
CHANGES = ({}, {"head_dim": LEFT}, {"num_key_value_heads": 4}, {"num_key_value_heads": 4, "head_dim": 8},
           {"head_dim": LEFT, "num_key_value_heads": LEFT}, {"hidden_size": LEFT, "head_dim": LEFT}, {"intermediate_size": LEFT})

#: what else a kind needs
INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64, "indexer_compress_ratio": 4,
           "ple_embed_dim": 16, "ngram_vocab_size_base": 100, "split_ngram_parts": 1, "hc_lowrank": 16}
HALVES = {"rope_type": "default", "rope_theta": 10000.0}
MORE = {
    "bamba": {"attn_layer_indices": [1, 5]},
    "blt": {"encoder_hash_byte_group_vocab": 500},
    "cohere_compass_text": {"rope_parameters": {"full_attention": HALVES, "sliding_attention": HALVES}},
    "dbrx": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "dory": {"n_input_layers": 2, "n_output_layers": 2},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 5},
    "gpt_neo": {"attention_types": [[["global", "local"], 4]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 4},
    "mamba2": {"expand": 1},
    "prophetnet": {"num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4},
    "qwen4_exp": INDEXER,
    "qwen4_exp_text": INDEXER,
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 4},
    "zaya": {"num_experts_per_tok": 1},
}

#: further models of some kinds
SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
OTHERS = {
    "exaone4, all layers full": {"sliding_window": None, "layer_types": ["full_attention"] * 8},
    "llama, linear": {"rope_parameters": {**SCALED, "rope_type": "linear"}},
    "llama, llama3": {"rope_parameters": {**SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    "llama, yarn": {"rope_parameters": {**SCALED, "rope_type": "yarn"}},
    "llama, dynamic": {"rope_parameters": {**SCALED, "rope_type": "dynamic"}},
    "mistral, no windows": {"sliding_window": None},
    "phi, half of a head": {"rope_parameters": {**HALVES, "partial_rotary_factor": 0.5}},
    "smollm3, all layers rotated": {"no_rope_layers": [1] * 8},
    "smollm3, no layer rotated": {"no_rope_layers": [0] * 8},
}
KINDS = sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *OTHERS])


def smaller(config, changes):
    """Arguments that make a configuration small, and those within it."""
    known = set(config.to_dict()) | set(inspect.signature(type(config).__init__).parameters) | set(config.attribute_map)
    found = {name: size for name, size in {**SMALL, **changes}.items() if size is not LEFT and (name in known or name not in SMALL)}
    inner = {name: getattr(config, name, None) for name in config.sub_configs}
    inner = {name: smaller(one, changes) for name, one in inner.items() if isinstance(one, transformers.PreTrainedConfig)}
    return {**found, **inner}


def small(kind, changes):
    """A small model with random weights, whose attention is far from even."""
    model_class = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(kind))]
    make = lambda: model_class.config_class(**smaller(model_class.config_class(), changes))
    with torch.device("meta"):
        count = sum(one.numel() for one in model_class._from_config(make()).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters")
    torch.manual_seed(0)
    model, generator = model_class._from_config(make()).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                noise = torch.randn(weight.shape, generator=generator)
                if isinstance(module, (torch.nn.Linear, torch.nn.Embedding, transformers.pytorch_utils.Conv1D)) or name.endswith("proj"):
                    weight.copy_(noise * (1.5 * weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.3))
                elif "Norm" in type(module).__name__:
                    weight.add_(0.3 * noise)
    return model


def logits(model, cache, ids):
    """Logits of the calls after the prompt, and of the prompt's last token."""
    argument, found, first = {mdkv.transformers.CACHE_ARGUMENT: cache}, [], 0
    for count in (PROMPT, *LATER):
        found.append(model(input_ids=ids[:, first : first + count], use_cache=True, **argument).logits[:, -count:])
        first += count
    return torch.cat([found[0][:, -1:], *found[1:]], dim=1).float()


def generated(model, cache, ids, mask):
    options = {mdkv.transformers.CACHE_ARGUMENT: cache, "max_new_tokens": 6, "do_sample": False}
    return model.generate(ids, attention_mask=mask, **options)


def tried(call):
    """The result of a call, or its exception."""
    try:
        return call()
    except Exception as problem:
        return problem


def described(problem):
    return re.sub(r"\s+", " ", f"{type(problem).__name__}: {problem}")[:160]


def reason(problem):
    """The part of a refusal's text that says why."""
    return re.sub(r"^mdkv: (not served: )?|; pass rope=.*|; model.set_attn.*|(, which only its attention can read)?\. Make the cache.*", "",
                  str(problem))


def turned(keys, rope, position):
    """Keys [..., D] rotated by a position, for arguments of `mdkv.Rope`."""
    given = rope.get("frequencies")
    count = 2 * len(given) if given is not None else rope["rotating"]
    frequencies = torch.tensor(given if given is not None else [rope["base"] ** (-2 * i / count) for i in range(count // 2)]).double()
    places = torch.arange(count).reshape(-1, 2).T if rope.get("pairs") == "neighbours" else torch.arange(count).reshape(2, -1)
    found, (one, other) = keys.double().clone(), keys.double()[..., places].unbind(-2)
    cos, sin = (frequencies * position).cos(), (frequencies * position).sin()
    found[..., places[0]], found[..., places[1]] = one * cos - other * sin, other * cos + one * sin
    return found


def rotation(model, cache):
    """What `best` measured in words, once keys of one token at two positions agree with it; otherwise an AssertionError."""
    ropes = {one.index: one.rope for one in cache.compressed}
    rope = next(iter(ropes.values()))
    count = 2 * len(rope["frequencies"]) if "frequencies" in rope else rope["rotating"]
    words = f"{rope.get('pairs')}, {count} of {cache.compressed[0].key_dim}, " + (
        "given frequencies" if "frequencies" in rope else f"base {rope['base']:g}")
    if not any(rope.get("frequencies", [1])):
        words = "none"
    seen = []
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return words + "; positions are not an argument"
    for position in (0, POSITION):
        plain = DynamicCache(config=model.config)
        out = model(input_ids=torch.tensor([[7]]), position_ids=torch.tensor([[position]]), use_cache=True, output_hidden_states=True,
                    **{mdkv.transformers.CACHE_ARGUMENT: plain})
        seen.append(({index: plain.layers[index].keys for index in ropes}, out.hidden_states[0] if out.hidden_states else None))
    (before, start), (after, end) = seen
    if start is not None and not torch.equal(start, end):
        return words + "; positions are added to the input"
    for index, keys in before.items():
        off = (turned(keys, ropes[index], POSITION) - after[index].double()).norm() / after[index].double().norm()
        assert off < 1e-4, f"layer {index}: keys are {off:.1e} off the rotation {words}"
    return words


def model_of(kind, ids):
    """A small model of a kind, and its logits with DynamicCache, or the exception of the first attempt."""
    first = None
    for changes in CHANGES:
        try:
            model = small(kind.split(",")[0], {**changes, **MORE.get(kind, OTHERS.get(kind, {}))})
            full = logits(model, DynamicCache(config=model.config), ids)
            return model, full
        except Exception as problem:
            first = first or problem
    return first, None


@torch.no_grad()
def verdict(kind):
    """(verdict, words) of a kind."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (1, PROMPT + sum(LATER)), generator=generator)
    other = ids.clone()
    other[:, : PROMPT // 2] = torch.randint(3, VOCABULARY, (1, PROMPT // 2), generator=generator)
    model, full = model_of(kind, ids)
    if full is None:
        return "not tried", "no small model works with DynamicCache: " + described(model)
    config = model.config.get_text_config(decoder=True)
    own = config._attn_implementation
    batch = torch.randint(3, VOCABULARY, (2, 12), generator=generator)
    mask = torch.ones_like(batch)
    batch[1, :5], mask[1, :5] = 0, 0

    scale = float(full.std())
    if not scale > 0:
        return "not tried", "logits with DynamicCache are not finite, or all the same"
    tokens = tried(lambda: generated(model, DynamicCache(config=model.config), batch, mask))
    if (logits(model, DynamicCache(config=model.config), other) - full)[:, 1:].abs().max() < 0.02 * scale:
        return "not tried", "logits do not depend on the cache"

    found = []
    for preset in ("by_window", "best"):
        config._attn_implementation = own
        cache = tried(lambda: mdkv.transformers.Cache(model.config, budget=1.0, preset=preset))
        ours = cache if isinstance(cache, Exception) else tried(lambda: logits(model, cache, ids))
        if isinstance(ours, NotImplementedError) and "mdkv: " in str(ours):
            found.append(("refused", reason(ours)))
        elif isinstance(ours, Exception):
            return "WRONG", f"{preset}: " + described(ours)
        elif (ours - full).abs().max() > 2e-3 * scale:
            return "WRONG", f"{preset}: logits are off by {float((ours - full).abs().max()) / scale:.1e} of their spread"
        else:
            words = tried(lambda: rotation(model, cache) if preset == "best" else "")
            if isinstance(words, Exception):
                return "WRONG", "rotation: " + described(words)
            again = tried(lambda: generated(model, mdkv.transformers.Cache(model.config, 1.0, preset), batch, mask))
            note = ""
            if isinstance(tokens, Exception):
                note = "; generate: " + described(tokens)
            elif isinstance(again, NotImplementedError) and "mdkv: " in str(again):
                note = "; generate with padding refused: " + reason(again)
            elif isinstance(again, Exception) or not torch.equal(again, tokens):
                return "WRONG", f"{preset}: generate: " + (described(again) if isinstance(again, Exception) else "other tokens")
            found.append(("same", f"rotation: {words}" + note * (note != found[0][1]) if words else note))
    after = tried(lambda: logits(model, DynamicCache(config=model.config), ids))
    if isinstance(after, Exception) or (after - full).abs().max() > 2e-3 * scale:
        return "WRONG", "DynamicCache afterwards: " + (described(after) if isinstance(after, Exception) else "other logits")
    (window, first), (best, second) = found
    if window == "refused":
        return ("refused", first) if best == "refused" else ("WRONG", f"by_window is refused ({first}), best is not")
    return ("same" if best == "same" else "by_window"), second + first


def in_a_process(kind, seconds):
    """`verdict` in a forked process, which may crash or take too long."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(kind, writer))
    process.start()
    writer.close()
    try:
        if not reader.poll(seconds):
            return "not tried", f"takes more than {seconds} seconds"
        return reader.recv()
    except EOFError:
        process.join()
        return "WRONG", f"the process ended by signal or status {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _send(kind, writer):
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)
    torch.set_num_threads(1)
    try:
        writer.send(verdict(kind))
    except Exception as problem:
        writer.send(("WRONG", described(problem)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=KINDS, help="kinds of models, by default all")
    parser.add_argument("--seconds", type=int, default=120, help="for one kind (120)")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    start, counts = time.time(), {}
    print("| kind | | |\n|:--|:--|:--|")
    for kind in arguments.kinds:
        result, words = in_a_process(kind, arguments.seconds)
        counts[result] = counts.get(result, 0) + 1
        print(f"| {kind} | {result} | {words.replace('|', '/')} |", flush=True)
    print(f"\n{len(arguments.kinds)} kinds of transformers {transformers.__version__}, torch {torch.__version__}: "
          + ", ".join(f"{counts[name]} {name}" for name in sorted(counts)) + f" ({time.time() - start:.0f} s)")
    return 1 if counts.get("WRONG") else 0


if __name__ == "__main__":
    sys.exit(main())
