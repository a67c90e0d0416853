"""test_lmcache.py: mdkv.lmcache with LMCache's own memory objects, keys, factory and threads, without a GPU."""
import importlib.util
import os
import select
import zlib

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if importlib.util.find_spec("lmcache") is None:  # one that is there but does not import has failed
    pytest.skip("lmcache is not installed: pip install --no-deps -r examples/python/tests/requirements-lmcache.txt",
                allow_module_level=True)
import lmcache.v1.distributed.serde as serde
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

import mdkv.lmcache

L, T, H, D = 3, 256, 2, 64
KEY = ObjectKey(chunk_hash=b"1234", model_name="m/n", kv_rank=0, cache_salt="tenant")


@pytest.fixture(autouse=True)
def seed(request):
    number = int(os.environ.get("MDKV_TEST_SEED", zlib.crc32(request.node.name.encode())))
    print("MDKV_TEST_SEED", number)
    torch.manual_seed(number)


def memory(shape, dtype):
    shape = torch.Size(shape)
    size = shape.numel() * dtype.itemsize
    about = MemoryObjMetadata(shape=shape, dtype=dtype, address=0, phy_size=size, ref_count=1, fmt=MemoryFormat.KV_2LTD)
    return TensorMemoryObj(torch.zeros(size, dtype=torch.uint8), about, None)


def chunk(dtype=torch.float16, tokens=T, layers=L):
    """Keys with outlying channels, whose tokens differ in size."""
    made = memory((2, layers, tokens, H * D), dtype)
    rows = torch.randn(2, layers, tokens, H, D)
    rows[0, ..., 5] += 12
    rows[:, :, ::17] *= 4
    made.tensor.copy_(rows.reshape(made.tensor.shape).to(dtype))
    return made


def layout(of):
    return MemoryLayoutDesc(shapes=[of.tensor.shape], dtypes=[of.tensor.dtype])


def there_and_back(src, share, **options):
    serializer = mdkv.lmcache.MdkvSerializer(D, share)
    between = memory((serializer.estimate_serialized_size(layout(src)),), torch.uint8)
    count = serializer.serialize(src, between, KEY)
    between.set_used_size(count)
    back = memory(src.tensor.shape, src.tensor.dtype)
    mdkv.lmcache.MdkvDeserializer(D).deserialize(between, back, KEY)
    return count, back


def worst_channel(back, src):
    """Most of all channels' errors of keys by the channel's spread; infinite if equal numbers come back as others."""
    a, b = src.tensor[0].double(), back.tensor[0].double()
    error, spread = (a - b).square().mean(1).sqrt(), a.std(1, correction=0)
    return float(torch.where(error > 0, error / spread, 0).amax())


def off(back, src, which=slice(None)):
    a, b = back.tensor[which].double(), src.tensor[which].double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_more_bytes_lose_less_and_all_tokens_come_back(dtype):
    for tokens in (T, 37, 1000):
        src = chunk(dtype, tokens, 1 if tokens == 37 else L)
        errors = []
        for share in (0.45, 0.6, 0.8, 1.1):
            count, back = there_and_back(src, share)
            assert count <= share * src.get_size()
            assert torch.isfinite(back.tensor).all() and (back.tensor.float().norm(dim=-1) > 0).all()
            errors.append(off(back, src))
        assert errors == sorted(errors, reverse=True) and max(errors) < 0.12, errors
    with pytest.raises(ValueError, match="a share of [0-9]"):  # records alone take more
        there_and_back(chunk(dtype, 8, 1), 0.5)


def turned(rows, base):
    """Keys [L, T, H*D], rotated to their positions."""
    rows, angles = rows.unflatten(-1, (-1, D)), torch.arange(rows.shape[1])[:, None] * base ** (-torch.arange(0, D, 2) / D)
    x, y, sine, cosine = *rows.chunk(2, -1), angles.sin()[:, None], angles.cos()[:, None]
    return torch.cat([x * cosine - y * sine, x * sine + y * cosine], -1).flatten(-2)


