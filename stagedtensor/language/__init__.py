"""The textual surfaces: einsum specs, statement strings, and models as text. Grammars are the ``.lark`` files here.

``st.language.load(path)`` and ``st.language.parse(text)`` read models; ``st.language.format`` prints them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model_module import Module


def load(path: str | os.PathLike[str]) -> Module:
    """Read a file of model definitions.

    ``nets = st.language.load("mlp.st")`` has its definitions as attributes: ``model = nets.mlp(hid=64, out=10)()``
    makes the parameters of a block, ``model(x)`` applies it.

    Reading parses and checks names; it builds nothing and runs no Python. Raises LanguageError with file, line, column
    and a caret; OSError where the file cannot be read.
    """
    from .model_module import module_at  # brings in lark

    return module_at(path)


def parse(text: str, name: str = "<text>") -> Module:
    """Read model definitions from a string; ``name`` stands for the file in messages and generated source.

    >>> import stagedtensor as st
    >>> nets = st.language.parse("let dense ~hid () x = relu ({ w } * x + { b = 0.; o = [hid] })")
    >>> layer = nets.dense(hid=64)()     # () is the stage at which parameters are made
    >>> print(layer(st.placeholder("x", batch=[32], output=[784])).shape)
    32 | -> 64
    """
    from .model_module import module_of

    if not isinstance(text, str) or not isinstance(name, str):
        raise TypeError(f"parse takes a text and a name, not {type(text).__name__} and {type(name).__name__}")
    return module_of(text, name)


def format(module_or_text: Module | str) -> str:
    r"""Return a module, or a text, in one layout; parsing that gives an equal module.

    Comments of a definition are kept and stand before it.

    >>> import stagedtensor as st
    >>> st.language.format("let f x=x*.(2.)")
    'let f x = x *. 2.0\n'
    """
    from .model_module import formatted

    return formatted(module_or_text)
