"""The parts of one private local step: sample, clip, cut to the mask, noise. Each carries out what a plan describes."""
