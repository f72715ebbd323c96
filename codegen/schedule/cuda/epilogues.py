"""Which reductions of a module are done in the epilogue of the product whose results they read.

In: blocks in order. Out: the notes that products are to take, by the place of their block. Decides by shapes alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stagedtensor.codegen.loop_ir import Block, Buffer
from stagedtensor.codegen.schedule.cuda.choose import result_tiles
from stagedtensor.codegen.schedule.cuda.notes import Note, note, noted
from stagedtensor.numerics import Numerics


class Epilogues:
    """The notes of products; those at places of ``taken`` are scheduled by others and take none."""

    def __init__(self, blocks: Sequence[Block], numerics: Numerics, taken: Collection[int]) -> None:
        self.notes: dict[int, Note] = {}
        self._blocks = blocks
        self._numerics = numerics
        self._taken = taken

    def ask(self, place: int) -> Buffer | None:
        """Return where a product leaves what the reduction at ``place`` is made of; None where no product can."""
        found = noted(self._blocks, place)
        if found is None or found[0] in self.notes or found[0] in self._taken:
            return None
        maker, source = found
        tiles = result_tiles(self._blocks[maker], self._numerics)
        if tiles is None:
            return None
        self.notes[maker] = note(self._blocks[place], source, tiles)
        return self.notes[maker].cells
