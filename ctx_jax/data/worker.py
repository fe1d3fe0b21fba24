"""A process that tokenizes: `python -m ctx_jax.data.worker`.

On stdin come a pickled tokenizer and then batches of passages; on stdout go their `store.Encoded`, or the message of a
ValueError. It ends with its stdin, however the other side ended. It never imports jax.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys

from ctx_jax.data.store import encode_passages


def main() -> None:
    """Serves until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no reply
    requests = sys.stdin.buffer
    try:
        tokenizer = pickle.load(requests)
        while True:
            try:
                reply = encode_passages(pickle.load(requests), tokenizer)
            except ValueError as error:
                reply = str(error)
            pickle.dump(reply, replies, pickle.HIGHEST_PROTOCOL)
            replies.flush()
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        os._exit(0)  # without flushing into a pipe that nobody reads


if __name__ == "__main__":
    main()
