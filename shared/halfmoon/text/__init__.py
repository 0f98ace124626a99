"""Text and tokens: the model's tokenizer and chat template, incremental decoding, stop strings. Never imports torch."""

from halfmoon.text.codec import TextCodec
from halfmoon.text.detokenizer import Detokenizer
from halfmoon.text.errors import TextError, TokenizerUnusable
from halfmoon.text.stops import StopScanner

__all__ = ["Detokenizer", "StopScanner", "TextCodec", "TextError", "TokenizerUnusable"]
