"""Where layers lie, by pytest's --device: `cpu`; torch's device `cuda`; `executor`: host memory that is called a device's."""
import ctypes
import os
import types

import numpy as np
import pytest

#: the cases that run on the CPU alone, by their reason
CPU_ALONE = {
    "asks the CPU's backend for its scratch memory": "test_scratch_is_given_back_at_a_prompts_end",
    "reads what a process prints, to which the executor adds a line":
        "test_the_package_is_imported_again_after_it_was_removed test_processors_that_tell_nothing",
    "refuses outputs in the host's memory that cannot be written": "test_outputs_that_cannot_be_written",
    "shows the module's own classes": "test_help_lists_what_the_package_has",
    "maps a file's pages, which layers on the CPU alone read": "test_attention_reads_the_files_pages",
    "compares with the CPU of another process, bit for bit": "test_another_process_attends test_generate_in_another_process",
    "gives torch's tensors to functions of the host, log_sum_exps and write": "test_torch_tensors test_torch_tensors_with_the_negative_bit",
}


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda", "executor"))
    parser.addoption("--part", default="0/1", type=lambda x: slice(int(x[0]), None, int(x[2])), help="1/3: every third case from 1 on")


def pytest_configure(config):
    os.environ["MDKV_TEST_PLACE"] = config.getoption("--device")
    os.environ["MDKV_TEST_DEVICE"] = config.getoption("--device").replace("executor", "cpu")  # torch's name
    if config.getoption("--device") == "executor":  # which is slow
        os.environ |= {"MDKV_PTX_HOST_MEMORY": "1", "MDKV_TEST_SMALL": "1"}


def pytest_collection_modifyitems(config, items):
    items[:] = items[config.getoption("--part")]
    reasons = {case: reason for reason, cases in CPU_ALONE.items() for case in cases.split()}
    for item in items if config.getoption("--device") != "cpu" else ():
        if item.originalname in reasons:
            item.add_marker(pytest.mark.skip(reason="on the CPU alone: " + reasons[item.originalname]))


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--device") == "executor":
        terminalreporter.write_line(f"{getattr(config, 'worked', 0)} of the cases had work for the device")


class HostSource:
    """Streams and memory for the executor, in the place of device.TorchSource."""

    number, made = 0, []

    def __init__(self, _=None):
        self.calls, self.allocated, self.blocks, self.refuses, self.handle = 0, 0, {}, None, 0
        self.made.append(self)

    def stream(self):
        self.calls += 1
        return self.handle

    def allocate(self, size):
        if self.refuses:
            raise self.refuses
        block = np.full(size + 256, 255, np.uint8)  # NaNs
        address = -(-block.ctypes.data // 256) * 256
        self.blocks[address], self.allocated = block, self.allocated + 1
        return address

    def release(self, address):
        self.blocks.pop(address).fill(255)


def as_cuda(export):
    """torch's Tensor.__dlpack__ whose capsules say that the tensor is on a CUDA device."""
    def exported(self, **options):
        options.pop("stream", None)
        capsule, api = export(self, **options), ctypes.pythonapi
        api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
        api.PyCapsule_GetPointer.restype, api.PyCapsule_GetPointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        name = api.PyCapsule_GetName(capsule)
        tensor = api.PyCapsule_GetPointer(capsule, name) + (32 if name == b"dltensor_versioned" else 0)
        ctypes.c_int32.from_address(tensor + 8).value = 2  # DLTensor: data, then the device's type
        return capsule
    return exported


@pytest.fixture(autouse=True)
def place(request, monkeypatch):
    """The device under test: `name`; `to`, torch's name; `on()` makes a backend, None on the CPU. A kernel's fault fails a case."""
    name = request.config.getoption("--device")
    if name == "cpu":
        yield types.SimpleNamespace(name=name, to="cpu", on=lambda: None)
        return
    import torch
    import mdkv
    from mdkv import device
    to, faults = os.environ["MDKV_TEST_DEVICE"], lambda: 0
    export = torch.Tensor.__dlpack__
    if name == "executor":
        HostSource.made.clear()
        monkeypatch.setattr(torch.Tensor, "__dlpack__", as_cuda(export))
        monkeypatch.setitem(device.SOURCES, "cpu", HostSource)
        faults = ctypes.CDLL(mdkv._module.__file__)["_ZN3ptx6faultsEv"]
        faults.restype = ctypes.c_uint64
    before = faults()
    on = lambda: mdkv.CudaBackend(source=device.SOURCES[to](torch.device(to)))
    if request.module.__name__ in ("test_mdkv", "test_reader", "test_storing"):
        arrays_on(monkeypatch, mdkv, on(), to)
    yield types.SimpleNamespace(name=name, to=to, on=on, plain=export)
    request.config.worked = getattr(request.config, "worked", 0) + any(one.calls for one in HostSource.made)
    assert faults() == before


def arrays_on(monkeypatch, mdkv, on, to):
    """Gives the module's calls NumPy's arrays as tensors of the device, and its backend in the place of the CPU's."""
    import torch

    def moved(value):
        if isinstance(value, mdkv.Backend):
            return on
        if not isinstance(value, np.ndarray) or str(value.dtype) not in ("float16", "float32", "float64", "int32", "int64"):
            return value
        return torch.from_numpy(value if value.flags.writeable and min(value.strides, default=0) >= 0 else value.copy()).to(to)

    def call(function, *given, **options):
        pairs = [(one, moved(one)) for one in (*given, *options.values())]
        found = function(*(new for _, new in pairs[: len(given)]), **dict(zip(options, (new for _, new in pairs[len(given) :]))))
        for old, new in pairs if to != "cpu" else ():
            if isinstance(new, torch.Tensor) and old.flags.writeable:
                old[...] = new.cpu().numpy()
        return found

    def method(plain):
        return lambda self, *given, **options: (
            plain(self, *given, **options) if getattr(self, "device", "cuda") == "cpu" else call(plain, self, *given, **options))

    for kind, names in ((mdkv.Layer, "append attend recompress unpack"), (mdkv.Reader, "attend"),
                        (mdkv.Prompt, "read_chunk take_losses finish_layer allocate pack")):
        for name in names.split():
            monkeypatch.setattr(kind, name, method(getattr(kind, name)))
    for name in ("Prompt", "Reader", "compress"):
        plain = getattr(mdkv, name)
        monkeypatch.setattr(mdkv, name, lambda *given, plain=plain, backend=None, **options: call(
            plain, *given, backend=on if backend is None else backend, **options))
    monkeypatch.setattr(mdkv.Stored, "layer", lambda *given, layer=mdkv.Stored.layer, **options: layer(*given, **options).to(on))
