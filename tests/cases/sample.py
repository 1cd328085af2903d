"""Computes by a sort in float64 the tokens that filters leave, and the sampled token."""

import numpy as np


def kept_by_sorting(
    logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, slack=2.0**-21
) -> np.ndarray:
    """Returns whether each token passes the filters, bool [V], for logits [V]."""
    z = np.asarray(logits, np.float64)
    order = np.argsort(-z, kind="stable")
    weights = np.exp((z - z.max()) / temperature)[order]
    words = len(z)
    if 0 < top_k < words:
        words = top_k
    total = weights[:words].sum()
    before = np.cumsum(weights) - weights
    kept = np.arange(len(z)) < words
    if top_p < 1.0:
        kept &= before < top_p * (1.0 - slack) * total
    kept &= weights >= min_p * (1.0 - 2.0 * slack)
    kept[0] = True
    result = np.zeros(len(z), bool)
    result[order[kept]] = True
    return result


def token_by_sorting(logits, noise, *, temperature=1.0, **filters) -> int:
    """Returns the token with the largest scaled logit plus noise among those that pass the filters."""
    z = np.asarray(logits, np.float64)
    kept = kept_by_sorting(z, temperature=temperature or 1.0, **filters)
    if temperature == 0.0:
        return int(np.argmax(z))
    return int(np.argmax(np.where(kept, z / temperature + np.asarray(noise, np.float64), -np.inf)))
