"""test_storing.py: layers and caches in files: the same bits afterwards, from the file's own pages, in other processes; files
of others."""
import copy
import hashlib
import json
import os
import pathlib
import resource
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

import mdkv

FOLDERS = [str(pathlib.Path(__file__).parents[i]) for i in range(2)]
sys.path[:0] = FOLDERS
from test_mdkv import D, G, H, N, off, prompt_rows, random  # noqa: F401  (random is a fixture)

PRESETS = ["best", "any_question", "by_window", "paper", "evict"]


def attended(layer, queries):
    output = np.empty(queries.shape, queries.dtype)
    layer.attend(queries, output)
    return output


def same(one, other):
    """The same bits; on a device the same up to rounding: a tail's room, which a loaded one has not, changes the order of sums."""
    return np.array_equal(one, other) if os.environ["MDKV_TEST_PLACE"] == "cpu" else off(one, other) < 2e-3


def layers_of(random, preset="best", dtype=np.float16, count=2, share=0.2):
    """Layers with tails, and rows of further tokens."""
    made = []
    for _ in range(count):
        rows = prompt_rows(random, dtype)
        layer, _ = mdkv.compress(*rows, share, mdkv.preset(preset), rope=mdkv.Rope())
        layer.append(rows[1][:, :21], rows[2][:, :21])
        made.append(layer)
    return made, prompt_rows(random, dtype, 150)


def mapping(path):
    """KiB of a mapped file in this process by name, such as Rss and Private_Dirty."""
    sizes, inside = {}, False
    for line in open("/proc/self/smaps"):
        name = line.split()[0]
        if not name.endswith(":"):
            inside = line.rstrip().endswith(str(path))
        elif inside and line.endswith("kB\n"):
            sizes[name[:-1]] = sizes.get(name[:-1], 0) + int(line.split()[1])
    return sizes


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_stored_layer_goes_on_with_the_same_bits(random, tmp_path, preset, dtype):
    layers, (queries, keys, values) = layers_of(random, preset, dtype)
    mdkv.save(tmp_path / "a", layers, identity="m", tokens=N + 21, attachment=b"mine")
    stored = mdkv.load(tmp_path / "a", identity="m")
    assert (len(stored), stored.heads, stored.tokens, stored.attachment) == (2, H, N + 21, b"mine")
    assert (stored.first_layer, stored.model_layers, stored.first_head, stored.model_heads) == (0, 2, 0, H)
    for i, layer in enumerate(layers):
        loaded = stored.layer(i)
        for name in ("dtype", "heads", "key_dim", "value_dim", "tokens", "appended", "compressed_tokens", "stand_ins", "rungs"):
            assert getattr(loaded, name) == getattr(layer, name), name
        assert list(loaded.ratios) == list(layer.ratios) and loaded.bytes["arena"] == layer.bytes["arena"]
        assert same(attended(loaded, queries[:, :3]), attended(layer, queries[:, :3]))
        part = stored.layer(i, 1, 1)
        assert part.heads == 1
        assert same(attended(part, queries[G:, :3]), attended(layer, queries[:, :3])[G:])
        other = loaded.copy()
        for one in (layer, loaded):
            one.append(keys[:, :100], values[:, :100])
            one.truncate(60)
        assert other.appended == 21 and same(attended(loaded, queries[:, :30]), attended(layer, queries[:, :30]))
        if preset != "paper":
            folds = [one.recompress(queries[:, :20], mdkv.Budget.bytes(60000), mdkv.preset(preset)) for one in (layer, loaded)]
            assert folds[0] == folds[1] and loaded.tokens == layer.tokens == N + 60
            assert same(attended(loaded.copy(), queries[:, :1]), attended(layer, queries[:, :1]))
    del stored
    assert other.heads == H and attended(other, queries[:, :3]).any()  # keeps the file


