"""Codecs: encode float tensors as bytes and decode them, with fewer bits and a known error.

A codec is a pure value. It has no state and writes no headers. The length of a code in bytes
follows from the number of elements, so ranks know it without communicating. With
``Q(x) = decode(encode(x))``:

| codec    | Q(x)                                                   | bits per element (default) |
|----------|--------------------------------------------------------|----------------------------|
| ``Cast`` | x rounded to float16 or bfloat16 (float32: x)          | 16 (32)                    |
| ``Int8`` | s * q, q in -127..127, s = max(abs(x)) / 127 per block | 8.06                       |
| ``Int4`` | s * q, q in -7..7                                      | 4.06                       |
| ``Int2`` | s * q, q in -1, 0, 1                                   | 2.06                       |
"""

from laconic.codecs.cast import Cast
from laconic.codecs.codec import Codec
from laconic.codecs.integers import Int2, Int4, Int8
from laconic.errors import check_choice

__all__ = ["CODECS", "Cast", "Codec", "Int2", "Int4", "Int8", "codec_of"]

CODECS: dict[str, Codec] = {
    "float32": Cast("float32"),
    "bfloat16": Cast("bfloat16"),
    "float16": Cast("float16"),
    "int8": Int8(),
    "int4": Int4(),
    "int2": Int2(),
}
"""Codecs by name, as recipes accept them."""


def codec_of(codec: object) -> Codec:
    """Return the codec named ``codec``, or ``codec`` itself if it is a `Codec`.

    Raises ``ValueError`` that lists the choices.
    """
    return codec if isinstance(codec, Codec) else CODECS[check_choice("codec", codec, CODECS)]
