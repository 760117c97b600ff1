"""Styles for `parallelize_module`, made of this package's functions and torch's DTensor; imported on first use.

linears       FusedColwiseParallel, FusedRowwiseParallel
grouped       FusedGroup: several linears with one gather
norms         FusedNormParallel
embeddings    FusedEmbeddingParallel
decoders      parallelize: the whole plan of a Hugging Face decoder, and the check that all ranks apply the same one
stack         the parts of a decoder, by name
packed        linears that are several in one
tokens        split tokens, heads, tied heads
lora          adapters of peft
shared        parameters that are whole on every rank; classes derived from a module's own class
"""
