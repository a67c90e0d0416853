"""test_fork.py: processes that are forked while another thread is in a call, which a pipe or a rank that is late holds up, and
programs that end meanwhile."""
import os
import select
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import mdkv

LIMIT = 60  # seconds until a child that hangs is ended
D = 64

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def rows(tokens=200, heads=2):
    g = np.random.default_rng(7)
    return [g.standard_normal((h, n, D)).astype(np.float32) for h, n in ((2 * heads, 64), (heads, tokens), (heads, tokens))]


def layer_on(backend):
    return mdkv.compress(*rows(), 0.25, backend=backend)[0]


def attended(layer):
    output = np.empty((4, 1, D), np.float32)
    layer.attend(rows()[0][:, :1], output)
    return output.tobytes()


def in_child(body):
    """body() in a forked process: what it returns, as text, or its exception's type and message."""
    to_read, to_write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT)
        try:
            text = str(body())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(to_write, text.encode())
        os._exit(0)
    os.close(to_write)
    with os.fdopen(to_read) as answer:
        text = answer.read()
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"the child ended with {status}; signal {signal.SIGALRM} is that of one that hangs"
    return text


@pytest.fixture(params=["a rank is late", "a pipe is full"])
def held(request, tmp_path):
    """A backend and a layer on it, while another thread is in a call on both; after leave() it is not."""
    backend = mdkv.Backend()
    layer = layer_on(backend)
    inside, go_on, failed = threading.Event(), threading.Event(), []
    if request.param == "a pipe is full":
        os.mkfifo(tmp_path / "pipe")
        reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        large = mdkv.compress(*rows(9000), 1.0, backend=backend)[0]  # more than a pipe holds

        def call():
            mdkv.save(tmp_path / "pipe", [large])

        def leave():
            os.set_blocking(reader, True)
            while os.read(reader, 1 << 16):
                pass
            os.close(reader)
    else:
        def exchange(numbers):
            inside.set()
            assert go_on.wait(LIMIT)
            raise ConnectionError("the other rank has ended")

        def call():
            mdkv.compress(*rows(), 0.25, backend=backend, ranks=mdkv.Ranks(exchange, first_head=0, heads=2))

        leave = go_on.set

    def work():
        try:
            call()
        except Exception as error:
            failed.append(error)

    expected = [] if request.param == "a pipe is full" else [ConnectionError]
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    if request.param == "a pipe is full":
        assert select.select([reader], [], [], LIMIT)[0]  # bytes are there: more follow
    else:
        assert inside.wait(LIMIT)
    left = []

    def leave_once():
        if not left:
            left.append(leave())
            thread.join(LIMIT)
            assert not thread.is_alive() and [type(error) for error in failed] == expected

    yield backend, layer, leave_once
    leave_once()


@pytest.mark.parametrize("call", [
    lambda backend, layer: attended(layer), lambda backend, layer: layer.tokens, lambda backend, layer: layer.copy(),
    lambda backend, layer: layer.append(*(x[:, :1] for x in rows()[1:])), lambda backend, layer: layer.truncate(0),
    lambda backend, layer: mdkv.write([layer]), lambda backend, layer: layer_on(backend),
    lambda backend, layer: mdkv.read(mdkv.write([layer_on(None)]), backend=backend).layer(0).tokens])
def test_a_child_is_told_that_a_call_was_under_way(held, call):
    backend, layer, leave = held
    text = in_child(lambda: call(backend, layer))
    assert text.startswith("RuntimeError: Backend: this process was forked while another thread was in a call on it; make a")


def test_what_no_call_was_on_works_in_a_child(held):
    backend, layer, leave = held
    own = mdkv.Backend(2)
    apart = layer_on(own)
    expected = attended(apart)
    assert in_child(lambda: attended(apart) == expected) == "True"
    assert in_child(lambda: attended(layer_on(mdkv.Backend())) == attended(layer_on(None)) == expected) == "True"
    assert in_child(lambda: in_child(lambda: layer.tokens)).startswith("RuntimeError: Backend: this process was forked")
    leave()
    assert attended(layer) and in_child(lambda: attended(layer) == attended(layer)) == "True"
    assert in_child(lambda: layer.tokens) == str(layer.tokens)


def test_threads_of_a_child_take_turns():
    backend = mdkv.Backend()
    layers = [layer_on(backend) for _ in range(3)]
    expected = attended(layers[0])

    def together():
        results = []
        threads = [threading.Thread(target=lambda one=one: results.extend(attended(one) for _ in range(50))) for one in layers]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        return len(results), set(results) == {expected}

    assert together() == (150, True)
    assert in_child(together) == "(150, True)"


ENDS = """
import _thread, threading, time
import numpy as np
import mdkv

def rows(*shape):
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)

N, backend = 2000, mdkv.Backend(2)
q, k, v, to = rows(4, N, 64), rows(2, N, 64), rows(2, N, 64), rows(4, N, 64)
last, inside = q[:, -64:], threading.Event()
layer = mdkv.compress(last, k, v, 0.9, backend=backend)[0]
data, tensors = mdkv.write([layer]), dict(layers=1, heads=2, group=2, key_dim=64, tokens=N, dtype="float32", backend=backend)

def exchange(numbers):
    inside.set()
    while True:
        numbers = numbers + 0

def read_prompt():
    reader = mdkv.Reader(mdkv.presets.any_question, rope=mdkv.Rope(), limit=0.25, **tensors)
    for first in range(0, N, 250):
        part = slice(first, first + 250)
        reader.attend(0, q[:, part], k[:, part], v[:, part], to[:, part])
        reader.end_chunk()
    reader.finish()

calls = {"write": lambda: mdkv.write([layer]), "read": lambda: mdkv.read(data), "attend": lambda: layer.attend(q[:, :1], to[:, :1]),
         "compress": lambda: mdkv.compress(last, k, v, 0.5, backend=backend), "bytes": lambda: layer.bytes, "reader": read_prompt,
         "log_sum_exps": lambda: mdkv.log_sum_exps(last, k, backend=backend), "budget": lambda: mdkv.Budget.fraction(0.3),
         "ranks": lambda: mdkv.compress(last, k, v, 0.5, ranks=mdkv.Ranks(exchange, first_head=0, heads=2))}

def work():
    while True:
        calls[KIND]()
        inside.set()

threading.Thread(target=work, daemon=True).start() if DAEMON else _thread.start_new_thread(work, ())
inside.wait()
time.sleep(0.05)
"""


@pytest.mark.parametrize("kind", ["write", "read", "attend", "compress", "bytes", "reader", "log_sum_exps", "budget", "ranks"])
def test_a_program_ends_while_another_thread_is_in_a_call(kind):
    programs = [subprocess.Popen([sys.executable, "-c", ENDS.replace("KIND", repr(kind)).replace("DAEMON", str(i % 2 == 0))],
                                 stderr=subprocess.PIPE, text=True) for i in range(4)]
    found = [(program.communicate(timeout=LIMIT)[1][-400:], program.returncode) for program in programs]
    assert [code for _, code in found] == [0] * 4, found
