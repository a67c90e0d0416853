"""storing.py: layers as files that other processes attend to where they lie."""
import hashlib
import mmap
import os
import stat

import numpy

from . import _module


def save(path, layers, *, identity="", **options):
    """Writes the `mdkv.Layer`s of neighbouring layers of one sequence to a file, which `load` maps. Options:

    identity                   text or bytes for all that must agree: model, revision, encoding of positions, a secret of one
                               tenant. `load` refuses another; the file holds its SHA-256
    tokens                     number of all tokens of the text, appended ones included. Without it a layer that is loaded counts in
                               `Layer.tokens` the tokens that are stored, and no dropped ones
    positions                  of each layer int32 [H, S]: the place in the text of each token in the order of the cache, or -1,
                               for engines that need plain tensors (`Layer.unpack`); by default none
    attachment                 bytes of your own
    first_layer, model_layers, first_head, model_heads
                               the part of the model that these layers are; by default all of it

    The bytes are written under a temporary name in the same folder, synced, and renamed: whatever happens, `path` names the old
    file or the whole new one, which only its owner can read. A symbolic link stays, and the file at its end is replaced. A device
    or a pipe that a process reads stays, too, and takes the bytes as they come. Raises ValueError with the library's message
    before anything is written, and OSError if the file cannot be written; then the old file is still there.
    """
    _module.write(os.fspath(path), _on_host(layers), _digest(identity), **options)


def write(layers, *, identity="", **options):
    """The bytes that `save` would write, as a NumPy array uint8, e.g. to send them; `read` takes them."""
    return _module.write(None, _on_host(layers), _digest(identity), **options)


def load(path, *, identity="", verify="everything", backend=None):
    """The `mdkv.Stored` caches of a file, which is mapped: nothing is copied, and processes share its pages.

        mdkv.load("prompt.mdkv", identity="...").layer(7).attend(query, output)

    identity   as it was given to `save`
    verify     "everything": compare the checksum, which reads the file once. "bounds": leave it out; everything that decides an
               access is checked in either case, so that a file of a stranger's is refused or attended without an access outside
    backend    `mdkv.Backend` of the layers; None: one thread

    The file may be replaced or removed while it is in use, but must not be changed or truncated: that ends the process.
    Raises ValueError with the library's message for a file of another identity, a damaged one, and one that is none, and OSError
    for what cannot be opened or mapped, such as a pipe, whose bytes `read` takes.
    """
    name = shown(path)
    with open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{name}: is not a regular file")
        if not status.st_size:
            raise ValueError(f"{name}: the file is empty")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return read(mapped, identity=identity, verify=verify, backend=backend)
    except ValueError as problem:
        raise type(problem)(f"{name}: {problem}") from None


def shown(path):
    """A path's text for a message, whatever its bytes are."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _open_at_once(path, flags):
    """A pipe that no process writes is opened, too, and does not wait for one."""
    return os.open(path, flags | os.O_NONBLOCK)


def read(data, *, identity="", verify="everything", backend=None):
    """As `load`, of bytes in memory: anything with the buffer protocol. They are copied unless they lie at a multiple of 64, as
    those of `write` and of `mmap` do."""
    if verify not in ("everything", "bounds"):
        raise ValueError(f"mdkv: verify is {verify!r}; there are \"everything\" and \"bounds\"")
    data = numpy.frombuffer(data, numpy.uint8)
    return _module.Stored(data, _digest(identity), everything=verify == "everything", backend=backend)


def as_bytes(identity):
    return identity.encode(errors="surrogatepass") if isinstance(identity, str) else identity


def _on_host(layers):
    return [one.to(_module.Backend()) if getattr(one, "device", None) == "cuda" else one for one in layers]


def _digest(identity):
    return hashlib.sha256(as_bytes(identity)).digest()
