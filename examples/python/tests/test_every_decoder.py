"""test_every_decoder.py: every_decoder.py with a dozen kinds of models; the whole list takes minutes."""
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.2", reason="transformers 5.2 or newer is not installed")

FOLDER = pathlib.Path(__file__).parents[1]
EXPECTED = {
    "deepseek_v3": ("refused", "multi-head latent attention"),
    "ernie4_5": ("same", "rotation: neighbours, 16 of 16"),
    "exaone4": ("same", "rotation: none"),
    "exaone4, all layers full": ("same", "rotation: halves, 16 of 16"),
    "falcon": ("refused", "compute attention themselves"),
    "glm": ("same", "rotation: neighbours, 8 of 16"),
    "gpt2": ("same", "positions are added to the input"),
    "gpt_oss": ("same", "rotation: halves, 16 of 16, given frequencies"),
    "hunyuan_v1_dense": ("by_window", "depend on positions in another way"),
    "llama, yarn": ("same", "rotation: halves, 16 of 16, given frequencies"),
    "mllama": ("refused", "cross_attention_layers"),
    "phi, half of a head": ("same", "rotation: halves, 8 of 16"),
    "smollm3": ("by_window", "layers 0 and 3 have different rotary encodings"),
    "stablelm": ("same", "rotation: halves, 4 of 16"),
}


@pytest.fixture(scope="module")
def rows():
    ran = subprocess.run([sys.executable, FOLDER / "every_decoder.py", *EXPECTED], capture_output=True, text=True)
    found = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*) \|$", ran.stdout, re.MULTILINE)
    assert ran.returncode == 0 and len(found) == len(EXPECTED), ran.stdout + ran.stderr
    return {kind: (verdict, words) for kind, verdict, words in found}


@pytest.mark.parametrize("kind", EXPECTED)
def test_decoders(rows, kind):
    verdict, words = EXPECTED[kind]
    assert rows[kind][0] == verdict and words in rows[kind][1], rows[kind]
