"""Generated tokens as text: where it stops, and what of it can be shown while it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ctx_jax.data.tokenizers import Tokenizer

Show = Callable[[str], None]
"""Is given a text piece by piece."""


class Texts:
    """Prompts and what follows, cut before the first stop string that is generated.

    With `show`, whole texts are shown while they grow, one after the other, each on lines of its own: the first one at
    once, the next as far as it is when the one before has ended. What is shown is never taken back, and all of it
    together is the result.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompts: list[list[int]], stop: Sequence[str] = (), show: Show | None = None
    ) -> None:
        self.tokenizer, self.prompts, self.stop, self.show = tokenizer, prompts, stop, show
        self.starts = [len(tokenizer.decode(prompt)) for prompt in prompts]
        self.row, self.shown = 0, 0

    def watch(self, tokens: list[list[int]]) -> list[bool]:
        """Takes the tokens that follow each prompt so far; says which texts have come to a stop string."""
        whole, stopped = self.decoded(tokens)
        longest = max(map(len, tokens))
        ended = [stop or len(row) < longest for row, stop in zip(tokens, stopped, strict=True)]
        self.appear([text if end else certain(text, self.stop) for text, end in zip(whole, ended, strict=True)], ended)
        return stopped

    def finish(self, tokens: list[list[int]]) -> list[str]:
        """The texts, all of their tokens being there."""
        whole, _ = self.decoded(tokens)
        self.appear(whole, [True] * len(whole))
        return whole

    def decoded(self, tokens: list[list[int]]) -> tuple[list[str], list[bool]]:
        """The texts up to a stop string, and whether there is one."""
        texts, stopped = [], []
        for prompt, row, start in zip(self.prompts, tokens, self.starts, strict=True):
            text = self.tokenizer.decode(prompt + row)
            places = [place for word in self.stop if (place := text.find(word, start)) >= 0]
            texts.append(text[: min(places)] if places else text)
            stopped.append(bool(places))
        return texts, stopped

    def appear(self, texts: list[str], ended: list[bool]) -> None:
        """Shows what is new of the text in turn, and of those after it once it has ended."""
        while self.show is not None and self.row < len(texts):
            self.show(texts[self.row][self.shown :])
            self.shown = len(texts[self.row])
            if not ended[self.row]:
                return
            self.show("\n")
            self.row, self.shown = self.row + 1, 0


def certain(text: str, stop: Sequence[str] = ()) -> str:
    """What no further token changes: without the bytes of a character that is not complete, which look like U+FFFD, and
    without what may be the beginning of a stop string."""
    text = text.rstrip("\ufffd")
    longest = max(map(len, stop), default=0)
    for count in range(min(longest - 1, len(text)), 0, -1):
        if any(word.startswith(text[-count:]) for word in stop):
            return text[:-count]
    return text