def test_attention_reads_the_files_pages(random, tmp_path):
    path = tmp_path / "a"
    layers, (queries, _, _) = layers_of(random, share=0.9, count=8)
    mdkv.save(path, layers)
    expected = [attended(one, queries[:, :1]) for one in layers]
    stored = mdkv.load(path, verify="bounds")
    loaded = [stored.layer(i) for i in range(8)]
    opened = mapping(path)
    assert opened["Rss"] < opened["Size"] / 2
    path.unlink()
    results = [attended(one, queries[:, :1]) for one in loaded]
    read = mapping(f"{path} (deleted)")
    assert all(map(same, results, expected))
    assert read["Rss"] > 0.9 * read["Size"] and read["Private_Dirty"] == 0
    del stored, loaded
    assert mapping(f"{path} (deleted)") == {}


def test_bytes_in_memory(random, tmp_path):
    layers, (queries, _, _) = layers_of(random)
    data = mdkv.write(layers, identity="s")
    mdkv.save(tmp_path / "a", layers, identity="s")
    assert data.dtype == np.uint8 and data.tobytes() == (tmp_path / "a").read_bytes()
    for copied in (data, data.tobytes(), memoryview(b"!" + data.tobytes())[1:]):
        stored = mdkv.read(copied, identity="s")
        assert same(attended(stored.layer(1), queries[:, :1]), attended(layers[1], queries[:, :1]))
    assert mdkv.write([stored.layer(0), stored.layer(1)], identity="s").tobytes() == data.tobytes()  # of a file that was read
    assert len(mdkv.read(mdkv.write([]))) == 0


def test_place_and_identity(random):
    layers, _ = layers_of(random)
    data = mdkv.write(layers, identity=b"\xff m", tokens=N + 21, first_layer=3, model_layers=9, first_head=1, model_heads=8)
    stored = mdkv.read(data, identity=b"\xff m")
    assert (stored.first_layer, stored.model_layers, stored.first_head, stored.model_heads) == (3, 9, 1, 8)
    assert stored.tokens == N + 21 and data[24:56].tobytes() == hashlib.sha256(b"\xff m").digest()
    assert len(mdkv.read(mdkv.write([], identity="\udc80"), identity="\udc80")) == 0


def test_plain_tensors_and_their_places(random):
    _, keys, values = prompt_rows(random, np.float16)
    preset = mdkv.presets.by_window.replace(ratios=mdkv.RatioSet("int4", "int8", "full"), stand_ins=0)
    prompt = mdkv.Prompt(preset, layers=1, heads=H, key_dim=D, tokens=N, dtype="float16")
    prompt.finish_layer(0, keys[:, -preset.queries:], keys, values)
    prompt.allocate(0.45)
    layer, _ = prompt.pack(0, keys[:, -preset.queries:], keys, values)
    window = np.arange(N - preset.window, N)
    places = np.stack([np.concatenate([np.argsort(rungs, kind="stable"), window]) for rungs in prompt.rungs_of(0)]).astype(np.int32)
    stored = mdkv.read(mdkv.write([layer], tokens=N, positions=[places]))
    assert np.array_equal(stored.positions(0), places) and mdkv.read(mdkv.write([layer])).positions(0).shape == (H, 0)
    rows = np.empty((2, H, N + 5, D), np.float16)
    for one in (layer, stored.layer(0)):
        rows[:] = 7
        assert one.unpack(*rows).tolist() == [N] * H and not rows[:, :, N:].any()
        for found, full in zip(rows, (keys, values)):
            there = np.empty_like(full)
            np.put_along_axis(there, places[..., None].astype(int), found[:, :N], axis=1)
            assert np.array_equal(there[:, window], full[:, window]) and 0 < off(there, full.astype(float)) < 0.1
    for call, message in (
            (lambda: layer.unpack(rows[0, :, :9], rows[1, :, :9]), f"S = 9; a head has {N} rows"),
            (lambda: mdkv.write([layer], tokens=N, positions=[]), "positions are of 0 layers, not of the 1"),
            (lambda: mdkv.write([layer], tokens=N, positions=[places[:, 1:].copy()]), r"positions \[H, S\] are"),
            (lambda: mdkv.write([layer], tokens=9), f"layer 0: a head holds {N} tokens; place.tokens allows 9"),
            (lambda: mdkv.write([layer], tokens=N, positions=[places + 1]), "a position of head 0 lies outside")):
        with pytest.raises(ValueError, match=message):
            call()


