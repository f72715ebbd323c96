"""A GGUF file as a file of named arrays, for loading by name.

In: a path. Out: a ``TensorFile`` whose arrays decode when they are asked for, so that a large file costs what is loaded
of it. Packed weights come out in f32, plain ones in their own precision. Nothing is kept packed here: that is
``st.encodings.load_gguf``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from .encodings.gguf_file import GGUFWeights, load_gguf
from .errors import CheckpointError, EncodingError
from .source import user_source
from .tensor_file import Array, TensorFile

_MAGIC = b"GGUF"


def is_gguf(path: str | Path) -> bool:
    """Whether a file begins as a GGUF file does."""
    try:
        with open(path, "rb") as stream:
            return stream.read(len(_MAGIC)) == _MAGIC
    except OSError:  # whoever reads the file says what is wrong with it
        return False


class _Decoded(Mapping[str, Array]):
    """The weights of a file, each decoded anew at every look."""

    def __init__(self, weights: GGUFWeights) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Array:
        return self._weights[name].numpy()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __contains__(self, name: object) -> bool:
        return name in self._weights


def read_gguf(path: str | Path) -> TensorFile:
    """Open a GGUF file; types that are not supported are listed as unreadable. Raises CheckpointError."""
    try:
        weights = load_gguf(path, skip_unsupported=True)
    except EncodingError as error:
        raise CheckpointError(f"{error}\n  {user_source().quoted()}") from error
    return TensorFile(
        Path(path),
        _Decoded(weights),
        {name: value.prec for name, value in weights.items()},
        {},
        {
            name: f"the file has {kind}, which load does not decode; see st.encodings.load_gguf"
            for name, kind in weights.skipped.items()
        },
    )