#: keys of normal keys x, and biases b of their channels
KEYS = {**{f"biases of {size:g}": lambda x, b, size=size: x + size * b for size in (30, 300, 3e3, 1e4)},
        **{f"biases of {size:g}, turned": lambda x, b, size=size: turned(x + size * b, 1e4) for size in (300, 3e3)},
        **{f"spreads of {size:g}": lambda x, b, size=size: x * size for size in (1e-20, 1e-6, 1e3, 1e15)},
        **{f"a channel's spread of {size:g}": lambda x, b, size=size: x * torch.where(torch.arange(H * D) == 5, size, 1)
           for size in (1e-20, 1e4, 1e15)},
        "spreads of all sizes": lambda x, b: x * 10 ** (3 * b), "alike but for rounding": lambda x, b: 600 * b * (1 + 2**-7 * x),
        "alike": lambda x, b: b.expand_as(x), "zeros": lambda x, b: 0 * x, "one head of zeros": lambda x, b: x * (torch.arange(H * D) < D)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("keys", KEYS)
def test_channels_come_back_whatever_their_mean_and_spread(keys, dtype):
    src = memory((2, L, T, H * D), dtype)
    src.tensor.copy_(torch.randn(src.tensor.shape))
    most = torch.finfo(dtype).max
    src.tensor[0] = KEYS[keys](torch.randn(L, T, H * D), torch.randn(L, 1, H * D)).clamp(-most, most).to(dtype)
    count, back = there_and_back(src, 0.5)
    assert count <= 0.5 * src.get_size()
    assert worst_channel(back, src) < 0.2 and off(back, src, 1) < 0.1
    src.tensor[1] = src.tensor[0]
    back = there_and_back(src, 0.5)[1].tensor[1].double()
    assert (back - src.tensor[1].double()).norm() <= 0.1 * src.tensor[1].double().norm()


def test_estimates_hold_and_are_close():
    serializer = mdkv.lmcache.MdkvSerializer(D, 0.5)
    for tokens in (256, 300, 1000):
        src = chunk(tokens=tokens)
        estimate = serializer.estimate_serialized_size(layout(src))
        count, _ = there_and_back(src, 0.5)
        assert estimate - 2048 <= count <= estimate <= 0.5 * src.get_size()


def test_types_and_threads_of_lmcache():
    assert "mdkv" in serde.get_registered_serde_types()
    processor = serde.create_serde_processor(serde.SerdeConfig("mdkv", {"head_dim": D, "share": 0.5, "max_workers": 3}))
    try:
        sources = [chunk() for _ in range(6)]
        size = serde.serialized_layout_desc(layout(sources[0]), processor)
        between = [memory(size.shapes[0], size.dtypes[0]) for _ in sources]
        back = [memory(one.tensor.shape, one.tensor.dtype) for one in sources]
        keys = [serde.make_temp_key(KEY) for _ in sources]

        def wait(fd, query, tasks):
            results = {}
            while len(results) < len(tasks):
                assert select.select([fd], [], [], 60)[0], "no event"
                os.read(fd, 8)
                for task in tasks:
                    if task not in results and (done := query(task)) is not None:
                        results[task] = done
            return set(results.values())

        tasks = [processor.submit_serialize(sources[i::3], between[i::3], keys[i::3]) for i in range(3)]
        assert wait(processor.get_serialize_event_fd(), processor.query_serialize_result, tasks) == {True}
        assert all(one.get_size() < size.shapes[0][0] + 1 for one in between)
        tasks = [processor.submit_deserialize(between[i::3], back[i::3], keys[i::3]) for i in range(3)]
        assert wait(processor.get_deserialize_event_fd(), processor.query_deserialize_result, tasks) == {True}
        assert all(off(*pair) < 0.12 for pair in zip(back, sources))
        other = [ObjectKey(chunk_hash=b"1", model_name="other", kv_rank=0, cache_salt="tenant")]
        tasks = [processor.submit_deserialize(between[:1], back[:1], other)]
        assert wait(processor.get_deserialize_event_fd(), processor.query_deserialize_result, tasks) == {False}
    finally:
        processor.close()


def test_nearer_than_lmcaches_own_fp8_in_a_little_more_bytes():
    src = chunk(tokens=1024)
    theirs = serde.Fp8QuantizationSerializer()
    between = memory((theirs.estimate_serialized_size(layout(src)),), torch.uint8)
    theirs.serialize(src, between, KEY)
    back = memory(src.tensor.shape, src.tensor.dtype)
    serde.Fp8QuantizationDeserializer().deserialize(between, back, KEY)
    for which in (0, 1):
        assert off(there_and_back(src, 0.6)[1], src, which) < 0.6 * off(back, src, which)


def test_what_does_not_fit_is_refused():
    src = chunk()
    for shape in ((2, L, T, H * D + 1), (1, L, T, H * D), (2, T, H * D), (2, L, 0, H * D)):
        with pytest.raises(ValueError, match=r"a chunk is \[2, L, T, H\*D\]"):
            mdkv.lmcache.MdkvSerializer(D).estimate_serialized_size(MemoryLayoutDesc([torch.Size(shape)], [torch.float16]))
    with pytest.raises(ValueError, match="4 bits of all tokens take [0-9]+, a share of 0.[0-9]+"):
        mdkv.lmcache.MdkvSerializer(D, 0.1).estimate_serialized_size(layout(src))
    with pytest.raises(ValueError, match="share 2"):
        mdkv.lmcache.MdkvSerializer(D, 2)
    with pytest.raises(ValueError, match="needs head_dim"):
        serde.create_serde_processor(serde.SerdeConfig("mdkv", {}))
    with pytest.raises(ValueError, match="the chunk takes [0-9]+ bytes; dst has 1000"):
        mdkv.lmcache.MdkvSerializer(D, 0.5).serialize(src, memory((1000,), torch.uint8), KEY)
    src.tensor[0, 1, 5, 7] = float("nan")
    with pytest.raises(ValueError, match="NaN|finite"):
        there_and_back(src, 0.5)


def test_changed_bytes_are_refused():
    src = chunk(tokens=300)
    serializer = mdkv.lmcache.MdkvSerializer(D, 0.5)
    between = memory((serializer.estimate_serialized_size(layout(src)),), torch.uint8)
    count = serializer.serialize(src, between, KEY)
    back = memory(src.tensor.shape, src.tensor.dtype)
    deserializer = mdkv.lmcache.MdkvDeserializer(D)
    deserializer.deserialize(between, back, KEY)  # with bytes behind the end
    for other in (chunk(tokens=299), chunk(torch.bfloat16, 300), chunk(tokens=300, layers=2)):
        with pytest.raises(ValueError, match="the chunk is of|of type"):
            deserializer.deserialize(between, other, KEY)
    used = torch.nonzero(between.tensor[:count])[:, 0]
    for place in used[torch.randint(len(used), (60,))].tolist() + [17, 20, 23]:
        between.tensor[place] ^= 1 << int(torch.randint(8, ()))
        with pytest.raises(ValueError):
            deserializer.deserialize(between, back, KEY)
        between.tensor[:] = 0
        serializer.serialize(src, between, KEY)