def test_another_process_attends(random, tmp_path):
    layers, (queries, _, _) = layers_of(random)
    mdkv.save(tmp_path / "a", layers, identity="m")
    np.save(tmp_path / "q.npy", queries[:, :1])
    code = ("import sys, numpy, mdkv; q = numpy.load(sys.argv[1] + '/q.npy'); o = numpy.empty_like(q);"
            "mdkv.load(sys.argv[1] + '/a', identity='m').layer(1).attend(q, o); numpy.save(sys.argv[1] + '/o.npy', o)")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert np.array_equal(np.load(tmp_path / "o.npy"), attended(layers[1], queries[:, :1]))


@pytest.mark.parametrize("call,message", [
    (lambda f, x: mdkv.load(f, identity="n"), "a: read: byte 24: .* identity 62c66a7a5dd70c31..., not 1b16b1df538ba12d"),
    (lambda f, x: mdkv.load(f, identity="m", verify="some"), "verify is 'some'"),
    (lambda f, x: mdkv.read(f.read_bytes()[:-64], identity="m"), "the file has [0-9]+ bytes, of which there are"),
    (lambda f, x: mdkv.read(b"no", identity="m"), "fewer than a header"),
    (lambda f, x: mdkv.read(bytes(500)), "no file of compressed caches"),
    (lambda f, x: mdkv.load(f, identity="m").layer(2), "layer 2 is not among the file's 2"),
    (lambda f, x: mdkv.load(f, identity="m").layer(0, 1, 2), r"heads \[1, 1 \+ 2\) are not among the 2"),
    (lambda f, x: mdkv.load(f, identity="m").layer(0).reserve(-1), "must not be negative"),
    (lambda f, x: mdkv.save(f, x, first_layer=1, model_layers=2), r"first_layer is 1; it must lie in \[0, 0\]"),
    (lambda f, x: mdkv.save(f, [x[0], mdkv.compress(*(np.ones((2, 40, 64), "f"),) * 3, 1.0)[0]]), "layer 1 has another element type"),
    (lambda f, x: mdkv.save(f, x, tokens=-1), r"tokens is -1; it must lie in \[0, "),
])
def test_messages(random, tmp_path, call, message):
    path = tmp_path / "a"
    layers, _ = layers_of(random)
    mdkv.save(path, layers, identity="m")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        call(path, layers)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a"]


def test_other_errors(random, tmp_path):
    layers, _ = layers_of(random)
    with pytest.raises(TypeError, match="no sequence of mdkv.Layer"):
        mdkv.save(tmp_path / "a", [layers[0], 7])
    with pytest.raises(FileNotFoundError):
        mdkv.load(tmp_path / "a")
    with pytest.raises(OSError, match="no/a.*: cannot be made"):
        mdkv.save(tmp_path / "no" / "a", layers)
    (tmp_path / "a").touch()
    with pytest.raises(ValueError, match="a: the file is empty"):
        mdkv.load(tmp_path / "a")


@pytest.mark.parametrize("name", [b"a" * 255, b"a" * 250, b"\xe9\xff \n", "\N{SNOWMAN}".encode(), b"folder/a"])
def test_every_name_of_a_file(random, tmp_path, name):
    layers, _ = layers_of(random, count=1)
    (tmp_path / "folder").mkdir()
    path = os.fsencode(tmp_path) + b"/" + name
    for i, kind in enumerate((path, os.fsdecode(path), pathlib.Path(os.fsdecode(path)))):
        mdkv.save(kind, layers, identity=str(i))
        assert len(mdkv.load(kind, identity=str(i))) == 1
        with pytest.raises(ValueError, match="the file is of the identity") as error:
            mdkv.load(kind, identity="other")
        str(error.value).encode()  # fit for any output
    missing = os.fsencode(tmp_path) + b"/no/" + name
    with pytest.raises(OSError, match="(?s)no/.*: cannot be made: No such file") as error:
        mdkv.save(missing, layers)
    str(error.value).encode()
    with pytest.raises(FileNotFoundError):
        mdkv.load(missing)
    assert len(os.listdir(tmp_path)) <= 2


