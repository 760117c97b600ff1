"""Styles for `parallelize_module`, on top of the functions and of torch's DTensor; a name loads what it needs.

linears       FusedColwiseParallel, FusedRowwiseParallel
grouped       FusedGroup: several linears at one gather
norms, embeddings
decoders      parallelize: the whole plan of a Hugging Face decoder; stack, packed, tokens: what it needs beside these
agreed        do all ranks apply the same plan?
shared        parameters that every rank has whole, classes made of a module's own
"""
