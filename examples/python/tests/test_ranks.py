"""test_ranks.py: one budget over ranks that are threads with NumPy's arrays; test_tensor_parallel.py has processes. Nothing
waits longer than a limit of time."""
import gc
import itertools
import os
import threading
import weakref
import zlib

import numpy as np
import pytest

import mdkv

H, G, N, D, LAYERS = 5, 3, 700, 64, 2
LIMIT = 60  # seconds


@pytest.fixture
def random(request):
    seed = int(os.environ.get("MDKV_TEST_SEED", zlib.crc32(request.node.name.encode())))
    print("MDKV_TEST_SEED", seed)  # pytest shows it if the test fails
    return np.random.default_rng(seed)


class Team:
    """Threads as ranks: numbers of all are added between two barriers. A thread that ends early breaks the barriers."""

    def __init__(self, size):
        self.size, self.barrier, self.numbers = size, threading.Barrier(size, timeout=LIMIT / 3), [None] * size

    def sum(self, rank, numbers):
        self.numbers[rank] = numbers.copy()
        self.barrier.wait()
        total = sum(self.numbers)
        self.barrier.wait()
        numbers[:] = total

    def ranks(self, rank, **place):
        return mdkv.Ranks(lambda x: self.sum(rank, x), **place)

    def run(self, body):
        """body(rank) of all ranks at once: results, or the exceptions in their places."""
        results = [None] * self.size

        def of(rank):
            try:
                results[rank] = body(rank)
            except Exception as error:
                self.barrier.abort() if isinstance(error, threading.BrokenBarrierError) else None
                results[rank] = error

        threads = [threading.Thread(target=of, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive(), "a rank hangs"
        return results


def layers_of(random, count=LAYERS, heads=H):
    """For each layer queries, keys, values of all tokens; heads differ by what a byte is worth to them."""
    layers = []
    for _ in range(count):
        keys, values = random.normal(size=(2, heads, N, D)).astype(np.float32)
        keys[:, ::37] *= 2
        values *= random.uniform(0.1, 10, size=(heads, 1, 1)).astype(np.float32)
        layers.append((random.normal(size=(heads * G, N, D)).astype(np.float32), keys, values))
    return layers


def part(layers, first, count):
    """Heads first, first + 1, ... of each layer."""
    return [(q[first * G : (first + count) * G], k[first : first + count], v[first : first + count]) for q, k, v in layers]


def packed(layers, preset, limit, **ranks):
    """A prompt after its choice, the choice, and its layers with their last queries."""
    heads = layers[0][1].shape[0]
    prompt = mdkv.Prompt(preset, layers=len(layers), heads=heads, group=G, key_dim=D, tokens=N, dtype="float32",
                         rope=mdkv.Rope(base=1e4), **ranks)
    last = [(q[:, -preset.queries :], k, v) for q, k, v in layers]
    lse = [mdkv.log_sum_exps(q, k) for q, k, _ in last]
    for i, rows in enumerate(layers):
        prompt.read_chunk(i, 0, *rows)
        prompt.finish_layer(i, *last[i], lse[i])
    choice = prompt.allocate(limit)
    return prompt, choice, [(prompt.pack(i, *rows, lse[i])[0], rows[0]) for i, rows in enumerate(last)]


def compressed(layers, preset, limit, **ranks):
    """A prompt's choice, and for each layer rungs, bytes of the arena, and the attention of three queries a head."""
    prompt, choice, made = packed(layers, preset, limit, **ranks)
    out = []
    for i, (layer, queries) in enumerate(made):
        attended = np.empty((queries.shape[0], 1, D), np.float32)
        layer.attend(queries[:, -1:], attended)
        out.append((prompt.rungs_of(i), attended, layer.bytes["arena"]))
    return choice, out


@pytest.mark.parametrize("name", ["best", "paper"])
@pytest.mark.parametrize("counts", [[5], [1, 0, 4]])
def test_one_budget_chooses_as_one_rank_bit_for_bit(random, name, counts):
    layers, preset = layers_of(random), mdkv.preset(name)
    firsts = np.cumsum([0, *counts])
    for limit in (0.125, 0.5, 1.0):
        team = Team(len(counts))

        def body(rank):
            ranks = team.ranks(rank, first_head=int(firsts[rank]), heads=H)
            return *compressed(part(layers, firsts[rank], counts[rank]), preset, limit, ranks=ranks), ranks

        found, (choice, one) = team.run(body), compressed(layers, preset, limit)
        for result in found:
            assert not isinstance(result, Exception), result
            assert result[0] == choice  # losses and multipliers, too
        for i, (rungs, attended, arena) in enumerate(one):
            assert np.concatenate([result[1][i][0] for result in found]).tobytes() == rungs.tobytes()
            assert np.concatenate([result[1][i][1] for result in found]).tobytes() == attended.tobytes()
            assert sum(result[1][i][2] for result in found) == arena
        assert len({(ranks.exchanges, ranks.bytes) for _, _, ranks in found}) == 1


def compress_on(team, layers, **changes):
    """`mdkv.compress` of one layer on 3 ranks, one of which has other arguments: results or exceptions."""
    firsts, counts = (0, 2, 3), (2, 1, 2)

    def body(rank):
        [(queries, keys, values)] = part(layers, firsts[rank], counts[rank])
        options = dict(limit=0.2, preset=mdkv.presets.best, rope=mdkv.Rope(), first_head=firsts[rank], queries=queries, keys=keys)
        options.update({name: change(options[name]) for name, change in changes.items()} if rank == 1 else {})
        queries, keys, limit, first = (options.pop(name) for name in ("queries", "keys", "limit", "first_head"))
        return mdkv.compress(queries, keys, values, limit, ranks=team.ranks(rank, first_head=first, heads=H), **options)

    return team.run(body)


def test_compress(random):
    layers = layers_of(random, 1)
    found, (layer, report) = compress_on(Team(3), layers), mdkv.compress(*layers[0], 0.2, mdkv.presets.best, rope=mdkv.Rope())
    assert sum(one.bytes["arena"] for one, _ in found) == layer.bytes["arena"]
    assert {name: sum(one.rungs[name] for one, _ in found) for name in layer.rungs} == layer.rungs
    assert all(one[1]["budget_bytes"] == report["budget_bytes"] for one in found)


def contents(layer):
    """All that a layer stores: the numbers of tokens by rung; for each head its rows, in the order of the cache, as what their rungs
    left of keys and values; and the arena, the heads' bytes one after another."""
    file = mdkv.write([layer])  # docs/stored-caches.md: the third section's record begins with the arena's place
    arena, size = file[(at := int(file[112:120].view(np.int64)[0])) : at + 16].view(np.int64)
    keys = np.zeros((layer.heads, layer.tokens + layer.stand_ins, layer.key_dim), np.float32)
    values = np.zeros((*keys.shape[:2], layer.value_dim), np.float32)
    rows = layer.unpack(keys, values)
    heads = [(keys[h, : rows[h]].tobytes(), values[h, : rows[h]].tobytes()) for h in range(layer.heads)]
    return layer.rungs, heads, file[arena : arena + size].tobytes()


def expects_equal(parts, whole):
    """The contents of ranks' layers are, bit for bit, those of one rank's layer."""
    rungs, heads, arenas = zip(*parts)
    assert {rung: sum(one[rung] for one in rungs) for rung in rungs[0]} == whole[0]
    assert list(itertools.chain(*heads)) == whole[1]
    assert b"".join(arenas) == whole[2]


@pytest.mark.parametrize("own,others,changes", [
    ("ranks differ in the call, the preset", None, {"limit": lambda x: 0.3}),
    ("no share of the uncompressed bytes", "another rank refuses", {"limit": lambda x: 300}),
    ("a share from 0 to 1 or an mdkv.Budget is needed", "another rank refuses", {"limit": lambda x: "much"}),
    ("cannot hold the window", "another rank refuses", {"limit": lambda x: mdkv.Budget.bytes(5)}),
    ("keys", "another rank refuses", {"keys": lambda x: x * np.nan}),
    ("it must be at least 1", "another rank refuses", {"preset": lambda x: x.replace(queries=0)}),
    ("there are float32, float16", "another rank refuses", {"keys": lambda x: x.astype(np.float64)}),
    ("element type is float16", "another rank refuses", {"queries": lambda x: x.astype(np.float16)}),
    ("ranks differ in the call, the preset", None, {"preset": lambda x: x.replace(shared=None)}),
    ("not every one of 5 heads is on one rank", None, {"first_head": lambda x: x + 1}),
    ("this rank's 1 heads from 5 on are not among the 5 of all ranks", "another rank refuses", {"first_head": lambda x: 5}),
])
def test_an_error_of_one_rank_is_one_of_all(random, own, others, changes):
    with np.errstate(all="ignore"):
        found = compress_on(Team(3), layers_of(random, 1), **changes)
    for rank, error in enumerate(found):
        assert isinstance(error, TypeError if "mdkv.Budget" in own and rank == 1 else ValueError), error
        assert (own if rank == 1 or others is None else others) in str(error)


def alone(total=lambda x: None):
    """The first of some ranks, with a function that does not wait for another one."""
    return mdkv.Ranks(total, first_head=0, heads=H)


def test_exceptions_of_functions_leave_the_call(random):
    layer = layers_of(random, 1)[0]

    def fails(numbers):
        raise ZeroDivisionError(f"sum of {numbers.dtype} {numbers.shape}")

    ranks = alone(fails)
    with pytest.raises(ZeroDivisionError, match="sum of int64"):
        mdkv.compress(*layer, 0.2, ranks=ranks)
    assert ranks.exchanges >= 1
    with pytest.raises(TypeError, match="sum must change the numbers in place.* it returned .*int"):
        mdkv.compress(*layer, 0.2, ranks=alone(lambda x: 7))
    team = Team(2)

    def breaks(rank):
        ranks = team.ranks(rank, first_head=3 * rank, heads=H)
        if rank == 1:
            ranks = mdkv.Ranks(lambda x: team.barrier.abort(), first_head=3, heads=H)
        return compressed(part([layer], 3 * rank, 3 - rank), mdkv.presets.by_window, 0.2, ranks=ranks)

    found = team.run(breaks)
    assert isinstance(found[0], threading.BrokenBarrierError) and isinstance(found[1], Exception), found


def test_arrays_may_be_kept(random):
    kept = []
    with pytest.raises(ValueError):  # the other rank's heads are missing
        mdkv.compress(*(x[: 3 * (G if i == 0 else 1)] for i, x in enumerate(layers_of(random, 1)[0])), 0.2,
                      ranks=alone(kept.append))
    assert kept and all(x.dtype == np.int64 and x.flags.writeable and x.ndim == 1 for x in kept)


def test_other_threads_may_ask_while_ranks_exchange(random):
    layers, backend, team = layers_of(random, 1), mdkv.Backend(), Team(2)
    layer, _ = mdkv.compress(*layers[0], 0.2, backend=backend)
    asked = []

    def body(rank):
        def slowly(numbers):  # while this thread has the turn at the backend, another one waits for it
            if rank == 0 and not asked:
                asked.append(threading.Thread(target=lambda: asked.extend((layer.bytes, layer.rungs, layer.copy())), daemon=True))
                asked[0].start()
                asked[0].join(0.3)
            team.sum(rank, numbers)

        ranks = mdkv.Ranks(slowly, first_head=3 * rank, heads=H)
        return compressed(part(layers, 3 * rank, 3 - rank), mdkv.presets.by_window, 0.2, ranks=ranks,
                          backend=backend if rank == 0 else None)

    assert not any(isinstance(one, Exception) for one in team.run(body))
    asked[0].join(LIMIT)
    assert asked[1] == layer.bytes


def test_ranks_of_an_object_that_holds_them_are_freed():
    class Engine:
        def __init__(self):
            self.ranks = mdkv.Ranks(self.sum, first_head=2, heads=5)

        def sum(self, numbers):
            pass

    engine = Engine()
    assert (engine.ranks.first_head, engine.ranks.heads) == (2, 5)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


def test_arguments():
    for first in (-1, 6):
        with pytest.raises(ValueError, match=f"first_head is {first}; it must be from 0 to 5"):
            mdkv.Ranks(print, first_head=first, heads=5)
    options = dict(layers=2, heads=2, key_dim=D, tokens=N, dtype="float32", rope=mdkv.Rope())
    with pytest.raises(TypeError, match="an mdkv.Ranks or None is needed"):
        mdkv.Prompt(mdkv.presets.best, **options, ranks=7)
    with pytest.raises(ValueError, match="this rank's 2 heads from 4 on are not among the 5 of all ranks"):
        mdkv.Prompt(mdkv.presets.best, **options, ranks=mdkv.Ranks(print, first_head=4, heads=5))
