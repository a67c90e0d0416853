from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
Tensor = Any  # anything with __dlpack__, of rank and type as said


class InvalidArgument(ValueError):
    pass

library_version: str = '0.3.0'

compiled_for: str

class Budget:
    """
    The limit of an average layer's bytes: window, tokens, projections, channels and stand-ins, without the tail of decoded tokens. Where a limit is asked for, a number from 0 to 1 is a share of the uncompressed bytes.
    """

    @staticmethod
    def bytes(n: int) -> Budget:
        """n bytes."""

    @staticmethod
    def kv_size(tokens: int) -> Budget:
        """The bytes of so many uncompressed tokens of every KV head."""

    @staticmethod
    def fraction(share: float) -> Budget:
        """A share of the uncompressed bytes, from 0 to 1."""

class RatioSet:
    """
    The ways in which a token may be stored, cheapest first: RatioSet("drop", "int4", "int8", "full"). "1/4" is the leading quarter of its coordinates in the head's own basis, "1/4:int8" the same in codes of 8 bits. Iterates over the names.
    """

    def __init__(self, *args) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator: ...

    def __repr__(self) -> str: ...

class Preset:
    """
    All options of a prompt, a value. Its members are those of mdkv::preset in include/mdkv/presets.hpp: name, ratios, window, queries, question, early_weight, uniform, stand_ins, stand_in_part, coded_stand_ins, window_part, scale, charge, and the dictionaries pooling, replayed, shared and refitted, of which the last three may be None. The package's README says what they mean under "A policy of your own"; repr shows them.
    """

    def replace(self, **kwargs) -> Preset:
        """
        A copy with other members: replace(window=16, pooling={"width": 5}, shared=None). A dictionary changes the members that it names.
        """

    def __getattr__(self, arg: str, /) -> object: ...

    def __dir__(self) -> list: ...

    def __repr__(self) -> str: ...

def preset(name: str) -> Preset:
    """The library's preset of this name."""

class Rope:
    """
    A model's rotary position encoding: at position p, pair i is rotated by p * base^(-2 i / n) radians, n the first `rotating` coordinates of a head (0: all), or by p * frequencies[i]. pairs: "halves" (i and i + n/2, as transformers stores them) or "neighbours" (2 i and 2 i + 1).
    """

    def __init__(self, base: float = 10000.0, rotating: int = 0, pairs: str = 'halves', frequencies: Sequence[float] = []) -> None: ...

class Backend:
    """
    Threads of the CPU and scratch memory, which grows to the largest need until a prompt's last layer is packed. Calls from several threads take turns; separate backends work side by side. In a process that is forked while another thread is in a call on a backend, the backend and all that was made on it raise RuntimeError.
    """

    def __init__(self, threads: int = 1) -> None: ...

    @property
    def threads(self) -> int:
        """Threads that share each call, the calling one included."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch memory."""

    def release_scratch(self) -> None:
        """
        Gives the scratch memory back, as the last layer's Prompt.pack and Reader.finish do; the next call takes what it needs.
        """

    def __reduce__(self) -> object: ...

class Ranks:
    """
    This process among those over which the heads of prompts are spread, and its transport. Prompts with ranks share one budget over all heads, and choose bit for bit what one process with all heads does: see docs/ranks.md. mdkv.distributed makes them of torch.distributed's groups.
    """

    def __init__(self, sum: Callable, *, first_head: int, heads: int) -> None:
        """
        sum(numbers): each of int64 [n] becomes its sum over all ranks; it changes the NumPy array in place and returns None when it is done; its exceptions leave the call that exchanges. All ranks make the same calls in the same order, each with a backend of its own. first_head: number of this rank's first KV head among the `heads` of a layer on all ranks.
        """

    @property
    def first_head(self) -> int:
        """Number of this rank's first KV head."""

    @property
    def heads(self) -> int:
        """KV heads of a layer, on all ranks."""

    @property
    def exchanges(self) -> int:
        """Calls of the function so far."""

    @property
    def bytes(self) -> int:
        """Bytes that this rank has given to the function so far."""

    def refuse(self) -> None:
        """
        Tells the other ranks that this one does not make its next call: theirs raises. finish_layer and allocate of a prompt whose arguments are refused do it themselves.
        """

