"""device.py: where the layers of a cache lie: on the CPU, or on CUDA devices, by torch's streams and in torch's memory."""
import contextlib

import torch

import mdkv


class TorchSource:
    """A CUDA device's streams and memory for an `mdkv.CudaBackend`: every call goes to torch's current stream, behind the work of
    the call before, and all memory is torch's, so that torch.cuda.memory_allocated counts it and its errors are torch's."""

    def __init__(self, device):
        if torch.version.hip:
            raise NotImplementedError("mdkv: ROCm's devices are not served")
        self._device, self._last, self._blocks = device, None, {}
        self.number = torch.cuda.current_device() if device.index is None else device.index

    def stream(self):
        """The handle of the current stream. Work of another one is waited for by an event; a capture begins when all work is over."""
        now = torch.cuda.current_stream(self._device)
        if self._last is not None and now != self._last and not torch.cuda.is_current_stream_capturing():
            now.wait_event(self._last.record_event())
            for block in list(self._blocks.values()):  # another thread may release some
                block.record_stream(now)
        self._last = now
        return now.cuda_stream

    def allocate(self, size):
        """The address of so many bytes, which are the current stream's."""
        block = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._blocks[block.data_ptr()] = block
        return block.data_ptr()

    def release(self, address):
        """Gives the bytes back, in the order of the streams that have used them."""
        del self._blocks[address]


SOURCES = {"cuda": TorchSource}  #: by a torch device's type: what makes the source of its mdkv.CudaBackend


class Backends:
    """The backends of a cache by their torch devices, made when they are first asked for; `host`: the CPU's."""

    def __init__(self, host):
        self._host, self._others = host, {}

    def __getitem__(self, device):
        """Raises NotImplementedError, with the reason, for a device that is not served."""
        if device in self._others:
            return self._others[device]
        source = SOURCES.get(device.type)
        if source is None:
            if device.type != "cpu":
                raise NotImplementedError(f"mdkv: keys are on {device}; the CPU and CUDA devices are served")
            return self._host
        if mdkv.CudaBackend is None:
            raise NotImplementedError(f"mdkv: keys are on {device}, and this package was built without CUDA, as mdkv.build() says. "
                                      "Where nvcc is on the PATH, pip install --force-reinstall --no-deps . in a clone builds it with")
        self._others[device] = mdkv.CudaBackend(source=source(device))
        return self._others[device]

    def __deepcopy__(self, memo):
        return self

    @property
    def scratch_bytes(self):
        return sum(one.scratch_bytes for one in (self._host, *self._others.values()))

    def release_scratch(self):
        for one in (self._host, *self._others.values()):
            one.release_scratch()

    def moved(self, layers, device):
        """`mdkv.Layer`s as they are if they lie there, or their copies."""
        to = self[device]
        return [one if one.device == "cpu" and to is self._host else one.to(to) for one in layers]

    def log_sum_exps(self, queries, keys, scale):
        """A tensor where queries are, see mdkv.log_sum_exps; nothing waits for a device's."""
        on = self[queries.device]
        if on is not self._host:
            return log_sum_exps(queries, keys, scale)
        return torch.from_numpy(mdkv.log_sum_exps(queries, keys, scale, on))


def log_sum_exps(queries, keys, scale, sink_logits=None):
    """The log-sum-exps [H*G, Q], float32, of the last Q of N tokens' queries [H*G, Q, D] over the keys [H, N, D] that each one sees,
    and over sink logits [H*G], by torch."""
    heads, (tokens, dim), count = keys.shape[0], keys.shape[1:], queries.shape[1]
    later = torch.ones(count, count, dtype=torch.bool, device=keys.device).triu(1)
    found = []
    with torch.autocast(keys.device.type, enabled=False):
        for own, head in zip(queries.float().unflatten(0, (heads, -1)), keys.float()):
            logits = (scale or dim ** -0.5) * (own @ head.T)
            logits[..., tokens - count:].masked_fill_(later, -torch.inf)
            found.append(logits.logsumexp(-1))
    return torch.cat(found) if sink_logits is None else torch.logaddexp(torch.cat(found), sink_logits[:, None])


def current(device):
    """A scope whose current device is this one, as tensors of it must be given to the module."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
