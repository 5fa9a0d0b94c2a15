"""The models that people bring, in plain torch: residual nets with GroupNorm, transformers, frozen bodies."""
