"""Styles for `parallelize_module`, made of this package's functions and torch's DTensor; imported on first use.

linears       FusedColwiseParallel, FusedRowwiseParallel; parameters that are whole on every rank; derived classes
grouped       FusedGroup: several linears with one gather; linears that are several in one
norms         FusedNormParallel
embeddings    FusedEmbeddingParallel
"""