def test_what_is_no_path(random, tmp_path):
    layers, _ = layers_of(random, count=1)
    with pytest.raises(OSError, match="File name too long"):
        mdkv.save(tmp_path / ("a" * 256), layers)
    for call in (lambda path: mdkv.save(path, layers), mdkv.load):
        with pytest.raises(ValueError, match="null byte"):
            call(f"{tmp_path}/a\0b")
        for other in (7, None, ["a"]):
            with pytest.raises(TypeError):
                call(other)
    assert os.listdir(tmp_path) == []


def test_links_pipes_and_devices_stay(random, tmp_path):
    layers, _ = layers_of(random)
    data = mdkv.write(layers).tobytes()
    link, pipe, socket_path = (tmp_path / name for name in ("link", "pipe", "socket"))
    (tmp_path / "there").mkdir()
    link.symlink_to("there/file")
    for count in (2, 1):
        mdkv.save(link, layers[:count])
        assert link.is_symlink() and len(mdkv.load(link)) == len(mdkv.load(tmp_path / "there" / "file")) == count
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="pipe: is not a regular file"):
        mdkv.load(pipe)
    with pytest.raises(OSError, match="pipe: no process reads this pipe"):
        mdkv.save(pipe, layers)
    with open(tmp_path / "read", "wb") as to:
        reader = subprocess.Popen(["cat", pipe], stdout=to)
    while True:
        try:
            mdkv.save(pipe, layers)
            break
        except OSError as error:  # cat has not opened it yet
            assert "no process reads" in str(error) and reader.poll() is None
    assert reader.wait() == 0 and (tmp_path / "read").read_bytes() == data and pipe.is_fifo()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(socket_path))
        with pytest.raises(OSError, match="socket: is a socket"):
            mdkv.save(socket_path, layers)
        with pytest.raises(OSError):
            mdkv.load(socket_path)
    with pytest.raises(OSError, match="there: is a folder"):
        mdkv.save(tmp_path / "there", layers)
    with pytest.raises(IsADirectoryError):
        mdkv.load(tmp_path / "there")
    terminal, device = os.openpty()
    with pytest.raises(OSError, match="is not a regular file"):
        mdkv.load(os.ttyname(device))
    os.close(terminal), os.close(device)
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe", "read", "socket", "there"]


def test_a_full_disk_leaves_the_old_file(random, tmp_path):
    path = tmp_path / "a"
    layers, _ = layers_of(random)
    mdkv.save(path, layers)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))
    try:
        with pytest.raises(OSError, match="cannot be written at byte"):
            mdkv.save(path, layers, identity="s")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a"]
    reader = mdkv.load(path)
    mdkv.save(path, layers[:1])
    assert len(mdkv.load(path)) == 1 and len(reader) == 2 and path.stat().st_mode & 0o777 == 0o600


def test_other_threads_append_while_a_file_is_written(random, tmp_path):
    layers, (_, keys, values) = layers_of(random, count=6)
    saved, failed = [], []

    def save():
        try:
            for i in range(20):
                mdkv.save(tmp_path / "a", layers[::-1] if i % 2 else layers)
                saved.append(mdkv.load(tmp_path / "a").layer(0).appended)
        except Exception as error:
            failed.append(error)

    savers = [threading.Thread(target=save) for _ in range(2)]
    for one in savers:
        one.start()
    while any(one.is_alive() for one in savers):
        for layer in layers:
            layer.append(keys[:, :1], values[:, :1])
            assert layer.tokens == N + layer.appended
    for one in savers:
        one.join()
    assert not failed and len(saved) == 40 and min(saved) >= 21 and os.listdir(tmp_path) == ["a"]


# transformers.

@pytest.fixture
def hf():
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", minversion="5.2", reason="transformers 5.2 or newer is not installed")
    import test_transformers

    return test_transformers


def go_on(torch, model, cache, ids):
    """Logits of single tokens."""
    with torch.no_grad():
        return torch.cat([model(one[None, None], past_key_values=cache).logits for one in ids], dim=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["best", "any_question", "by_window", "paper", "evict"])