class Layer:
    """
    One layer's compressed cache of one sequence: a compressed part and a tail of appended tokens, which are stored uncompressed.
    """

    @property
    def dtype(self) -> str:
        """Element type: "float32", "float16" or "bfloat16"."""

    @property
    def heads(self) -> int:
        """KV heads H."""

    @property
    def key_dim(self) -> int:
        """Numbers of a key D."""

    @property
    def value_dim(self) -> int:
        """Numbers of a value Dv."""

    @property
    def tokens(self) -> int:
        """Tokens of the text so far, dropped ones included."""

    @property
    def compressed_tokens(self) -> int:
        """Tokens of the text in the compressed part, dropped ones included."""

    @property
    def appended(self) -> int:
        """Tokens in the tail."""

    @property
    def window(self) -> int:
        """
        Last tokens of the compressed part, which stay as they are: the preset's window, or a shorter prompt.
        """

    @property
    def stand_ins(self) -> int:
        """Stand-ins for dropped tokens, over all heads."""

    @property
    def ratios(self) -> RatioSet:
        """The rungs."""

    @property
    def rungs(self) -> dict:
        """
        Tokens of the compressed part by the name of their rung, over all heads. "full" counts the window.
        """

    @property
    def rungs_of_heads(self) -> list:
        """The same for each head."""

    @property
    def bytes(self) -> dict:
        """
        Bytes that the cache takes: "arena" (the compressed part), "tail" (its room), "directory", "total"; and "uncompressed", those of the same tokens in plain tensors.
        """

    def append(self, keys: Tensor, values: Tensor) -> None:
        """
        Adds n tokens to the tail, which grows if it is full: keys [H, n, D] after position encoding, values [H, n, Dv].
        """

    def attend(self, queries: Tensor, output: Tensor, lse: Tensor | None = None, scale: float = 0.0) -> None:
        """
        Attention over the whole cache: queries [H*G, n, D] of the last n appended tokens, each of which sees the tokens up to its own; n = 1 may be any token after the text. Writes output [H*G, n, Dv], of the queries' type, and lse [H*G, n] in float32, the log-sum-exps. scale: factor of q.k (0: the cache's). Reads every stored byte once.
        """

    def unpack(self, keys: Tensor, values: Tensor) -> object:
        """
        Plain keys [H, S, D] and values [H, S, Dv] of all tokens, with what their rungs left of them: the rungs in turn, those of one in the order of the text, the window, the tail, then stand-ins. Returns the rows of each head [H]; those behind them are zeros. S: at least the most rows of a head.
        """

    def truncate(self, appended: int) -> None:
        """Takes the last tokens of the tail back: at most so many stay."""

    def reserve(self, appended: int) -> None:
        """Room in the tail for so many tokens in all."""

    def recompress(self, queries: Tensor, limit: object | None = None, preset: Preset | None = None, *, sources: Tensor | None = None) -> dict:
        """
        Folds the tail into the compressed part, within a limit, by default the bytes that the layer got when its prompt was compressed: queries [H*G, Q, D] of the last Q tokens, from 1 to all of the window and the tail. The preset (by_window if none is given) has the rungs that the cache has. Returns a report. sources: int32 [H, S] receives for each token of the new cache, in the order of unpack without stand-ins, its place in the old one, -1 behind a head's last; S: at least the tokens of the text.
        """

    def copy(self) -> Layer:
        """An equal cache in memory of its own."""

    def __reduce__(self) -> object: ...

