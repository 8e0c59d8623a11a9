"""The posterior over weights: noise, prior, norm layers, seeds, and attaching it to a network."""
