"""The format of safetensors: a header in JSON that says where each tensor of the file is, then the tensors.

    bytes of the header u64, the header, the elements of all tensors, without gaps

All little-endian. Tensors with large elements come first here, and the header fills a multiple of 64 bytes, so that the
elements of each tensor are aligned. The format knows no complex128: such a tensor is written as twice as many float64,
and the metadata of the file has its name.
"""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HEADER_LIMIT: Final = 100_000_000
"""The longest header that the library of safetensors reads, too."""
ALIGNMENT: Final = 64
_HEADER_LENGTH: Final = struct.Struct("<Q")
_FORMAT_NAMES: Final = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "complex128": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""By the name of numpy's dtype: the name in the file."""
FORMAT_DTYPES: Final = {
    name: np.dtype(getattr(ml_dtypes, name) if name.startswith(("bfloat", "float8")) else name)
    for name in _FORMAT_NAMES
}
_BY_NAME: Final = {name: FORMAT_DTYPES[each] for each, name in _FORMAT_NAMES.items() if each != "complex128"}
_WIDE: Final = "complex128"
"""The key of the metadata with the names of tensors of this dtype."""


class FileTensor(NamedTuple):
    """A tensor of a file."""

    name: str
    dtype: str
    """The name of a numpy dtype: a key of `FORMAT_DTYPES`."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * FORMAT_DTYPES[self.dtype].itemsize


class FileLayout(NamedTuple):
    """Where everything is in a file."""

    header: bytes
    """The first bytes, with the length."""
    starts: tuple[int, ...]
    """Where each tensor begins, from the start of the file."""
    nbytes: int


def lay_out(tensors: Sequence[FileTensor], metadata: Mapping[str, str] | None = None) -> FileLayout:
    """Return the layout of a file with these tensors, in this order; names are unique."""
    entries: dict[str, Any] = {}
    said = dict(metadata or {})
    if wide := [tensor.name for tensor in tensors if tensor.dtype == "complex128"]:
        said[_WIDE] = json.dumps(wide)
    if said:
        entries["__metadata__"] = said
    at, starts = 0, []
    for tensor in tensors:
        shape = [*tensor.shape, 2] if tensor.dtype == "complex128" else list(tensor.shape)
        entries[tensor.name] = {
            "dtype": _FORMAT_NAMES[tensor.dtype],
            "shape": shape,
            "data_offsets": [at, at + tensor.nbytes],
        }
        starts.append(at)
        at += tensor.nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _HEADER_LENGTH.size) % ALIGNMENT)
    header = _HEADER_LENGTH.pack(len(text)) + text
    return FileLayout(header, tuple(len(header) + start for start in starts), len(header) + at)


def in_order(tensors: Sequence[FileTensor]) -> list[int]:
    """Return the numbers of tensors in the order in which their elements are aligned in a file."""
    return sorted(range(len(tensors)), key=lambda number: (-FORMAT_DTYPES[tensors[number].dtype].itemsize, number))


def header_bytes(start: bytes) -> int:
    """Return the length of the header that a file's first eight bytes tell; raise ConfigError for an impossible one."""
    if len(start) != _HEADER_LENGTH.size:
        raise ConfigError("the file is too short for safetensors")
    length: int = _HEADER_LENGTH.unpack(start)[0]
    if length > HEADER_LIMIT:
        raise ConfigError(f"the file is no safetensors: its header would have {length} bytes")
    return length


def decode_tensors(header: bytes, data_bytes: int) -> dict[str, tuple[np.dtype[Any], tuple[int, ...], int]]:
    """Return dtype, shape and start in the data of each tensor, from a header without its length.

    `data_bytes` is what follows the header in the file. Whatever the header says, no tensor is outside of that.

    Raises:
        ConfigError: no such header, or it does not fit the file.
    """
    try:
        entries = json.loads(header.decode())
        wide = json.loads(entries.pop("__metadata__", {}).get(_WIDE, "[]"))
        found = {}
        for name, entry in entries.items():
            dtype, shape = _BY_NAME[entry["dtype"]], tuple(entry["shape"])
            start, end = entry["data_offsets"]
            if not all(type(each) is int and each >= 0 for each in (*shape, start, end)) or len(shape) > 32:
                raise ValueError(f"{name[:50]!r} has an impossible place")
            if end > data_bytes or end - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name[:50]!r} has {start} to {end} of {data_bytes} bytes")
            if name in wide:
                if dtype != np.float64 or not shape or shape[-1] != 2:
                    raise ValueError(f"{name[:50]!r} is no complex128")
                dtype, shape = np.dtype(np.complex128), shape[:-1]
            found[name] = (dtype, shape, start)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"the file has no readable header of safetensors: {error}") from error
    return found
