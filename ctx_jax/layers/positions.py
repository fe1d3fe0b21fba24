"""Places of tokens in their window."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sinusoids(positions: jax.Array, width: int) -> jax.Array:
    """positions [...] -> [..., width] = [sin(p w_i) | cos(p w_i)], w_i = 10000^(-2i / width); fp32 (float64 if given).

    Vaswani et al. 2017, section 3.5, with sines and cosines concatenated, not interleaved, as in Transformer-XL; the
    positions may be negative (relative ones) and fractional. `width` is even.
    """
    wide = jnp.promote_types(positions.dtype, jnp.float32)
    frequencies = jnp.exp(jnp.arange(0, width, 2, dtype=wide) * (-jnp.log(jnp.asarray(10000.0, wide)) / width))
    angles = positions[..., None].astype(wide) * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def counted(documents: jax.Array) -> jax.Array:
    """Packing ids [B, T] -> [B, T]: how many tokens stand before each one in its row, padding left out.

    A token's position is so the same wherever its row is padded; what padding itself gets has no meaning.
    """
    return jnp.maximum(jnp.cumsum(documents != 0, axis=1) - 1, 0)
