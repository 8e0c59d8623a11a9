"""The posterior over weights: noise, prior, norm layers, seeds, and attaching all of it to somebody's network."""