def test_a_saved_cache_goes_on_with_the_same_logits(hf, tmp_path, preset, dtype):
    import torch

    model, ids = hf.small("llama", getattr(torch, dtype)), hf.text(200)
    cache = mdkv.transformers.Cache(model.config, 0.4, preset)
    with torch.no_grad():
        model(ids[:, :160], past_key_values=cache)
    cache.save(tmp_path / "a", ids[:, :160], identity="m")
    go_on(torch, model, cache, ids[0, 160:180])
    path = os.fsencode(tmp_path) + b"/\xe9"
    cache.save(path, ids[:, :180], b"m s")
    with pytest.raises(ValueError, match=r"/\\xe9: the text does not begin with the 180 tokens"):
        mdkv.transformers.Cache.load(path, model.config, ids[0, 1:], identity=b"m s")
    a = mdkv.transformers.Cache.load(tmp_path / "a", model.config, ids, identity="m")
    b = mdkv.transformers.Cache.load(path, model.config, ids, identity=b"m s", verify="bounds")
    assert (a.get_seq_length(), b.get_seq_length()) == (160, 180)
    go_on(torch, model, a, ids[0, 160:180])
    found = [go_on(torch, model, one, ids[0, 180:]) for one in (cache, a, b, copy.deepcopy(b))[:3]]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    names = ("arena", "directory")
    reports = [one.report() for one in (cache, a, b)]
    for one in reports[1:]:
        assert one["uncompressed_bytes"] == reports[0]["uncompressed_bytes"]
        assert [[x["rungs"], *(x["bytes"][n] for n in names)] for x in one["layers"]] == [
            [x["rungs"], *(x["bytes"][n] for n in names)] for x in reports[0]["layers"]]
    hf.crop(b, 15)
    copied = copy.deepcopy(b)
    assert torch.equal(go_on(torch, model, b, ids[0, 185:]), go_on(torch, model, copied, ids[0, 185:]))
    b.reset()
    with torch.no_grad():
        model(ids[:, :160], past_key_values=b)  # another prompt, in memory
    assert b.get_seq_length() == 160


@pytest.mark.parametrize("preset", ["best", "by_window", mdkv.presets.best.replace(name="mine", shared=None, stand_ins=0)])
def test_tails_of_loaded_caches_are_folded_as_without_saving(hf, tmp_path, preset):
    import torch

    model, ids = hf.small("llama"), hf.text(300)
    cache = mdkv.transformers.Cache(model.config, 0.4, preset, tail=16)
    with torch.no_grad():
        model(ids[:, :160], past_key_values=cache)
    go_on(torch, model, cache, ids[0, 160:190])
    cache.save(tmp_path / "a", ids[:, :190], identity="m")
    loaded = mdkv.transformers.Cache.load(tmp_path / "a", model.config, identity="m")  # the file has preset and tail
    assert (repr(loaded.preset), loaded.tail, loaded.budget) == (repr(cache.preset), 16, 0.4)
    assert mdkv.transformers.Cache.load(tmp_path / "a", model.config, tail=None, identity="m").tail is None
    assert torch.equal(*(go_on(torch, model, one, ids[0, 190:]) for one in (cache, loaded)))
    assert loaded.report()["layers"] == cache.report()["layers"]


def test_generate_in_another_process(hf, tmp_path):
    import torch

    model, ids = hf.small("qwen2"), hf.text(150)
    options = dict(max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))
    cache = mdkv.transformers.Cache(model.config, 0.4)
    with torch.no_grad():
        model(ids[:, :140], past_key_values=cache)
    cache.save(tmp_path / "a", ids[0, :140].tolist(), identity="m")
    code = ("import sys; sys.path[:0] = sys.argv[2:]; import torch, mdkv.transformers, test_transformers as t;"
            "m, ids = t.small('qwen2'), t.text(150);"
            "c = mdkv.transformers.Cache.load(sys.argv[1], m.config, ids, identity='m');"
            "print(m.generate(ids, past_key_values=c, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids)).tolist())")
    answer = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a"), *FOLDERS], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout.splitlines()[-1]) == model.generate(ids, past_key_values=cache, **options).tolist()


