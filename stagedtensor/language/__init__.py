"""The textual surfaces: einsum specs, statement strings, and models as text. Grammars are the ``.lark`` files here."""
