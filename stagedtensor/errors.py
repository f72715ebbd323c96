"""Exception classes of the whole package.

Every message says what was expected, what came, where in the user's code, and what to do. Classes also derive from
the built-in exception a caller would expect. ``InternalError`` marks a broken invariant: a bug of this package.
"""

from __future__ import annotations


class StagedTensorError(Exception):
    """Base class of every error this package raises on purpose."""


class ShapeError(StagedTensorError, ValueError):
    """Shapes do not fit; names both sides with their source lines."""


class SpecError(StagedTensorError, ValueError):
    """A malformed einsum spec or statement string; shows it with a caret under the offending column."""


class LanguageError(StagedTensorError, ValueError):
    """A fault in a textual model, or a block used against its stages.

    ``file``, ``line`` and ``column`` (from 1) say where in a text; they are empty and 0 where Python code is at fault.
    """

    def __init__(self, message: str, *, file: str = "", line: int = 0, column: int = 0) -> None:
        super().__init__(message)
        self.file = file
        self.line = line
        self.column = column


class PrecisionError(StagedTensorError, ValueError):
    """Precisions conflict or a precision is unknown."""


class ConstantRangeError(PrecisionError):
    """A literal cannot be represented in the format that its node was given."""


class GradientError(StagedTensorError, ValueError):
    """A gradient was asked for where there is none, or a gradient protocol was broken."""


class CompileError(StagedTensorError, RuntimeError):
    """The C or CUDA toolchain is missing or failed; carries source, compiler message and the user's line."""

    def __init__(self, message: str, *, source: str = "", output: str = "") -> None:
        super().__init__(message)
        self.source = source
        self.output = output


class ContextError(StagedTensorError, RuntimeError):
    """A Context was used against its contract: uninitialised input, wrong shape, foreign routine, closed context."""


class MemoryCheckError(StagedTensorError, RuntimeError):
    """A kernel on the emulated device touched memory it must not: names kernel, block, thread and expression."""


class EncodingError(StagedTensorError, ValueError):
    """Block-encoded data is damaged or of an unknown layout."""


class ExportError(StagedTensorError, ValueError):
    """A computation cannot be expressed in the interchange format."""


class CheckpointError(StagedTensorError, ValueError):
    """A checkpoint or a state dictionary does not fit."""


class InternalError(StagedTensorError, RuntimeError):
    """A broken invariant of this package: please report it with the text shown."""
