"""Randomness: keyed streams, masks from a public seed, and batches as the accountants assume them."""
