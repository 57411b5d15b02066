"""What trainers and workers are asked in the tests of weight updates, where what they say has to be the same."""

PROMPTS = (b"The mill wheel turns", b"Water", b"tokens, tokens and tokens again")
#: Tokens of each answer, whatever ends a sequence.
LENGTH = 12