def test_files_that_do_not_fit_are_refused(hf, tmp_path):
    import torch

    path = tmp_path / "a"
    model, ids = hf.small("llama"), hf.text(120)
    cache = mdkv.transformers.Cache(model.config, 0.4)
    with pytest.raises(NotImplementedError, match="before its prompt's end"):
        cache.save(path, [], identity="m")
    with torch.no_grad():
        model(ids[:, :100], past_key_values=cache)
    with pytest.raises(ValueError, match="there are 99 tokens; the cache holds 100"):
        cache.save(path, ids[:, :99], identity="m")
    with pytest.raises(ValueError, match="has no name; say identity="):
        cache.save(path, ids[:, :100])
    cache.save(path, ids[:, :100], identity="m")
    packed = [layer.packed[0] for layer in cache.compressed]
    load = lambda config=model.config, tokens=None, identity="m": mdkv.transformers.Cache.load(
        path, config, tokens, identity=identity)
    other = ids.clone()
    other[0, 7] += 1
    for wrong in (other, ids[:, :99]):
        with pytest.raises(ValueError, match="a: the text does not begin with the 100 tokens of the file"):
            load(tokens=wrong)
    with pytest.raises(ValueError, match="a: read: byte 24: the file is of the identity .* the place of the model's name, now '', and commit"):
        load(identity="n")
    changed = copy.deepcopy(model.config)
    changed.rope_parameters = {**changed.rope_parameters, "rope_theta": 77.0}
    with pytest.raises(ValueError, match="the file is of the identity"):
        load(changed)
    for sizes in ({"num_hidden_layers": 2}, {"num_key_value_heads": 4}):
        with pytest.raises(ValueError, match="holds 3 layers from 0 on of 2 heads from 0 on; the model has"):
            load(hf.small("llama", **sizes).config)
    identity = json.dumps(model.config.rope_parameters, sort_keys=True) + "\nm"
    for attachment in (b"", b"\xff\n", b"[1]\nx", b'{"kind": 5}\n'):  # of other programs
        mdkv.save(path, packed, identity=identity, tokens=100, attachment=attachment)
        assert torch.equal(*(go_on(torch, model, one, ids[0, 100:]) for one in (load(), copy.deepcopy(cache))))
        with pytest.raises(ValueError, match="a: mdkv.transformers did not write it, and its tokens are unknown"):
            load(tokens=ids)
    whole = {"limits": [1, 2, 3], "queries": []}
    for beside in ({"limits": [1], "queries": []}, {"limits": [1, 2, 3], "queries": [[1, 4, 2, 16]] * 3}, {**whole, "options": [1]},
                   {**whole, "options": {"preset": {"ratios": ["drop", "full"], "window": "x"}, "tail": None, "least": 1}}):
        mdkv.save(path, packed, identity=identity, tokens=100,
                  attachment=json.dumps({"kind": "mdkv.transformers 1", "text": "", **beside}).encode() + b"\n")
        with pytest.raises(ValueError, match="what mdkv.transformers wrote beside the caches is damaged"):
            load()
    mdkv.save(path, packed, identity=identity)
    with pytest.raises(ValueError, match="was written without its 100 tokens"):
        load()
    cache.batch_repeat_interleave(2)
    with pytest.raises(NotImplementedError, match="one sequence; the cache has 2"):
        cache.save(path, ids[:, :100], identity="m")
    with pytest.raises(NotImplementedError, match="DynamicSlidingWindowLayer"):
        mdkv.transformers.Cache(hf.small("gemma3_text").config).save(path, [], identity="m")


@pytest.mark.parametrize("variable", ["MDKV_REFERENCE_MODEL", "MDKV_SECOND_MODEL"])
def test_a_prompt_of_a_real_model_answers_from_a_file(hf, tmp_path, variable):
    import torch

    model, tokenizer = hf.real_model(variable)
    story = "".join(f"Entry {i}: " + hf.PROSE for i in range(8)) + "Beside the log lay a key, and its tag said: Marguerite. "
    ids = tokenizer(story + "The name on the key's tag is", return_tensors="pt").input_ids
    cache = mdkv.transformers.Cache(model.config, budget=0.25)
    with torch.no_grad():
        model(ids[:, :-8], past_key_values=cache)
    cache.save(tmp_path / "a", ids[:, :-8], variable)
    loaded = mdkv.transformers.Cache.load(tmp_path / "a", model.config, ids, identity=variable)
    options = dict(max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
    answers = [model.generate(ids, past_key_values=one, **options)[0, ids.shape[1]:].tolist() for one in (cache, loaded)]
    assert answers[0] == answers[1], [tokenizer.decode(one) for one in answers]