class Prompt:
    """
    All layers of one prompt, compressed by a preset: read_chunk for each chunk of each layer while the prompt is read (presets that replay), finish_layer for each layer, allocate, pack for each layer. The package's README has the calls under "A layer", include/mdkv/prompt.hpp the contract.
    """

    def __init__(self, preset: Preset, *, layers: int, heads: int, group: int = 1, key_dim: int, value_dim: int | None = None, tokens: int, dtype: str, rope: Rope | None = None, check_finite: bool = True, backend: object | None = None, ranks: object | None = None) -> None:
        """
        layers L, heads H (KV heads), group G (query heads per KV head), key_dim D, value_dim Dv (D if none is given), tokens: the prompt's, or the most that it may have; dtype: "float32", "float16" or "bfloat16", of queries, keys and values. rope: the model's, for read_chunk if the preset replays. check_finite: search for NaNs and infinities first. ranks: an mdkv.Ranks if other processes have further heads of the prompt; the sizes are then this one's, limit and choice of `allocate` are of all heads.
        """

    def read_chunk(self, layer: int, first: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """
        Scores n tokens of a layer, the prompt's tokens first, first + 1, ..., by their own queries [H*G, n, D], keys [H, n, D] and values [H, n, Dv]. The presets were measured with first and n that are multiples of preset.replayed["chunk"], but for the last n; others give other losses.
        """

    def take_losses(self, layer: int, losses: Tensor) -> None:
        """
        Losses of your own in the place of read_chunk, for a preset that replays: float32 [H, R, N - window], how much is lost if a token is stored at each rung of preset.ratios, 0 if nothing is. finish_layer pools them, and joins them with those of the last queries if preset.replayed["join"] is above 0; allocate balances the layers' losses unless preset.shared is None.
        """

    def finish_layer(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, lse: Tensor | None = None) -> None:
        """
        Finds a layer's losses once it was read: queries [H*G, Q, D] of the last Q tokens, keys [H, N, D] and values [H, N, Dv] of all, and the queries' log-sum-exps [H*G, Q], if they are known.
        """

    def allocate(self, limit: object | None = None, quotas: Tensor | None = None) -> dict:
        """
        Chooses every token's rung within a limit, for all layers at once if the preset is shared, or within quotas, int64 [L, H]: the bytes that each head may spend on tokens, projections and channels, beside its window. May be called again with another limit. Returns the choice over all layers: status, multiplier (of the limit), loss, dual (no choice loses less), limit (of the tokens before the window, without stand-ins), token_bytes, charged_bytes (of projections), and tokens by the name of their rung.
        """

    def pack(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, lse: Tensor | None = None) -> tuple:
        """
        A layer's Layer and report, from the rows that finish_layer had. lse is needed if the preset makes stand-ins. The report: status, budget_bytes (of an average layer), window_bytes, resident_bytes (of the arena), full_bytes (uncompressed), and chosen: the multiplier and the layer's tokens by the name of their rung.
        """

    def rungs_of(self, layer: int) -> object:
        """
        [H, N - window]  the chosen rung of each token of a layer, an index of preset.ratios; [H, N] if the window is stored in codes (Preset.window_part).
        """

    def losses_of(self, layer: int) -> object:
        """[H, R, N - window]  a layer's losses at each rung."""

    @property
    def preset(self) -> Preset:
        """The preset."""

    @property
    def dtype(self) -> str:
        """Element type of queries, keys and values."""

    @property
    def state_bytes(self) -> int:
        """Bytes that the prompt takes beside the tensors, until it is deleted."""

    def __reduce__(self) -> object: ...

def log_sum_exps(queries: Tensor, keys: Tensor, scale: float = 0.0, backend: Backend | None = None) -> object:
    """
    [H*G, Q]  log-sum-exps of the last Q of N tokens' queries [H*G, Q, D] over the keys [H, N, D] that each one sees. scale: factor of q.k (0: 1/sqrt(D)).
    """

class Reader:
    """
    A prompt that is compressed while it is read, in memory that does not grow with its length: attend for each layer and end_chunk for each chunk, then finish. For presets that replay. See include/mdkv/reader.hpp.
    """

    def __init__(self, preset: Preset, *, layers: int, heads: int, group: int = 1, key_dim: int, value_dim: int | None = None, tokens: int, dtype: str, rope: Rope | None = None, check_finite: bool = True, backend: object | None = None, limit: object, chunk: int = 256, slack: float | None = None) -> None:
        """
        layers L, heads H (KV heads), group G (query heads per KV head), key_dim D, value_dim Dv (D if none is given), tokens: the most that the prompt may have; dtype: "float32", "float16" or "bfloat16", of queries, keys and values. rope: the model's. check_finite: search for NaNs and infinities first. limit: of an average layer, for window and all tokens, see Budget; a share is one of `tokens`. chunk: the most tokens of a chunk, which are held uncompressed beside the limit. slack: share of the limit that stored tokens may take beside it before the prompt's end; None: a quarter if the preset's last queries score, otherwise none.
        """

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, output: Tensor, lse: Tensor | None = None, *, ahead: bool = False) -> None:
        """
        Attention of the chunk's next n tokens in one layer, causal over the chunk and over what is kept of the tokens before it: queries [H*G, n, D], keys [H, n, D], values [H, n, Dv]. Writes output [H*G, n, Dv], of the queries' type, and lse [H*G, n] in float32, the log-sum-exps. ahead: the tokens come behind the chunk, e.g. drafts behind a prompt's end, and the reader does not keep them.
        """

    def end_chunk(self) -> dict:
        """
        Brings all layers, which have the chunk's tokens, within the limit and its slack. Returns a report: tokens (read so far), limit_bytes and held_bytes of all layers' arenas, losses_bytes beside them, chosen.
        """

    def forget_chunk(self) -> None:
        """
        Takes the tokens of the present chunk back from all layers, e.g. after an error in one of them.
        """

    def finish(self) -> tuple[list[Layer], dict]:
        """
        Ends the prompt: brings all layers within the limit. Returns the Layer of each, and a report as end_chunk's.
        """

    @property
    def tokens(self) -> int:
        """Tokens read and stored; those of the present chunk do not count."""

    @property
    def preset(self) -> Preset:
        """The preset."""

    @property
    def dtype(self) -> str:
        """Element type of queries, keys and values."""

    @property
    def state_bytes(self) -> int:
        """
        Bytes that the reader takes beside the caches and their losses, until it is deleted.
        """

    @property
    def bytes(self) -> dict:
        """
        Bytes that the reader holds now: "arena" (compressed parts of all layers), "tail" (room for a chunk), "directory", "losses" (of stored tokens), "state", "total".
        """

    def __reduce__(self) -> object: ...

