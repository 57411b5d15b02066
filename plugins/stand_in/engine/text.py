"""The pseudo-tokenizer: ids below 256 are the bytes of UTF-8, one id ends a sequence, and all others are words made of their number."""

import codecs
from collections.abc import Sequence

EOS_TEXT = "<|endoftext|>"

#: A character of UTF-8 has at most this many bytes.
_LONGEST = 4


def encode(text: str) -> list[int]:
    """The tokens of a text: its bytes."""
    return list(text.encode())


class Detokenizer:
    """Turns tokens into text one by one; a character comes out when its last byte is in.

    It starts with the end of the prompt: a character that the prompt left incomplete comes out with the first tokens, as with
    vLLM.
    """

    def __init__(self, prompt: Sequence[int], eos_token_id: int, *, skip_special: bool) -> None:
        self._eos_token_id = eos_token_id
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in prompt[-_LONGEST:]:
            self.push(token)

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        if token == self._eos_token_id:
            return self._flush() + ("" if self._skip_special else EOS_TEXT)
        if token < 256:
            return self._decoder.decode(bytes((token,)))
        return self._flush() + f" w{token}"

    def _flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