class Stored:
    """
    Caches in the bytes of a file: checked once, and attended where they lie. The bytes must not change.
    """

    def __init__(self, bytes: Annotated[Tensor[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], identity: bytes, *, everything: bool = True, backend: Backend | None = None) -> None:
        """
        bytes: the whole file as uint8, which is copied if it does not lie at a multiple of 64. identity: 32 bytes. everything: compare the checksum, which reads all bytes; bounds are checked in either case.
        """

    def __len__(self) -> int:
        """Layers of the file."""

    @property
    def heads(self) -> int:
        """KV heads of the file."""

    @property
    def tokens(self) -> int:
        """
        Tokens of the text, if they were given when it was written; otherwise 0.
        """

    @property
    def first_layer(self) -> int:
        """The file's first layer among those of the model."""

    @property
    def model_layers(self) -> int:
        """Layers of the model."""

    @property
    def first_head(self) -> int:
        """The file's first KV head among those of the model."""

    @property
    def model_heads(self) -> int:
        """KV heads of the model."""

    @property
    def dtype(self) -> str:
        """Element type: "float32", "float16" or "bfloat16"."""

    def __reduce__(self) -> object: ...

    @property
    def attachment(self) -> bytes:
        """Bytes of the program that wrote the file, which nothing has checked."""

    def positions(self, i: int) -> object:
        """
        [H, S] places in the text of the rows that unpack gives of layer i, int32, -1 behind a head's last one; [H, 0] if they were not given when the file was written.
        """

    def layer(self, i: int, head: int = 0, count: int = -1) -> Layer:
        """
        A Layer of heads [head, head + count) of the file's layer i (-1: all that follow), whose compressed part lies in the file's bytes. Its tail is its own: append, truncate and attend as with any other Layer. recompress puts it into memory of its own. Each call makes another Layer.
        """

def write(path: object | None, layers: Sequence, identity: bytes, *, tokens: int = 0, positions: Sequence[Annotated[Tensor[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)]] | None = None, attachment: bytes = ..., first_layer: int = 0, model_layers: int | None = None, first_head: int = 0, model_heads: int | None = None) -> object:
    """
    See mdkv.save and mdkv.write: to a file, or, if path is None, to memory, which is returned.
    """
